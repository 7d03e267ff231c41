"""REINFORCE, the Monte Carlo policy gradient: make the actions that paid off likelier.

An environment, such as a cart with a pole to keep upright, shows its state s (`obs` in the code).
It answers an action a with a reward R and the next state. A policy π(a | s), a network with weights
θ, gives each action a probability. In each of N environments it plays one whole episode τ = s_0,
a_0, R_0, s_1, a_1, R_1, … Then θ takes a step that should raise the expected return J:

    J(θ) = E[ R(τ) ] = Σ_τ p(τ) R(τ)             over all episodes τ that π could play
    R(τ) = R_0 + γ R_1 + γ² R_2 + …              the return; with γ < 1 late rewards count less

The environment need not be differentiated: θ acts only through p(τ), the probability of an
episode. Since ∇p = p ∇log p, ∇J is a mean over episodes, too, and those played can estimate it:

    ∇J = Σ_τ ∇p(τ) R(τ) = Σ_τ p(τ) ∇log p(τ) R(τ) = E[ R(τ) ∇log p(τ) ]
    log p(τ) = Σ_t log π(a_t | s_t) + log-probabilities of the environment, without θ
    ∇J = E[ Σ_t Ψ_t ∇log π(a_t | s_t) ],   where Ψ_t, the credit, is R(τ) or, by --psi:

    return          R(τ)                         the whole return, for each of its actions
    reward-to-go    G_t = R_t + γ R_{t+1} + …    without the rewards from before the action
    baseline        G_t − V(s_t)                 the advantage: minus V(s) = E[ G_t | s_t = s ],
                                                 which a network, the critic, learns from the G_t

If γ = 1, these differ by past rewards or by V(s_t): a number b that is fixed before a_t is chosen.
On average over the actions, b ∇log π(a_t | s_t) is 0:

    Σ_a π b ∇log π = b Σ_a ∇π = b ∇ Σ_a π = b ∇1 = 0

With γ = 1 and no time limit all three have the mean ∇J. Each usually varies less than the one
before it, and that is the whole purpose of a baseline.

Why: it is the simplest estimate of ∇J. It is on-policy: E is over the episodes of the current π,
so after one step of θ the old episodes no longer fit, and new ones are played. Ψ_t is computed
first, and only then is V fitted to the G_t: fitted earlier, V would know what followed a_t, a bias.

Weakness: one lucky episode stands for all that might have followed an action, and an episode must
end before anything is learned.

Differs from the formula: rewards are rescaled (see main), and π's entropy has a bonus. If γ < 1,
R(τ) counts the rewards from t on as γ^t G_t. G_t leaves out γ^t, because late actions would hardly
count. What is estimated is then in general no gradient (Nota & Thomas 2020, arXiv:1906.07073).

    python reinforce.py --psi return             # compare its noise with the default's (baseline)
Williams 1992, doi:10.1007/BF00992696; best baselines: Greensmith, Bartlett & Baxter 2004, JMLR 5
"""

import math
import random
import sys
import time
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete, flatdim
from gymnasium.wrappers import vector
from PIL import Image
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    # an action's credit: the whole return, the rewards from then on, or the latter minus V(s)
    psi: Literal["return", "reward-to-go", "baseline"] = "baseline"
    update_epochs: int = 4  # the critic's epochs: its passes over the steps of each rollout
    num_minibatches: int = 4  # optimizer steps per epoch
    # weight of a bonus for π's entropy, −Σ π log π, so that π goes on trying actions; falls to 0
    ent_coef: float = 0.01
    gamma: float = 0.99  # γ, the discount factor
    num_envs: int = 24  # N, environments stepped in parallel; many, as whole returns are noisy
    learning_rate: float = 4e-3  # Adam's learning rate; no decay, so that late setbacks can heal
    max_grad_norm: float = 1.0  # the critic's gradient is clipped to this norm
    total_timesteps: int = 200_000  # steps over all environments; 0: only evaluate --load's agent
    env_id: str = "CartPole-v1"  # any gymnasium environment with Discrete or Box actions
    init_std: float = 1.0  # initial std of a Gaussian policy; bounded actions are scaled to [-1, 1]
    target_return: float = math.inf  # stop once the last 100 episodes reach this mean return
    seed: int = 1  # the same seed gives the same run, on the same machine
    load: str = ""  # start from the agent in this file, the agent.pt of an earlier run
    record: bool = False  # save one greedy episode as a GIF next to the agent
    output_dir: str = "runs"  # each run makes a folder in here for its logs and agent.pt
    FRACTIONS: ClassVar = ("gamma",)  # flags that check_args refuses above 1


# -------------------------------------------------------------------------------------- Algorithm
def compute_advantages(rollout, values, next_values, args):
    """Ψ_t, with a baseline called the advantage, and the critic's targets, for a rollout (see
    `rollouts`): all (T, N). Only --psi baseline trains and uses the critic.

    There, if a time limit cut an episode off, V(s_{t+1}) stands for the missing rewards, and its
    errors add a bias. Without it G_t would shrink near the limit, which V cannot foresee, because
    s_t contains no clock. (The other choices of --psi take a time limit for the end.)
    """
    rewards = rollout["rewards"]
    if args.psi == "baseline":
        truncated = rollout["done"] & ~rollout["terminated"]
        rewards = rewards + args.gamma * next_values * truncated
    returns = torch.zeros_like(rewards)
    following = 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + args.gamma * following * ~rollout["done"][t]
        returns[t] = following
    if args.psi == "baseline":
        return returns - values, returns
    if args.psi == "return":
        returns = returns[0].expand_as(returns)
    return returns, returns


@torch.no_grad()
def prepare(agent, rollout, args):
    """The rollout's B real steps as columns (B, …), with advantages and targets."""
    values = agent.value(rollout["obs"])
    next_values = agent.value(rollout["next_obs"])
    advantages, targets = compute_advantages(rollout, values, next_values, args)
    rollout = rollout | {"advantages": advantages, "targets": targets}
    return {name: column[rollout["mask"]] for name, column in rollout.items()}


def update(agent, optimizer, batch, progress_remaining, args):
    """One step of the policy, then epochs of the critic; returns what to log."""
    advantages = batch["advantages"]
    if args.psi == "baseline":  # V may be too low everywhere
        # An episode's own advantages are in the mean: a bias, of order 1/N.
        advantages = advantages - advantages.mean()
    policy = agent.policy(batch["obs"])
    entropy = policy.entropy().mean()
    logprobs = policy.log_prob(batch["actions"])
    # Sum over the steps of an episode, mean over the episodes: one per environment.
    policy_loss = -(advantages * logprobs).sum() / args.num_envs
    loss = policy_loss - args.ent_coef * progress_remaining * entropy
    optimizer.zero_grad()
    loss.backward()
    # No clipping: Adam divides by the size of past gradients. If the long ones of early training
    # were clipped, Adam would divide by less, and later, noisy gradients would make longer steps.
    optimizer.step()
    stats = {"policy_loss": policy_loss.item(), "entropy": entropy.item()}
    if args.psi == "baseline":
        stats["value_loss"] = fit_critic(agent, optimizer, batch, args)
    return stats


def fit_critic(agent, optimizer, batch, args):
    """Epochs of minibatches that pull V(s_t) to its target; returns the last loss."""
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch["obs"]))
        for rows in order.chunk(args.num_minibatches):
            error = agent.value(batch["obs"][rows]) - batch["targets"][rows]
            loss = 0.5 * error.square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.critic.parameters(), args.max_grad_norm)
            optimizer.step()  # of V alone: Adam skips the actor, whose gradients are None
    return loss.item()


# --------------------------------------------------------------------------------------- Rollouts
def rollouts(envs, agent, args):
    """Yield, without end, rollouts of a whole episode in each of N environments, with the returns
    of the episodes that ended in it.

    `done` marks the last step of an episode. A terminated episode is over, so no reward could
    follow; a truncated one would have gone on, but the time limit cut it off. After both, `mask` is
    False: the environment plays on, unused, until the longest episode, of T steps, has ended.
    """
    limit = envs.spec.max_episode_steps or 1000  # without a limit an episode might never end
    obs, _ = envs.reset(seed=args.seed)
    while True:
        mask = np.ones(args.num_envs, bool)
        steps, returns = [], []
        while mask.any():
            actions = agent.act(obs)
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)
            done = terminated | truncated
            if "whole episode" in infos:  # of RecordEpisodeStatistics
                returns += infos["whole episode"]["r"][mask & done].tolist()
            done |= len(steps) + 1 == limit
            step = {
                "obs": obs,  # (N, D); in the rollout (T, N, D)
                "next_obs": next_obs,
                "actions": actions,  # (N,) or (N, A)
                "rewards": rewards.astype(np.float32),  # (N,), as all below
                "terminated": terminated.copy(),
                "done": done,
                "mask": mask,
            }
            steps.append(step)
            obs, mask = next_obs, mask & ~done
        columns = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
        rollout = {name: torch.as_tensor(column) for name, column in columns.items()}
        yield rollout, returns
        obs, _ = envs.reset()


# From here on, all scripts of this family are the same, byte for byte.
# ------------------------------------------------------------------------------------------ Agent
class RunningMeanStd(nn.Module):
    """Scales to mean 0 and standard deviation 1 over all rows seen so far: networks learn best from
    such numbers. It counts in float64, as the mean may be large: a date in seconds."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("std", torch.ones(size, dtype=torch.float64))

    def update(self, x):
        """Add the rows of x (B, D), by the formula of Chan, Golub & LeVeque (1979)."""
        var, mean = torch.var_mean(x.double(), 0, correction=0)
        self.count += len(x)
        share = len(x) / self.count
        delta = mean - self.mean
        self.mean += share * delta
        self.var += share * (var - self.var + (1 - share) * delta**2)
        constant = self.var <= 1e-24 * self.mean**2  # but for float64's rounding
        self.std = self.var.sqrt().masked_fill(constant, 1.0)

    def forward(self, x):
        return ((x.double() - self.mean) / self.std).clamp(-10, 10).float()


def mlp(inputs, outputs):
    """Two hidden layers of 64 tanh units."""
    hidden = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


class Agent(nn.Module):
    """A policy π(a|s), Categorical or Gaussian, and a critic V(s), as two separate networks."""

    def __init__(self, envs, init_std=1.0):
        super().__init__()
        obs_size = flatdim(envs.single_observation_space)
        action_space = envs.single_action_space
        self.obs_norm = RunningMeanStd(obs_size)
        self.actor = mlp(obs_size, flatdim(action_space))
        self.critic = mlp(obs_size, 1)
        self.actor[-1].weight.data *= 0.01  # close to uniform at first
        self.discrete = isinstance(action_space, Discrete)
        if not self.discrete:
            self.actor.log_std = nn.Parameter(torch.full(action_space.shape, math.log(init_std)))

    def policy(self, obs):
        """π(·|s): obs (…, D) → a distribution over actions (…) or (…, A)."""
        output = self.actor(self.obs_norm(obs))
        if self.discrete:
            return Categorical(logits=output)
        return Independent(Normal(output, self.actor.log_std.exp()), 1)

    def value(self, obs):
        """V(s): obs (…, D) → (…)."""
        return self.critic(self.obs_norm(obs)).squeeze(-1)

    @torch.inference_mode()
    def act(self, obs, greedy=False):
        """Actions for the observations of N environments: drawn from π, or its mode."""
        policy = self.policy(torch.as_tensor(obs))
        return (policy.mode if greedy else policy.sample()).numpy()


# ------------------------------------------------------------------------------ Training and main
def train(envs, agent, path, args):
    """Train until the steps are spent or --target-return is reached. The agent that has played the
    newest rollout is always at `path`, beside the logs."""
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    writer = SummaryWriter(path.parent)
    writer.add_text("hyperparameters", str(args))
    scratch = path.with_suffix(".tmp")
    recent = []  # returns of the last 100 episodes
    global_step = 0
    start = time.perf_counter()
    bar = tqdm(total=args.total_timesteps, unit="step", disable=None)
    for rollout, returns in rollouts(envs, agent, args):
        torch.save({args.env_id: agent.state_dict()}, scratch)
        scratch.replace(path)  # a kill at any moment leaves a whole file
        steps = int(rollout["mask"].sum())
        global_step += steps
        bar.update(steps)
        recent = (recent + returns)[-100:]
        if returns:
            bar.set_postfix(mean_return=f"{np.mean(recent):.4g}")
            writer.add_scalar("charts/episodic_return", np.mean(returns), global_step)
        solved = len(recent) == 100 and np.mean(recent) >= args.target_return
        if solved or global_step >= args.total_timesteps:
            break

        batch = prepare(agent, rollout, args)
        progress_remaining = 1 - global_step / args.total_timesteps  # falls from 1 to 0
        stats = update(agent, optimizer, batch, progress_remaining, args)
        agent.obs_norm.update(batch["obs"])  # only now: update needs the π that acted
        if not math.isfinite(sum(stats.values())):
            hint = f"lower --learning-rate; the agent from before this update is {path}"
            sys.exit(f"error: step {global_step}: loss not finite; {hint}")
        error = batch["advantages"].var(correction=0)
        total = batch["targets"].var(correction=0).clamp(min=1e-30)
        stats["explained_variance"] = 1 - (error / total).item()  # 1: V fits its targets
        for name, value in stats.items():
            writer.add_scalar(f"losses/{name}", value, global_step)
        writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
        sps = global_step / (time.perf_counter() - start)
        writer.add_scalar("charts/SPS", sps, global_step)
    bar.close()
    writer.close()


def main(args):
    check_args(args)
    torch.set_num_threads(1)  # networks this small only get slower with more
    Distribution.set_default_validate_args(False)  # checking every tensor is slow as well
    for seed in (torch.manual_seed, np.random.seed, random.seed):  # environments may use these
        seed(args.seed)
    with closing(make_envs(args.env_id, args.num_envs)) as envs:
        # It sums what the environment pays, for the log. (Its infos may have an "episode" already.)
        envs = vector.RecordEpisodeStatistics(envs, stats_key="whole episode")
        # We train on rewards divided by the standard deviation of the returns so far: so one rate
        # suits an environment that pays 0.001 a step, and one that pays 1,000. In the first hundred
        # steps this deviation is a guess, and the rewards are bounded.
        envs = vector.NormalizeReward(envs, args.gamma)
        seen, few = envs.return_rms, 100 * args.num_envs
        envs = vector.TransformReward(envs, lambda r: r.clip(-10, 10) if seen.count < few else r)
        agent = Agent(envs, args.init_std)
        if args.load:
            try:
                agent.load_state_dict(torch.load(args.load, weights_only=True)[args.env_id])
            except Exception as error:  # a missing, torn or foreign file can fail in many ways
                stop(f"--load {args.load}: no agent of --env-id {args.env_id}: {error!r:.99}")
        if args.record and "rgb_array" not in envs.metadata.get("render_modes", []):
            stop(f"--record: --env-id {args.env_id} needs the render mode rgb_array")
        folder = f"{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
        path = Path(args.output_dir, folder, "agent.pt")
        try:
            path.parent.mkdir(parents=True)
        except OSError as error:
            stop(f"--output-dir {args.output_dir}: {error.strerror}")
        print(f"logs and agent in {path.parent}; tensorboard --logdir {args.output_dir}")
        train(envs, agent, path, args)
    greedy = evaluate(agent, args, True)
    sampled = evaluate(agent, args, False)
    print(f"mean return {greedy:.4g} greedy, {sampled:.4g} sampled; agent: {path}")
    if args.record:
        evaluate(agent, args, True, episodes=1, gif=path.with_suffix(".gif"))
    return {"eval/return": greedy, "eval/return_stochastic": sampled, "agent": str(path)}


# -------------------------------------------------------------------- Evaluation and environments
def evaluate(agent, args, greedy, episodes=100, gif=None):
    """Mean return of fresh episodes, one per environment, each cut off after 10,000 steps. With a
    file name as `gif` the first is filmed, its first 1,000 steps at most."""
    options = {"render_mode": "rgb_array"} if gif else {}
    returns = np.zeros(episodes)
    running = np.ones(episodes, bool)
    frames = []
    with closing(make_envs(args.env_id, episodes, **options)) as envs:
        obs, _ = envs.reset(seed=args.seed + 10**6)
        for step in range(10_000):
            if gif and step < 1000:  # more would fill the memory
                frames.append(Image.fromarray(envs.render()[0].copy()))
            obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs, greedy))
            returns += rewards * running
            running &= ~(terminated | truncated)
            if not running.any():
                break
    if gif:
        duration = 1000 / envs.metadata.get("render_fps", 30)
        frames[0].save(gif, save_all=True, append_images=frames[1:], duration=duration)
    return returns.mean()


def make_envs(env_id, num_envs, **options):
    """num_envs environments that step as one, with flat observations and bounded actions."""
    sys.path.append(str(Path.cwd()))  # for --env-id my_module:MyEnv-v0
    try:
        envs = gym.make_vec(env_id, num_envs=num_envs, **options)
    except (gym.error.Error, ImportError) as error:
        stop(f"--env-id {env_id}: {error}")
    seen = envs.single_observation_space
    space = envs.single_action_space
    reset = envs.metadata.get("autoreset_mode")
    next_step = reset == gym.vector.AutoresetMode.NEXT_STEP
    discrete = isinstance(space, Discrete) and space.start == 0
    continuous = isinstance(space, Box) and len(space.shape) == 1 and space.dtype.kind == "f"
    needs = [
        (seen.is_np_flattenable, f"observations of a fixed size, has {seen}"),
        (discrete or continuous, f"actions from 0 to n - 1 or a flat Box of floats, has {space}"),
        (next_step, f"autoreset_mode NEXT_STEP in its metadata, has {reset}"),
    ]
    for fits, what in needs:
        if not fits:
            envs.close()
            stop(f"--env-id {env_id}: needs {what}")
    if not isinstance(seen, Box) or len(seen.shape) != 1:  # a Dict or an image becomes a vector
        envs = vector.FlattenObservation(envs)
    if continuous:  # only the environment sees the clipped action; log π does not
        envs = vector.ClipAction(envs)
        # π begins as N(0, 1), which suits bounds of -1 and 1. Bounds beyond a million are none.
        bounded = space.high / 2 - space.low / 2 < 1e6
        low, high = np.where(bounded, [space.low, space.high], [[-1], [1]])
        envs = vector.TransformAction(envs, lambda a: (low + high + (high - low) * a) / 2)

    def checked_copy(values):
        if not np.isfinite(values).all():
            sys.exit(f"error: --env-id {env_id} gave an observation or a reward of NaN or infinity")
        return values.copy()  # the environment may write its next values into the same array

    envs = vector.TransformObservation(envs, checked_copy)
    return vector.TransformReward(envs, checked_copy)


def check_args(args):
    """Stop at the first number that no run can use."""
    for field in fields(args):
        name, value = field.name, getattr(args, field.name)
        low = 1 if field.type is int and name not in ("seed", "total_timesteps") else 0
        if name in ("init_std", "max_grad_norm"):
            low = 1e-9
        high = 1 if name in args.FRACTIONS else 2**31
        is_number = field.type in (int, float) and name != "target_return"
        if is_number and not low <= value <= high:
            stop(f"--{name.replace('_', '-')} {value}: must be between {low} and {high}")


def stop(message):
    """End a run that cannot work: one line that names the flag and the fix, exit status 2."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(tyro.cli(Args))

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[classic-control]==1.4.0", "tyro==1.0.17",
#     "tensorboard==2.21.0", "tqdm==4.70.1", "pillow==13.0.0"]
# ///

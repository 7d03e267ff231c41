"""Actor-critic: a critic predicts the rewards to come, so no episode has to end first.

The policy π, the actor, plays T steps in each of N environments. The critic V judges each action by
one reward and the next state. Then π takes one step, and V several epochs over the same steps:

    ∇J ∝ mean_t δ_t ∇log π(a_t | s_t)            the step of the actor
    δ_t = R_t + γ V(s_{t+1}) − V(s_t)            the temporal-difference (TD) error
    mean_t ½ δ_t²                                the loss of the critic, γ V(s_{t+1}) held fixed

The ∝: a mean over steps is an episode's mean sum, divided by its mean length. γ^t is left out.
If R_t = 1, γ = 0.99, V(s_t) = 40 and V(s_{t+1}) = 41, then δ_t = 1 + 40.59 − 40 = 1.59, a push
towards a_t. If V is right, Q(s, a) = E[ R_t + γ V(s_{t+1}) | s, a ] is the value of a in s,
and A = Q − V its advantage, so δ_t is one sample of A(s_t, a_t). Then V is the mean of Q:
V(s) = Σ_a π(a | s) Q(s, a), which is Bellman's equation.

What changes from reinforce.py                   Where
    the TD error, not G_t − V(s_t)               compute_advantages
    rollouts of T steps, not whole episodes      rollouts, --num-steps
    the critic's targets contain V itself        fit_critic
    a mean over steps, and a clipped gradient    update, --max-grad-norm

Why: REINFORCE waits for whole episodes and credits every action with all that came after it. The TD
error depends on one reward and one step of the environment, so it varies far less. In the target,
R_t + γ V(s_{t+1}), V stands for the rewards to come. This is called bootstrapping. No gradient
flows through the target, so V(s_t) is pulled towards it alone: this is called a semi-gradient.

Weakness: δ_t is unbiased if V is right. As it rarely is, V should learn faster than the policy
(--update-epochs). And nothing limits how far a step moves the policy.

Differs from the paper: there the actor's rule is not yet ∇log π, both learn after every step of one
environment, and eligibility traces spread δ_t over past states. Here they learn from T steps of N
environments, as in A2C, the synchronous A3C (arXiv:1602.01783), but from one-step errors by Adam.

    python actor_critic.py --env-id Acrobot-v1
Barto, Sutton & Anderson 1983, doi:10.1109/TSMC.1983.6313077; Sutton & Barto 2018, section 13.5
"""

import math
import random
import sys
import time
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

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
    update_epochs: int = 4  # the critic's epochs: its passes over the steps of each rollout
    num_minibatches: int = 4  # optimizer steps per epoch
    # weight of a bonus for π's entropy, −Σ π log π, so that π goes on trying actions; falls to 0
    ent_coef: float = 0.01
    gamma: float = 0.99  # γ, the discount factor
    num_steps: int = 64  # T, steps per rollout in each environment; few, so that π steps often
    num_envs: int = 16  # N, environments stepped in parallel
    learning_rate: float = 2e-3  # Adam's learning rate; no decay, so that late setbacks can heal
    max_grad_norm: float = 1.0  # the gradients of actor and critic are each clipped to this norm
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
    """The TD errors and the critic's targets, for a rollout (see `rollouts`) or a minibatch.

    No reward follows a termination. At every other step V(s_{t+1}) stands for the rewards to come,
    also where a time limit or the rollout's end cut the episode off.
    """
    next_values = next_values * ~rollout["terminated"]
    targets = rollout["rewards"] + args.gamma * next_values
    return targets - values, targets


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
    # A constant baseline: while V is too low everywhere, every action would look good. (Dividing
    # by the std, too, as many do, blows up the small advantages of a good policy.)
    advantages = batch["advantages"] - batch["advantages"].mean()
    policy = agent.policy(batch["obs"])
    entropy = policy.entropy().mean()
    logprobs = policy.log_prob(batch["actions"])
    policy_loss = -(advantages * logprobs).mean()
    loss = policy_loss - args.ent_coef * progress_remaining * entropy
    optimizer.zero_grad()
    loss.backward()
    # Clipped: a TD error can be very large while V is still wrong.
    nn.utils.clip_grad_norm_(agent.actor.parameters(), args.max_grad_norm)
    optimizer.step()
    stats = {"policy_loss": policy_loss.item(), "entropy": entropy.item()}
    return stats | {"value_loss": fit_critic(agent, optimizer, batch, args)}


def fit_critic(agent, optimizer, batch, args):
    """Epochs of minibatches that pull V(s_t) to its target; returns the last loss."""
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch["obs"]))
        for rows in order.chunk(args.num_minibatches):
            mini = {name: column[rows] for name, column in batch.items()}
            next_values = agent.value(mini["next_obs"]).detach()  # no gradient flows into a target
            error, _ = compute_advantages(mini, agent.value(mini["obs"]), next_values, args)
            loss = 0.5 * error.square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.critic.parameters(), args.max_grad_norm)
            optimizer.step()  # of V alone: Adam skips the actor, whose gradients are None
    return loss.item()


# --------------------------------------------------------------------------------------- Rollouts
def rollouts(envs, agent, args):
    """Yield, without end, rollouts of T = num_steps steps in N environments, with the returns
    of the episodes that ended in it.

    `done` marks the last step of an episode. A terminated episode is over, so no reward could
    follow; a truncated one would have gone on, but the time limit cut it off. In the step after,
    gymnasium resets the environment and ignores the action: no real step, so `mask` is False there.
    """
    obs, _ = envs.reset(seed=args.seed)
    mask = np.ones(args.num_envs, bool)
    while True:
        steps, returns = [], []
        for _ in range(args.num_steps):
            actions = agent.act(obs)
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)
            done = terminated | truncated
            if "whole episode" in infos:  # of RecordEpisodeStatistics
                returns += infos["whole episode"]["r"][done].tolist()
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
            obs, mask = next_obs, ~done
        columns = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
        rollout = {name: torch.as_tensor(column) for name, column in columns.items()}
        if rollout["mask"].any():  # a rollout may hold nothing but resets
            yield rollout, returns


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

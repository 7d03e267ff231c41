"""REINFORCE, the Monte Carlo policy gradient: make the actions that paid off likelier.

In CartPole a pole stands on a cart. A state s (`obs` in the code) is four numbers: where cart and
pole are, and how fast they move. A policy π(a | s), a network with weights θ, gives each action a
a probability: a push to the left or to the right. One is drawn, and each step pays a reward R of 1
until the pole falls, or until step 500. So an episode τ = s_0, a_0, R_0, s_1, a_1, R_1, … earns as
much as it has steps. (Sutton & Barto write R_1 for our R_0.) REINFORCE plays one whole episode in
each of N environments. Then θ takes a step that should raise the expected return J: the larger an
action's credit, what was earned with it, the likelier this step makes it.

    J(θ) = E[ R(τ) ] = Σ_τ p(τ) R(τ)             over all episodes τ, of probability p(τ)
    R(τ) = R_0 + γ R_1 + γ² R_2 + …              the return; with γ < 1 late rewards count less

Nobody can sum over all episodes. But as ∇p = p ∇log p, ∇J is a mean over episodes, which a few can
estimate. And nobody has to differentiate the environment, as its part of log p is without θ:

    ∇J = Σ_τ ∇p(τ) R(τ) = Σ_τ p(τ) ∇log p(τ) R(τ) = E[ R(τ) ∇log p(τ) ]
    log p(τ) = Σ_t log π(a_t | s_t) + log-probabilities of the environment, without θ
    ∇J = E[ Σ_t Ψ_t ∇log π(a_t | s_t) ],   where Ψ_t, the credit, is one of these (--psi):

    return          R(τ)                         all that the episode has earned
    reward-to-go    G_t = R_t + γ R_{t+1} + …    only what it has earned from a_t on
    baseline        G_t − V(s_t)                 the advantage; V(s) is the mean of G_t if s_t = s
                                                 (a network, the critic, learns V from the G_t)

Suppose two episodes return 380 and 400. With the first credit all their actions are pushed up,
nearly alike. If V expects 390 at the start, the advantages of the first actions are −10 and 10: 39
times smaller, of opposite signs, and yet the gradient's mean over all episodes is the same. Here is
why, for γ = 1. Let b be what is left out or subtracted: rewards from before a_t, or V(s_t). It was
fixed before a_t was drawn, so the mean of b ∇log π over all actions is Σ_a π b ∇log π = b Σ_a ∇π =
b ∇ Σ_a π = b ∇1 = 0. So each credit gives ∇J on average, usually with less noise than the credit
listed before it. (A time limit biases the third: see compute_advantages.)

Why: its first form (--psi return) is the simplest estimate of ∇J. E is a mean over episodes of the
present π, so each step of θ needs new ones: the method is on-policy. V is fitted to the G_t only
after being the baseline: fitted earlier, V would know what followed a_t, and the proof would fail.

Weakness: one lucky episode stands for all that might have followed an action, and an episode must
end before anything is learned.

Differs from the formula: rewards are rescaled (see main), the advantages' mean is subtracted, and
π's entropy has a bonus (its mean over steps; the policy's loss is a sum over an episode's steps).
If γ < 1, ∇J weighs G_t by γ^t. We leave γ^t out, because late actions would hardly count; what is
estimated is then in general no function's gradient (Nota & Thomas 2020, arXiv:1906.07073).

    python reinforce.py --psi return             # compare its noise with the default's (baseline)
Williams 1992, doi:10.1007/BF00992696; best baselines: Greensmith, Bartlett & Baxter 2004, JMLR 5
"""

import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete, flatdim
from gymnasium.wrappers import vector
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.utils.tensorboard import SummaryWriter


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
    total_timesteps: int = 200_000  # used steps, all environments; 0: only evaluate --load's agent
    env_id: str = "CartPole-v1"  # any gymnasium environment with Discrete or Box actions
    init_std: float = 1.0  # initial std of a Gaussian policy; bounded actions are scaled to [-1, 1]
    target_return: float = math.inf  # stop once the last 100 episodes reach this mean return
    seed: int = 1  # the same seed gives the same run, on the same machine
    load: str = ""  # start from the weights in this file, an earlier run's agent.pt
    output_dir: str = "runs"  # each run makes a folder in here for its logs and agent.pt


# -------------------------------------------------------------------------------------- Algorithm
def compute_advantages(rollout, values, next_values, args):
    """Ψ_t (with a baseline: the advantage) and the critic's targets, for a rollout (see
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
        returns = returns[0].expand_as(returns)  # R(τ) is G_0
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
    if args.psi == "baseline":  # while V is too low everywhere, every action would look good
        # The mean contains what followed a_t, so the proof above fails: a bias, of order 1/N.
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
    # were clipped, Adam would divide by less, and the noisy ones later on would make longer steps.
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
            next_obs, rewards, terminated, truncated, infos = envs.step(actions.copy())
            done = terminated | truncated
            if "whole episode" in infos:  # of RecordEpisodeStatistics, see main
                returns += infos["whole episode"]["r"][mask & done].tolist()
            done |= len(steps) + 1 == limit
            step = {
                "obs": obs,  # (N, D); in the rollout (T, N, D)
                "next_obs": next_obs,  # after the last step, too: the reset comes a step later
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
    """Scales to mean 0 and standard deviation 1 over all rows seen so far, counted in float64, as
    the mean may be large: a date in seconds. Without this none of the four scripts learned
    MountainCarContinuous, whose speeds are below 0.07; with it all but REINFORCE did. But REINFORCE
    learned more without on CartPole and Acrobot, and actor-critic on Acrobot (two or three seeds
    each: tests/benchmarks/results/observations.md)."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("count", torch.zeros(1).double())
        self.register_buffer("mean", torch.zeros(size).double())
        self.register_buffer("var", torch.zeros(size).double())
        self.register_buffer("std", torch.ones(size).double())

    def update(self, x):
        """Add the rows of x (B, D). The new variance is the mean of both, plus the variance of the
        means (Chan, Golub & LeVeque 1979)."""
        var, mean = torch.var_mean(x.double(), 0, correction=0)
        self.count += len(x)
        share = len(x) / self.count
        delta = mean - self.mean
        self.mean += share * delta
        self.var = (1 - share) * self.var + share * var + share * (1 - share) * delta**2
        self.std = (self.var + 1e-24 * self.mean**2).sqrt() + 1e-30  # a constant becomes 0

    def forward(self, x):
        return ((x.double() - self.mean) / self.std).clamp(-10, 10).float()


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, outputs),
    )


class Agent(nn.Module):
    """A policy π(a|s), Categorical or Gaussian, and a critic V(s), as two separate networks."""

    def __init__(self, envs, init_std=1.0):
        super().__init__()
        obs_size = flatdim(envs.single_observation_space)
        actions = envs.single_action_space
        self.discrete = isinstance(actions, Discrete)
        self.obs_norm = RunningMeanStd(obs_size)
        self.actor = mlp(obs_size, flatdim(actions))
        self.critic = mlp(obs_size, 1)
        self.actor[-1].weight.data *= 0.01  # close to uniform at first
        if not self.discrete:  # one std for each component of an action, in all states
            self.actor.log_std = nn.Parameter(torch.full(actions.shape, math.log(init_std)))

    def policy(self, obs):
        """π(·|s): obs (…, D) → a distribution over actions (…) or (…, A)."""
        output = self.actor(self.obs_norm(obs))
        if self.discrete:
            return Categorical(logits=output)
        gaussian = Normal(output, self.actor.log_std.exp())
        return Independent(gaussian, 1)  # its log-probability sums over an action's components

    def value(self, obs):
        """V(s): obs (…, D) → (…)."""
        return self.critic(self.obs_norm(obs)).squeeze(-1)

    @torch.inference_mode()
    def act(self, obs, greedy=False):
        """Actions for the observations of N environments: drawn from π, or its mode."""
        policy = self.policy(torch.as_tensor(obs))
        actions = policy.mode if greedy else policy.sample()
        return actions.numpy()


# ------------------------------------------------------------------------------ Training and main
def train(envs, agent, path, args):
    """Train until the steps are spent or --target-return is reached. The agent that has played the
    newest rollout is always at `path`, beside the logs."""
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    writer = SummaryWriter(path.parent)
    writer.add_text("hyperparameters", str(args))
    recent = []  # returns of the last 100 episodes
    global_step = 0
    start = time.perf_counter()
    for iteration, (rollout, returns) in enumerate(rollouts(envs, agent, args)):
        torch.save(agent.state_dict(), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)  # a kill at any moment leaves a whole file
        global_step += int(rollout["mask"].sum())
        recent = (recent + returns)[-100:]
        if returns:
            writer.add_scalar("charts/episodic_return", np.mean(returns), global_step)
        if iteration % 10 == 0:
            mean = f"{np.mean(recent):.4g}" if recent else "unknown, no episode has ended"
            print(f"step {global_step:,}: mean return {mean}", flush=True)
        solved = len(recent) == 100 and np.mean(recent) >= args.target_return
        if solved or global_step >= args.total_timesteps:
            break

        batch = prepare(agent, rollout, args)
        progress_remaining = 1 - global_step / args.total_timesteps  # falls from 1 to 0
        stats = update(agent, optimizer, batch, progress_remaining, args)
        if not math.isfinite(sum(stats.values())):
            sys.exit(f"error: step {global_step}: loss not finite; lower --learning-rate")
        agent.obs_norm.update(batch["obs"])  # only now: update needs the π that acted

        unexplained = batch["advantages"].var(correction=0) / batch["targets"].var(correction=0)
        stats["explained_variance"] = 1 - unexplained.item()  # 1: V fits its targets
        for name, value in stats.items():
            writer.add_scalar(f"losses/{name}", value, global_step)
        sps = global_step / (time.perf_counter() - start)
        writer.add_scalar("charts/SPS", sps, global_step)
        writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
    writer.close()


def main(args):
    for name in ("num_envs", "num_steps", "update_epochs", "clip_coef", "max_kl", "max_grad_norm"):
        if not getattr(args, name, 1) > 0:
            sys.exit(f"error: --{name.replace('_', '-')} must be above 0")
    if not 0 <= getattr(args, "gae_lambda", 1) <= 1:
        sys.exit("error: --gae-lambda must be between 0 and 1")
    torch.set_num_threads(1)  # networks this small only get slower with more
    Distribution.set_default_validate_args(False)  # checking every tensor is slow as well
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # some environments draw from this, or from random
    random.seed(args.seed)
    envs = make_envs(args.env_id, args.num_envs)
    envs = vector.RecordEpisodeStatistics(envs, stats_key="whole episode")  # "episode" may be taken
    # Training sees rewards divided by the standard deviation of their discounted sums so far, so
    # one rate suits an environment that pays 0.001 a step, and one that pays 1,000. In the first
    # hundred steps this deviation is a guess, and the rewards are bounded.
    envs = vector.NormalizeReward(envs, args.gamma)
    returns, few = envs.return_rms, 100 * args.num_envs
    envs = vector.TransformReward(envs, lambda r: r.clip(-10, 10) if returns.count < few else r)
    agent = Agent(envs, args.init_std)
    if args.load:
        agent.load_state_dict(torch.load(args.load))
    name = f"{envs.spec.name}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
    folder = Path(args.output_dir, name)
    folder.mkdir(parents=True)
    path = folder / "agent.pt"
    print(f"logs and agent in {folder}; tensorboard --logdir {args.output_dir}")
    train(envs, agent, path, args)
    envs.close()
    print("evaluating: 100 greedy episodes, then 100 sampled ones", flush=True)
    greedy = evaluate(agent, args, greedy=True)
    sampled = evaluate(agent, args, greedy=False)
    print(f"mean return {greedy:.4g} greedy, {sampled:.4g} sampled; agent: {path}")
    return {"eval/return": greedy, "eval/return_stochastic": sampled, "agent": str(path)}


# -------------------------------------------------------------------- Evaluation and environments
def evaluate(agent, args, greedy, episodes=100):
    """Mean return of fresh episodes, one per environment, each cut off after 10,000 steps."""
    envs = make_envs(args.env_id, episodes)
    returns = np.zeros(episodes)
    running = np.ones(episodes, bool)
    obs, _ = envs.reset(seed=args.seed + 10**6)  # seeds that training does not use
    for _ in range(10_000):
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs, greedy))
        returns += rewards * running
        running &= ~(terminated | truncated)
        if not running.any():
            break
    envs.close()
    return returns.mean()


def make_envs(env_id, num_envs, **options):
    """num_envs environments that step as one, with flat observations and bounded actions."""
    sys.path.append(str(Path.cwd()))  # for --env-id my_module:MyEnv-v0
    try:
        envs = gym.make_vec(env_id, num_envs=num_envs, **options)
    except (gym.error.Error, ImportError) as error:
        sys.exit(f"error: --env-id {env_id}: {error}")
    envs.unwrapped._add_info = lambda infos, *of: infos  # infos go unused, and may not fit an array
    space = envs.single_action_space
    discrete = isinstance(space, Discrete) and space.start == 0
    continuous = isinstance(space, Box) and len(space.shape) == 1 and space.dtype.kind == "f"
    if not (discrete or continuous):
        fits = "actions 0 to n - 1 or a flat Box of floats"
        sys.exit(f"error: --env-id {env_id}: needs {fits}, has {space}")
    if envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.NEXT_STEP:
        sys.exit(f"error: --env-id {env_id}: needs autoreset_mode NEXT_STEP")
    if continuous:
        # π begins as N(0, 1), so -1 and 1 become the bounds, if there are any (beyond a million
        # there are none). Only the environment sees the clipped action; log π does not.
        bounded = space.high / 2 - space.low / 2 < 1e6
        low, high = np.where(bounded, [space.low, space.high], [[-1], [1]])
        envs = vector.ClipAction(envs)
        envs = vector.TransformAction(envs, lambda a: (low + high + (high - low) * a) / 2)
    seen = envs.single_observation_space
    if not isinstance(seen, Box) or len(seen.shape) != 1:  # a Dict or an image becomes a vector
        envs = vector.FlattenObservation(envs)
    # NaN and infinity stop here. (A copy, as some write the next observation into the same array.)
    envs = vector.TransformReward(envs, np.asarray_chkfinite)
    return vector.TransformObservation(envs, lambda obs: np.asarray_chkfinite(obs).copy())


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # for terminals without UTF-8
    main(tyro.cli(Args))

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[classic-control]==1.4.0", "tyro==1.0.17",
#     "tensorboard==2.21.0"]
# ///

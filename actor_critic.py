"""Actor-critic: a critic predicts the rewards to come, so we need not wait for an episode to end.

The policy π, the actor, plays T steps in each of N environments. A second network, the critic V,
predicts from a state the discounted sum of the rewards to come. With it, one reward and the next
state are enough to judge an action: did it lead to more than V had predicted? Then π takes one step
towards the actions that did, and V several steps towards its targets, in epochs:

    mean_t δ_t ∇log π(a_t | s_t)                 the actor's step: ∇J (scaled), if γ = 1 and V right
    δ_t = R_t + γ V(s_{t+1}) − V(s_t)            the temporal-difference (TD) error
    mean_t ½ δ_t²                                the critic's loss, with γ V(s_{t+1}) held fixed

In CartPole each step pays 1 until the pole falls. Suppose V predicts 40 before a push to the left
and 41 after it. If γ is 0.99, δ_t = 1 + 40.59 − 40 = 1.59, and the push becomes more likely. If V
falls to 38 instead, because the pole now leans, δ_t is −1.38, and the push becomes less likely.

What changes from reinforce.py                   Where
    the TD error, not G_t − V(s_t)               compute_advantages
    rollouts of T steps, not whole episodes      rollouts, --num-steps
    the critic's targets contain V itself        fit_critic
    a mean over steps, and a clipped gradient    update, --max-grad-norm

Why: the TD error depends on one reward and one step of the environment, so it varies far less than
G_t − V(s_t). If V is right, its mean is the action's advantage (tests/learn/THEORY.md, 4).
Weakness: V is rarely right, so it should learn faster than the policy (--update-epochs). And
nothing limits how far a step moves the policy.
Differs from the paper: there eligibility traces spread δ_t over past states, after every step. N
environments and T steps are A2C's (arXiv:1602.01783, synchronous), without its n-step returns. As
in reinforce.py: rescaled rewards and observations, advantages minus mean, entropy bonus, no γ^t.

    python actor_critic.py --env-id Acrobot-v1
Barto, Sutton & Anderson 1983, doi:10.1109/TSMC.1983.6313077; Sutton & Barto 2018, section 13.5
"""

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete, flatdim
from gymnasium.wrappers import vector
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import default_collate
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    update_epochs: int = 4  # the critic's epochs: its passes over the steps of each rollout
    num_minibatches: int = 4  # optimizer steps per epoch
    # weight of a bonus for π's entropy, −Σ π log π, so that π keeps trying actions; decays to 0
    ent_coef: float = 0.01
    gamma: float = 0.99  # γ, the discount factor
    num_steps: int = 64  # T, steps per rollout in each environment: few, so that π steps often
    num_envs: int = 16  # N, environments stepped in parallel
    learning_rate: float = 2e-3  # Adam's learning rate; no decay, to recover from late setbacks
    max_grad_norm: float = 1.0  # the gradients of actor and critic are each clipped to this norm
    total_timesteps: int = 200_000  # steps across all environments
    env_id: str = "CartPole-v1"  # any gymnasium environment with Discrete or Box actions
    seed: int = 1  # the same seed gives the same run, on the same machine
    output_dir: str = "runs"  # each run makes its own folder in here, for its logs and agent.pt

    def __post_init__(self):
        if not self.max_grad_norm > 0:
            sys.exit("error: needs --max-grad-norm > 0")


# -------------------------------------------------------------------------------------- Algorithm
def compute_advantages(rollout, values, next_values, args):
    """The TD errors and the critic's targets, for a rollout (see `rollouts`) or a minibatch.

    No reward follows a termination. At every other step V(s_{t+1}) stands in for the rewards to
    come, even where a time limit or the rollout's end cut the episode off.
    """
    next_values = next_values * ~rollout["terminated"]
    targets = rollout["rewards"] + args.gamma * next_values
    return targets - values, targets


@torch.no_grad()
def prepare(agent, rollout, args):
    """The rollout's B real steps as columns (B, …), with their advantages and targets."""
    values = agent.value(rollout["obs"])
    next_values = agent.value(rollout["next_obs"])
    advantages, targets = compute_advantages(rollout, values, next_values, args)
    rollout = rollout | {"advantages": advantages, "targets": targets}
    return {name: column[rollout["mask"]] for name, column in rollout.items()}


def update(agent, optimizer, batch, progress_remaining, args):
    """One step of the policy, then several epochs of the critic. Returns what to log."""
    # While V is too low everywhere, every action looks good. So the mean goes, at a small bias.
    # (Many also divide by the std, which blows up a good policy's small advantages.)
    advantages = batch["advantages"] - batch["advantages"].mean()
    policy = agent.policy(batch["obs"])
    entropy = policy.entropy().mean()
    logprobs = policy.log_prob(batch["actions"])
    policy_loss = -(advantages * logprobs).mean()
    loss = policy_loss - args.ent_coef * progress_remaining * entropy
    optimizer.zero_grad()
    loss.backward()
    # Clipped: a TD error can be very large while V is still wrong.
    clip_grad_norm_(agent.actor.parameters(), args.max_grad_norm)
    optimizer.step()
    stats = {"policy_loss": policy_loss.item(), "entropy": entropy.item()}
    return stats | {"value_loss": fit_critic(agent, optimizer, batch, args)}


def fit_critic(agent, optimizer, batch, args):
    """Several epochs of minibatches that pull V(s_t) towards its target. Returns the last loss."""
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch["obs"]))
        for rows in order.chunk(args.num_minibatches):
            mini = {name: column[rows] for name, column in batch.items()}
            next_values = agent.value(mini["next_obs"]).detach()  # no gradient flows into a target
            error, _ = compute_advantages(mini, agent.value(mini["obs"]), next_values, args)
            loss = 0.5 * error.square().mean()
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(agent.critic.parameters(), args.max_grad_norm, error_if_nonfinite=True)
            optimizer.step()  # of V alone: Adam skips the actor, whose gradients are None
    return loss.item()


# --------------------------------------------------------------------------------------- Rollouts
def rollouts(envs, agent, args):
    """Yield, forever, rollouts of T = num_steps steps in N environments, with the returns of the
    episodes that ended in them.

    `done` marks the last step of an episode. A terminated episode is over, so no reward could
    follow; a truncated one would have gone on, but hit the time limit. In the next step gymnasium
    resets the environment and ignores the action. That is not a real step, so its `mask` is False.
    """
    obs, _ = envs.reset(seed=10_000 * args.seed)  # most tasks: environment i gets it + i
    earned = np.zeros(args.num_envs)
    mask = np.ones(args.num_envs, bool)
    while True:
        steps, returns = [], []
        for _ in range(args.num_steps):
            actions = agent.act(obs)
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)
            done = np.logical_or(terminated, truncated)
            if "whole episode" in infos:  # from RecordEpisodeStatistics, see main
                returns += infos["whole episode"]["r"][done].tolist()
            earned = rewards + args.gamma * earned * (1 - terminated)
            step = {
                "obs": obs,  # (N, D); in the rollout (T, N, D)
                "next_obs": next_obs,  # even after the last step: the reset comes a step later
                "actions": actions,  # (N,) or (N, A)
                "rewards": rewards.astype(np.float32),  # (N,), like all below
                "earned": earned,  # as in gymnasium's NormalizeReward, see train
                "terminated": terminated.astype(bool),
                "done": done,
                "mask": mask,
            }
            steps.append(step)
            obs, mask = next_obs, ~done
        rollout = default_collate(steps)
        if rollout["mask"].any():  # a rollout may contain nothing but resets
            yield rollout, returns


# From here on, all scripts of this family are the same, byte for byte.
# ------------------------------------------------------------------------------------------ Agent
class RunningMeanStd(nn.Module):
    """Scales to mean 0 and std 1 over all rows so far (in float64: a mean may dwarf the std)."""

    def __init__(self, shape):
        super().__init__()
        self.register_buffer("count", torch.zeros(()).double())
        self.register_buffer("mean", torch.zeros(shape).double())
        self.register_buffer("std", torch.ones(shape).double())

    def update(self, rows):
        """The variance of old and new rows is the mean of both, plus the variance of the means."""
        var, mean = torch.var_mean(rows.double(), 0, correction=0)
        self.count += len(rows)
        share = len(rows) / self.count
        delta = mean - self.mean
        self.mean += share * delta
        var = (1 - share) * self.std**2 + share * var + share * (1 - share) * delta**2
        self.std = var.sqrt().maximum(1e-12 * self.mean.abs() + 1e-30)  # a constant becomes 0

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
    """A policy π(a|s), categorical or Gaussian, and a critic V(s), in two separate networks."""

    def __init__(self, envs):
        super().__init__()
        obs_size = flatdim(envs.single_observation_space)
        actions = envs.single_action_space
        self.discrete = isinstance(actions, Discrete)
        self.obs_norm = RunningMeanStd(obs_size)
        self.actor = mlp(obs_size, flatdim(actions))
        self.critic = mlp(obs_size, 1)
        self.actor[-1].weight.data *= 0.01  # nearly uniform at first
        if not self.discrete:  # one std per component of an action, the same in all states
            self.actor.log_std = nn.Parameter(torch.zeros(actions.shape))

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
        """Actions for the observations of N environments: samples from π, or its mode."""
        policy = self.policy(torch.as_tensor(obs))
        actions = policy.mode if greedy else policy.sample()
        return actions.numpy()


# --------------------------------------------------------------- Training, evaluation, environments
def train(envs, agent, folder, args):
    """Train `agent`. folder/agent.pt always holds the weights that played the newest rollout."""
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    writer = SummaryWriter(folder)
    writer.add_text("hyperparameters", str(args))
    earned = RunningMeanStd(())
    earned.update(torch.zeros(1))  # nothing is earned before the first step
    global_step, start = 0, time.perf_counter()
    for iteration, (rollout, returns) in enumerate(rollouts(envs, agent, args)):
        torch.save(agent.state_dict(), folder / "agent.tmp")
        Path(folder, "agent.tmp").replace(folder / "agent.pt")  # so a kill never leaves half a file
        global_step += int(rollout["mask"].sum())
        if returns:
            writer.add_scalar("charts/episodic_return", np.mean(returns), global_step)
        if iteration % 10 == 0:
            mean = f"{np.mean(returns):.4g}" if returns else "unknown, as no episode has ended"
            print(f"step {global_step:,}: mean return {mean}")
        if global_step >= args.total_timesteps:
            break
        # Rewards are divided by the standard deviation of their discounted sums so far, so that one
        # rate suits an environment that pays 0.001 per step and one that pays 1,000.
        earned.update(rollout["earned"][rollout["mask"]])
        rollout["rewards"] /= earned.std
        batch = prepare(agent, rollout, args)
        progress_remaining = 1 - global_step / args.total_timesteps  # falls from 1 to 0
        stats = update(agent, optimizer, batch, progress_remaining, args)
        agent.obs_norm.update(batch["obs"])  # only now, as update needs the π that acted
        unexplained = batch["advantages"].var() / batch["targets"].var()
        stats["explained_variance"] = 1 - unexplained.item()  # 1: V fits its targets
        for key, value in stats.items():
            writer.add_scalar(f"losses/{key}", value, global_step)
        writer.add_scalar("charts/SPS", global_step / (time.perf_counter() - start), global_step)
        writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
    writer.close()


def main(args):
    """Train, save, evaluate. Returns the score, a mean return, and the path of the saved agent."""
    torch.set_num_threads(1)  # more would only slow down networks this small
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # some environments draw from this, or from random
    random.seed(args.seed)
    envs = make_envs(args.env_id, args.num_envs)
    envs = vector.RecordEpisodeStatistics(envs, stats_key="whole episode")  # "episode" may be taken
    name = f"{envs.spec.name}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
    folder = Path(args.output_dir, name).expanduser()
    print(f"agent and logs in {folder}")
    agent = Agent(envs)
    train(envs, agent, folder, args)
    envs.close()
    score = evaluate(agent, args)
    print(f"mean return {score:.4g} in 100 greedy episodes; agent and logs in {folder}")
    return {"eval/return": score, "agent": str(folder / "agent.pt")}


def evaluate(agent, args, episodes=100):
    """The mean return of greedy episodes, one per environment, each cut off after 10,000 steps."""
    envs = make_envs(args.env_id, episodes)
    returns = np.zeros(episodes)
    running = np.ones(episodes, bool)
    obs, _ = envs.reset(seed=10_000 * args.seed + 5_000)  # no run trains on these seeds
    for _ in range(10_000):
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs, greedy=True))
        returns += rewards * running
        running &= ~np.logical_or(terminated, truncated)
        if not running.any():
            break
    envs.close()
    return returns.mean()


def make_envs(env_id, num_envs, **options):
    """num_envs environments that step together, with flat observations and scaled actions."""
    envs = gym.make_vec(env_id, num_envs=num_envs, **options)
    seen, space = envs.single_observation_space, envs.single_action_space
    if seen.shape != (flatdim(seen),):  # a number, a Dict or an image becomes a vector
        envs = vector.FlattenObservation(envs)
    envs = vector.TransformObservation(envs, np.copy)  # some environments reuse their array
    if isinstance(space, Discrete):
        return vector.TransformAction(envs, lambda a: a + space.start)
    if not isinstance(space, Box) or len(space.shape) != 1:
        sys.exit(f"error: --env-id {env_id}: needs Discrete actions or a flat Box, has {space}")
    # π starts as N(0, 1), so -1 and 1 become the bounds, if there are any (beyond a million there
    # are none). Only the environment sees the clipped action; log π does not.
    low, high = np.where(space.high / 2 - space.low / 2 < 1e6, [space.low, space.high], [[-1], [1]])
    envs = vector.TransformAction(envs, lambda a: a.clip(space.low, space.high).astype(space.dtype))
    return vector.TransformAction(envs, lambda a: (low + high + (high - low) * a) / 2)


if __name__ == "__main__":
    sys.path.insert(1, str(Path.cwd()))  # --env-id my_module:MyEnv-v0: my_module and its neighbours
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # for files, and without UTF-8
    main(tyro.cli(Args))

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[classic-control]==1.4.0", "tyro==1.0.17",
#     "tensorboard==2.21.0"]
# ///

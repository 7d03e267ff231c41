"""REINFORCE, the Monte Carlo policy gradient: make actions that paid off more likely.

In CartPole a state s is four numbers (positions and speeds of cart and pole), an action a pushes
the cart left or right, and each step pays a reward R of 1 until the pole falls, or until step 500.
A policy π(a | s), a network with weights θ, gives each action a probability, and one is drawn. This
makes an episode τ: s_0, a_0, R_0, s_1, a_1, R_1, … REINFORCE plays one whole episode in each of N
environments and gives every action a credit for what was earned. Then one step of θ makes actions
with a large credit more likely, to raise J, the expected return, which is what an episode earns:

    J(θ) = E[ R(τ) ] = Σ_τ p(τ) R(τ)             over all episodes τ, of probability p(τ)
    ∇J = Σ_τ ∇p(τ) R(τ) = E[ R(τ) ∇log p(τ) ]    as ∇p = p ∇log p: a mean, so N episodes estimate it
    log p(τ) = Σ_t log π(a_t | s_t) + log-probabilities of the environment, without θ
    ∇J = E[ Σ_t Ψ_t ∇log π(a_t | s_t) ]          if γ = 1, with any of three credits Ψ_t (--credit):
    return          R(τ) = R_0 + γ R_1 + …       all the episode has earned; γ ≤ 1 discounts later R
    reward-to-go    G_t = R_t + γ R_{t+1} + …    only what it has earned from a_t on
    baseline        G_t − V(s_t)                 the advantage; V, a network, learns the mean of G_t

Suppose that γ is 1, and that two episodes return 380 and 400. The first credit makes all their
actions more likely, and almost equally so. If V expects 390 at the start, however, the first
actions get −10 and 10. All three credits give ∇J on average, and each is usually less noisy than
the one above it. To see why the average stays the same, let b be what a credit leaves out (the
rewards before a_t) or subtracts (V(s_t)). Since b was fixed before a_t was drawn, the mean of b
∇log π over all actions is Σ_a π b ∇log π = b Σ_a ∇π = b ∇1 = 0.

Why: this is the simplest estimate of ∇J. Since a step of θ changes p, each step needs new episodes.
Weakness: one lucky episode stands for all that might have followed an action, and it has to end.
Differs from the formula: rescaled rewards and observations, advantages minus their mean, a bonus
for the entropy of π, and no factor γ^t, which would make late actions count for very little.

    python reinforce.py --credit return          # compare its curve with the default's (baseline)
Williams 1992, doi:10.1007/BF00992696; without γ^t: Nota & Thomas 2020, arXiv:1906.07073
"""

import sys
import time
from collections import deque
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
from torch.distributions import Categorical, Independent, Normal
from torch.nn.utils import clip_grad_norm_
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    # an action's credit: the whole return, the rewards from then on, or those rewards minus V(s)
    credit: Literal["return", "reward-to-go", "baseline"] = "baseline"
    update_epochs: int = 4  # the critic's epochs: its passes over the steps of each rollout
    num_minibatches: int = 4  # optimizer steps per epoch
    ent_coef: float = 0.01  # weight of a bonus for π's entropy, so that π stays random; decays to 0
    gamma: float = 0.99  # γ, the discount factor
    num_envs: int = 24  # N, environments stepped in parallel: many, as whole returns are noisy
    learning_rate: float = 4e-3  # Adam's learning rate; no decay, to recover from late setbacks
    max_grad_norm: float = 1.0  # the critic's gradient is clipped to this norm
    total_timesteps: int = 200_000  # steps across all environments
    env_id: str = "CartPole-v1"  # any gymnasium environment with Discrete or Box actions
    seed: int = 1  # the same seed gives the same run, on the same machine
    output_dir: str = "runs"  # each run makes its own folder in here, for its logs and agent.pt

    def __post_init__(self):
        may_be_0 = ["ent_coef", "gamma", "seed"]
        for name, value in vars(self).items():
            if type(value) in (int, float) and not (value > 0 or value == 0 and name in may_be_0):
                bound = "0 or more" if name in may_be_0 else "above 0"
                sys.exit(f"--{name.replace('_', '-')} {value}: must be {bound}")
        if self.gamma > 1:
            sys.exit("--gamma: must be at most 1")


# -------------------------------------------------------------------------------------- Algorithm
def compute_advantages(rollout, values, next_values, args):
    """Ψ_t and the critic's targets: all (T, N), with one episode in each column. With the baseline,
    V(s_{t+1}) stands in for the rewards that a time limit cut off. Without it G_t would shrink near
    the limit, which V cannot foresee, because s_t contains no clock. The price is a bias where V is
    wrong. (The other two credits treat a time limit as the end.)"""
    baseline = args.credit == "baseline"
    truncated = rollout["done"] & ~rollout["terminated"]
    returns = rollout["rewards"] + args.gamma * next_values * truncated * baseline
    for t in reversed(range(len(returns) - 1)):
        returns[t] += args.gamma * returns[t + 1] * ~rollout["done"][t]
    if args.credit == "return":
        returns = returns[0].expand_as(returns)  # R(τ) is G_0
    return returns - values * baseline, returns


def main(args):
    """A run from top to bottom. Returns its last mean return, and where the agent is saved."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # more would only slow down networks this small
    envs = vector.RecordEpisodeStatistics(make_envs(args.env_id, args.num_envs), stats_key="total")
    agent, earned_norm = Agent(envs), RunningNorm(1)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, fused=True)
    name = f"{envs.spec.name}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
    folder = Path(args.output_dir, name).expanduser()
    writer = SummaryWriter(folder)
    writer.add_text("hyperparameters", str(args))
    print(f"agent and logs in {folder}")

    obs, _ = envs.reset(seed=10_000 * args.seed)  # environment i gets it + i
    returns = deque(maxlen=100)  # of the last 100 episodes
    limit = envs.spec.max_episode_steps or 1000  # without a limit an episode might never end
    global_step = 0
    while global_step < args.total_timesteps:
        # ------------------------------------------------------------------------------- Rollout
        steps = []
        earned, real = np.zeros(args.num_envs), np.ones(args.num_envs, bool)
        while real.any():
            with torch.no_grad():
                actions = agent.policy(obs).sample().numpy()
            next_obs, rewards, terminated, truncated, _ = envs.step(actions)
            done = real & ((terminated | truncated).astype(bool) | (len(steps) + 1 == limit))
            earned = rewards + args.gamma * earned * (1 - terminated)
            step = {
                "obs": obs,  # (N, D); in `rollout` (T, N, D)
                "next_obs": next_obs,  # also after a last step: the reset comes a step later
                "actions": actions,  # (N,) or (N, A)
                "rewards": rewards.astype(np.float32),  # (N,), like all below
                "earned": earned,  # discounted sum, as in NormalizeReward: its std scales rewards
                "terminated": terminated.astype(bool),  # no reward could follow
                "done": done,  # terminated, or cut off by a time limit
                "real": real,  # False after the episode, while others still play
            }
            steps.append(step)
            returns.extend(envs.episode_returns[done])
            obs, real = next_obs, real & ~done
        obs, _ = envs.reset()

        # ---------------------------------------------------------------------------- Advantages
        rollout = {key: torch.tensor(np.array([step[key] for step in steps])) for key in steps[0]}
        earned_norm.update(rollout["earned"][rollout["real"]][:, None])  # before its first use
        rollout["rewards"] /= earned_norm.std()  # so one rate suits rewards of any size
        with torch.no_grad():
            values = agent.value(rollout["obs"])
            next_values = agent.value(rollout["next_obs"])
        advantages, targets = compute_advantages(rollout, values, next_values, args)
        rollout |= {"advantages": advantages, "targets": targets}
        batch = {key: column[rollout["real"]] for key, column in rollout.items()}  # (B, …)
        # While V is too low everywhere, every action looks good, so the mean goes: a small bias.
        # (It contains what followed a_t, so the proof above fails, by a term of order 1/N.)
        if args.credit == "baseline":
            batch["advantages"] -= batch["advantages"].mean()

        # -------------------------------------------------------------------------------- Update
        remaining = 1 - global_step / args.total_timesteps  # falls from 1 to 0
        policy = agent.policy(batch["obs"])
        terms = batch["advantages"] * policy.log_prob(batch["actions"])  # Ψ_t log π(a_t | s_t)
        policy_loss = -terms.sum() / args.num_envs  # the sum over t, the mean over episodes
        entropy = policy.entropy()
        optimizer.zero_grad()
        (policy_loss - args.ent_coef * remaining * entropy.sum() / args.num_envs).backward()
        # Not clipped: Adam divides by the size of past gradients, so that the large ones of early
        # rollouts keep later steps, which are noisier, small.
        optimizer.step()
        for _ in range(args.update_epochs):
            for rows in torch.randperm(len(batch["obs"])).chunk(args.num_minibatches):
                mini = {key: column[rows] for key, column in batch.items()}
                value_loss = 0.5 * (agent.value(mini["obs"]) - mini["targets"]).square().mean()
                optimizer.zero_grad()
                value_loss.backward()
                clip_grad_norm_(agent.parameters(), args.max_grad_norm, error_if_nonfinite=True)
                optimizer.step()  # of V alone: Adam skips the actor, whose gradients are None
        agent.obs_norm.update(batch["obs"])  # only now, as the update needs the π that played

        # ----------------------------------------------------------------------------------- Log
        global_step += len(batch["obs"])
        torch.save(agent.state_dict(), folder / "agent.tmp")
        Path(folder, "agent.tmp").replace(folder / "agent.pt")  # so a kill never leaves half a file
        stats = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy.mean()}
        stats["explained_variance"] = 1 - batch["advantages"].var() / batch["targets"].var()
        for key, value in stats.items():
            writer.add_scalar(f"losses/{key}", value, global_step)
        mean_return = np.mean(returns or [np.nan])
        if returns:
            writer.add_scalar("charts/episodic_return", mean_return, global_step)
        print(f"step {global_step:,}: mean return {mean_return:.4g} ({len(returns)} episodes)")
    envs.close()
    writer.close()
    return {"return": mean_return, "agent": str(folder / "agent.pt")}


# From here on, all scripts of this family are the same, byte for byte.
class RunningNorm(nn.Module):
    """Scales each component to mean 0 and standard deviation 1 over all that `update` has seen."""

    def __init__(self, size):
        super().__init__()
        guess = torch.tensor([[1.0], [0.0], [1.0]]).double()  # sums of 1, x and x² over one row
        self.register_buffer("sums", 1e-12 * guess.repeat(1, size))  # so std() is 1 at first

    def update(self, x):
        x = x.double()
        self.sums += torch.stack([x**0, x, x**2]).sum(1)

    def std(self):
        mean, square = self.sums[1:] / self.sums[0]
        return (square - mean**2).clamp(min=1e-12).sqrt()

    def forward(self, x):
        mean = self.sums[1] / self.sums[0]
        return ((torch.as_tensor(x).double() - mean) / self.std()).clamp(-10, 10).float()


def mlp(inputs, outputs):
    hidden = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


class Agent(nn.Module):
    """A policy π(a|s), categorical or Gaussian, and a critic V(s), in two separate networks."""

    def __init__(self, envs):
        super().__init__()
        obs_size, actions = flatdim(envs.single_observation_space), envs.single_action_space
        self.obs_norm = RunningNorm(obs_size)
        self.actor = mlp(obs_size, flatdim(actions))
        self.actor[-1].weight.data *= 0.01  # nearly uniform at first
        self.critic = mlp(obs_size, 1)
        self.discrete = isinstance(actions, Discrete)
        if not self.discrete:  # one std per component of an action, the same in all states
            self.actor.log_std = nn.Parameter(torch.zeros(actions.shape))

    def policy(self, obs):
        """π(·|s): obs (…, D) → a distribution over actions (…) or (…, A)."""
        output = self.actor(self.obs_norm(obs))
        if self.discrete:
            return Categorical(logits=output)
        return Independent(Normal(output, self.actor.log_std.exp()), 1)

    def value(self, obs):
        """V(s): obs (…, D) → (…)."""
        return self.critic(self.obs_norm(obs)).squeeze(-1)


def make_envs(env_id, num_envs, **options):
    """num_envs environments that step together, with flat observations and scaled actions."""
    try:
        envs = gym.make_vec(env_id, num_envs, **options)
    except (gym.error.Error, ImportError) as error:
        sys.exit(f"--env-id {env_id}: {error}")
    if envs.metadata.get("autoreset_mode") not in (None, gym.vector.AutoresetMode.NEXT_STEP):
        sys.exit(f"--env-id {env_id}: does not reset itself in the step after an episode")
    seen, space = envs.single_observation_space, envs.single_action_space
    if seen.shape != (flatdim(seen),):  # a number, a Dict or an image
        envs = vector.FlattenObservation(envs)
    envs = vector.TransformObservation(envs, np.copy)  # some environments reuse their array
    if isinstance(space, Discrete):
        return vector.TransformAction(envs, lambda a: a + space.start)
    if not isinstance(space, Box) or len(space.shape) != 1:
        sys.exit(f"--env-id {env_id}: needs Discrete actions or a flat Box, has {space}")
    # π starts as N(0, 1): −1 and 1 become the bounds (below a million). log π has actions as drawn.
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

"""Actor-critic: a critic predicts the rewards to come, so no episode has to end first.

The policy π, the actor, plays T steps in each of N environments. A second network, the critic V,
predicts from a state the discounted sum of the rewards to come. With it one reward and the next
state are enough to judge an action: did more come of it than V had predicted? Then π takes one step
towards the actions that did better, and V several steps towards its targets, in epochs:

    mean_t δ_t ∇log π(a_t | s_t)                 the actor's step; if γ = 1, it estimates ∇J, scaled
    δ_t = R_t + γ V(s_{t+1}) − V(s_t)            the temporal-difference (TD) error
    mean_t ½ δ_t²                                the loss of the critic, γ V(s_{t+1}) held fixed

In CartPole each step pays 1 until the pole falls. Suppose V predicts 40 before a push to the left
and 41 after it. If γ is 0.99, δ_t = 1 + 40.59 − 40 = 1.59, and the push becomes likelier. Had V
fallen to 38, because the pole now leans, δ_t would be −1.38, and the push would become rarer.

If V is right, the mean of δ_t is the advantage A = Q − V. Q(s, a) = E[ R_t + γ V(s_{t+1}) | s, a ]
is the value of an action, V its mean over actions, V(s) = Σ_a π(a | s) Q(s, a). That is Bellman's
equation. (For γ = 1 the scale is 1 over the episodes' mean length: the mean is over steps.)

What changes from reinforce.py                   Where
    the TD error, not G_t − V(s_t)               compute_advantages
    rollouts of T steps, not whole episodes      rollouts, --num-steps
    the critic's targets contain V itself        fit_critic
    a mean over steps, and a clipped gradient    update, --max-grad-norm

Why: REINFORCE waits for whole episodes and credits every action with all that came after it. The TD
error depends on one reward and one step of the environment, so it varies far less. In the target,
R_t + γ V(s_{t+1}), V stands for the rewards to come. This is called bootstrapping. No gradient
flows through the target: V(s_t) is pulled to it, not it to V(s_t). That is called a semi-gradient.

Weakness: the mean of δ_t is the advantage only if V is right. It rarely is, so it should learn
faster than the policy (--update-epochs). And nothing limits how far a step moves the policy.

Differs from the paper: there the actor's rule is not yet ∇log π, both learn after every step of one
environment, and eligibility traces spread δ_t over past states. Here they learn from T steps of N
environments, as in A2C, the synchronous A3C (arXiv:1602.01783), but from one-step errors by Adam.
As in reinforce.py: rescaled rewards, advantages less their mean, an entropy bonus, and no γ^t.

    python actor_critic.py --env-id Acrobot-v1
Barto, Sutton & Anderson 1983, doi:10.1109/TSMC.1983.6313077; Sutton & Barto 2018, section 13.5
"""

import math
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
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.utils.tensorboard import SummaryWriter


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
    load: str = ""  # start from the weights in this file, an earlier run's agent.pt
    output_dir: str = "runs"  # each run makes a folder in here for its logs and agent.pt


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
    # One baseline for all, with a small bias: while V is too low everywhere, every action would
    # look good. (Dividing by the std, too, as many do, blows up a good policy's small advantages.)
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
    """Epochs of minibatches that pull V(s_t) to its target, by δ_t; returns the last loss."""
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
            next_obs, rewards, terminated, truncated, infos = envs.step(actions.copy())
            done = terminated | truncated
            if "whole episode" in infos:  # of RecordEpisodeStatistics, see main
                returns += infos["whole episode"]["r"][done].tolist()
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
            obs, mask = next_obs, ~done
        columns = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
        rollout = {name: torch.as_tensor(column) for name, column in columns.items()}
        if rollout["mask"].any():  # a rollout may hold nothing but resets
            yield rollout, returns


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

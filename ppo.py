"""PPO, Proximal Policy Optimization: a clip instead of TRPO's trust region.

The current policy, π_old, plays T steps in each of N environments. In CartPole a state s is four
numbers (where cart and pole are, and how fast they move), an action a pushes the cart to the left
or to the right, and each step pays 1 until the pole falls. The critic V predicts the discounted sum
of the rewards to come. From it comes the advantage A_t: how much better than expected a_t was. Then
the policy, now called π, takes many small steps, on minibatches in several epochs, to increase

    L   = mean_t min(r_t A_t, clip(r_t, 1 − ε, 1 + ε) A_t)                       (--clip-coef)
    r_t = π(a_t | s_t) / π_old(a_t | s_t)                           the ratio, 1 at first
    A_t = Σ_l (γλ)^l (R_{t+l} + γ V(s_{t+l+1}) − V(s_{t+l}))        to the episode's end or T

Suppose the pole leans to the right, π_old pushed right with probability 0.5, and A_t is 1. Then L
grows until π makes this push 0.6 likely, if ε is 0.2. Beyond, L is flat, and the sample has no
gradient. With A_t = −1 L would grow as the probability falls to 0.4, and be flat below. The min
matters if r_t has moved against A_t. Suppose steps on other samples have lowered the probability to
0.35 although A_t is 1. Then the min is r_t A_t = 0.7, not 0.8, and its gradient, r_t A_t ∇log π,
pushes it up again. The clip alone would leave it there.

What changes from trpo.py                        Where
    a clip, not a bound on the KL                surrogate, --clip-coef
    many steps of Adam, not a single step        update, --update-epochs, --num-minibatches
    actor and critic step together               update (--ent-coef is back, 0 by default)
    or a penalty on KL(π_old ‖ π), not a clip    kl_k3, surrogate, update, --beta, --target-kl

Why: TRPO needs conjugate gradients and a line search for a single step per rollout. PPO takes many
steps, but after the first one the samples are an older policy's. The ratio corrects for the choice
of the action. It does not correct for the states, which are still π_old's. So L can be trusted only
near π_old, and the clip lets go of a sample once r_t has passed 1 ± ε in the direction of A_t.

Weakness: a clipped sample no longer pushes its own ratio, but Adam's momentum and the other samples
may. So nothing bounds the distance to π_old. And if A_t < 0, a ratio above 1 + ε is not clipped,
and its gradient grows with it. Dual-clip PPO bounds that (Ye et al. 2020, arXiv:1912.09729).

Differs from the paper: the KL of --beta is sampled, by k3, whose gradient has the same mean.
Many implementations (Huang et al. 2022, The 37 Implementation Details of PPO) also clip the
critic's loss, scale A_t to std 1 in each minibatch, and initialize orthogonally. Here only the
rollout's mean of A_t is subtracted. (Like many, we rescale rewards: see main.)

    python ppo.py --env-id Pendulum-v1 --gamma 0.95 --total-timesteps 300000   # continuous actions
    python ppo.py --clip-coef inf --beta 1       # the other form: L = mean_t r_t A_t − β KL
Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347
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
    clip_coef: float = 0.2  # ε, the ratio is clipped to 1 ± ε; inf: it is not clipped
    beta: float = 0.0  # β, weight of a penalty on the KL; adapted after each rollout, unless 0
    target_kl: float = 0.01  # the KL that β aims at. It ends no epochs, unlike in other libraries
    update_epochs: int = 4  # epochs: passes over the steps of each rollout
    num_minibatches: int = 4  # optimizer steps per epoch
    ent_coef: float = 0.0  # weight of a bonus for π's entropy, to keep it random; falls to 0
    gae_lambda: float = 0.98  # λ of GAE: 0 trusts the critic, 1 the rewards; 0.95 is usual
    gamma: float = 0.99  # γ, the discount factor
    num_steps: int = 128  # T, steps per rollout in each environment
    num_envs: int = 16  # N, environments stepped in parallel
    learning_rate: float = 3e-3  # Adam's learning rate; decays linearly to 0
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
    """GAE(γ, λ) and the critic's targets, V + GAE, for a rollout (see `rollouts`): all (T, N).

    No reward follows a termination. An episode that a time limit or the rollout's end cut off would
    have gone on, and V(s_{t+1}) stands for the rest of it.
    """
    next_values = next_values * ~rollout["terminated"]
    delta = rollout["rewards"] + args.gamma * next_values - values
    decay = args.gamma * args.gae_lambda
    advantages = torch.zeros_like(delta)
    following = 0.0
    for t in reversed(range(len(delta))):
        # After `done` another episode begins: the sum stops there.
        following = delta[t] + decay * following * ~rollout["done"][t]
        advantages[t] = following
    return advantages, values + advantages


@torch.no_grad()
def prepare(agent, rollout, args):
    """The rollout's B real steps as columns (B, …), with advantages and targets."""
    values = agent.value(rollout["obs"])
    next_values = agent.value(rollout["next_obs"])
    advantages, targets = compute_advantages(rollout, values, next_values, args)
    rollout = rollout | {"advantages": advantages, "targets": targets}
    return {name: column[rollout["mask"]] for name, column in rollout.items()}


def kl_k3(logprobs, other_logprobs):
    """Schulman's k3 of each action, an estimate of KL(π ‖ other), if π drew the actions: −d, with
    d = log(other / π) and the KL as its mean, plus e^d − 1, with the mean Σ_a other − 1 = 0. As
    d ≤ e^d − 1, none is negative. (Here π_old drew them, and the other is the policy since.)"""
    d = other_logprobs - logprobs
    return d.expm1() - d


def surrogate(logprobs, old_logprobs, advantages, args):
    """Each step's term of L, less β KL, and whether the clip removes its gradient, as the ratio has
    passed its bound in the direction of A: all (B,)."""
    ratio = (logprobs - old_logprobs).exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    unclipped = ratio * advantages
    objective = torch.minimum(unclipped, clipped_ratio * advantages)
    penalty = args.beta * kl_k3(old_logprobs, logprobs)
    return objective - penalty, objective < unclipped


def update(agent, optimizer, batch, progress_remaining, args):
    """Epochs over the batch in minibatches, one step of actor and critic on each; returns
    approx_kl and the last step's numbers, to log."""
    optimizer.param_groups[0]["lr"] = args.learning_rate * progress_remaining
    obs, actions = batch["obs"], batch["actions"]
    old_logprobs = agent.policy(obs).log_prob(actions).detach()  # π is still the one that acted
    # One baseline for all, with a small bias: while V is too low everywhere, every action would
    # look good. (Dividing by the std, too, as many do, blows up a good policy's small advantages.)
    advantages = batch["advantages"] - batch["advantages"].mean()

    for _ in range(args.update_epochs):
        order = torch.randperm(len(obs))
        for rows in order.chunk(args.num_minibatches):
            policy = agent.policy(obs[rows])
            logprobs = policy.log_prob(actions[rows])
            objective, clipped = surrogate(logprobs, old_logprobs[rows], advantages[rows], args)
            policy_loss = -objective.mean()
            error = agent.value(obs[rows]) - batch["targets"][rows]
            value_loss = 0.5 * error.square().mean()
            entropy = policy.entropy().mean()
            bonus = args.ent_coef * progress_remaining * entropy
            optimizer.zero_grad()
            (policy_loss + value_loss - bonus).backward()
            nn.utils.clip_grad_norm_(agent.actor.parameters(), args.max_grad_norm)
            nn.utils.clip_grad_norm_(agent.critic.parameters(), args.max_grad_norm)
            optimizer.step()

    with torch.no_grad():
        kl = kl_k3(old_logprobs, agent.policy(obs).log_prob(actions)).mean().item()
    # The paper's rule: double β if the policy went too far, halve it if it hardly moved.
    if kl > 1.5 * args.target_kl:
        args.beta *= 2
    elif kl < args.target_kl / 1.5:
        args.beta /= 2
    return {
        "policy_loss": policy_loss.item(),
        "value_loss": value_loss.item(),
        "entropy": entropy.item(),
        "approx_kl": kl,
        "clipfrac": clipped.float().mean().item(),
        "beta": args.beta,
    }


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

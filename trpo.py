"""TRPO, Trust Region Policy Optimization: the best step that hardly changes the policy.

The current policy, π_old, plays T steps in each of N environments. The critic V predicts the
discounted sum of the rewards to come. From it comes the advantage A_t: how much better than
expected a_t was. Then the policy takes one step, from π_old to π, which nearly solves

    max_θ L = mean_t r_t A_t   subject to   mean_t KL(π_old ‖ π) ≤ δ             (--max-kl)
    r_t = π(a_t | s_t) / π_old(a_t | s_t)                           the ratio, 1 at first
    A_t = Σ_l (γλ)^l (R_{t+l} + γ V(s_{t+l+1}) − V(s_{t+l}))        to the episode's end or T
    KL(π_old ‖ π) = Σ_a π_old log(π_old / π)     0 if both are equal, otherwise positive

If CartPole's π_old pushes left and right with probability 0.5 everywhere, and δ is 0.01, π may make
one of them 0.57 likely in every state, or more in some states and less in others.

What changes from actor_critic.py                Where
    GAE, not a single TD error                   compute_advantages, --gae-lambda
    a ratio in place of log π                    measure, in update
    the natural gradient                         conjugate_gradient, fisher_vector_product
    a step within the trust region               line_search, --max-kl
    targets computed once; no entropy bonus      fit_critic, update (the critic's rate now falls)

The ratio: A says how much better an action is than π_old's average, so Σ_a π A is what one action
of π gains in a state. But the actions are π_old's. The importance weight r corrects for that:
Σ_a π_old r A is Σ_a π A. As ∇r = ∇π / π_old = r ∇log π, and r = 1 at π_old, ∇L at π_old is
mean_t A_t ∇log π.

The step (ppo.py does not need this): at π_old the KL is at its minimum, so its gradient is 0. For a
short step d the KL is about ½ dᵀF d, where F, its Hessian, is called the Fisher matrix (it is also
the mean of ∇log π ∇log πᵀ), and L gains gᵀd, with g = ∇L. At the best d the gradients of both, F d
and g, are parallel. So d is a multiple of x with F x = g, the natural gradient:
d = √(2δ / xᵀF x) x. Conjugate gradients solve F x = g from products F v alone, the gradients of
∇KL · v, so F, with a number for each pair of weights, is never built. A line search then halves d
until L has grown and the KL is at most δ.

GAE, generalized advantage estimation: A_t is the mean of all k-step estimates, R_t + … + γ^k
V(s_{t+k}) − V(s_t), with weights (1 − λ) λ^(k−1), the last one λ^(k−1). λ = 0 leaves the TD error,
biased by V's errors; λ = 1 leaves REINFORCE's noisy G_t − V(s_t), up to the rollout's end.

Why: Adam's learning rate roughly bounds each weight's change, but of two equally long steps one
may hardly change the policy and the other ruin it. TRPO bounds the mean KL of its step.

Weakness: one step takes some twenty passes over a rollout. L can be trusted only near π_old, whose
states it uses. The proof needs exact A_t and bounds the KL in every state: to promise that no more
than 0.1 max |A| is lost, δ must be some 4,000 times smaller (γ = 0.99; tests/learn/THEORY.md, 14).
(And after the step the normalizer of observations takes in the rollout, which moves π, too: on
CartPole up to a KL of 0.02.)

Differs from the paper: that uses Monte Carlo returns instead of GAE, and no --damping.

    python trpo.py --env-id Pendulum-v1 --gamma 0.95                   # continuous actions
Schulman et al. 2015, arXiv:1502.05477; GAE: Schulman et al. 2015, arXiv:1506.02438
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
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    max_kl: float = 0.01  # δ, a step's bound on the mean KL(π_old ‖ π), in nats
    cg_steps: int = 10  # iterations of conjugate gradients, at most
    damping: float = 0.1  # added to the diagonal of the Fisher matrix F
    update_epochs: int = 4  # the critic's epochs: its passes over the steps of each rollout
    num_minibatches: int = 4  # optimizer steps per epoch
    gae_lambda: float = 0.98  # λ of GAE: 0 trusts the critic, 1 the rewards; 0.95 is usual
    gamma: float = 0.99  # γ, the discount factor
    num_steps: int = 128  # T, steps per rollout in each environment
    num_envs: int = 16  # N, environments stepped in parallel
    learning_rate: float = 3e-3  # the critic's learning rate (Adam); decays linearly to 0
    max_grad_norm: float = 1.0  # the critic's gradient is clipped to this norm
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


def flat_gradient(scalar, parameters, twice=False):
    """d scalar / dθ, one vector (P,) of all parameters; `twice` if it will be differentiated."""
    gradients = torch.autograd.grad(scalar, parameters, retain_graph=True, create_graph=twice)
    return torch.cat([gradient.flatten() for gradient in gradients])


def conjugate_gradient(product, g, steps, tolerance=1e-10):
    """Solve F x = g, where F v is product(v): `steps` steps, or fewer if the residual's square is
    small. Each step goes to the minimum of ½ xᵀF x − gᵀx along one direction. Any two directions u,
    v have uᵀF v = 0, so no step undoes another: P steps would be exact, ten often suffice."""
    x = torch.zeros_like(g)
    residual = direction = g
    square = residual @ residual
    for _ in range(steps):
        if square <= tolerance:
            break
        image = product(direction)
        alpha = square / (direction @ image)
        x = x + alpha * direction
        residual = residual - alpha * image
        new_square = residual @ residual
        direction = residual + new_square / square * direction
        square = new_square
    return x


@torch.no_grad()
def line_search(measure, parameters, step, args):
    """Take `step`, halved until L has grown and the KL, both from measure(), is at most δ. If nine
    halvings are not enough, restore θ. Returns the KL and the number of halvings, or 0 and 10."""
    theta = nn.utils.parameters_to_vector(parameters)
    start, _ = measure()
    for backtracks in range(10):
        nn.utils.vector_to_parameters(theta + 0.5**backtracks * step, parameters)
        objective, kl = measure()
        if objective > start and kl <= args.max_kl:
            return kl.item(), backtracks
    nn.utils.vector_to_parameters(theta, parameters)
    return 0.0, 10


def update(agent, optimizer, batch, progress_remaining, args):
    """A step of the policy in the trust region, then epochs of the critic; returns what to log."""
    optimizer.param_groups[0]["lr"] = args.learning_rate * progress_remaining
    with torch.no_grad():
        old_policy = agent.policy(batch["obs"])
        old_logprobs = old_policy.log_prob(batch["actions"])
    # One baseline for all, with a small bias: while V is too low everywhere, every action would
    # look good. (Dividing by the std, too, as many do, blows up a good policy's small advantages.)
    advantages = batch["advantages"] - batch["advantages"].mean()

    def measure():
        """L and the KL at the current parameters."""
        policy = agent.policy(batch["obs"])
        ratio = (policy.log_prob(batch["actions"]) - old_logprobs).exp()
        return (ratio * advantages).mean(), kl_divergence(old_policy, policy).mean()

    parameters = list(agent.actor.parameters())
    objective, kl = measure()
    g = flat_gradient(objective, parameters)
    kl_gradient = flat_gradient(kl, parameters, twice=True)

    def fisher_vector_product(v):
        """(F + damping I) v without ever writing down F: the gradient of ∇KL · v."""
        return flat_gradient(kl_gradient @ v, parameters) + args.damping * v

    # x = (F + damping I)⁻¹ g: damping keeps weights that hardly move π from moving far. step_size
    # makes ½ dᵀ(F + damping I) d equal to δ, so the KL's estimate, ½ dᵀF d, is less.
    search_direction = conjugate_gradient(fisher_vector_product, g, args.cg_steps)
    curvature = search_direction @ fisher_vector_product(search_direction)
    step_size = (2 * args.max_kl / (curvature + 1e-20)).sqrt()
    kl, backtracks = line_search(measure, parameters, step_size * search_direction, args)
    objective, _ = measure()  # before the step L is 0, the mean advantage
    stats = {"policy_loss": -objective.item(), "entropy": old_policy.entropy().mean().item()}
    stats |= {"kl": kl, "backtracks": backtracks}
    return stats | {"value_loss": fit_critic(agent, optimizer, batch, args)}


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

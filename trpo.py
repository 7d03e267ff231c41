"""TRPO, Trust Region Policy Optimization: the best step that hardly changes the policy.

The current policy, π_old, plays T steps in each of N environments. The critic V predicts the
discounted sum of the rewards to come, and is fitted to the old V + A_t. A_t, the advantage, is how
much better than expected action a_t was. One step of the policy, from π_old to π, nearly solves

    max_θ L = mean_t r_t A_t   subject to   mean_t KL(π_old ‖ π) ≤ δ             (--max-kl)
    r_t = π(a_t | s_t) / π_old(a_t | s_t)                           the ratio, 1 at first
    A_t = Σ_l (γλ)^l (R_{t+l} + γ V(s_{t+l+1}) − V(s_{t+l}))        to the episode's end or T
    KL(π_old ‖ π) = Σ_a π_old log(π_old / π)     0 if both are equal, otherwise positive

If CartPole's π_old pushes left and right with probability 0.5 everywhere, and δ is 0.01, π may
raise one of them to 0.57 in every state, or further in some states and less far in others.

What changes from actor_critic.py                Where
    GAE, not a single TD error                   compute_advantages, --gae-lambda
    a ratio instead of log π                     measure, in update
    the natural gradient                         conjugate_gradient, fisher_vector_product
    a step within the trust region               line_search, --max-kl
    targets computed once; no entropy bonus      fit_critic, update (the critic's rate now falls)

The step (ppo.py does not need it): the best short step follows the natural gradient x, the solution
of F x = ∇L. F, the Fisher matrix, is the Hessian of the KL at π_old (tests/learn/THEORY.md, 9). A
line search halves the step until L has grown and the KL is at most δ.
Why: Adam's learning rate roughly bounds how much each weight changes, but of two equally long steps
one may hardly change the policy and the other ruin it. TRPO bounds the mean KL of its step instead.
Weakness: one step takes some twenty passes over a rollout, and L can be trusted only near π_old.
Differs from the paper: GAE, --damping, rescaled rewards, advantages minus their mean, and rescaled
observations, whose statistics change after the step and move π a little beyond δ.
    python trpo.py --env-id Pendulum-v1 --gamma 0.95                   # continuous actions
Schulman et al. 2015, arXiv:1502.05477; GAE: Schulman et al. 2015, arXiv:1506.02438
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
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import default_collate
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
    total_timesteps: int = 200_000  # steps across all environments
    env_id: str = "CartPole-v1"  # any gymnasium environment with Discrete or Box actions
    seed: int = 1  # the same seed gives the same run, on the same machine
    output_dir: str = "runs"  # each run makes its own folder in here, for its logs and agent.pt

    def __post_init__(self):
        if not (self.max_kl > 0 and self.max_grad_norm > 0 and 0 <= self.gae_lambda <= 1):
            sys.exit("error: needs --max-kl and --max-grad-norm > 0, --gae-lambda in [0, 1]")


# -------------------------------------------------------------------------------------- Algorithm
def compute_advantages(rollout, values, next_values, args):
    """GAE(γ, λ) and the critic's targets, V + GAE, for a rollout (see `rollouts`): all (T, N).

    λ = 0 leaves the TD error, biased by V's errors; λ = 1 leaves REINFORCE's noisy G_t − V(s_t).
    No reward follows a termination. An episode that a time limit or the rollout's end cut off would
    have gone on, and V(s_{t+1}) stands in for the rest of it.
    """
    next_values = next_values * ~rollout["terminated"]
    delta = rollout["rewards"] + args.gamma * next_values - values
    decay = args.gamma * args.gae_lambda
    advantages = torch.zeros_like(delta)
    next_advantage = 0.0
    for t in reversed(range(len(delta))):
        # After `done` another episode begins, so the sum stops there.
        next_advantage = delta[t] + decay * next_advantage * ~rollout["done"][t]
        advantages[t] = next_advantage
    return advantages, values + advantages


@torch.no_grad()
def prepare(agent, rollout, args):
    """The rollout's B real steps as columns (B, …), with their advantages and targets."""
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
    """Solve F x = g, where product(v) is F v, in `steps` steps, or fewer if the residual is small.
    Each step goes to the minimum of ½ xᵀF x − gᵀx along one direction. As uᵀF v = 0 for any two
    directions u and v, no step undoes another: P steps would be exact, and ten often suffice."""
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
    """Take `step`, halved until L has grown and the KL is at most δ (measure returns both). If nine
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
    """One policy step in the trust region, then epochs of the critic. Returns what to log."""
    optimizer.param_groups[0]["lr"] = args.learning_rate * progress_remaining
    with torch.no_grad():
        old_policy = agent.policy(batch["obs"])
        old_logprobs = old_policy.log_prob(batch["actions"])
    # While V is too low everywhere, every action looks good. So the mean goes, at a small bias.
    # (Many also divide by the std, which blows up a good policy's small advantages.)
    advantages = batch["advantages"] - batch["advantages"].mean()

    def measure():
        """L and the KL at the current parameters. As π_old drew the actions, r has to weigh them:
        Σ_a π_old r A = Σ_a π A."""
        policy = agent.policy(batch["obs"])
        ratio = (policy.log_prob(batch["actions"]) - old_logprobs).exp()
        return (ratio * advantages).mean(), kl_divergence(old_policy, policy).mean()

    parameters = list(agent.actor.parameters())
    objective, kl = measure()
    g = flat_gradient(objective, parameters)
    kl_gradient = flat_gradient(kl, parameters, twice=True)

    def fisher_vector_product(v):
        """(F + damping I) v, without ever building F: the gradient of ∇KL · v."""
        return flat_gradient(kl_gradient @ v, parameters) + args.damping * v

    # x = (F + damping I)⁻¹ g: damping keeps weights that hardly affect π from moving far. step_size
    # makes ½ sᵀ(F + damping I) s equal to δ for the step s, so the KL's estimate, ½ sᵀF s, is less.
    search_direction = conjugate_gradient(fisher_vector_product, g, args.cg_steps)
    curvature = search_direction @ fisher_vector_product(search_direction)
    step_size = (2 * args.max_kl / (curvature + 1e-20)).sqrt()
    kl, backtracks = line_search(measure, parameters, step_size * search_direction, args)
    objective, _ = measure()  # before the step L was 0, as the advantages' mean is
    stats = {"policy_loss": -objective.item(), "entropy": old_policy.entropy().mean().item()}
    stats |= {"kl": kl, "backtracks": backtracks}
    return stats | {"value_loss": fit_critic(agent, optimizer, batch, args)}


def fit_critic(agent, optimizer, batch, args):
    """Several epochs of minibatches that pull V(s_t) towards its target. Returns the last loss."""
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch["obs"]))
        for rows in order.chunk(args.num_minibatches):
            error = agent.value(batch["obs"][rows]) - batch["targets"][rows]
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

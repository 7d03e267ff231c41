"""TRPO, Trust Region Policy Optimization: the best step that hardly changes the policy.

The current policy, π_old, plays T steps in each of N environments. The critic V predicts the
discounted sum of the rewards to come. The advantage A_t says by how much action a_t turned out
better than predicted, and V is fitted to the old V + A_t. One step, from π_old to π, nearly solves

    max_θ L = mean_t r_t A_t   subject to   mean_t KL(π_old ‖ π) ≤ δ             (--max-kl)
    r_t = π(a_t | s_t) / π_old(a_t | s_t)                           the ratio, 1 at first
    A_t = Σ_l (γλ)^l (R_{t+l} + γ V(s_{t+l+1}) − V(s_{t+l}))        to the episode's end or T
    KL(π_old ‖ π) = Σ_a π_old log(π_old / π)     0 if both are equal, otherwise positive

How far may a step go? Suppose that π_old pushes left and right with probability 0.5 everywhere in
CartPole, and that δ is 0.01. Then π may raise one of the two to 0.57 in every state, or further in
some states if it stays nearer to 0.5 in others.

What changes from actor_critic.py                Where
    GAE, not a single TD error                   compute_advantages, --gae-lambda
    a ratio instead of log π                     surrogate
    the natural gradient                         trust_region_step, conjugate_gradient
    a step within the trust region               line_search, --max-kl
    targets computed once; no bonus; rate falls  main (Update)

The step (ppo.py does not need it): the best short step follows the natural gradient x, the solution
of F x = ∇L. F, the Fisher matrix, is the Hessian of the KL at π_old (tests/learn/THEORY.md, 9).
Why: the learning rate of Adam roughly bounds how far each weight moves, but not how far the policy
moves. Of two steps of equal length, one may barely change the policy and the other may ruin it.
TRPO therefore bounds the mean KL of its step.
Weakness: one step takes about twenty passes over a rollout, and L can be trusted only near π_old.
Differs from the paper: GAE, --damping, rescaled rewards, advantages minus their mean, and rescaled
observations, whose statistics change after the step and move π a little beyond δ.
    python trpo.py --env-id Pendulum-v1 --gamma 0.95                   # continuous actions
Schulman et al. 2015, arXiv:1502.05477; GAE: Schulman et al. 2015, arXiv:1506.02438
"""

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
    learning_rate: float = 3e-3  # Adam's learning rate, of the critic; decays linearly to 0
    max_grad_norm: float = 1.0  # the critic's gradient is clipped to this norm
    total_timesteps: int = 200_000  # steps across all environments
    env_id: str = "CartPole-v1"  # any gymnasium environment with Discrete or Box actions
    seed: int = 1  # the same seed gives the same run, on the same machine
    output_dir: str = "runs"  # each run makes its own folder in here, for its logs and agent.pt

    def __post_init__(self):
        may_be_0 = ["damping", "gae_lambda", "gamma", "seed"]
        for name, value in vars(self).items():
            if type(value) in (int, float) and not (value > 0 or value == 0 and name in may_be_0):
                bound = "0 or more" if name in may_be_0 else "above 0"
                sys.exit(f"--{name.replace('_', '-')} {value}: must be {bound}")
        if max(self.gamma, self.gae_lambda) > 1:
            sys.exit("--gamma, --gae-lambda: must be at most 1")


# -------------------------------------------------------------------------------------- Algorithm
def compute_advantages(rollout, values, next_values, args):
    """GAE(γ, λ) and the critic's targets, V + GAE: all (T, N). No reward follows a termination. An
    episode that a time limit or the rollout's end cut off would have gone on, and V(s_{t+1}) stands
    in for the rest of it."""
    td_error = rollout["rewards"] + args.gamma * next_values * ~rollout["terminated"] - values
    decay = args.gamma * args.gae_lambda
    advantages = td_error.clone()
    for t in reversed(range(len(td_error) - 1)):  # at `done` the sum stops
        advantages[t] += decay * advantages[t + 1] * ~rollout["done"][t]
    return advantages, values + advantages


def surrogate(logprobs, old_logprobs, advantages):
    """Each step's term of L. The ratio is there because π_old drew a: Σ_a π_old r A = Σ_a π A."""
    ratio = (logprobs - old_logprobs).exp()
    return ratio * advantages


def flat_gradient(scalar, parameters, create_graph=False):
    """d scalar / dθ, one vector (P,) of all parameters."""
    grads = torch.autograd.grad(scalar, parameters, retain_graph=True, create_graph=create_graph)
    return torch.cat([grad.flatten() for grad in grads])


def conjugate_gradient(product, g, steps, tolerance=1e-10):
    """Solve F x = g, where product(v) is F v, in `steps` steps, or fewer if the residual is small.
    Each step goes to the minimum of ½ xᵀF x − gᵀx along one direction. As uᵀF v = 0 for any two
    directions u and v, no step undoes another: P steps would be exact, and ten often suffice."""
    x = torch.zeros_like(g)
    r = p = g  # the residual g − F x, and the direction
    rr = r @ r
    for _ in range(steps):
        if rr <= tolerance:  # also if g is 0
            break
        Fp = product(p)
        alpha = rr / (p @ Fp)
        x = x + alpha * p
        r = r - alpha * Fp
        new_rr = r @ r
        p = r + new_rr / rr * p
        rr = new_rr
    return x


@torch.no_grad()
def line_search(measure, parameters, step, args):
    """Take `step`, halved until L has grown and the KL is at most δ (measure returns both). If nine
    halvings are not enough, restore θ. Returns L, the KL and the halvings (10: no step)."""
    theta = nn.utils.parameters_to_vector(parameters)
    start, _ = measure()
    for backtracks in range(10):
        nn.utils.vector_to_parameters(theta + 0.5**backtracks * step, parameters)
        objective, kl = measure()
        if objective > start and kl <= args.max_kl:
            return objective, kl, backtracks
    nn.utils.vector_to_parameters(theta, parameters)
    return start, 0.0, 10


def trust_region_step(agent, batch, args):
    """One step of the policy, along the natural gradient. Returns what to log."""
    with torch.no_grad():
        old_policy = agent.policy(batch["obs"])
        old_logprobs = old_policy.log_prob(batch["actions"])

    def measure():
        """L and the mean KL(π_old ‖ π) at the current parameters."""
        policy = agent.policy(batch["obs"])
        terms = surrogate(policy.log_prob(batch["actions"]), old_logprobs, batch["advantages"])
        return terms.mean(), kl_divergence(old_policy, policy).mean()

    parameters = list(agent.actor.parameters())
    objective, kl = measure()
    g = flat_gradient(objective, parameters)
    kl_gradient = flat_gradient(kl, parameters, create_graph=True)  # 0, but its derivatives are F

    def fisher_vector_product(v):
        """(F + damping I) v without F. Damping holds back weights that hardly affect π."""
        return flat_gradient(kl_gradient @ v, parameters) + args.damping * v

    x = conjugate_gradient(fisher_vector_product, g, args.cg_steps)
    # So ½ sᵀ(F + damping I) s is δ for the step s, and the KL, about ½ sᵀF s, is less.
    step_size = (2 * args.max_kl / (x @ fisher_vector_product(x) + 1e-20)).sqrt()
    objective, kl, backtracks = line_search(measure, parameters, step_size * x, args)
    return -objective, old_policy.entropy().mean(), kl, backtracks


def main(args):
    """A run from top to bottom. Returns its last mean return, and where the agent is saved."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # more would only slow down networks this small
    envs = vector.RecordEpisodeStatistics(make_envs(args.env_id, args.num_envs), stats_key="total")
    agent, earned_norm = Agent(envs), RunningNorm(1)
    optimizer = torch.optim.Adam(agent.critic.parameters(), args.learning_rate, fused=True)
    name = f"{envs.spec.name}__{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
    folder = Path(args.output_dir, name).expanduser()
    writer = SummaryWriter(folder)
    writer.add_text("hyperparameters", str(args))
    print(f"agent and logs in {folder}")

    obs, _ = envs.reset(seed=10_000 * args.seed)  # environment i gets it + i
    earned, real = np.zeros(args.num_envs), np.ones(args.num_envs, bool)
    returns = envs.return_queue  # of the last 100 episodes
    global_step = 0
    while global_step < args.total_timesteps:
        # ------------------------------------------------------------------------------- Rollout
        steps = []
        for _ in range(args.num_steps):
            with torch.no_grad():
                actions = agent.policy(obs).sample().numpy()
            next_obs, rewards, terminated, truncated, _ = envs.step(actions)
            done = np.logical_or(terminated, truncated)
            earned = rewards + args.gamma * earned * (1 - terminated)
            step = {
                "obs": obs,  # (N, D); in `rollout` (T, N, D)
                "next_obs": next_obs,  # also after a last step: the reset comes a step later
                "actions": actions,  # (N,) or (N, A)
                "rewards": rewards.astype(np.float32),  # (N,), like all below
                "earned": earned,  # discounted sum, as in NormalizeReward: its std scales rewards
                "terminated": terminated.astype(bool),  # no reward could follow
                "done": done,  # terminated, or cut off by a time limit
                "real": real,  # False after `done`: there gymnasium only resets
            }
            steps.append(step)
            obs, real = next_obs, ~done

        # ---------------------------------------------------------------------------- Advantages
        rollout = {key: torch.tensor(np.array([step[key] for step in steps])) for key in steps[0]}
        if not rollout["real"].any():  # nothing but resets
            continue
        earned_norm.update(rollout["earned"][rollout["real"]][:, None])  # before its first use
        rollout["rewards"] /= earned_norm.std()  # so one rate suits rewards of any size
        with torch.no_grad():
            values = agent.value(rollout["obs"])
            next_values = agent.value(rollout["next_obs"])
        advantages, targets = compute_advantages(rollout, values, next_values, args)
        rollout |= {"advantages": advantages, "targets": targets}
        batch = {key: column[rollout["real"]] for key, column in rollout.items()}  # (B, …)
        # While V is too low everywhere, every action looks good, so the mean goes: a small bias.
        batch["advantages"] -= batch["advantages"].mean()

        # -------------------------------------------------------------------------------- Update
        remaining = 1 - global_step / args.total_timesteps  # falls from 1 to 0
        optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        policy_loss, entropy, kl, backtracks = trust_region_step(agent, batch, args)
        for _ in range(args.update_epochs):
            for rows in torch.randperm(len(batch["obs"])).chunk(args.num_minibatches):
                mini = {key: column[rows] for key, column in batch.items()}
                value_loss = 0.5 * (agent.value(mini["obs"]) - mini["targets"]).square().mean()
                optimizer.zero_grad()
                value_loss.backward()
                clip_grad_norm_(agent.parameters(), args.max_grad_norm, error_if_nonfinite=True)
                optimizer.step()
        agent.obs_norm.update(batch["obs"])  # only now, as the update needs the π that played

        # ----------------------------------------------------------------------------------- Log
        global_step += len(batch["obs"])
        torch.save(agent.state_dict(), folder / "agent.tmp")
        Path(folder, "agent.tmp").replace(folder / "agent.pt")  # so a kill never leaves half a file
        stats = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        stats["explained_variance"] = 1 - batch["advantages"].var() / batch["targets"].var()
        stats |= {"kl": kl, "backtracks": backtracks}
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

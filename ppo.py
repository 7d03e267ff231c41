"""PPO, Proximal Policy Optimization: a clip instead of TRPO's trust region.

The current policy, π_old, plays T steps in each of N environments. The critic V predicts the
discounted sum of the rewards to come. The advantage A_t says by how much action a_t turned out
better than predicted, and V is fitted to the old V + A_t. From π_old, π takes many steps, to raise

    L   = mean_t min(r_t A_t, clip(r_t, 1 − ε, 1 + ε) A_t)                       (--clip-coef)
    r_t = π(a_t | s_t) / π_old(a_t | s_t)                           the ratio, 1 at first
    A_t = Σ_l (γλ)^l (R_{t+l} + γ V(s_{t+l+1}) − V(s_{t+l}))        to the episode's end or T

Suppose that the pole of CartPole leans right, that π_old pushed right with probability 0.5, and
that A_t is 1. If ε is 0.2, L grows until π pushes right with probability 0.6. Beyond that L is
flat, so the sample has no gradient. Why the min? If steps on other samples have lowered the
probability to 0.35, the smaller product is r_t A_t = 0.7, not 0.8, and its gradient raises the
probability again.

What changes from trpo.py                        Where
    a clip, not a bound on the KL                surrogate, --clip-coef
    many steps of Adam, not a single step        main (Update), --update-epochs, --num-minibatches
    actor and critic step together               main (Update), --ent-coef 0
    optional: a penalty on the KL, adaptive      kl_k3, main (Update), --beta, --kl-target

Why: TRPO needs conjugate gradients and a line search for a single step per rollout. PPO takes many
steps, but after the first one the samples come from an older policy. The ratio corrects for its
choice of actions, but not for the states that it visited. L can therefore be trusted only near
π_old, so the clip removes the gradient once r_t has passed 1 ± ε in the direction of A_t.
Weakness: a clipped sample no longer moves its own ratio, but the momentum of Adam and other samples
may. If A_t < 0, a ratio above 1 + ε is not clipped, and the gradient grows with the ratio.
Differs from the paper: k3, rescaled rewards and observations, advantages minus their mean.
    python ppo.py --env-id Pendulum-v1 --gamma 0.95 --total-timesteps 300000   # continuous actions
    python ppo.py --clip-coef inf --beta 1 --kl-target 0.01     # L = mean_t r_t A_t − β KL instead
Schulman et al. 2017, arXiv:1707.06347; Huang et al. 2022, The 37 Implementation Details of PPO
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
from torch.distributions import Categorical, Independent, Normal
from torch.nn.utils import clip_grad_norm_
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    clip_coef: float = 0.2  # ε: the ratio is clipped to 1 ± ε; inf: no clipping
    beta: float = 0.0  # β, weight of a penalty on KL(π_old ‖ π)
    kl_target: float = 0.0  # β > 0 doubles above 1.5 × this KL, halves below it / 1.5; 0: fixed
    update_epochs: int = 4  # epochs: passes over each rollout
    num_minibatches: int = 4  # optimizer steps per epoch
    ent_coef: float = 0.0  # weight of an entropy bonus, to keep π random; decays to 0
    gae_lambda: float = 0.98  # λ of GAE: 0 trusts the critic, 1 the rewards; 0.95 is usual
    gamma: float = 0.99  # γ, the discount factor
    num_steps: int = 128  # T, steps per rollout in each environment
    num_envs: int = 16  # N, environments stepped in parallel
    learning_rate: float = 3e-3  # Adam's learning rate; decays linearly to 0
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    total_timesteps: int = 200_000  # steps across all environments
    env_id: str = "CartPole-v1"  # any gymnasium environment with Discrete or Box actions
    seed: int = 1  # the same seed gives the same run, on the same machine
    output_dir: str = "runs"  # each run makes its own folder in here, for its logs and agent.pt

    def __post_init__(self):
        may_be_0 = ["beta", "kl_target", "ent_coef", "gae_lambda", "gamma", "seed"]
        for name, value in vars(self).items():
            if type(value) in (int, float) and not (value > 0 or value == 0 and name in may_be_0):
                bound = "0 or more" if name in may_be_0 else "above 0"
                sys.exit(f"--{name.replace('_', '-')} {value}: must be {bound}")
        if self.kl_target > 0 and self.beta == 0:
            sys.exit("--kl-target: needs a --beta above 0, which it doubles or halves")
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


def surrogate(logprobs, old_logprobs, advantages, args):
    """Each step's term of L, and whether the clip has removed its gradient."""
    ratio = (logprobs - old_logprobs).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef) * advantages
    objective = torch.minimum(unclipped, clipped)
    return objective, objective < unclipped


def kl_k3(logprobs, other_logprobs):
    """Schulman's k3, which estimates KL(π ‖ other) from actions that π drew: −d plus e^d − 1, whose
    mean is 0, so that no value is negative. (Below, π is π_old, and other is the new policy.)"""
    d = other_logprobs - logprobs
    return d.expm1() - d


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
    earned, real = np.zeros(args.num_envs), np.ones(args.num_envs, bool)
    returns = envs.return_queue  # of the last 100 episodes
    global_step, beta = 0, args.beta
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
            rollout["old_logprobs"] = agent.policy(rollout["obs"]).log_prob(rollout["actions"])
        advantages, targets = compute_advantages(rollout, values, next_values, args)
        rollout |= {"advantages": advantages, "targets": targets}
        batch = {key: column[rollout["real"]] for key, column in rollout.items()}  # (B, …)
        # While V is too low everywhere, every action looks good, so the mean goes: a small bias.
        # (Many also divide by the std, which blows up a good policy's small advantages.)
        batch["advantages"] -= batch["advantages"].mean()

        # -------------------------------------------------------------------------------- Update
        remaining = 1 - global_step / args.total_timesteps  # falls from 1 to 0
        optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        for _ in range(args.update_epochs):
            for rows in torch.randperm(len(batch["obs"])).chunk(args.num_minibatches):
                mini = {key: column[rows] for key, column in batch.items()}
                policy = agent.policy(mini["obs"])
                logprobs, old_logprobs = policy.log_prob(mini["actions"]), mini["old_logprobs"]
                objective, clipped = surrogate(logprobs, old_logprobs, mini["advantages"], args)
                policy_loss = -objective.mean() + beta * kl_k3(old_logprobs, logprobs).mean()
                value_loss = 0.5 * (agent.value(mini["obs"]) - mini["targets"]).square().mean()
                entropy = policy.entropy().mean()
                optimizer.zero_grad()
                (policy_loss + value_loss - args.ent_coef * remaining * entropy).backward()
                clip_grad_norm_(agent.parameters(), args.max_grad_norm, error_if_nonfinite=True)
                optimizer.step()
        new_logprobs = agent.policy(batch["obs"]).log_prob(batch["actions"]).detach()
        approx_kl = kl_k3(batch["old_logprobs"], new_logprobs).mean()
        if 0 < 1.5 * args.kl_target < approx_kl:  # π has gone too far
            beta *= 2
        elif approx_kl < args.kl_target / 1.5:
            beta /= 2
        agent.obs_norm.update(batch["obs"])  # only now, as the update needs the π that played

        # ----------------------------------------------------------------------------------- Log
        global_step += len(batch["obs"])
        torch.save(agent.state_dict(), folder / "agent.tmp")
        Path(folder, "agent.tmp").replace(folder / "agent.pt")  # so a kill never leaves half a file
        stats = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        stats["explained_variance"] = 1 - batch["advantages"].var() / batch["targets"].var()
        stats |= {"approx_kl": approx_kl, "beta": beta, "clipfrac": clipped.float().mean()}
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

"""Actor-critic: a critic predicts the rewards to come, so we need not wait for an episode to end.

The policy π, the actor, plays T steps in each of N environments. A second network, the critic V,
predicts from a state the discounted sum of the rewards to come. With V, one reward and the next
state are enough to judge an action: did it lead to more than V had predicted? If so, the next step
of π makes this action more likely. V has to learn faster, so it takes several (--update-epochs):

    mean_t δ_t ∇log π(a_t | s_t)                 the actor's step: ∇J (scaled), if γ = 1 and V right
    δ_t = R_t + γ V(s_{t+1}) − V(s_t)            the temporal-difference (TD) error
    mean_t ½ δ_t²                                the critic's loss, with γ V(s_{t+1}) held fixed

In CartPole each step pays 1 until the pole falls. Suppose V predicts 40 before a push to the left
and 41 after it. If γ is 0.99, δ_t = 1 + 40.59 − 40 = 1.59, and the push becomes more likely. If V
falls to 38 instead, because the pole now leans, δ_t is −1.38, and the push becomes less likely.

What changes from reinforce.py                   Where
    the TD error, not G_t − V(s_t)               compute_advantages
    rollouts of T steps, not whole episodes      main (Rollout), --num-steps
    targets that contain V, and move with it     main (Update)
    a mean over steps, and a clipped gradient    main (Update), --max-grad-norm

Why: the TD error depends on one reward and one step of the environment, so it varies far less than
G_t − V(s_t). If V is right, the mean of δ_t is the advantage of a_t (tests/learn/THEORY.md, 4).
Weakness: V is rarely right, and its errors bias the gradient. Nor does anything limit how far a
step moves the policy.
Differs from the paper: there eligibility traces spread δ_t over past states, after every step. N
environments and T steps are from A2C (arXiv:1602.01783, synchronous), but not its n-step returns.
As in reinforce.py: rescaled rewards and observations, advantages minus mean, entropy bonus, no γ^t.

    python actor_critic.py --env-id Acrobot-v1
Barto, Sutton & Anderson 1983, doi:10.1109/TSMC.1983.6313077; Sutton & Barto 2018, section 13.5
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
    update_epochs: int = 4  # the critic's epochs: its passes over the steps of each rollout
    num_minibatches: int = 4  # optimizer steps per epoch
    ent_coef: float = 0.01  # weight of a bonus for π's entropy, so that π stays random; decays to 0
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
        may_be_0 = ["ent_coef", "gamma", "seed"]
        for name, value in vars(self).items():
            if type(value) in (int, float) and not (value > 0 or value == 0 and name in may_be_0):
                bound = "0 or more" if name in may_be_0 else "above 0"
                sys.exit(f"--{name.replace('_', '-')} {value}: must be {bound}")
        if self.gamma > 1:
            sys.exit("--gamma: must be at most 1")


# -------------------------------------------------------------------------------------- Algorithm
def compute_advantages(rollout, values, next_values, args):
    """The TD errors and the critic's targets: all (T, N). No reward follows a termination. At every
    other step V(s_{t+1}) stands in for the rewards to come, even where a time limit or the
    rollout's end cut the episode off."""
    targets = rollout["rewards"] + args.gamma * next_values * ~rollout["terminated"]
    return targets - values, targets


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
        policy = agent.policy(batch["obs"])
        policy_loss = -(batch["advantages"] * policy.log_prob(batch["actions"])).mean()
        entropy = policy.entropy().mean()
        optimizer.zero_grad()
        (policy_loss - args.ent_coef * remaining * entropy).backward()
        clip_grad_norm_(agent.parameters(), args.max_grad_norm, error_if_nonfinite=True)
        optimizer.step()
        for _ in range(args.update_epochs):
            for rows in torch.randperm(len(batch["obs"])).chunk(args.num_minibatches):
                mini = {key: column[rows] for key, column in batch.items()}
                # Made anew, as V moves: with fixed targets a reward travels one step per rollout.
                next_values = agent.value(mini["next_obs"]).detach()  # a target has no gradient
                error, _ = compute_advantages(mini, agent.value(mini["obs"]), next_values, args)
                value_loss = 0.5 * error.square().mean()
                optimizer.zero_grad()
                value_loss.backward()
                clip_grad_norm_(agent.parameters(), args.max_grad_norm, error_if_nonfinite=True)
                optimizer.step()  # of V alone: Adam skips the actor, whose gradients are None
        agent.obs_norm.update(batch["obs"])  # only now, as the update needs the π that played

        # ----------------------------------------------------------------------------------- Log
        global_step += len(batch["obs"])
        torch.save(agent.state_dict(), folder / "agent.tmp")
        Path(folder, "agent.tmp").replace(folder / "agent.pt")  # so a kill never leaves half a file
        stats = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
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

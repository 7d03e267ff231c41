"""Actor-critic: learning before the episode is over.

The policy π plays T steps in each of N environments. Each action is judged by what the critic V
makes of its outcome:

    ∇J ≈ mean_t δ_t ∇log π(a_t | s_t),   δ_t = R_t + γ V(s_{t+1}) − V(s_t)

Then V takes several passes over the same steps to reduce δ_t². Its target R_t + γ V(s_{t+1}) is
taken anew each time, but no gradient flows through it. V(s_{t+1}) counts as 0 where the episode
terminated, but not where a time limit cut it off: it would have gone on.

Why: REINFORCE waits for whole episodes, and credits every action with all that came after it. The
TD error δ_t depends on a single reward and a single step of the environment, so it varies far less,
and a rollout may stop anywhere: no episode is too long. On CartPole that saves no steps.

Weakness: δ_t is unbiased only if V is right, so V must learn faster than the policy
(--update-epochs). And nothing limits how far a step moves the policy.

    python actor_critic.py                                                     # CartPole-v1
    python actor_critic.py --env-id Acrobot-v1

Sutton & Barto 2018, Reinforcement Learning, section 13.5
Two time scales: Konda & Tsitsiklis 2000. Parallel environments: Mnih et al. 2016, arXiv:1602.01783
"""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete, flatdim
from PIL import Image
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    update_epochs: int = 4
    """passes of the critic over each rollout"""
    num_minibatches: int = 4
    """optimizer steps per pass"""
    ent_coef: float = 0.01
    """weight of the entropy bonus; decays linearly to 0"""
    gamma: float = 0.99
    """γ, the discount factor"""
    num_steps: int = 64
    """T, steps per rollout in each environment"""
    num_envs: int = 16
    """N, environments stepped in parallel"""
    learning_rate: float = 2e-3
    """Adam's learning rate; constant, since a policy that slips late must be able to recover"""
    max_grad_norm: float = 1.0
    """the gradients of actor and critic are each clipped to this norm"""
    total_timesteps: int = 200_000
    """environment steps in total, over all environments"""
    env_id: str = "CartPole-v1"
    """any gymnasium environment with Discrete or Box actions; observations that are no Box are
    flattened by gymnasium: Discrete, MultiDiscrete, MultiBinary, Tuple, Dict"""
    init_std: float = 1.0
    """initial standard deviation of a Gaussian policy (Box actions); it is learned from there"""
    target_return: float | None = None
    """stop training once the last 100 episodes reach this mean return, if given"""
    seed: int = 1
    """random seed; the same seed gives the same run, to the last digit"""
    load: str = ""
    """start from the agent in this file, the agent.pt of an earlier run"""
    eval_only: bool = False
    """only evaluate the agent given by --load, without training"""
    record: bool = False
    """save one greedy episode as a GIF next to the agent"""
    output_dir: str = "runs"
    """folder in which each run makes its own, for its logs and agent.pt"""


# -------------------------------------------------------------------------------------- Algorithm
def compute_advantages(rewards, values, terminated, done, args):
    """The TD error δ: values (T + 1, N), all others (T, N) → advantages (T, N). `done` is unused:
    δ_t looks no further than s_{t+1}."""
    # Nothing follows a termination. An episode cut off by a time limit would have gone on, and
    # V(s_{t+1}) stands for the rest of it.
    next_values = values[1:] * ~terminated
    return rewards + args.gamma * next_values - values[:-1]


@torch.no_grad()
def rescale_returns(agent, returns):
    """Update the running mean and deviation with the returns (B,), and leave V(s) as it was: the
    critic's last layer makes up for it (Pop-Art, van Hasselt et al. 2016, arXiv:1602.07714)."""
    # These returns are mostly γ V(s_{t+1}): if V grew whenever they do, it would run away.
    norm, last = agent.return_norm, agent.critic[-1]
    old_mean, old_std = norm.mean, norm.std
    norm.update(returns)
    last.bias += (old_mean - norm.mean) / old_std
    last.bias *= old_std / norm.std
    last.weight *= old_std / norm.std


@torch.no_grad()
def prepare(agent, rollout, args):
    """A rollout's real steps as B rows: obs (B, D), actions (B,) or (B, A), the others (B,)."""
    values = agent.value(rollout["obs"])
    advantages = compute_advantages(
        rollout["rewards"], values, rollout["terminated"], rollout["done"], args
    )
    batch = {
        "obs": rollout["obs"][:-1],
        "actions": rollout["actions"],
        "rewards": rollout["rewards"],
        "next_obs": rollout["obs"][1:],
        "terminated": rollout["terminated"],
        "values": values[:-1],
        "advantages": advantages,
        "returns": values[:-1] + advantages,  # what the critic should have said
    }
    return {name: column[rollout["mask"]] for name, column in batch.items()}


def update(agent, optimizer, batch, ent_coef, args):
    """One step of the policy, then passes of the critic; returns what to log."""
    policy = agent.policy(batch["obs"])
    entropy = policy.entropy().mean()
    logprobs = policy.log_prob(batch["actions"])
    # In standard deviations of the return, so that one learning rate suits rewards of any scale.
    # A z-score per batch would turn what little noise a good policy is left with into a signal.
    advantages = batch["advantages"] / agent.return_norm.std
    policy_loss = -(advantages * logprobs).mean()
    loss = policy_loss - ent_coef * entropy
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.actor.parameters(), args.max_grad_norm)
    optimizer.step()
    return {
        "policy_loss": policy_loss.detach(),
        "value_loss": fit_critic(agent, optimizer, batch, args),
        "entropy": entropy.detach(),
    }


def fit_critic(agent, optimizer, batch, args):
    """Passes over the batch in minibatches that pull V(s_t) to R_t + γ V(s_{t+1}); mean loss."""
    losses = []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch["obs"]))
        for rows in order.chunk(args.num_minibatches):
            with torch.no_grad():  # no gradient flows into the target
                next_values = agent.value(batch["next_obs"][rows]) * ~batch["terminated"][rows]
                target = batch["rewards"][rows] + args.gamma * next_values
            error = agent.value(batch["obs"][rows]) - target
            loss = 0.5 * (error / agent.return_norm.std).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.critic.parameters(), args.max_grad_norm)
            optimizer.step()  # of V alone: Adam skips the actor, whose gradients are None
            losses.append(loss.item())
    return torch.tensor(losses).mean()


# --------------------------------------------------------------------------------------- Rollouts
def rollouts(envs, agent, args):
    """Yield, without end, rollouts of T = num_steps steps in N environments, each with the returns
    of the episodes that ended in it.

    A rollout: obs (T + 1, N, D), actions (T, N) or (T, N, A), all others (T, N). `done` marks the
    last step of an episode, terminated or out of time. In the step after that, gymnasium resets the
    environment and ignores the action; `mask` is False there, for it is not a real step. Its obs is
    the old episode's last, so obs[t + 1] is always where step t led.
    """
    obs, _ = envs.reset(seed=args.seed)
    mask = np.ones(args.num_envs, bool)
    returns = np.zeros(args.num_envs)  # of the episodes under way, so far
    while True:
        observations, steps, episodes = [obs], [], []
        for _ in range(args.num_steps):
            actions = agent.act(obs)
            obs, rewards, terminated, truncated, _ = envs.step(actions)
            done = terminated | truncated
            step = {"actions": actions, "rewards": rewards.astype(np.float32), "mask": mask}
            steps.append(step | {"terminated": terminated, "done": done})
            observations.append(obs)
            returns += rewards * mask
            episodes += returns[done].tolist()
            returns[done] = 0
            mask = ~done
        rollout = {"obs": torch.as_tensor(np.stack(observations)).float().flatten(2)}
        for name in steps[0]:
            rollout[name] = torch.as_tensor(np.stack([step[name] for step in steps]))
        if rollout["mask"].any():  # a rollout may hold nothing but resets
            yield rollout, episodes


# -------------------------------------------------------------------------- Environment and agent
def make_envs(env_id, num_envs, **options):
    """num_envs environments that step as one; natively vectorized where gymnasium has that."""
    try:
        envs = gym.make_vec(env_id, num_envs=num_envs, **options)
    except (gym.error.Error, ImportError) as error:
        stop(f"--env-id {env_id}: {error}")
    seen, space = envs.single_observation_space, envs.single_action_space
    discrete = isinstance(space, Discrete) and space.start == 0
    continuous = isinstance(space, Box) and len(space.shape) == 1
    supported = seen.is_np_flattenable and (discrete or continuous)
    if not supported or envs.metadata["autoreset_mode"] != gym.vector.AutoresetMode.NEXT_STEP:
        stop(
            f"--env-id {env_id}: needs observations that gymnasium can flatten, Discrete or flat "
            "Box actions and next-step autoreset"
        )
    if not isinstance(seen, Box):  # a Discrete state becomes one-hot, a Dict a single vector
        envs = gym.wrappers.vector.FlattenObservation(envs)
    if continuous:  # for the environment alone: log π is that of the action drawn
        envs = gym.wrappers.vector.ClipAction(envs)
    return envs


class RunningNorm(nn.Module):
    """Scales to mean 0 and standard deviation 1 over all rows that `update` has seen."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("sums", torch.zeros(3, *shape, dtype=torch.float64))  # of 1, x, x²
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))

    def update(self, x):
        x = x.double()
        self.sums += torch.stack([x**0, x, x**2]).sum(1)
        count, total, squares = self.sums
        mean = total / count
        self.mean = mean.float()
        self.std = (squares / count - mean**2).clamp(min=1e-8).sqrt().float()

    def forward(self, x):
        return ((x - self.mean) / self.std).clamp(-10, 10)


class Agent(nn.Module):
    """A policy π(a|s), Categorical or Gaussian, and a critic V(s), as two separate networks."""

    def __init__(self, envs, init_std=1.0):
        super().__init__()
        obs_size = flatdim(envs.single_observation_space)
        action_space = envs.single_action_space
        self.discrete = isinstance(action_space, Discrete)
        self.obs_norm = RunningNorm(obs_size)
        self.return_norm = RunningNorm()
        self.actor = nn.Sequential(
            nn.Linear(obs_size, 64),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Tanh(),
            nn.Linear(64, flatdim(action_space)),
        )
        self.critic = nn.Sequential(
            nn.Linear(obs_size, 64),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Tanh(),
            nn.Linear(64, 1),
        )
        self.actor[-1].weight.data *= 0.01  # close to uniform at first
        if not self.discrete:
            self.actor.log_std = nn.Parameter(torch.full(action_space.shape, np.log(init_std)))

    def policy(self, obs):
        """π(·|s): obs (…, D) → a distribution over actions (…) or (…, A)."""
        output = self.actor(self.obs_norm(obs))
        if self.discrete:
            return Categorical(logits=output)
        return Independent(Normal(output, self.actor.log_std.exp()), 1)

    def value(self, obs):
        """V(s): obs (…, D) → (…). The network itself sees returns of mean 0 and deviation 1."""
        normalized = self.critic(self.obs_norm(obs)).squeeze(-1)
        return normalized * self.return_norm.std + self.return_norm.mean

    @torch.no_grad()
    def act(self, obs, greedy=False):
        """Actions for the observations of N environments: drawn from π, or its mode."""
        policy = self.policy(torch.as_tensor(obs, dtype=torch.float32).flatten(1))
        return (policy.mode if greedy else policy.sample()).numpy()


def load_agent(agent, args):
    """Fill `agent` from the file given by --load."""
    try:
        agent.load_state_dict(torch.load(args.load, weights_only=True)[args.env_id])
    except Exception as error:  # a missing, torn or foreign file can fail in many ways
        stop(f"--load {args.load}: no agent of --env-id {args.env_id} ({type(error).__name__})")


# ------------------------------------------------------------------------------------ Flag checks
def stop(message):
    """End a run that cannot work: one line that names the flag and the fix, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_args(args):
    """Stop at the first flag whose value no run can use."""
    may_be_0 = ["ent_coef", "gamma", "learning_rate", "seed"]
    for name, value in vars(args).items():
        low = 0 if name in may_be_0 else 1e-9
        high = 1 if name == "gamma" else 2**31
        is_number = type(value) in (int, float) and name != "target_return"
        if is_number and not low <= value <= high:
            stop(f"--{name.replace('_', '-')} {value}: must be between {low} and {high}")


# --------------------------------------------------------------------------- Evaluation and main
@torch.no_grad()
def evaluate(agent, args, greedy, episodes=100, gif=None):
    """Mean return of fresh episodes, one per environment, each cut off after 10,000 steps; of a
    single one, filmed, if given a file name for the `gif`."""
    options = {}
    if gif:
        episodes, options = 1, {"render_mode": "rgb_array"}
    envs = make_envs(args.env_id, episodes, **options)
    obs, _ = envs.reset(seed=args.seed + 10**6)
    returns = np.zeros(episodes)
    running = np.ones(episodes, bool)
    frames = []
    for _ in range(10_000):
        if gif:
            frames.append(Image.fromarray(envs.render()[0]))
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs, greedy))
        returns += rewards * running
        running &= ~(terminated | truncated)
        if not running.any():
            break
    if gif:
        duration = 1000 / envs.metadata["render_fps"]
        frames[0].save(gif, save_all=True, append_images=frames[1:], duration=duration)
    return returns.mean()


def train(envs, agent, path, args):
    """Train until the steps are spent; returns the step and second at which the task was solved."""
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    writer = SummaryWriter(path.parent)
    writer.add_text("hyperparameters", str(args))
    threshold = args.target_return
    if threshold is None:
        threshold = envs.spec.reward_threshold or np.inf
    global_step, solved_step, solved_seconds = 0, None, None
    recent = []  # returns of the last 100 episodes
    bar = tqdm(total=args.total_timesteps, unit="step", disable=None)
    start = time.perf_counter()
    for rollout, episodes in rollouts(envs, agent, args):
        torch.save({args.env_id: agent.state_dict()}, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)  # a kill at any moment leaves a whole agent
        steps = int(rollout["mask"].sum())
        global_step += steps
        seconds = time.perf_counter() - start
        recent = (recent + episodes)[-100:]
        mean_return = np.mean(recent or [np.nan])
        bar.set_postfix(mean_return=f"{mean_return:.1f}")
        bar.update(steps)
        if solved_step is None and len(recent) == 100 and mean_return >= threshold:
            solved_step, solved_seconds = global_step, seconds
        left = 1 - global_step / args.total_timesteps
        if left <= 0 or (solved_step and args.target_return is not None):
            break
        batch = prepare(agent, rollout, args)
        rescale_returns(agent, batch["returns"])  # before: the losses are in their deviations
        stats = update(agent, optimizer, batch, args.ent_coef * left, args)
        agent.obs_norm.update(batch["obs"])  # not before: the update needs the π that acted
        if not math.isfinite(sum(stats.values())):
            bar.close()
            sys.exit(
                f"error: step {global_step}: loss not finite; lower --learning-rate; "
                f"the last good agent is {path}"
            )
        errors = batch["returns"] - batch["values"]
        unexplained = errors.var(correction=0) / batch["returns"].var(correction=0)
        stats["explained_variance"] = 1 - unexplained.item()
        for name, value in stats.items():
            writer.add_scalar(f"losses/{name}", value, global_step)
        writer.add_scalar("charts/learning_rate", args.learning_rate, global_step)
        writer.add_scalar("charts/SPS", global_step / seconds, global_step)
        if episodes:
            writer.add_scalar("charts/episodic_return", np.mean(episodes), global_step)
    bar.close()
    writer.close()
    return solved_step, solved_seconds


def main(args):
    start = time.perf_counter()
    check_args(args)
    torch.set_num_threads(1)  # networks this small only get slower with more
    Distribution.set_default_validate_args(False)  # checking every tensor is slow as well
    torch.manual_seed(args.seed)
    envs = make_envs(args.env_id, args.num_envs)
    agent = Agent(envs, args.init_std)
    if args.load or args.eval_only:
        load_agent(agent, args)
    path = Path(args.load)
    solved_step, solved_seconds = None, None
    if not args.eval_only:
        folder = f"{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        path = Path(args.output_dir, folder, "agent.pt")
        print(f"logs and agent in {path.parent}; tensorboard --logdir {args.output_dir}")
        solved_step, solved_seconds = train(envs, agent, path, args)
    greedy = evaluate(agent, args, True)
    sampled = evaluate(agent, args, False)
    if args.record:
        evaluate(agent, args, True, gif=path.with_suffix(".gif"))
    seconds = time.perf_counter() - start
    print(f"mean return {greedy:.1f} greedy, {sampled:.1f} sampled; {seconds:.0f} s; agent: {path}")
    return {
        "eval/return": greedy,
        "eval/return_stochastic": sampled,
        "solved_step": solved_step,
        "solved_seconds": solved_seconds,
        "seconds": seconds,
        "agent": str(path),
    }


if __name__ == "__main__":
    main(tyro.cli(Args))

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "gymnasium[classic-control]==1.4.0",
#     "tyro==1.0.17",
#     "tensorboard==2.21.0",
#     "tqdm==4.70.1",
# ]
# ///

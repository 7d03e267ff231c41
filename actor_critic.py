"""Actor-critic: learn before the episode is over.

The policy π plays T steps in each of N environments. The critic V judges each action by its reward
and next state:

    ∇J ≈ mean_t δ_t ∇log π(a_t | s_t),   δ_t = R_t + γ V(s_{t+1}) − V(s_t)

δ_t is the temporal-difference (TD) error: what the action turned out to be worth, minus what V had
expected. If R_t = 1, γ = 0.99, V(s_t) = 40 and V(s_{t+1}) = 41, then δ_t = 1 + 40.59 − 40 = 1.59,
and a_t becomes likelier. To let V stand for the rewards to come is called bootstrapping. If V were
right, R_t + γ V(s_{t+1}) would have the same mean as REINFORCE's G_t, and ∇J would be the same.

Then V takes several epochs over the same steps to reduce δ_t². Its target R_t + γ V(s_{t+1}) is
recomputed each time, but no gradient flows through it: V(s_t) moves towards the target, which has
one real reward in it; the target does not move. (A mean over steps replaces REINFORCE's sum over an
episode. Adam divides such a factor out again; only --ent-coef and --max-grad-norm now weigh
differently.)

Why: REINFORCE waits for whole episodes, and credits every action with all that came after it. The
TD error depends on one reward and one step of the environment, so it varies far less, and a rollout
may stop anywhere in an episode. On CartPole, though, this loop learned faster if up to 64 rewards
were summed before V stands for the rest (tests/experiments/EXPERIMENTS.md#bootstrap).

Weakness: δ_t is unbiased only if V(s_{t+1}) is right, so V should learn faster than the policy
(--update-epochs). And nothing limits how far a step moves the policy.

    python actor_critic.py                                                     # CartPole-v1
    python actor_critic.py --env-id Acrobot-v1

Barto, Sutton & Anderson 1983, doi:10.1109/TSMC.1983.6313077; Sutton & Barto 2018, section 13.5
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
    update_epochs: int = 4  # the critic's epochs: its passes over the steps of each rollout
    num_minibatches: int = 4  # optimizer steps per epoch
    # weight of a bonus for π's entropy, −Σ π log π; falls to 0. It keeps π random at first, as an
    # action that is never tried is never learned
    ent_coef: float = 0.01
    gamma: float = 0.99  # γ, the discount factor
    num_steps: int = 64  # T, steps per rollout in each environment; few, so that π steps often
    num_envs: int = 16  # N, environments stepped in parallel
    # Adam's learning rate, for one step of π per rollout; no decay, so late setbacks can heal
    learning_rate: float = 2e-3
    max_grad_norm: float = 1.0  # the gradients of actor and critic are each clipped to this norm
    # steps over all environments (the last rollout trains nothing); 0: only evaluate --load's agent
    total_timesteps: int = 200_000
    env_id: str = "CartPole-v1"  # any gymnasium environment with Discrete or Box actions
    init_std: float = 1.0  # initial standard deviation of a Gaussian policy (Box actions)
    target_return: float = math.inf  # stop once the last 100 episodes reach this mean return
    seed: int = 1  # the same seed gives the same run, to the last digit
    load: str = ""  # start from the agent in this file, the agent.pt of an earlier run
    record: bool = False  # save one greedy episode as a GIF next to the agent
    output_dir: str = "runs"  # each run makes a folder in here for its logs and agent.pt


# -------------------------------------------------------------------------------------- Algorithm
def compute_advantages(rollout, values, next_values, args):
    """The TD errors of a rollout (see `rollouts`) or a minibatch, and the critic's targets: all of
    one shape."""
    # Nothing follows a termination. An episode cut off by a time limit, or by the rollout's end,
    # would have gone on, and V(s_{t+1}) stands for the rest of it.
    next_values = next_values * ~rollout["terminated"]
    targets = rollout["rewards"] + args.gamma * next_values
    return targets - values, targets


@torch.no_grad()
def prepare(agent, rollout, args):
    """The rollout's B real steps, with advantages and targets: obs (B, D), actions (B,) or (B, A),
    the others (B,)."""
    # obs[t + 1] is next_obs[t], after an episode's last step, too: the reset comes one step later.
    values = agent.value(torch.cat([rollout["obs"], rollout["next_obs"][-1:]]))  # V(s_0) … V(s_T)
    advantages, targets = compute_advantages(rollout, values[:-1], values[1:], args)
    rollout = rollout | {"advantages": advantages, "targets": targets}
    return {name: column[rollout["mask"]] for name, column in rollout.items()}


@torch.no_grad()
def rescale_returns(agent, targets):
    """Update the mean and deviation of the returns with the targets (B,), and leave V(s) as it was:
    the critic's last layer makes up for it (an aid, Pop-Art: van Hasselt et al., 1602.07714)."""
    # Targets are mostly γ V(s_{t+1}), and V is std times the network's output. If a larger std made
    # V larger, the next targets would grow, then std again, without end.
    norm, last = agent.return_norm, agent.critic[-1]
    old_mean, old_std = norm.mean, norm.std
    # At first all targets may be equal, and std 0. So each counts with a 0, V after an episode.
    norm.update(torch.cat([targets, torch.zeros_like(targets)]))
    last.weight *= old_std / norm.std
    last.bias.copy_((last.bias * old_std + old_mean - norm.mean) / norm.std)


def update(agent, optimizer, batch, progress_remaining, args):
    """One step of the policy, then epochs of the critic; returns what to log.
    `progress_remaining` falls from 1 to 0 over the training."""
    # In units of the standard deviation of all returns so far: the same flags then suit rewards of
    # 1e-6 and of 1e6. A z-score per batch would blow up the small advantages of a good policy.
    rescale_returns(agent, batch["targets"])
    advantages = batch["advantages"] / agent.return_norm.std
    policy = agent.policy(batch["obs"])
    entropy = policy.entropy().mean()
    policy_loss = -(advantages * policy.log_prob(batch["actions"])).mean()
    loss = policy_loss - args.ent_coef * progress_remaining * entropy
    optimizer.zero_grad()
    loss.backward()
    # Clipped, unlike REINFORCE's: a TD error can be very large while V is still wrong.
    nn.utils.clip_grad_norm_(agent.actor.parameters(), args.max_grad_norm)
    optimizer.step()
    stats = {"policy_loss": policy_loss.item(), "entropy": entropy.item()}
    stats["value_loss"] = fit_critic(agent, optimizer, batch, args)
    return stats


def fit_critic(agent, optimizer, batch, args):
    """Epochs over the batch in minibatches that pull V(s_t) to its target; returns the last
    loss."""
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch["obs"]))
        for rows in order.chunk(args.num_minibatches):
            mini = {key: batch[key][rows] for key in ("obs", "next_obs", "rewards", "terminated")}
            next_values = agent.value(mini["next_obs"]).detach()  # no gradient flows into a target
            error, _ = compute_advantages(mini, agent.value(mini["obs"]), next_values, args)
            loss = 0.5 * (error / agent.return_norm.std).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.critic.parameters(), args.max_grad_norm)
            optimizer.step()  # of V alone: Adam skips the actor, whose gradients are None
    return loss.item()


# --------------------------------------------------------------------------------------- Rollouts
def rollouts(envs, agent, args):
    """Yield, without end, rollouts of T = num_steps steps in N environments, with the returns
    of the episodes that ended in it.

    A rollout: obs and next_obs (T, N, D), actions (T, N) or (T, N, A), all others (T, N). `done`
    marks the last step of an episode. A terminated episode is over, so no reward could follow; a
    truncated one would have gone on, but the time limit cut it off. In the step after either,
    gymnasium resets the environment and ignores the action: no real step, so `mask` is False there.
    """
    obs, _ = envs.reset(seed=args.seed)
    mask = np.ones(args.num_envs, bool)
    episode_returns = np.zeros(args.num_envs)  # of the episodes under way, so far
    while True:
        steps, ended = [], []
        for _ in range(args.num_steps):
            actions = agent.act(obs)
            next_obs, rewards, terminated, truncated, _ = envs.step(actions)
            done = terminated | truncated
            step = {"obs": obs, "actions": actions, "rewards": rewards.astype(np.float32)}
            step |= {"next_obs": next_obs, "terminated": terminated, "done": done, "mask": mask}
            steps.append(step)
            episode_returns += rewards * mask
            ended += episode_returns[done].tolist()
            episode_returns[done] = 0
            obs, mask = next_obs, ~done
        rollout = {name: torch.as_tensor(np.stack([s[name] for s in steps])) for name in steps[0]}
        if rollout["mask"].any():  # a rollout may hold nothing but resets
            yield rollout, ended


# From here on, all scripts of this family are the same, byte for byte.
# -------------------------------------------------------------------------- Environment and agent
def make_envs(env_id, num_envs, **options):
    """num_envs environments that step as one; natively vectorized where gymnasium has that."""
    try:
        envs = gym.make_vec(env_id, num_envs=num_envs, **options)
    except (gym.error.Error, ImportError) as error:
        stop(f"--env-id {env_id}: {error}")
    seen, space = envs.single_observation_space, envs.single_action_space
    discrete = isinstance(space, Discrete) and space.start == 0
    flat = isinstance(space, Box) and len(space.shape) == 1
    continuous = flat and np.issubdtype(space.dtype, np.floating)
    next_step = envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP
    if not (seen.is_np_flattenable and (discrete or continuous) and next_step):
        needs = "observations of a fixed size, Discrete or flat float actions, next-step autoreset"
        stop(f"--env-id {env_id}: needs {needs}")
    if not isinstance(seen, Box) or len(seen.shape) != 1:  # a Dict or an image becomes a vector
        envs = gym.wrappers.vector.FlattenObservation(envs)
    if continuous:  # only the environment sees the clipped action; log π does not
        envs = gym.wrappers.vector.ClipAction(envs)

    def check_finite(values):
        if not np.isfinite(values).all():
            sys.exit(f"error: --env-id {env_id} gave an observation or a reward of NaN or infinity")
        return values

    envs = gym.wrappers.vector.TransformObservation(envs, check_finite)
    return gym.wrappers.vector.TransformReward(envs, check_finite)


def check_frames(env_id):
    """Stop if --record would fail after the training: render one frame before it."""
    try:
        envs = make_envs(env_id, 1, render_mode="rgb_array")
        envs.reset()
        Image.fromarray(envs.render()[0])
    except Exception as error:  # each environment fails in a way of its own
        stop(f"--record: --env-id {env_id} gives no frames ({type(error).__name__})")


class RunningMeanStd(nn.Module):
    """Scales to mean 0 and standard deviation 1 over all rows seen, as networks learn best so."""

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
        return ((x.to(self.mean.dtype) - self.mean) / self.std).clamp(-10, 10)


def mlp(inputs, outputs):
    """Two hidden layers of 64 tanh units."""
    hidden = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


class Agent(nn.Module):
    """A policy π(a|s), Categorical or Gaussian, and a critic V(s), as two separate networks."""

    def __init__(self, envs, init_std=1.0):
        super().__init__()
        obs_size = flatdim(envs.single_observation_space)
        action_space = envs.single_action_space
        self.obs_norm = RunningMeanStd(obs_size)
        self.return_norm = RunningMeanStd()
        self.actor = mlp(obs_size, flatdim(action_space))
        self.critic = mlp(obs_size, 1)
        self.actor[-1].weight.data *= 0.01  # close to uniform at first
        self.critic[-1].weight.data *= 0  # V is 0 at first, so that it suits tiny rewards, too
        self.critic[-1].bias.data *= 0
        self.discrete = isinstance(action_space, Discrete)
        if not self.discrete:
            self.actor.log_std = nn.Parameter(torch.full(action_space.shape, math.log(init_std)))

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
        policy = self.policy(torch.as_tensor(obs))
        return (policy.mode if greedy else policy.sample()).numpy()


# --------------------------------------------------------------- Evaluation, training and main
def evaluate(agent, args, greedy, episodes=100, gif=None):
    """Mean return of fresh episodes, one per environment, each cut off after 10,000 steps; the
    first is filmed if given a file name for the `gif`."""
    options = {"render_mode": "rgb_array"} if gif else {}
    envs = make_envs(args.env_id, episodes, **options)
    obs, _ = envs.reset(seed=args.seed + 10**6)
    episode_returns = np.zeros(episodes)
    running = np.ones(episodes, bool)
    frames = []
    for _ in tqdm(range(10_000), desc="evaluating", disable=None, leave=False):
        if gif:
            frames.append(Image.fromarray(envs.render()[0]))
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs, greedy))
        episode_returns += rewards * running
        running &= ~(terminated | truncated)
        if not running.any():
            break
    if gif:
        duration = 1000 / envs.metadata.get("render_fps", 30)
        frames[0].save(gif, save_all=True, append_images=frames[1:], duration=duration)
    return episode_returns.mean()


def train(envs, agent, path, args):
    """Train until the steps are spent or --target-return is reached; the agent as it was before
    each update is saved at `path`, beside the logs."""
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    writer = SummaryWriter(path.parent)
    writer.add_text("hyperparameters", str(args))
    global_step, recent = 0, []  # recent: returns of the last 100 episodes
    start = time.perf_counter()
    with tqdm(total=args.total_timesteps, unit="step", disable=None) as bar:  # on a terminal
        for rollout, episode_returns in rollouts(envs, agent, args):
            torch.save({args.env_id: agent.state_dict()}, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)  # a kill at any moment leaves a whole agent
            steps = int(rollout["mask"].sum())
            global_step += steps
            bar.update(steps)
            recent = (recent + episode_returns)[-100:]
            if episode_returns:
                bar.set_postfix(mean_return=f"{np.mean(recent):.1f}")
                writer.add_scalar("charts/episodic_return", np.mean(episode_returns), global_step)
            solved = len(recent) == 100 and np.mean(recent) >= args.target_return
            if solved or global_step >= args.total_timesteps:
                break
            batch = prepare(agent, rollout, args)
            stats = update(agent, optimizer, batch, 1 - global_step / args.total_timesteps, args)
            agent.obs_norm.update(batch["obs"])  # only now: update needs the π that acted
            if not math.isfinite(sum(stats.values())):
                hint = f"lower --learning-rate; the agent from before this update is {path}"
                sys.exit(f"error: step {global_step}: loss not finite; {hint}")
            error, total = (batch[key].var(correction=0) for key in ("advantages", "targets"))
            stats["explained_variance"] = 1 - (error / total.clamp(min=1e-30)).item()
            for name, value in stats.items():
                writer.add_scalar(f"losses/{name}", value, global_step)
            writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
            seconds = time.perf_counter() - start
            writer.add_scalar("charts/SPS", global_step / seconds, global_step)
    writer.close()


def stop(message):
    """End a run that cannot work: one line that names the flag and the fix, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_args(args):
    """Stop at the first number that no run can use."""
    for name, value in vars(args).items():
        low = 1 if Args.__annotations__[name] is int else 0
        if name in ("seed", "total_timesteps"):
            low = 0
        if name in ("init_std", "max_grad_norm"):
            low = 1e-9
        high = 1 if name in ("gamma", "gae_lambda") else 2**31  # trpo.py and ppo.py have gae_lambda
        is_number = type(value) in (int, float) and name != "target_return"
        if is_number and not low <= value <= high:
            stop(f"--{name.replace('_', '-')} {value}: must be between {low} and {high}")


def main(args):
    check_args(args)
    torch.set_num_threads(1)  # networks this small only get slower with more
    Distribution.set_default_validate_args(False)  # checking every tensor is slow as well
    torch.manual_seed(args.seed)
    envs = make_envs(args.env_id, args.num_envs)
    agent = Agent(envs, args.init_std)
    if args.load:
        try:
            agent.load_state_dict(torch.load(args.load, weights_only=True)[args.env_id])
        except Exception as error:  # a missing, torn or foreign file can fail in many ways
            stop(f"--load {args.load}: no agent of --env-id {args.env_id} ({type(error).__name__})")
    if args.record:
        check_frames(args.env_id)
    folder = f"{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
    path = Path(args.output_dir, folder, "agent.pt")
    try:
        path.parent.mkdir(parents=True)
    except OSError as error:
        stop(f"--output-dir {args.output_dir}: {error.strerror}")
    print(f"logs and agent in {path.parent}; tensorboard --logdir {args.output_dir}")
    train(envs, agent, path, args)
    greedy = evaluate(agent, args, True)
    sampled = evaluate(agent, args, False)
    print(f"mean return {greedy:.1f} greedy, {sampled:.1f} sampled; agent: {path}")
    if args.record:
        evaluate(agent, args, True, episodes=1, gif=path.with_suffix(".gif"))
    return {"eval/return": greedy, "eval/return_stochastic": sampled, "agent": str(path)}


if __name__ == "__main__":
    main(tyro.cli(Args))

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[classic-control]==1.4.0", "tyro==1.0.17",
#     "tensorboard==2.21.0", "tqdm==4.70.1", "pillow==13.0.0"]
# ///

"""PPO, Proximal Policy Optimization: a trust region for the price of a clip.

The policy as it stands, π_old, plays T steps in each of N environments, the critic V turns them into advantages A_t,
and minibatches climb, several times over the same steps, on a surrogate of the return that does not reward going far:

    J = mean_t min(r_t A_t, clip(r_t, 1 − ε, 1 + ε) A_t),   r_t = π(a_t | s_t) / π_old(a_t | s_t)
    A_t = Σ_l (γλ)^l δ_{t+l},   δ_t = R_t + γ V(s_{t+1}) − V(s_t)

The pain it cures. TRPO pays for its trust region with conjugate gradients and a line search, and takes one step per
rollout. In PPO a step that has gone far enough, the way its advantage points, loses its gradient, and plain Adam does
the rest. --surrogate penalty is the paper's other form: r_t A_t − β KL(π_old ‖ π), with a β that holds the KL near a
target. How it fails. The clip ends a sample's own push, not that of the others: watch losses/approx_kl.

    python ppo.py      # CartPole-v1, solved in seconds; for continuous actions, add for example
    --env-id Pendulum-v1 --gamma 0.9 --total-timesteps 300000

Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from PIL import Image
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

@dataclass
class Args:
    surrogate: Literal["clip", "penalty"] = "clip"
    """clipped ratio, or plain ratio with a KL penalty of adaptive weight"""
    clip_low: float = 0.2
    """the ratio is clipped below at 1 - clip_low"""
    clip_high: float = 0.2
    """the ratio is clipped above at 1 + clip_high"""
    beta: float = 1.0
    """first weight of the KL penalty (--surrogate penalty)"""
    target_kl: float | None = None
    """KL per rollout, in nats, that ends the passes over it, if given; that the penalty aims at (0.01, if not given)"""
    update_epochs: int = 4
    """passes over each rollout"""
    num_minibatches: int = 4
    """optimizer steps per pass"""
    clip_values: bool = False
    """clip the critic's change per rollout as well, at clip_low and clip_high standard deviations of the return"""
    ent_coef: float = 0.0
    """weight of the entropy bonus; falls linearly to 0"""
    gae_lambda: float = 0.98
    """λ: 0 trusts the critic (the TD error), 1 trusts the rewards (Monte Carlo)"""
    gamma: float = 0.99
    """γ, the discount factor"""
    num_steps: int = 128
    """steps per rollout in each environment (T)"""
    num_envs: int = 16
    """environments that step in parallel (N)"""
    learning_rate: float = 3e-3
    """Adam's rate; falls linearly to 0"""
    total_timesteps: int = 200_000
    """environment steps, over all environments"""
    env_id: str = "CartPole-v1"
    """any gymnasium environment with Box observations and Discrete or Box actions"""
    init_std: float = 1.0
    """standard deviation of a Gaussian policy (Box actions) at first; it is learned from there"""
    target_return: float | None = None
    """stop training once the mean return of the last 100 episodes reaches this"""
    seed: int = 1
    """same seed, same run, to the last digit"""
    load: str = ""
    """start from this agent.pt"""
    eval_only: bool = False
    """do not train: evaluate the agent of --load"""
    record: bool = False
    """film one greedy episode, as a GIF beside the agent"""
    output_dir: str = "runs"
    """each run puts its logs and agent.pt into a folder of its own in here"""

def stop(message: str):
    """End a run that cannot succeed: one line that names the flag and the mend, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)

def check_args(args):
    """Stop at the first flag whose value no run can use."""
    may_be_zero = "seed gamma gae_lambda learning_rate ent_coef clip_low clip_high beta damping".split()
    for name, value in vars(args).items():
        low, high = 0 if name in may_be_zero else 1e-9, 1 if name in ("gamma", "gae_lambda") else 2**31
        if type(value) in (int, float) and name != "target_return" and not low <= value <= high:
            stop(f"--{name.replace('_', '-')} {value}: must be {'above' if low else 'at least'} 0 and at most {high}")
    if args.num_envs * args.num_steps % args.num_minibatches:
        stop(f"--num-minibatches {args.num_minibatches}: must divide --num-envs times --num-steps")
    args.eval_only and not args.load and stop("--eval-only: name the agent with --load PATH")

# ---------------------------------------------------------------------------------------------- Environment and agent
def make_envs(env_id: str, num_envs: int, **options):
    """num_envs environments that step as one; natively vectorised where gymnasium has that (CartPole)."""
    try:
        envs = gym.make_vec(env_id, num_envs=num_envs, **options)
    except (gym.error.Error, ImportError) as error:
        stop(f"--env-id {env_id}: {str(error).splitlines()[0]}")
    obs, action, box = envs.single_observation_space, envs.single_action_space, gym.spaces.Box
    continuous = isinstance(action, box) and len(action.shape) == 1
    fits = isinstance(obs, box) and (continuous or isinstance(action, gym.spaces.Discrete) and action.start == 0)
    if not fits or envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.NEXT_STEP:
        stop(f"--env-id {env_id}: needs Box observations, Discrete or flat Box actions and next-step autoreset")
    return gym.wrappers.vector.ClipAction(envs) if continuous else envs  # log π remains that of the action drawn

class RunningNorm(nn.Module):
    """Shifts and scales to mean 0 and standard deviation 1 over all rows that `update` was shown."""
    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("sums", torch.zeros(3, *shape, dtype=torch.float64))  # of 1, x and x²
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))

    def update(self, x):
        self.sums += torch.stack([x.double() ** power for power in range(3)]).sum(1)
        mean, square = self.sums[1:] / self.sums[0]
        self.mean, self.std = mean.float(), (square - mean**2).clamp(min=1e-8).sqrt().float()

    def forward(self, x):
        return ((x - self.mean) / self.std).clamp(-10, 10)

class Agent(nn.Module):
    """A policy π(a|s), Categorical for Discrete actions and Gaussian for Box, and a critic V(s): two networks."""
    def __init__(self, envs, init_std: float = 1.0, hidden: int = 64):
        super().__init__()
        obs_size, space = np.prod(envs.single_observation_space.shape), envs.single_action_space
        self.discrete = isinstance(space, gym.spaces.Discrete)
        self.obs_norm, self.return_norm = RunningNorm(obs_size), RunningNorm()
        for name, outputs in ("actor", space.n if self.discrete else space.shape[0]), ("critic", 1):
            body = nn.Linear(obs_size, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()
            self.add_module(name, nn.Sequential(*body, nn.Linear(hidden, outputs)))
        self.actor[-1].weight.data *= 0.01  # close to uniform at first
        if not self.discrete:
            self.actor.log_std = nn.Parameter(torch.full(space.shape, np.log(init_std), dtype=torch.float32))

    def policy(self, obs):
        """π(·|s): obs (…, D) → a distribution over actions, (…) or (…, A)."""
        out = self.actor(self.obs_norm(obs))
        return Categorical(logits=out) if self.discrete else Independent(Normal(out, self.actor.log_std.exp()), 1)

    def value(self, obs):
        """V(s): obs (…, D) → (…). The network speaks in standard deviations of the return, so any scale will do."""
        return self.critic(self.obs_norm(obs))[..., 0] * self.return_norm.std + self.return_norm.mean

    @torch.no_grad()
    def act(self, obs: np.ndarray, greedy: bool = False) -> np.ndarray:
        """Actions for the observations of N environments: drawn from π, or its mode."""
        policy = self.policy(torch.as_tensor(obs, dtype=torch.float32).flatten(1))
        return (policy.mode if greedy else policy.sample()).numpy()

def load_agent(agent, args):
    """Fill `agent` from the file of --load."""
    try:
        agent.load_state_dict(torch.load(args.load, weights_only=True)[args.env_id])
    except Exception as error:  # a missing, torn or foreign file has many ways to fail
        stop(f"--load {args.load}: holds no agent for --env-id {args.env_id} ({type(error).__name__})")

# ---------------------------------------------------------------------------------------------------------- Algorithm
def rollouts(envs, agent, args):
    """Yield, without end, T = num_steps steps of N environments, and the returns of the episodes that ended in them.

    Tensors: obs (T + 1, N, D), actions (T, N) or (T, N, A), the others (T, N). done: terminated or out of time. mask: 0
    in the step *after* an episode's last, in which gymnasium resets; that one is no step. But as it still shows the old
    episode's last observation, obs[t + 1] always is where step t led to.
    """
    obs, _ = envs.reset(seed=args.seed)
    mask, returns = np.ones(args.num_envs, bool), np.zeros(args.num_envs)
    while True:
        steps, episodes = [], []
        for _ in range(args.num_steps):
            actions = agent.act(obs)
            next_obs, rewards, terminated, truncated, _ = envs.step(actions)
            done = terminated | truncated
            steps.append((obs, actions, rewards, terminated, done, mask))
            returns += rewards * mask
            episodes += returns[done].tolist()
            returns[done] = 0
            obs, mask = next_obs, ~done
        columns = (torch.as_tensor(np.stack(column)) for column in zip(*steps))
        rollout = dict(zip("obs actions rewards terminated done mask".split(), columns))
        rollout["obs"] = torch.cat([rollout["obs"], torch.as_tensor(obs)[None]]).float().flatten(2)
        yield rollout | {"rewards": rollout["rewards"].float()}, episodes

def compute_advantages(rewards, values, terminated, done, args):
    """GAE(γ, λ) of Schulman et al. 2015, arXiv:1506.02438: values (T + 1, N), all others (T, N) → advantages (T, N)."""
    # Nothing follows a termination; but an episode cut off would have gone on, and was worth V(s_{t+1}) still.
    delta = rewards + args.gamma * values[1:] * ~terminated - values[:-1]
    advantages, following = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        advantages[t] = following = delta[t] + args.gamma * args.gae_lambda * following * ~done[t]
    return advantages

@torch.no_grad()
def prepare(agent, rollout: dict, args) -> dict:
    """The B steps of a rollout that are real, in rows: obs (B, D), actions (B,) or (B, A), all others (B,)."""
    values, mask = agent.value(rollout["obs"]), rollout["mask"]
    advantages = compute_advantages(rollout["rewards"], values, rollout["terminated"], rollout["done"], args)
    batch = {"obs": rollout["obs"][:-1][mask], "actions": rollout["actions"][mask], "values": values[:-1][mask]}
    batch["returns"] = batch["values"] + advantages[mask]  # what the critic should have said
    agent.return_norm.update(batch["returns"])
    # In standard deviations of the return. A z-score per batch would, once all goes well, blow up what is only noise.
    batch["advantages"] = advantages[mask] / agent.return_norm.std
    batch["logprobs"] = agent.policy(batch["obs"]).log_prob(batch["actions"])
    return batch

def surrogate(logprobs, old_logprobs, advantages, args):
    """The objective of each step, to be maximised: all (B,)."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    if args.surrogate == "penalty":
        return ratio * advantages - args.beta * (ratio - 1 - log_ratio)  # its mean under π_old: β KL(π_old ‖ π)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - args.clip_low, 1 + args.clip_high) * advantages)

def adapt_beta(beta: float, kl: float, target_kl: float) -> float:
    """The paper's rule: twice the penalty after a step too long, half of it after one too short."""
    return beta * 2 if kl > target_kl * 1.5 else beta / 2 if kl < target_kl / 1.5 else beta

def update(agent, optimizer, batch: dict, ent_coef: float, args) -> dict:
    """Passes over the batch in minibatches, a step of policy and critic each; returns what to log, of the last one."""
    if args.clip_values:  # since they were taken, the norm of the return has moved them
        batch = batch | {"values": agent.value(batch["obs"]).detach()}
    for _ in range(args.update_epochs):
        for rows in torch.randperm(len(batch["obs"])).chunk(args.num_minibatches):
            mini = {name: column[rows] for name, column in batch.items()}
            policy, values, std = agent.policy(mini["obs"]), agent.value(mini["obs"]), agent.return_norm.std
            logprobs, entropy = policy.log_prob(mini["actions"]), policy.entropy().mean()
            policy_loss = -surrogate(logprobs, mini["logprobs"], mini["advantages"], args).mean()
            error = (values - mini["returns"]).abs()
            if args.clip_values:
                change = (values - mini["values"]).clamp(-args.clip_low * std, args.clip_high * std)
                error = torch.maximum(error, (mini["values"] + change - mini["returns"]).abs())
            value_loss = 0.5 * (error / std).square().mean()
            optimizer.zero_grad()
            (policy_loss - ent_coef * entropy + value_loss).backward()
            nn.utils.clip_grad_norm_(agent.actor.parameters(), 1.0)
            nn.utils.clip_grad_norm_(agent.critic.parameters(), 1.0)
            optimizer.step()
            log_ratio = (logprobs - mini["logprobs"]).detach()
            approx_kl = (log_ratio.exp() - 1 - log_ratio).mean().item()
        if args.surrogate == "clip" and args.target_kl and approx_kl > args.target_kl:
            break
    if args.surrogate == "penalty":
        args.beta = adapt_beta(args.beta, approx_kl, args.target_kl or 0.01)  # surrogate() reads it there
    clipfrac = (log_ratio.exp().clamp(1 - args.clip_low, 1 + args.clip_high) != log_ratio.exp()).float().mean()
    stats = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "approx_kl": approx_kl}
    return stats | {"clipfrac": clipfrac, "beta": args.beta}

# ---------------------------------------------------------------------------------------------------------- Main loop
@torch.no_grad()
def evaluate(agent, args, greedy: bool, episodes: int = 100, gif: Path | None = None) -> float:
    """Mean return of fresh episodes, one in each of as many environments; of a single one, filmed, if given a `gif`."""
    envs = make_envs(args.env_id, 1 if gif else episodes, **{"render_mode": "rgb_array"} if gif else {})
    obs, _ = envs.reset(seed=args.seed + 10**6)
    returns, running, frames = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool), []
    while running.any():
        frames += [Image.fromarray(envs.render()[0])] if gif else []
        obs, rewards, terminated, truncated, _ = envs.step(agent.act(obs, greedy))
        returns += rewards * running
        running &= ~(terminated | truncated)
    gif and frames[0].save(gif, save_all=True, append_images=frames[1:], duration=1000 / envs.metadata["render_fps"])
    return float(returns.mean())

def main(args: Args) -> dict:
    start = time.perf_counter()
    check_args(args)
    torch.set_num_threads(1)  # networks this small only get slower with more
    torch.distributions.Distribution.set_default_validate_args(False)  # and so they do with checks of every tensor
    torch.manual_seed(args.seed)
    envs = make_envs(args.env_id, args.num_envs)
    agent = Agent(envs, args.init_std)
    args.load and load_agent(agent, args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    folder = Path(args.output_dir) / f"{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(args.load) if args.eval_only else folder / "agent.pt"
    writer = SummaryWriter(path.parent)
    writer.add_text("hyperparameters", "|flag|value|\n|-|-|\n" + "".join(f"|{k}|{v}|\n" for k, v in vars(args).items()))
    threshold = envs.spec.reward_threshold or np.inf if args.target_return is None else args.target_return
    global_step, recent, solved_step, solved_seconds = 0, [], None, None
    bar = tqdm(total=args.total_timesteps, desc=args.env_id, unit="step", disable=args.eval_only)
    train_start = time.perf_counter()
    for rollout, episodes in () if args.eval_only else rollouts(envs, agent, args):
        torch.save({args.env_id: agent.state_dict()}, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)  # a kill at any moment leaves a whole file
        steps, seconds = int(rollout["mask"].sum()), time.perf_counter() - train_start
        global_step += steps
        recent = (recent + episodes)[-100:]
        bar.update(steps)
        bar.set_postfix(mean_return=f"{np.mean(recent or [np.nan]):.1f}", refresh=False)
        if solved_step is None and len(recent) == 100 and np.mean(recent) >= threshold:
            solved_step, solved_seconds = global_step, seconds
        left = 1 - global_step / args.total_timesteps
        if left <= 0 or solved_step and args.target_return is not None:
            break
        optimizer.param_groups[0]["lr"] = args.learning_rate * left
        batch = prepare(agent, rollout, args)
        stats = update(agent, optimizer, batch, args.ent_coef * left, args)
        agent.obs_norm.update(batch["obs"])  # not earlier: the policy would not be π_old any more
        stats = {key: torch.as_tensor(value).item() for key, value in stats.items()}
        if not np.isfinite(list(stats.values())).all():
            sys.exit(f"error: step {global_step}: loss not finite; lower --learning-rate; last good agent in {path}")
        stats["explained_variance"] = 1 - (batch["returns"] - batch["values"]).var() / batch["returns"].var()
        scalars = {f"losses/{key}": value for key, value in stats.items()} | {"charts/SPS": global_step / seconds}
        scalars |= {"charts/episodic_return": np.mean(episodes)} if episodes else {}
        for key, value in scalars.items():
            writer.add_scalar(key, float(value), global_step)
    bar.close()
    scores = {"eval/return": evaluate(agent, args, True), "eval/return_stochastic": evaluate(agent, args, False)}
    writer.close()
    args.record and evaluate(agent, args, True, gif=path.with_suffix(".gif"))
    result = {"solved_step": solved_step, "solved_seconds": solved_seconds, "seconds": time.perf_counter() - start}
    solved = f"solved in {solved_step} steps, {solved_seconds:.1f} s; " if solved_step else ""
    print("mean return {eval/return:.1f} greedy, {eval/return_stochastic:.1f} sampled; ".format(**scores), end=solved)
    print(f"{result['seconds']:.0f} s; agent in {path}; tensorboard --logdir {path.parent}")
    return scores | result | {"agent": str(path)}

if __name__ == "__main__":
    main(tyro.cli(Args))

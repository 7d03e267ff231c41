"""TRPO, Trust Region Policy Optimization: as far as the policy may move, and not a step further.

π_old plays T steps in each of N environments, the critic V turns them into advantages A_t, and one step solves

    max_θ L = mean_t r_t A_t   subject to   mean_t KL(π_old ‖ π) ≤ δ,   r_t = π(a_t | s_t) / π_old(a_t | s_t)

to first order in L, second in the KL, whose Hessian is F: conjugate gradients solve F s = ∇L, the step is
√(2δ / sᵀFs) s, and a line search halves it until L and KL agree. The pain it cures. A learning rate bounds a step in θ,
where the same length may be nothing or ruin the policy; here it is bounded in π. And A_t = Σ_l (γλ)^l δ_{t+l} (GAE)
lies between the TD error, biased, and REINFORCE's returns, noisy. How it fails. One step for twenty passes.

    python trpo.py      # CartPole-v1, solved in seconds; for continuous actions, add --env-id Pendulum-v1 --gamma 0.9

Schulman et al. 2015, Trust Region Policy Optimization, arXiv:1502.05477 · GAE: arXiv:1506.02438
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from PIL import Image
from torch import nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

@dataclass
class Args:
    max_kl: float = 0.01
    """δ: no step takes the policy further than this, in nats of KL(π_old ‖ π), mean over the rollout"""
    cg_steps: int = 10
    """iterations of conjugate gradient, at most"""
    damping: float = 0.1
    """added to the Fisher matrix's diagonal"""
    update_epochs: int = 4
    """passes of the critic over each rollout"""
    num_minibatches: int = 4
    """optimizer steps per pass"""
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

def flat_gradient(scalar, parameters, twice: bool = False):
    """d scalar / dθ, all parameters in one vector (P,); `twice` if it is to be differentiated again."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(scalar, parameters, None, True, twice)])

def fisher_vector_product(kl_gradient, parameters, vector, damping: float):
    """(F + damping I) v without ever writing F: the gradient of (∇KL · v), where F is the Hessian of KL(π_old ‖ π)."""
    return flat_gradient(kl_gradient @ vector, parameters) + damping * vector

def conjugate_gradient(product, g, steps: int, tolerance: float = 1e-10):
    """x with product(x) = g, but for a residual of squared length `tolerance`, or as far as `steps` lead."""
    x, residual, direction, square = torch.zeros_like(g), g, g, g @ g
    for _ in range(steps):
        if square > tolerance:
            image = product(direction)
            alpha = square / (direction @ image)
            x, residual = x + alpha * direction, residual - alpha * image
            direction, square = residual + (residual @ residual) / square * direction, residual @ residual
    return x

@torch.no_grad()
def line_search(measure, parameters, step, args):
    """Halve `step` until measure() → (surrogate, KL) finds the one higher and the other ≤ max_kl, or change nothing."""
    theta, (start, _) = nn.utils.parameters_to_vector(parameters), measure()
    for backtracks in range(10):
        nn.utils.vector_to_parameters(theta + 0.5**backtracks * step, parameters)
        objective, kl = measure()
        if objective > start and kl <= args.max_kl:
            return objective - start, kl, backtracks
    nn.utils.vector_to_parameters(theta, parameters)
    return 0.0, 0.0, 10

def update(agent, optimizer, batch: dict, args) -> dict:
    """One natural gradient step of the policy within the trust region, then the critic; returns what to log."""
    parameters, obs = list(agent.actor.parameters()), batch["obs"]
    old_policy = torch.no_grad()(agent.policy)(obs)
    def measure():
        policy = agent.policy(obs)
        ratio = (policy.log_prob(batch["actions"]) - batch["logprobs"]).exp()
        return (ratio * batch["advantages"]).mean(), kl_divergence(old_policy, policy).mean()

    objective, kl = measure()
    g, kl_gradient = flat_gradient(objective, parameters), flat_gradient(kl, parameters, twice=True)
    product = lambda vector: fisher_vector_product(kl_gradient, parameters, vector, args.damping)
    s = conjugate_gradient(product, g, args.cg_steps)  # F⁻¹g, the natural gradient
    step = s * (2 * args.max_kl / (s @ product(s) + 1e-20)).sqrt()  # to where a quadratic KL would be max_kl
    gain, kl, backtracks = line_search(measure, parameters, step, args)
    for _ in range(args.update_epochs):
        for rows in torch.randperm(len(batch["obs"])).chunk(args.num_minibatches):
            error = agent.value(batch["obs"][rows]) - batch["returns"][rows]
            value_loss = 0.5 * (error / agent.return_norm.std).square().mean()
            optimizer.zero_grad()
            value_loss.backward()
            nn.utils.clip_grad_norm_(agent.critic.parameters(), 1.0)
            optimizer.step()
    stats = {"policy_loss": -objective, "value_loss": value_loss, "entropy": old_policy.entropy().mean()}
    return stats | {"approx_kl": kl, "surrogate_gain": gain, "backtracks": backtracks}

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
        stats = update(agent, optimizer, batch, args)
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

"""The experiments on CartPole-v1: Ψ, the control of the step, the clip, λ."""

import contextlib
import importlib
import io
import tempfile
from dataclasses import replace
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
from bench import BLUE, COLORS, GREEN, GREY, ORANGE, RED
from cures_tools import Experiment, band, grid, select, smooth, titles

import ppo
import reinforce

SEEDS = range(1, 6)
POINTS = 40  # of a learning curve


def train(script, points=POINTS, after_update=None, **flags):
    """A run of the script: its greedy return at the end, and its learning curve, the mean return of
    the episodes that ended in each of `points` equal parts of the steps, or before it if none did.

    after_update(agent, batch) is called after each update, if given. Returns (result, agent).
    """
    module = importlib.import_module(script)
    args = module.Args(**flags)
    found = {"steps": [], "returns": [], "agent": None}
    make_rollouts, update = module.rollouts, module.update

    def rollouts(envs, agent, args):
        found["agent"] = agent
        for rollout, episodes in make_rollouts(envs, agent, args):
            found["steps"].append(int(rollout["mask"].sum()))
            found["returns"].append(episodes)
            yield rollout, episodes

    def watched(agent, optimizer, batch, *rest):
        stats = update(agent, optimizer, batch, *rest)
        if after_update is not None:
            after_update(agent, batch)
        return stats

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        patch.object(module, "rollouts", rollouts),
        patch.object(module, "update", watched),
    ):
        try:
            final = module.main(replace(args, output_dir=folder))["eval/return"]
        except SystemExit:  # the loss is not finite: nothing was learned
            final = 0.0
    result = {"greedy_return": float(final), "curve": learning_curve(found, args, points)}
    return result, found["agent"]


def learning_curve(found, args, points):
    """Mean returns of the episodes in equal parts of the steps; the last one's where none ended."""
    ends = np.cumsum(found["steps"]) / args.total_timesteps
    curve, last = [], 0.0
    for point in range(points):
        in_part = (point / points <= ends) & (ends < (point + 1) / points)
        episodes = [each for i in np.flatnonzero(in_part) for each in found["returns"][i]]
        if episodes:
            last = float(np.mean(episodes))
        curve.append(last)
    return curve


def curve_x(curve, total_timesteps):
    """The middles of the curve's parts, in thousands of steps."""
    return (np.arange(len(curve)) + 0.5) / len(curve) * total_timesteps / 1000


# ------------------------------------------------------------------------------------------- 1. Ψ

PSIS = {"return": ORANGE, "reward-to-go": BLUE, "baseline": RED}


def psi(psi, seed, steps=100_000, rollouts=60):
    """Variance of the gradient at one policy, and a learning curve, for one choice of Ψ.

    The policy is half trained, with reinforce.py's defaults, and the same for all Ψ and seeds. The
    seed draws the rollouts whose gradients are compared: 24 episodes each, γ = 1, where all Ψ
    have the same mean. variance: the trace of the covariance matrix of these gradients.
    """
    _, agent = train("reinforce", total_timesteps=min(steps, 20_000), seed=1000)
    args = reinforce.Args(psi=psi, gamma=1.0, seed=seed)
    stream = reinforce.rollouts(reinforce.make_envs(args.env_id, args.num_envs), agent, args)
    fitted = torch.optim.Adam(agent.critic.parameters(), lr=1e-3)
    for _ in range(rollouts // 4):  # the critic learns this policy, with γ = 1, first
        rollout, _ = next(stream)
        batch = reinforce.prepare(agent, rollout, replace(args, psi="baseline"))
        agent.return_norm.update(batch["returns"])
        reinforce.fit_critic(agent, fitted, batch, args)
    gradients = []
    for _ in range(rollouts):
        rollout, _ = next(stream)
        batch = reinforce.prepare(agent, rollout, args)
        logprobs = agent.policy(batch["obs"]).log_prob(batch["actions"])
        objective = (batch["advantages"] * logprobs).sum() / args.num_envs
        parts = torch.autograd.grad(objective, list(agent.actor.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]))
    result, _ = train("reinforce", psi=psi, seed=seed, total_timesteps=steps)
    return {"variance": torch.stack(gradients).var(0).sum().item()} | result


def draw_psi(figure, results):
    left, right = figure.subplots(1, 2)
    for row, (name, color) in enumerate(PSIS.items()):
        runs = select(results, psi=name)
        if not runs:
            continue
        values = [run["variance"] for run in runs]
        left.plot(values, [row] * len(values), ".", color=color, alpha=0.6)
        left.plot([np.median(values)], [row], "|", color=color, markersize=22, markeredgewidth=2)
        curves = [smooth(run["curve"]) for run in runs]
        x = curve_x(curves[0], 100_000)
        band(right, x, curves, color, name, at=len(x) * (3 - row) // 5)
    left.set_xscale("log")
    left.set_yticks(range(len(PSIS)), PSIS)
    left.set_ylim(-0.6, len(PSIS) - 0.4)
    titles(left, "Variance of the gradient, at one policy", "trace of its covariance")
    titles(right, "Return of the training episodes", "thousands of steps")


# ------------------------------------------------------------------------- 2. Control of the step

RATES = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
DELTAS = [1e-3, 1e-2, 3e-2, 1e-1, 3e-1]


def step(script, value, seed, steps=60_000):
    """Greedy return after 60,000 steps, over what sets the length of a step.

    That is the learning rate of actor_critic.py and of ppo.py, and δ of trpo.py.
    """
    flag = "max_kl" if script == "trpo" else "learning_rate"
    result, _ = train(script, total_timesteps=steps, seed=seed, **{flag: value})
    return {"greedy_return": result["greedy_return"], "last_return": result["curve"][-1]}


def draw_step(figure, results):
    panels = figure.subplots(1, 2, sharey=True)
    for script in ("actor_critic", "ppo", "trpo"):
        axes = panels[int(script == "trpo")]
        values = sorted({each["value"] for each, _ in results if each["script"] == script})
        runs = [select(results, script=script, value=value) for value in values]
        returns = [[run["greedy_return"] for run in same] for same in runs]
        if returns:
            at = 3 if script == "ppo" else 1
            band(
                axes, values, np.array(returns).T, COLORS[script], script, min(at, len(values) - 1)
            )
        axes.set_xscale("log")
    titles(panels[0], "Greedy return after 60,000 steps", "learning rate")
    titles(panels[1], "", "δ, the KL allowed per step")


# ------------------------------------------------------------------------------- 3. PPO's clip

EPOCHS = [1, 4, 10, 20]
FORMS = {
    "clip": ({}, RED),
    "no clip": ({"clip_low": 1e9, "clip_high": 1e9}, GREY),
    "penalty": ({"surrogate": "penalty"}, BLUE),
}


def clip(form, epochs, seed, steps=60_000):
    """Many passes over a rollout: with the clip, without it, and with the adaptive KL penalty.

    curve_mean is the mean return of the training episodes over the whole run, the area under the
    learning curve; kl is the median over the updates of KL(π_old ‖ π) on the rollout, and kl_max
    the largest.
    """
    divergences = []

    def record(agent, batch):
        divergences.append(ppo.mean_kl(agent, batch).item())

    flags = FORMS[form][0] | {"update_epochs": epochs, "total_timesteps": steps, "seed": seed}
    result, _ = train("ppo", after_update=record, **flags)
    return {
        "greedy_return": result["greedy_return"],
        "curve_mean": float(np.mean(result["curve"])),
        "kl": float(np.median(divergences)),
        "kl_max": float(np.max(divergences)),
    }


def draw_clip(figure, results):
    panels = figure.subplots(1, 2)
    for form, (_, color) in FORMS.items():
        epochs = sorted({each["epochs"] for each, _ in results if each["form"] == form})
        for axes, key in zip(panels, ("greedy_return", "kl_max"), strict=True):
            runs = [select(results, form=form, epochs=number) for number in epochs]
            values = [[run[key] for run in same] for same in runs]
            if values:
                label = form if key == "kl_max" else ""
                band(axes, epochs, np.array(values).T, color, label)
            axes.set_xscale("log")
            axes.set_xticks(EPOCHS, EPOCHS)
            axes.minorticks_off()
    panels[1].set_xlim(0.9, 38)
    panels[1].set_yscale("log")
    titles(panels[0], "Greedy return after 60,000 steps", "passes over each rollout")
    titles(panels[1], "Largest KL(π_old ‖ π) of a rollout", "passes over each rollout", "nats")


# --------------------------------------------------------------------------------- 4. GAE's λ

LAMBDAS = [0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0]


def play(envs, agent, states, actions, horizon):
    """N plays from the given states (N, 4) and first actions (N,), cut off at the horizon.

    Returns rewards (T, N) and the critic's values (T + 1, N), both 0 after the pole has fallen.
    """
    envs.reset()
    envs.unwrapped.state = states.T.copy()
    obs, alive = states, np.ones(len(states), bool)
    rewards, values = [], [value_of(agent, obs)]
    for _ in range(horizon):
        obs, reward, terminated, _, _ = envs.step(actions)
        rewards.append(reward * alive)
        alive = alive & ~terminated
        values.append(value_of(agent, obs) * alive)
        actions = agent.act(obs)
    return np.array(rewards), np.array(values)


@torch.no_grad()
def value_of(agent, obs):
    return agent.value(torch.as_tensor(obs, dtype=torch.float32)).numpy()


def gae(rewards, values, gamma, lam):
    """Â of the first step of each play: Σ_l (γλ)^l δ_l, shape (N,)."""
    deltas = rewards + gamma * values[1:] - values[:-1]
    weights = (gamma * lam) ** np.arange(len(deltas))
    return weights @ deltas


def errors_of_gae(agent, states, copies, horizon, gamma):
    """Squared bias and variance of Â, means over the states, for each λ.

    The policy gradient at a state hangs on the difference between the actions' advantages, so the
    bias is that of Â(s, right) − Â(s, left) against Q(s, right) − Q(s, left). `copies` plays of
    each action are dealt into four quarters: two bear Â, and two the Monte Carlo returns that tell
    Q. The product of two independent errors has the squared bias as its mean, without the noise.
    """
    envs = gym.make_vec("CartPole-v1", len(states) * copies, max_episode_steps=10**9)
    repeated = states.repeat(copies, 0)
    plays = []
    for action in (0, 1):
        first = np.full(len(repeated), action)
        plays.append(play(envs, agent, repeated, first, horizon))
    returns = [gae(rewards, values, gamma, 1.0) for rewards, values in plays]
    difference = (returns[1] - returns[0]).reshape(len(states), 4, -1).mean(2)
    bias, variance = [], []
    for lam in LAMBDAS:
        left, right = (gae(rewards, values, gamma, lam) for rewards, values in plays)
        estimate = (right - left).reshape(len(states), 4, -1).mean(2)
        one = estimate[:, 0] - difference[:, 2]
        other = estimate[:, 1] - difference[:, 3]
        bias.append(float((one * other).mean()))
        spread = [each.reshape(len(states), copies).var(1, ddof=1) for each in (left, right)]
        variance.append(float(np.mean(spread)))
    return bias, variance


def lam(seed, steps=20_000, states=32, copies=400, horizon=600, curve_steps=60_000):
    """Bias² and variance of GAE's advantages against λ, at a half-trained policy with its critic,
    and PPO's learning, as the mean return over the first 60,000 steps, for each λ."""
    _, agent = train("ppo", total_timesteps=steps, seed=seed)
    args = ppo.Args(seed=seed + 500)
    rollout, _ = next(ppo.rollouts(ppo.make_envs(args.env_id, args.num_envs), agent, args))
    visited = rollout["obs"][:-1][rollout["mask"]].double().numpy()
    chosen = visited[np.random.default_rng(seed).choice(len(visited), states, replace=False)]
    bias, variance = errors_of_gae(agent, chosen, copies, horizon, args.gamma)
    learned = []
    for each in LAMBDAS:
        result, _ = train("ppo", gae_lambda=each, total_timesteps=curve_steps, seed=seed)
        learned.append(float(np.mean(result["curve"])))
    columns = zip(LAMBDAS, bias, variance, learned, strict=True)
    named = {}
    for each, squared_bias, spread, mean_return in columns:
        named |= {f"bias² λ={each}": squared_bias, f"variance λ={each}": spread}
        named |= {f"return λ={each}": mean_return}
    return named


def draw_lam(figure, results):
    left, right = figure.subplots(1, 2)
    x = np.arange(len(LAMBDAS))
    for name, color in (("bias²", ORANGE), ("variance", BLUE), ("return", GREEN)):
        runs = [[run[f"{name} λ={each}"] for each in LAMBDAS] for _, run in results]
        axes = right if name == "return" else left
        band(axes, x, np.maximum(runs, 1e-3), color, "" if axes is right else name, at=2)
        axes.set_xticks(x, LAMBDAS)
    left.set_yscale("log")
    titles(left, "Error of the advantages, in points²", "λ")
    titles(right, "PPO's mean return, first 60,000 steps", "λ")


EXPERIMENTS = [
    Experiment(
        name="psi",
        claim="Reward-to-go and the baseline take away most of REINFORCE's variance.",
        measure="variance of the gradient at one policy; return while learning",
        run=psi,
        jobs=grid(SEEDS, psi=list(PSIS)),
        smoke=grid([1], psi=["return", "baseline"], steps=[2000], rollouts=[4]),
        draw=draw_psi,
    ),
    Experiment(
        name="step",
        claim="A trust region, exact or clipped, widens the range of step sizes that work.",
        measure="greedy return after 60,000 steps of CartPole-v1",
        run=step,
        jobs=grid(SEEDS, script=["actor_critic", "ppo"], value=RATES)
        + grid(SEEDS, script=["trpo"], value=DELTAS),
        smoke=grid([1], script=["trpo", "ppo"], value=[0.01], steps=[5000]),
        draw=draw_step,
    ),
    Experiment(
        name="clip",
        claim="The clip lets PPO use a rollout many times.",
        measure="greedy return after 60,000 steps; KL per rollout",
        run=clip,
        jobs=grid(SEEDS, form=list(FORMS), epochs=EPOCHS),
        smoke=grid([1], form=list(FORMS), epochs=[2], steps=[5000]),
        draw=draw_clip,
    ),
    Experiment(
        name="lambda",
        claim="λ trades the critic's bias against the variance of the rewards.",
        measure="squared bias and variance of Â at a half-trained policy; PPO's mean return",
        run=lam,
        jobs=grid(SEEDS),
        smoke=grid([1], steps=[3000], states=[3], copies=[4], horizon=[20], curve_steps=[3000]),
        draw=draw_lam,
    ),
]

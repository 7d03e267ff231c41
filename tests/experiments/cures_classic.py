"""From REINFORCE to the trust region: Ψ, the TD error, the step, λ."""

import contextlib
import importlib
import io
import tempfile
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
from bench import BLUE, BROWN, COLORS, GREEN, GREY, ORANGE, SKY
from cures_tools import Experiment, band, grid, labels, select, smooth, titles

import actor_critic
import ppo
import reinforce
import trpo

SEEDS = range(1, 6)
POINTS = 40  # of a learning curve


def train(script, points=POINTS, after_update=None, history=None, **flags):
    """A run of the script: its greedy return at the end, and its learning curve, the mean return of
    the episodes that ended in each of `points` equal parts of the steps, or before it if none did.

    after_update(agent, batch) is called after each update, if given. The list `history`, if given,
    gets for each rollout the steps so far, its mean reward, and the returns of its episodes.
    Returns (result, agent).
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
            if history is not None:
                reward = rollout["rewards"][rollout["mask"]].mean().item()
                history.append((sum(found["steps"]), reward, episodes))
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

PSIS = {"return": BROWN, "reward-to-go": SKY, "baseline": GREY, "TD error": ORANGE}


def policy_gradient(agent, rollout, psi, args):
    """The gradient from one rollout, with the Ψ that the scripts themselves compute: (P,)."""
    script = actor_critic if psi == "TD error" else reinforce
    batch = script.prepare(agent, rollout, replace(args, psi=psi))
    logprobs = agent.policy(batch["obs"]).log_prob(batch["actions"])
    objective = (batch["advantages"] * logprobs).sum() / args.num_envs
    parts = torch.autograd.grad(objective, list(agent.actor.parameters()))
    return torch.cat([part.flatten() for part in parts])


def square_of_mean(vectors):
    """‖E x‖² from independent x, (n, P), without the noise of their mean: the mean of x_i · x_j
    over all pairs of different i and j. Where E x = 0 it may be negative."""
    n = len(vectors)
    all_pairs = vectors.sum(0).square().sum() - vectors.square().sum()
    return (all_pairs / (n * (n - 1))).item()


def errors_of_psi(agent, stream, rollouts, args):
    """For each Ψ the variance and squared bias of the gradient, and the squared norm of the true
    one, from the same rollouts.

    The bias is taken against the gradient with the baseline: for γ = 1, and without a time limit,
    the mean of that one is the true gradient, whatever the critic says.
    """
    gradients = {name: [] for name in PSIS}
    for _ in range(rollouts):
        rollout, _ = next(stream)
        for name in PSIS:
            gradients[name].append(policy_gradient(agent, rollout, name, args))
    gradients = {name: torch.stack(each) for name, each in gradients.items()}
    unbiased = gradients["baseline"]
    return {
        name: {
            "variance": each.var(0).sum().item(),
            "bias²": square_of_mean(each - unbiased),
            "gradient²": square_of_mean(unbiased),
        }
        for name, each in gradients.items()
    }


@cache
def errors_at_one_policy(seed, training_steps, rollouts):
    """errors_of_psi with a critic that has seen 2 rollouts of the policy, and with one that has
    seen 50.

    The policy is half trained, with reinforce.py's defaults, and the same for all seeds. The seed
    draws the rollouts: 24 whole episodes each, without a time limit, γ = 1.
    """
    _, agent = train("reinforce", total_timesteps=training_steps, seed=1000)
    torch.manual_seed(seed)
    args = reinforce.Args(gamma=1.0, seed=seed)
    envs = reinforce.make_envs(args.env_id, args.num_envs, max_episode_steps=10**9)
    stream = reinforce.rollouts(envs, agent, args)
    optimizer = torch.optim.Adam(agent.critic.parameters(), lr=1e-3)
    found = []
    for fits in (2, 48):
        for _ in range(min(fits, rollouts)):
            rollout, _ = next(stream)
            batch = reinforce.prepare(agent, rollout, args)
            agent.return_norm.update(batch["returns"])
            reinforce.fit_critic(agent, optimizer, batch, args)
        found.append(errors_of_psi(agent, stream, rollouts, args))
    return found


def psi(psi, seed, steps=100_000, rollouts=80):
    """Variance and squared bias of the gradient at one policy, with a rough critic and with a
    fitted one; and a learning curve, for each Ψ of reinforce.py.

    variance: the trace of the covariance matrix of the gradients from 80 rollouts.
    """
    rough, fitted = errors_at_one_policy(seed, min(steps, 20_000), rollouts)
    result = fitted[psi] | {f"{key}, rough critic": value for key, value in rough[psi].items()}
    if psi == "TD error":
        return result
    learned, _ = train("reinforce", psi=psi, seed=seed, total_timesteps=steps)
    return result | learned


def draw_psi(figure, results):
    left, right = figure.subplots(1, 2)
    rows = [(psi, "") for psi in PSIS] + [("TD error", ", rough critic")]
    for row, (name, critic) in enumerate(rows):
        for key, marker in (("variance", "."), ("bias²", "x")):
            values = [run[key + critic] for run in select(results, psi=name)]
            if values and (key == "variance" or name == "TD error"):
                left.plot(values, [row] * len(values), marker, color=PSIS[name], markersize=5)
    if results:
        left.axvline(np.median([run["gradient²"] for _, run in results]), color=GREY, linestyle=":")
    left.set_xscale("log")
    left.set_yticks(range(len(rows)), [name + critic.replace(",", ",\n") for name, critic in rows])
    left.set_ylim(-0.6, len(rows) - 0.4)
    note = "×  squared bias\n●  variance\n⋮  squared gradient"
    left.text(0.03, 0.05, note, transform=left.transAxes, fontsize=8, color=GREY)
    for name in list(PSIS)[:3]:
        curves = [smooth(run["curve"]) for run in select(results, psi=name)]
        if curves:
            band(right, curve_x(curves[0], 100_000), curves, PSIS[name])
    labels(right, list(PSIS)[:3], 0.03, 0.72, PSIS)
    titles(left, "The TD error varies least, but is biased", "24 episodes' gradient, at one policy")
    titles(right, "Return of the training episodes", "thousands of steps")


# ---------------------------------------------------------------------------------- 2. TD error

UPDATES = range(0, 121, 3)


def bootstrap(script, seed, steps=150_000):
    """REINFORCE against the actor-critic on CartPole, each at its defaults: steps and updates until
    the last 100 episodes had a mean return of 475 or more, or all of them where that never was.

    by_updates: the mean return of the last 24 episodes after each number of updates.
    """
    history = []
    result, _ = train(script, history=history, total_timesteps=steps, seed=seed)
    returns, means, solved = [], [], None
    for step, _, episodes in history:
        returns += episodes
        means.append(float(np.mean(returns[-24:] or [0.0])))
        if solved is None and len(returns) >= 100 and np.mean(returns[-100:]) >= 475:
            solved = step, len(means)
    solved = solved or (steps, len(means))
    last = len(means) - 1
    return result | {
        "steps to 475": solved[0],
        "updates to 475": solved[1],
        "by_updates": [means[min(number, last)] for number in UPDATES],
    }


def draw_bootstrap(figure, results):
    panels = figure.subplots(1, 2, sharey=True)
    scripts = ("reinforce", "actor_critic")
    for script in scripts:
        runs = select(results, script=script)
        curves = [smooth(run["curve"]) for run in runs]
        if runs:
            band(panels[0], curve_x(curves[0], 150_000), curves, COLORS[script])
            band(panels[1], UPDATES, [run["by_updates"] for run in runs], COLORS[script])
    labels(panels[0], scripts, 0.98, 0.05)
    titles(panels[0], "Return: level by steps …", "thousands of steps")
    titles(panels[1], "… for four times the updates", "updates of the policy")


# ------------------------------------------------------------------------- 3. Control of the step

RATES = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
DELTAS = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]  # steps up to 100 times as long too: the length is ~ √δ
STEPS = {
    "plain step": {"update_epochs": 1, "num_minibatches": 1},  # r = 1: the policy gradient itself
    "no clip": {"clip_low": 1e9, "clip_high": 1e9},
    "ppo": {},
    "trpo": None,
}


def adam_steps(form, rate):
    """An update for trpo.py, but the policy's steps are Adam's: one on the whole rollout, or
    ppo.py's four passes of four minibatches, with its clip or without."""
    chosen = ppo.Args(**STEPS[form])
    made = {}  # at the first update

    def update(agent, optimizer, batch, args):
        if not made:
            made["adam"] = torch.optim.Adam(agent.actor.parameters())
        adam = made["adam"]
        left = optimizer.param_groups[0]["lr"] / args.learning_rate  # decays to 0, as in ppo.py
        adam.param_groups[0]["lr"] = rate * left
        advantages = batch["advantages"] / agent.return_norm.std
        for _ in range(chosen.update_epochs):
            for rows in torch.randperm(len(advantages)).chunk(chosen.num_minibatches):
                logprobs = agent.policy(batch["obs"][rows]).log_prob(batch["actions"][rows])
                old = batch["logprobs"][rows]
                loss = -ppo.surrogate(logprobs, old, advantages[rows], chosen).mean()
                adam.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(agent.actor.parameters(), args.max_grad_norm)
                adam.step()
        value_loss = trpo.fit_critic(agent, optimizer, batch, args)
        return {"policy_loss": loss.detach(), "value_loss": value_loss}

    return update


def step(form, value, seed, steps=60_000):
    """Greedy return after 60,000 steps, over what sets the length of a step: δ for TRPO, else
    Adam's rate for the policy.

    All is trpo.py but the policy's step: rollouts, GAE, the critic and its rate are the same for
    all four. curve_mean is the mean return of the training episodes over the whole run, kl_max the
    largest KL(π_old ‖ π) of a rollout.
    """
    divergences = []

    def record(agent, batch):
        divergences.append(ppo.mean_kl(agent, batch).item())

    flags = {"total_timesteps": steps, "seed": seed, "after_update": record}
    if form == "trpo":
        result, _ = train("trpo", max_kl=value, **flags)
    else:
        with patch.object(trpo, "update", adam_steps(form, value)):
            result, _ = train("trpo", **flags)
    return {
        "greedy_return": result["greedy_return"],
        "curve_mean": float(np.mean(result["curve"])),
        "kl_max": float(np.max(divergences)),
    }


def draw_step(figure, results):
    panels = figure.subplots(1, 2, sharey=True)
    for form in STEPS:
        axes = panels[int(form == "trpo")]
        values = sorted({each["value"] for each, _ in results if each["form"] == form})
        runs = [select(results, form=form, value=value) for value in values]
        returns = [[run["greedy_return"] for run in same] for same in runs]
        axes.plot(values, [min(same) for same in returns], ".-", color=COLORS[form], linewidth=1.8)
        axes.plot(values, list(map(np.median, returns)), ":", color=COLORS[form], linewidth=1.5)
        axes.set_xscale("log")
    panels[0].set_ylim(-10, 660)
    panels[0].set_yticks(range(0, 501, 100))
    labels(panels[0], ["plain step", "no clip", "ppo"], 0.98, 0.76)
    labels(panels[1], ["trpo"], 0.98, 0.85)
    titles(panels[0], "Return: worst seed (line), median (dotted)", "learning rate of the policy")
    titles(panels[1], "", "δ, the KL allowed per step")


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
        claim="Reward-to-go, the baseline and the TD error each take variance from the gradient; "
        "the TD error pays with a bias.",
        measure="variance and squared bias of the gradient at one policy; return while learning",
        run=psi,
        jobs=[{"psi": name, "seed": seed} for seed in SEEDS for name in PSIS],
        smoke=grid([1], psi=["return", "baseline", "TD error"], steps=[2000], rollouts=[4]),
        draw=draw_psi,
    ),
    Experiment(
        name="bootstrap",
        claim="With the TD error a policy is learned from fewer steps.",
        measure="return while learning CartPole-v1, by steps and by updates",
        run=bootstrap,
        jobs=grid(SEEDS, script=["reinforce", "actor_critic"]),
        smoke=grid([1], script=["reinforce", "actor_critic"], steps=[4000]),
        draw=draw_bootstrap,
    ),
    Experiment(
        name="step",
        claim="A trust region, exact or clipped, widens the range of step sizes that work.",
        measure="greedy return after 60,000 steps of CartPole-v1",
        run=step,
        jobs=grid(SEEDS, form=["plain step", "ppo"], value=RATES)
        + grid(SEEDS, form=["trpo"], value=DELTAS)
        + grid(SEEDS, form=["no clip"], value=RATES),
        smoke=grid([1], form=["trpo", "plain step", "ppo"], value=[0.01], steps=[5000]),
        draw=draw_step,
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

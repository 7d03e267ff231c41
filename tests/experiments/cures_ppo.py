"""PPO: its objective drawn, the clip, the entropy bonus."""

import gymnasium as gym
import numpy as np
import torch
from bench import COLORS, OLIVE, PURPLE, RED
from cures_classic import SEEDS, curve_x, train
from cures_tools import Experiment, band, dots, grid, labels, select, titles

import cispo_llm
import grpo_llm
import gspo_llm
import ppo
import rloo_llm

# ---------------------------------------------------------------------------- 1. The objective

RATIOS = np.linspace(0.02, 2.5, 125)
MARKS = [0.5, 1.1, 2.0]  # ratios that the sentences name
TOKENS = 20  # of an answer
WEIGHTS = {"RLOO": rloo_llm, "GRPO": grpo_llm, "GSPO": gspo_llm, "CISPO": cispo_llm}


def token_weight(script, ratio, advantage):
    """By how much a token's ∇log π is multiplied in an answer of 20 tokens, over A: the derivative
    of the script's own surrogate. This token has the given ratio, the others have 1."""
    old_logprobs = torch.full((1, TOKENS), -3.0, dtype=torch.float64)
    logprobs = old_logprobs.clone()
    logprobs[0, 0] += np.log(ratio)
    logprobs.requires_grad_()
    mask = torch.ones(1, TOKENS, dtype=torch.float64)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    objective, _ = script.surrogate(logprobs, old_logprobs, advantages, mask, script.Args())
    objective.sum().backward()
    return logprobs.grad[0, 0].item() / advantage


def surrogate(method, seed):
    """PPO: its objective over r, from ppo.py's own `surrogate`. The language-model methods: the
    weight of a token's gradient, each with its own bounds. Nothing is drawn at random."""
    result = {}
    for sign, advantage in (("+", 1.0), ("-", -1.0)):
        if method == "PPO":
            ratios, a = torch.tensor([*MARKS, *RATIOS]), torch.tensor(advantage)
            values = ppo.surrogate(ratios.log(), torch.zeros(()), a, ppo.Args()).tolist()
        else:
            values = [token_weight(WEIGHTS[method], r, advantage) for r in [*MARKS, *RATIOS]]
        result |= {f"A{sign} r={r}": values[i] for i, r in enumerate(MARKS)}
        result[f"A{sign}"] = values[len(MARKS) :]
    return result


def draw_surrogate(figure, results):
    left, right = figure.subplots(1, 2)
    for settings, found in results:
        method = settings["method"]
        axes, color = (left, COLORS["ppo"]) if method == "PPO" else (right, COLORS[method])
        for sign, style in (("+", "-"), ("-", "--")):
            axes.plot(RATIOS, found[f"A{sign}"], style, color=color, linewidth=1.8)
    for text, y in (("A = 1", 0.55), ("A = −1", -1.2)):
        left.text(0.15, y, text, color=COLORS["ppo"], fontsize=8)
    left.set_ylim(-2.6, 1.7)
    labels(right, list(WEIGHTS), 0.03, 0.62)
    titles(left, "PPO's objective is flat where r is as far as A wants", "r")
    titles(right, "Weight of a token's gradient (dashed: A < 0)", "r of the token, 1 at the others")


# ------------------------------------------------------------------------------- 2. The clip

EPOCHS = [1, 4, 10, 20]
FORMS = {
    "clip": ({}, COLORS["ppo"]),
    "no clip": ({"clip_low": 1e9, "clip_high": 1e9}, COLORS["no clip"]),
    "penalty": ({"surrogate": "penalty"}, COLORS["penalty"]),
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


# ---------------------------------------------------------------------------- 3. Entropy

HEIGHTS = [10, 11]
COEFFICIENTS = {0.0: RED, 0.1: PURPLE, 1.0: OLIVE}


class Stairs(gym.Env):
    """On each stair: stop, for 0 or 2 points by the toss of a coin, or climb on, at a cost of 0.1;
    the top is worth ten. Chosen at random, one episode in 2^height reaches it, so that stopping
    pays better at first. The observation is the stair."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, height):
        self.height = height
        self.observation_space = gym.spaces.Box(0, 1, (height + 1,), np.float32)

    def seen(self):
        return np.eye(self.height + 1, dtype=np.float32)[self.stair]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.stair = 0
        return self.seen(), {}

    def step(self, action):
        if action == 0:
            return self.seen(), 2.0 * self.np_random.integers(2), True, False, {}
        self.stair += 1
        top = self.stair == self.height
        return self.seen(), 10.0 * top - 0.1, top, False, {}


for height in HEIGHTS:
    gym.register(f"Stairs{height}-v0", Stairs, kwargs={"height": height})


def entropy(height, coefficient, seed, steps=100_000):
    """ppo.py on the stairs, with an entropy bonus of this weight, which decays to 0: greedy return,
    and the entropy of the policy on the first stair, in nats, in 40 equal parts of the run."""
    found = []

    def record(agent, batch):
        with torch.no_grad():
            found.append(agent.policy(torch.eye(height + 1)[0]).entropy().item())

    flags = {"ent_coef": coefficient, "total_timesteps": steps, "seed": seed}
    result, _ = train("ppo", env_id=f"Stairs{height}-v0", after_update=record, **flags)
    chosen = np.linspace(0, len(found) - 1, 40).astype(int)
    return {
        "greedy_return": result["greedy_return"],
        "found": float(result["greedy_return"] > 5),
        "entropy": [found[i] for i in chosen],
        "entropy halfway": found[len(found) // 2],
    }


def draw_entropy(figure, results):
    left, right = figure.subplots(1, 2)
    names = {}
    for column, (coefficient, color) in enumerate(COEFFICIENTS.items()):
        runs = select(results, height=HEIGHTS[-1], coefficient=coefficient)
        if runs:
            dots(left, column, [run["greedy_return"] for run in runs], color)
            x = curve_x(runs[0]["entropy"], 100_000)
            band(right, x, [run["entropy"] for run in runs], color)
            names[f"coefficient {coefficient:g}"] = color
    left.set_xticks(range(len(COEFFICIENTS)), [f"{value:g}" for value in COEFFICIENTS])
    right.set_ylim(0, 1.05)
    labels(right, list(names), 0.98, 0.75, names)
    titles(left, "Greedy return: 8.9 at the top of 11 stairs", "weight of the entropy bonus")
    titles(right, "Entropy on the first stair", "thousands of steps", "nats")


EXPERIMENTS = [
    Experiment(
        name="surrogate",
        claim="The clip takes the gradient where the ratio is as far as A wants, and only there.",
        measure="L^CLIP over r; weight of a token's gradient over r, by method",
        run=surrogate,
        jobs=grid([1], method=["PPO", *WEIGHTS]),
        smoke=grid([1], method=["PPO", *WEIGHTS]),
        draw=draw_surrogate,
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
        name="entropy",
        claim="An entropy bonus keeps a policy from settling for the nearest reward.",
        measure="PPO where a small reward is near and a large one far: greedy return, entropy",
        run=entropy,
        jobs=grid(SEEDS, height=HEIGHTS, coefficient=list(COEFFICIENTS)),
        smoke=grid([1], height=[11], coefficient=[0.0, 0.1], steps=[5000]),
        draw=draw_entropy,
    ),
]

"""A discount factor below 1 on the language model: what it does to the length of answers."""

from lab import LEARNED, Contrast, Experiment, arms, mean, train, values
from llm_parts import started, warm_start
from pictures import DASHED, SOLID, curves, figure

import ppo_llm


def run(gamma, seed, start, steps=30, warm=400):
    """PPO with λ = 1, so that γ alone discounts; the limit leaves room for every habit."""
    folder = warm_start("meander", start, warm)
    options = {"gamma": gamma, "gae_lambda": 1.0, "beta": 0.0, "max_new_tokens": 32}
    found = train(ppo_llm, ppo_llm.Args(seed=seed, steps=steps, **options), steps, folder=folder)
    lengths, reward = found["completions/mean_length"], found["reward"]
    result = {"tokens": mean(lengths), LEARNED: mean(reward), "tokens at the end": lengths[-1]}
    return result | {"length": lengths, "reward": reward}


GAMMAS = [1.0, 0.9]
JOBS = started(16, gamma=GAMMAS)
TESTS = [[Contrast("tokens: γ 1 − γ 0.9", *arms("tokens", "gamma", GAMMAS), 1.0)]]


def draw(runs):
    page, axes = figure("A discount factor of 0.9 keeps answers shorter", 3.1, 1, 2)
    for panel, column in zip(axes, ("length", "reward"), strict=True):
        lines = {}
        for gamma, dash in zip(GAMMAS, (SOLID, DASHED), strict=True):
            lines[f"γ = {gamma:g}"] = values(runs, ({"gamma": gamma}, column)), "PPO", dash
        curves(panel, range(1, len(lines["γ = 1"][0][0]) + 1), lines)
        panel.set_xlabel("rollouts")
    axes[0].set_title("tokens of an answer")
    axes[1].set_title("share of right answers")
    return page


EXPERIMENT = Experiment(run, JOBS, TESTS, draw, small={"steps": 2, "warm": 2})

if __name__ == "__main__":
    EXPERIMENT.main()

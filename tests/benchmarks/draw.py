"""Every figure, from the numbers in results/.

    python tests/benchmarks/draw.py                   # all of them, into results/
    python tests/benchmarks/draw.py cures_clip curves_llm --folder /tmp

Lines are medians over the seeds, bands reach from the worst seed to the best. Needs matplotlib.
"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from bench import COLORS, RESULTS, label
from cures import EXPERIMENTS
from cures_tools import band, labels, picture, smooth, titles


def before(steps, returns, window=10_000) -> list[float]:
    """The mean of each return and of those in the `window` steps before it: of many rollouts, or of
    this one alone, as in REINFORCE."""
    return [returns[(steps > step - window) & (steps <= step)].mean() for step in steps]


def draw_classic(figure, curves):
    """curves: for each script and seed a list of (step, return)."""
    axes = figure.subplots()
    for name, seeds in curves.items():
        seeds = [np.array(seed).T for seed in seeds]
        # rollouts end at other steps for each seed: onto one grid
        x = np.linspace(0, min(steps[-1] for steps, _ in seeds), 200)
        runs = [np.interp(x, steps, before(steps, returns)) for steps, returns in seeds]
        band(axes, x, runs, COLORS[name])
    axes.set_ylim(0, 515)
    labels(axes, curves, 0.98, 0.05)
    titles(axes, "CartPole-v1: return of the training episodes", "environment steps")


def draw_llm(figure, curves):
    """curves: for each script and seed a list per metric, with a number per step."""
    panels = figure.subplots(1, 2)
    keys = {"reward": "share of right answers", "completions/mean_length": "tokens of an answer"}
    for axes, (key, title) in zip(panels, keys.items(), strict=True):
        for name, seeds in curves.items():
            runs = [smooth(seed[key][:60])[2:] for seed in seeds]
            band(axes, np.arange(len(runs[0])) + 2, runs, COLORS[label(name)])
        labels(axes, list(map(label, curves)), 0.98, 0.05)
        titles(axes, f"Training: {title}", "training steps, the first 60 of 200")


def figures() -> dict:
    """{name of the figure: (its data in results/, the part drawn, how, size)}"""
    found = {
        "curves_classic": ("classic_curves", "curves", draw_classic, (8, 3)),
        "curves_llm": ("llm_curves", "curves", draw_llm, (8, 3)),
    }
    for name, each in EXPERIMENTS.items():
        found[f"cures_{name}"] = (f"cures_{name}", "runs", each.draw, each.size)
    return found


def main(names: Annotated[tuple[str, ...], tyro.conf.Positional] = (), folder: Path = RESULTS):
    for name in names or figures():
        data, part, draw, size = figures()[name]
        numbers = json.loads((RESULTS / f"{data}.json").read_text())[part]
        picture(folder / f"{name}.png", draw, numbers, size)


if __name__ == "__main__":
    tyro.cli(main)

"""Every figure, from the numbers in results/.

    python tests/benchmarks/draw.py                   # all of them
    python tests/benchmarks/draw.py cures_clip curves_llm

Lines are medians over the seeds, bands reach from the worst seed to the best. Needs matplotlib.
"""

import json
from collections import defaultdict
from typing import Annotated

import numpy as np
import tyro
from bench import BLUE, COLORS, GREY, LLM, RED, RESULTS, label
from cures import RESULTS as EXPERIMENTS
from cures import VERDICTS, experiment
from cures_tools import band, labels, picture, smooth, titles


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


def draw_real(figure, cells):
    """cells: for each run of real_model.py, TASK-METHOD-PASSESxROLLOUTS-seedN, its log."""
    methods, passes, tasks = figure.subplots(1, 3)
    logs = defaultdict(list)
    for name, cell in cells.items():
        logs[name.rpartition("-")[0]].append(cell["log"])
    learned = {
        name: [smooth(log["reward"]) for log in runs]
        for name, runs in logs.items()
        if not name.endswith("1x0")
    }
    measured = [name for name in LLM if f"products-{name.removesuffix('_llm')}-1x25" in learned]
    for method in measured:
        short = method.removesuffix("_llm")
        runs = learned[f"products-{short}-1x25"]
        band(methods, np.arange(1, 26), runs, COLORS[label(method)])
        if f"products-{short}-4x25" in learned:
            band(passes, np.arange(1, 26), runs, COLORS[label(method)], dashed=True)
            runs = learned[f"products-{short}-4x25"]
            band(passes, np.arange(1, 26), runs, COLORS[label(method)])
    labels(methods, list(map(label, measured)), 0.98, 0.05)
    labels(passes, ["RLOO", "GRPO", "GSPO"], 0.98, 0.05)
    titles(methods, "Products: share of right answers", "rollouts")
    titles(passes, "The same, 1 pass (dashed) and 4", "rollouts")
    names = {
        "sums": "sums-grpo-1x25",
        "dates": "dates-grpo-1x25",
        "largest": "largest-grpo-1x30",
        "products": "products-grpo-1x25",
    }
    scores = {"pass@1": RED, "pass@1_greedy": BLUE, "pass@8": GREY}
    for x, (task, name) in enumerate(names.items()):
        for shift, (score, color) in zip((-0.2, 0, 0.2), scores.items(), strict=True):
            (untrained,) = logs[f"{task}-grpo-1x0"]
            before = untrained[f"eval/{score}"][0]  # with room for 128 tokens
            after = np.median([log[f"eval/{score}"][-1] for log in logs[name]])
            arrow = {"arrowstyle": "->", "color": color, "linewidth": 1.8}
            tasks.annotate("", (x + shift, after), (x + shift, before), arrowprops=arrow)
    tasks.set_xticks(range(len(names)), names)
    tasks.set_xlim(-1.2, len(names) - 0.5)  # with room for the labels
    for axes in (methods, passes, tasks):
        axes.set_ylim(0, 1.05)
    shown = {"sampled": RED, "greedy": BLUE, "best of 8": GREY}
    labels(tasks, shown, 0.02, 0.75, shown)
    titles(tasks, "Held out: untrained, given 128 tokens → GRPO")


def figures() -> dict:
    """{name of the figure: (its data, beside which it lies, the part drawn, how, size)}"""
    found = {
        "curves_llm": (RESULTS / "llm_curves.json", "curves", draw_llm, (8, 3)),
        "real_model": (RESULTS / "real_model.json", "cells", draw_real, (11, 3)),
    }
    for name in VERDICTS:
        chosen = experiment(name)
        path = EXPERIMENTS / f"cures_{name}.json"
        found[path.stem] = (path, "runs", chosen.draw, chosen.size)
    return found


def main(names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()):
    for name in names or figures():
        path, part, draw, size = figures()[name]
        picture(path.with_name(f"{name}.png"), draw, json.loads(path.read_text())[part], size)


if __name__ == "__main__":
    tyro.cli(main)

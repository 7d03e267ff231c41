"""Learning curves of all nine scripts, as two pictures for the README.

    python tests/benchmarks/curves.py              # CartPole-v1, seeds 1 to 5; then draws
    python tests/benchmarks/curves.py --draw-only  # draws from the numbers in results/ alone

The classic runs go into results/classic_curves.json; llm_compare.py makes results/llm_curves.json.
Lines are medians over the seeds, bands reach from the worst seed to the best. Needs
tests/benchmarks/requirements.txt.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib
import numpy as np
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
COLORS = {
    "reinforce": "#888888",
    "actor_critic": "#d08020",
    "trpo": "#4080d0",
    "ppo": "#c03050",
    "rloo_llm": "#888888",
    "grpo_llm": "#c03050",
    "dapo_llm": "#4080d0",
    "gspo_llm": "#d08020",
    "cispo_llm": "#309050",
}


def run(script: str, seed: int) -> list[list[float]]:
    """Environment steps and mean return of the episodes that ended in each rollout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, f"{script}.py", "--seed", str(seed), "--output-dir", folder]
        subprocess.run(
            command,
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        events = EventAccumulator(
            next(Path(folder).iterdir()).as_posix(), size_guidance={"scalars": 0}
        )
        events.Reload()
    return [
        [event.step, round(event.value, 1)] for event in events.Scalars("charts/episodic_return")
    ]


def panel(axes, curves: dict, title: str, xlabel: str, limit=None):
    """One line and band per script: `curves` maps its name to (x, values of each seed (seeds,
    points))."""
    for name, (x, values) in curves.items():
        axes.plot(
            x,
            np.median(values, 0),
            color=COLORS[name],
            label=name.replace("_llm", ""),
            linewidth=1.8,
        )
        axes.fill_between(
            x, values.min(0), values.max(0), color=COLORS[name], alpha=0.18, linewidth=0
        )
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, labelcolor="#777777")
    if limit:
        axes.set_ylim(*limit)


def save(figure, name: str):
    """On a transparent ground, in a grey that light and dark pages both let one read."""
    for axes in figure.axes:
        for item in (
            axes.title,
            axes.xaxis.label,
            *axes.get_xticklabels(),
            *axes.get_yticklabels(),
        ):
            item.set_color("#777777")
        axes.tick_params(colors="#777777", labelsize=8)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color("#777777")
    figure.tight_layout()
    figure.savefig(RESULTS / name, transparent=True, dpi=150)


def smooth(curve: np.ndarray, window: int = 10_000) -> list[float]:
    """The mean of each return and of those in the `window` steps before it, whether that is many
    rollouts or this one alone, as in REINFORCE. curve: (points, 2)."""
    steps, returns = curve.T
    return [returns[(steps > step - window) & (steps <= step)].mean() for step in steps]


def draw():
    runs = json.loads((RESULTS / "classic_curves.json").read_text())["curves"]
    figure, axes = plt.subplots(figsize=(8, 3))
    curves = {}
    # rollouts end at other steps for each seed: onto one grid
    for name, seeds in runs.items():
        x = np.linspace(0, min(seed[-1][0] for seed in seeds), 200)
        values = [np.interp(x, np.array(seed)[:, 0], smooth(np.array(seed))) for seed in seeds]
        curves[name] = x, np.array(values)
    panel(
        axes, curves, "CartPole-v1: return of the training episodes", "environment steps", (0, 515)
    )
    save(figure, "curves_classic.png")
    runs = json.loads((RESULTS / "llm_curves.json").read_text())["curves"]
    figure, both = plt.subplots(1, 2, figsize=(8, 3))
    for axes, key, title in zip(
        both,
        ("reward", "completions/mean_length"),
        ("share of right answers", "length of an answer, in tokens"),
        strict=True,
    ):
        curves = {}
        for name, seeds in runs.items():
            values = np.array(
                [np.convolve(seed[key][:60], np.ones(3) / 3, mode="valid") for seed in seeds]
            )
            curves[name] = np.arange(values.shape[1]) + 2, values
        panel(axes, curves, f"Training: {title}", "training steps, the first 60 of 200")
    save(figure, "curves_llm.png")


def main(draw_only: bool = False, seeds: int = 5):
    if not draw_only:
        curves = {
            name: [run(name, seed) for seed in range(1, seeds + 1)]
            for name in ("reinforce", "actor_critic", "trpo", "ppo")
        }
        where = f"{platform.machine()}, Python {platform.python_version()}, "
        where += f"{time.strftime('%Y-%m-%d')}, {seeds} seeds"
        (RESULTS / "classic_curves.json").write_text(
            json.dumps({"where": where, "curves": curves}) + "\n"
        )
    draw()


if __name__ == "__main__":
    tyro.cli(main)

"""What the experiments of cures.py have in common: their form, and one style for all figures."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from bench import COLORS, GREY


class Experiment(NamedTuple):
    """One claim of the README, and the runs that test it.

    `run(**settings)` makes one run in a process of its own, with one thread, and returns numbers
    and lists of numbers by name. `draw(figure, results)` draws all of them, a list of (settings,
    result). Settings hold a "seed"; runs that differ in it alone are one row of the table.
    """

    name: str
    claim: str
    measure: str
    run: Callable[..., dict]
    jobs: list[dict]
    smoke: list[dict]
    draw: Callable
    size: tuple[float, float] = (8, 3)


def select(results, **wanted):
    """The results of the runs with these settings, in the order of their seeds."""
    return [result for settings, result in results if wanted.items() <= settings.items()]


def grid(seeds, **choices):
    """[{"seed": …, …}]: all combinations of the choices, each a list, for every seed."""
    jobs = [{}]
    for name, values in choices.items():
        jobs = [job | {name: value} for job in jobs for value in values]
    return [job | {"seed": seed} for job in jobs for seed in seeds]


def band(axes, x, runs, color, label="", at=-1, dashed=False):
    """A line through the medians, a band from worst to best: runs (seeds, points).

    The label stands beside the line's point number `at`, in the line's colour.
    """
    runs = np.array(runs, dtype=float)
    middle = np.median(runs, 0)
    style = "--" if dashed else "-"
    axes.plot(x, middle, style, color=color, linewidth=1.8)
    axes.fill_between(x, runs.min(0), runs.max(0), color=color, alpha=0.15, linewidth=0)
    if label:
        place = {"xytext": (4, 2), "textcoords": "offset points", "va": "bottom"}
        axes.annotate(label, (x[at], middle[at]), color=color, fontsize=8, **place)


def dots(axes, x, runs, color):
    """Each run as a dot above x, and their median as a bar."""
    axes.plot([x] * len(runs), runs, ".", color=color, alpha=0.6, markersize=5)
    axes.plot([x - 0.25, x + 0.25], [np.median(runs)] * 2, color=color, linewidth=2)


def labels(axes, names, x, y, colors=COLORS):
    """The names below each other, each in its colour; (x, y), in shares of the axes, is the corner
    of the last one, at its right where x is beyond the middle."""
    place = {"transform": axes.transAxes, "fontsize": 8, "ha": "right" if x > 0.5 else "left"}
    for i, name in enumerate(reversed(names)):
        axes.text(x, y + 0.09 * i, name, color=colors[name], **place)


def smooth(values, window=3):
    """The mean over the last `window` points, or as many as there are."""
    return [np.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def titles(axes, title, xlabel="", ylabel=""):
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)


def picture(path, draw, data, size):
    """draw(figure, data) as a PNG: no frame, a faint grid, grey text on a transparent ground."""
    from matplotlib.figure import Figure  # the tests run the rest without it

    figure = Figure(figsize=size)
    draw(figure, data)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.tick_params(colors=GREY, labelsize=8)
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_color(GREY)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(GREY)
    figure.tight_layout()
    figure.savefig(path, format="png", transparent=True, dpi=130)

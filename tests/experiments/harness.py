"""Every claim tried: settings → runs → a picture, a table and a finding. One file per experiment.

    python tests/experiments/harness.py                    # all of them: two hours of one core
    python tests/experiments/harness.py clip baseline
    python tests/experiments/harness.py --smoke            # each at toy size; writes nothing
    python tests/experiments/harness.py --pages            # page and pictures of what was measured

A run is kept in ~/.cache/policy-gradients-experiments under its settings, the text of its
experiment down to EXPERIMENT, and the text of all files of this repository that these import. So
none is made twice, and none outlives a change of what made it. The outcome goes into
results/NAME.json; from there come the pictures, for which matplotlib is needed, and, with what
stands in page.md, EXPERIMENTS.md.
"""

import importlib
import json
import multiprocessing
import os
import re
import sys
import textwrap
import time
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from itertools import combinations, cycle
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import numpy as np
import tyro

HERE = Path(__file__).parent
RESULTS, TEMPLATE = HERE / "results", (HERE / "page.md").read_text()
FOLDERS = [HERE, HERE.parents[1], HERE.parent / "benchmarks", HERE.parent / "examples"]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
CACHE = CACHE / "policy-gradients-experiments"
sys.path[:0] = [str(folder) for folder in FOLDERS]

from bench import footer, spread, table  # noqa: E402

NAMES = re.findall(r"^{(\w+)}$", TEMPLATE.partition("{index}")[2], re.M)  # in the page's order

SHOWN, PARTLY = "shown", "partly"
NOT_SHOWN, UNDECIDED = "not at this size", "undecided at this size"


class Panel(NamedTuple):
    """A part of a picture: a line for each label, from the runs with these settings.

    lines: {label: (settings, column)}. x: a setting, so that a point is a run of each value; or a
    column with the x of each run's list; or one list for all; or None, for 1, 2, …
    Lines are medians over the seeds, bands reach from the lowest to the highest.
    """

    title: str
    lines: dict[str, tuple[dict, str]]
    axes: tuple[str, str]  # what is along x, and along y
    x: str | list | None = None
    dots: bool = False  # no lines: a row for each label, and in it a dot for each run
    worst: bool = False  # no bands: the lowest seed solid, the median dotted
    log: str = ""  # the axes that are logarithmic, as in "xy"
    smooth: int = 1  # points of a run's list over which a mean is taken


class Experiment(NamedTuple):
    """A claim and what tries it. run(**settings) makes one run, in a process with one thread, and
    returns numbers, and lists of numbers, by name. Settings hold a "seed"; runs that differ in it
    alone are a row of the table, and fields of the finding are filled from these, as in fill()."""

    claim: str
    verdict: str
    run: Callable[..., dict]
    jobs: list[dict]
    smoke: list[dict]
    panels: list[Panel]
    finding: str


def grid(seeds, **choices):
    """[{…, "seed": …}]: all combinations of the choices, each a list, for seeds 1, 2, …"""
    jobs = [{}]
    for name, values in choices.items():
        jobs = [job | {name: value} for job in jobs for value in values]
    return [job | {"seed": seed} for job in jobs for seed in range(1, seeds + 1)]


def load(name):
    return importlib.import_module(name).EXPERIMENT


def select(runs, wanted):
    return [run for run in runs if wanted.items() <= run[0].items()]


# ------------------------------------------------------------------------------------------- Runs


def texts(path, found):
    """Enter into found the text of a file, and of all files here that it imports, and so on."""
    found[path.name] = path.read_text().partition("\nEXPERIMENT = ")[0]
    for module in re.findall(r"^ *(?:import|from) (\w+)", found[path.name], re.M):
        for folder in FOLDERS:
            file = folder / f"{module}.py"
            if file.exists() and file.name not in [*found, "harness.py"]:
                texts(file, found)
    return found


def rounded(value):
    """Four digits are enough for a picture."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def work(name, settings):
    """One run, in a worker process, into its file, unless it is there."""
    key = json.dumps([settings, texts(HERE / f"{name}.py", {})], sort_keys=True)
    path = CACHE / f"{name}-{zlib.crc32(key.encode()):08x}.json"
    if not path.exists():
        start = time.process_time()
        result = load(name).run(**settings)
        result = {column: rounded(value) for column, value in result.items()}
        found = {"run": [settings, result], "seconds": time.process_time() - start}
        mine = path.with_suffix(f".{os.getpid()}")
        mine.write_text(json.dumps(found))
        mine.rename(path)
    return json.loads(path.read_text())


def measure(name, workers):
    """All runs of an experiment, and what to know about them, into results/."""
    CACHE.mkdir(parents=True, exist_ok=True)
    # seed by seed, so that runs that are stopped have every setting
    jobs = sorted(load(name).jobs, key=lambda job: job["seed"])
    inputs = [(name, job) for job in jobs]
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=8) as pool:
        found = pool.starmap(work, inputs, chunksize=1)
    minutes = sum(each["seconds"] for each in found) / 60
    where = f"{minutes:.0f} minutes of one core; {footer('transformers')}"
    runs = [each["run"] for each in found]
    text = json.dumps({"where": where, "runs": runs})
    (RESULTS / f"{name}.json").write_text(text + "\n")


def measured(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def try_out(name):
    """Runs at toy size: they must give every number that the page and the picture take."""
    chosen = load(name)
    runs = [[job, chosen.run(**job)] for job in chosen.smoke]
    given = {column for _, result in runs for column in result}
    taken = {column for panel in chosen.panels for _, column in panel.lines.values()}
    taken |= {column for other, _, column, *_ in FIELD.findall(chosen.finding) if not other}
    if taken - given:
        sys.exit(f"{name}: no run gives {', '.join(taken - given)}")
    draw(chosen.panels, runs, os.devnull)
    print(f"{name}: {', '.join(sorted(given))}", flush=True)


# ---------------------------------------------------------------------------------------- Numbers


def summary(runs, short=False):
    """{row: {column: its numbers, one for each seed}}; a row for each setting, named by names and
    values as in "form clip, epochs 4"; or, if short, by those values that differ, "clip, 4"."""
    names = dict.fromkeys(name for settings, _ in runs for name in settings if name != "seed")
    if short:
        first, _ = runs[0]
        names = [n for n in names if any(of.get(n) != first.get(n) for of, _ in runs)]
    rows = {}
    for settings, result in runs:
        own = {name: settings[name] for name in names if name in settings}
        row = ", ".join(f"{value}" if short else f"{name} {value}" for name, value in own.items())
        for column, value in result.items():
            if not isinstance(value, list | None):
                rows.setdefault(row, {}).setdefault(column, []).append(value)
    return rows


def p_value(one, other):
    """Exact permutation test, two-sided: of all ways to deal these numbers into two such groups,
    the share in which the groups' means are as far apart as they are, or farther."""
    numbers = np.array([*one, *other], float)
    groups = list(combinations(range(len(numbers)), len(one)))  # the first is `one` itself
    distances = abs(numbers[groups].sum(1) - numbers.mean() * len(one))
    return (distances >= distances[0] * (1 - 1e-9)).mean()


FIELD = re.compile(r"\{(?:(\w+): )?([^{}]*?) ?/ ([^{}]+?)(?: / (low|high|range|p))? :([^{}]*)\}")


def fill(finding, name, rows):
    """The sentences with their numbers; rows: {(experiment, row): {column: numbers}}.

    {clip, 4 / return :.0f} is the median over the seeds, of this row and this column. Behind these
    may stand / low, / high, or / range for all three, "median (lowest to highest)". {clip, 4 ~
    no clip, 4 / return / p :.2f} is the p-value of a difference, and {step: ppo, 0.003 / return
    :.0f} is of another experiment.
    """

    def number(match):
        other, places, column, end, form = match.groups()
        numbers, *more = (rows[other or name, row][column] for row in places.split(" ~ "))
        if end == "range":
            text = spread(numbers, form)
        elif end == "p":
            text = format(p_value(numbers, *more), form)
        else:
            value = {"low": min, "high": max, None: median}[end](numbers)
            text = format(value, form)
        return text.replace("%", " %").replace("-", "−")

    return FIELD.sub(number, " ".join(finding.split()))


# --------------------------------------------------------------------------------------- Pictures

GREY = "#777777"  # readable on light pages and on dark ones
# Okabe and Ito's palette, which the colour-blind can tell apart, and three more.
ORANGE, SKY, GREEN = "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"
PALETTE = [RED, BLUE, ORANGE, GREEN, SKY, PINK, "#7B52AB", "#8F9A00", "#8C6D31", GREY]
# A method has one colour in all pictures; other labels take what is left of the palette.
COLORS = {"REINFORCE": GREY, "actor-critic": ORANGE, "TRPO": BLUE, "PPO": RED}
COLORS |= {"RLOO": GREY, "GRPO": RED, "DAPO": BLUE, "GSPO": ORANGE, "CISPO": GREEN}
STYLE = dict.fromkeys(("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY)
STYLE |= {"axes.titlecolor": GREY, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"axes.grid": True, "grid.alpha": 0.25, "font.size": 10, "axes.titlesize": 10.5}


def curve(panel, runs, column):
    """x of the points of a line, and for each point the numbers of these runs."""
    x, values = panel.x, [result[column] for _, result in runs]
    if not isinstance(x, str):
        length = min(map(len, values))
        y = np.array([value[:length] for value in values], float).T
        starts = [max(0, end - panel.smooth) for end in range(1, length + 1)]
        y = [y[start : end + 1].mean(0) for end, start in enumerate(starts)]
        return range(1, length + 1) if x is None else x[:length], y
    if x in runs[0][0]:
        points = sorted({settings[x] for settings, _ in runs})
        at_points = [select(runs, {x: point}) for point in points]
        y = [[result[column] for _, result in at_point] for at_point in at_points]
        return [f"{point:g}" for point in points], y
    own = [result[x] for _, result in runs]  # each run's: all are read at the same points
    first = max(each[0] for each in own)
    last = min(each[-1] for each in own)
    points = np.linspace(first, last, 100)
    y = [np.interp(points, *pair) for pair in zip(own, values, strict=True)]
    return points, np.transpose(y)


def draw_lines(axes, panel, lines, colors):
    """A line for each label, and a band about it."""
    ends = {}
    for label, (runs, column) in lines.items():
        x, y = curve(panel, runs, column)
        color = colors[label]
        middle = list(map(median, y))
        low = list(map(min, y))
        high = list(map(max, y))
        if panel.worst:
            axes.plot(x, middle, ":", color=color)
            axes.plot(x, low, ".-", color=color)
            ends[label] = low[-1]
        else:
            axes.plot(x, middle, color=color)
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
            ends[label] = middle[-1]
    write_labels(axes, ends, colors)


def write_labels(axes, ends, colors):
    """Each label right of its line's end; farther up or down where two would touch."""
    left, _ = axes.get_xlim()
    place = axes.transData + axes.transAxes.inverted()
    heights = {}
    for label, end in ends.items():
        _, heights[label] = place.transform((left, end))
    below = -1.0
    for label in sorted(ends, key=heights.get):
        below = max(heights[label], below + 0.12)
        heights[label] = below
    above = 1.1
    for label in sorted(ends, key=heights.get, reverse=True):
        above = min(heights[label], above - 0.12)
        style = {"color": colors[label], "transform": axes.transAxes, "va": "center"}
        axes.text(1.02, above, label, **style)


def draw_dots(axes, lines, colors):
    """A row for each label, in it a dot for each run, and a bar at the median."""
    for row, (label, (runs, column)) in enumerate(lines.items()):
        values = sorted(result[column] for _, result in runs)
        heights = np.linspace(row - 0.2, row + 0.2, len(values))  # so that none hides another
        color = colors[label]
        axes.plot(values, heights, "o", color=color, alpha=0.6, markersize=4)
        axes.plot(median(values), row, "|", color=color, markersize=16, markeredgewidth=2)
    axes.set_yticks(range(len(lines)), lines)
    axes.set_ylim(len(lines) - 0.4, -0.6)


def draw(panels, runs, path):
    """The panels, one below the other, as a PNG, if matplotlib is there."""
    if not find_spec("matplotlib"):
        return
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    labels = dict.fromkeys(label for panel in panels for label in panel.lines)
    free = cycle([color for color in PALETTE if color not in map(COLORS.get, labels)])
    colors = {label: COLORS.get(label) or next(free) for label in labels}
    with rc_context(STYLE):
        figure = Figure(figsize=(5.6, 2.4 * len(panels)))
        for number, panel in enumerate(panels, 1):
            axes = figure.add_subplot(len(panels), 1, number)
            lines = {}
            for label, (wanted, column) in panel.lines.items():
                if chosen := select(runs, wanted):  # not all, at toy size
                    lines[label] = chosen, column
            xlabel, ylabel = panel.axes
            axes.set(title=panel.title, xlabel=xlabel, ylabel=ylabel)
            for which in panel.log:
                axes.set(**{f"{which}scale": "log"})
            if panel.dots:
                draw_dots(axes, lines, colors)
            else:
                draw_lines(axes, panel, lines, colors)
        figure.tight_layout()
        figure.savefig(path, format="png", transparent=True, dpi=150)


# ------------------------------------------------------------------------------------------- Page


def section(name, rows):
    """Claim, picture, verdict and finding, and below them all numbers, folded away."""
    chosen = load(name)
    own = summary(measured(name)["runs"])
    columns = list(dict.fromkeys(column for numbers in own.values() for column in numbers))
    cells = []
    for row, numbers in own.items():
        of = [numbers.get(column) for column in columns]
        of = [spread(each, ".4g") if each else "–" for each in of]
        seeds = max(map(len, numbers.values()))
        cells.append([row, seeds, *of])
    said = f"**{chosen.verdict.capitalize()}.** {fill(chosen.finding, name, rows)}"
    seen = "; ".join(panel.title for panel in chosen.panels)
    return [
        f'### <a id="{name}"></a>{chosen.claim}\n',
        f'<img src="results/{name}.png" width="560" alt="{seen}">\n',
        textwrap.fill(said, 140, break_on_hyphens=False) + "\n",
        "<details><summary>All numbers: median (lowest to highest)</summary>\n",
        *table(["", "seeds", *columns], cells),
        f"\n{measured(name)['where']}\n</details>",
    ]


def page():
    """EXPERIMENTS.md: page.md, in which each name becomes the section of its experiment."""
    rows, text = {}, TEMPLATE
    for name in NAMES:
        runs = measured(name)["runs"]
        rows |= {(name, row): numbers for row, numbers in summary(runs, short=True).items()}
    for name in NAMES:
        text = text.replace(f"{{{name}}}", "\n".join(section(name, rows)))
    index = []
    for name in NAMES:
        claim = load(name).claim.replace("|", "\\|")
        index.append([f"[{claim}](#{name})", load(name).verdict])
    return text.replace("{index}", "\n".join(table(["claim", "verdict"], index)))


def main(
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    smoke: bool = False,
    pages: bool = False,
    workers: int = 2,
):
    """Run the experiments of these names, or all; then write EXPERIMENTS.md."""
    os.environ["OMP_NUM_THREADS"] = "1"  # in the workers: two runs beside each other on two cores
    for name in names or NAMES:
        if smoke:
            try_out(name)
            continue
        if not pages:
            measure(name, workers)
        draw(load(name).panels, measured(name)["runs"], RESULTS / f"{name}.png")
    if not smoke:
        (HERE / "EXPERIMENTS.md").write_text(page())


if __name__ == "__main__":
    tyro.cli(main)

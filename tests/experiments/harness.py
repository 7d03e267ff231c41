"""Every claim tried: settings → runs → a picture, a table and a finding. One file per experiment.

    python tests/experiments/harness.py                    # all of them: hours on two cores
    python tests/experiments/harness.py clip baseline
    python tests/experiments/harness.py --smoke            # each at toy size; writes nothing
    python tests/experiments/harness.py --pages            # page and pictures of what was measured

A run is kept in ~/.cache/policy-gradients-experiments under its settings, the text of its
experiment down to EXPERIMENT, and the text of all files of this repository that these import. So
none is made twice, and none outlives a change of what made it. The outcome goes into
results/NAME.json; from there come EXPERIMENTS.md and the pictures, for which matplotlib is needed.
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
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import numpy as np
import tyro

HERE = Path(__file__).parent
ROOT, RESULTS = HERE.parents[1], HERE / "results"
FOLDERS = [HERE, ROOT, HERE.parent / "benchmarks", HERE.parent / "examples"]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
CACHE = CACHE / "policy-gradients-experiments"
sys.path[:0] = [str(folder) for folder in FOLDERS]

from bench import footer, table  # noqa: E402

CHAPTERS = {  # the page: chapters, and the files of their experiments
    "REINFORCE → actor-critic": ["psi", "bootstrap"],
    "Actor-critic → TRPO": ["step", "lambda"],
    "TRPO → PPO": ["surrogate", "clip", "entropy"],
    "PPO → RLOO": ["baseline", "critic"],
    "RLOO → GRPO": ["passes", "hacking"],
    "GRPO's division by std and by length": ["length"],
    "GRPO → DAPO": ["cliphigher", "dynamic"],
    "GRPO → GSPO": ["ratio"],
    "GRPO → CISPO": ["silenced"],
}
NAMES = [name for names in CHAPTERS.values() for name in names]
WRITTEN = {path.stem for path in HERE.glob("*.py") if "\nEXPERIMENT = " in path.read_text()}
NAMES = [name for name in NAMES if name in WRITTEN]  # while the others are written

SHOWN, PARTLY = "shown", "partly"
NOT_SHOWN, UNDECIDED = "not at this size", "undecided at this size"

GREY = "#777777"  # readable on light pages and on dark ones
# Okabe and Ito's palette, which the colour-blind can tell apart, and three more.
ORANGE, SKY, GREEN = "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"
PALETTE = [RED, BLUE, ORANGE, GREEN, SKY, PINK, "#7B52AB", "#8F9A00", "#8C6D31", GREY]
COLORS = {  # of the methods, in all pictures; other labels take what is left of the palette
    "REINFORCE": GREY,
    "actor-critic": ORANGE,
    "TRPO": BLUE,
    "PPO": RED,
    "RLOO": GREY,
    "GRPO": RED,
    "DAPO": BLUE,
    "GSPO": ORANGE,
    "CISPO": GREEN,
}


STYLE = dict.fromkeys(("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY)
STYLE |= {"axes.titlecolor": GREY, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"axes.grid": True, "grid.alpha": 0.25, "font.size": 10, "axes.titlesize": 10.5}

HEAD = """# Every claim tried

What each algorithm is said to cure, tried with one thing changed at a time, or whole scripts as
they are, in the order of the lineage. *Shown*: on all seeds, or with p ≤ 0.01, and at more than one
setting. *Partly*: one half of it. *Not at this size*: looked for, and not seen here. *Undecided*:
nothing here could have shown it. p is that of an exact permutation test of the means, two-sided;
with five seeds a side it is 0.008 at best. Lines are medians over the seeds, bands reach from the
lowest to the highest. The runs of the language model start from the tiny one that `grpo_llm.py`
makes; a real one is in [real_model.md](../benchmarks/results/real_model.md). This page is written
by `python tests/experiments/harness.py`, which keeps each run and makes none twice.
"""


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
            if file.exists() and file.name not in found:
                texts(file, found)
    return found


def kept(name, settings):
    """Where a run is kept."""
    key = [settings, texts(HERE / f"{name}.py", {"harness.py": ""})]
    return CACHE / f"{name}-{zlib.crc32(json.dumps(key, sort_keys=True).encode()):08x}.json"


def rounded(value):
    """Four digits are enough for a picture."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def work(name, settings):
    """One run, in a worker process, into its file, unless it is there."""
    path, start = kept(name, settings), time.process_time()
    if not path.exists():
        result = {column: rounded(value) for column, value in load(name).run(**settings).items()}
        found = {"run": [settings, result], "seconds": time.process_time() - start}
        mine = path.with_suffix(f".{os.getpid()}")
        mine.write_text(json.dumps(found))
        mine.rename(path)
    return json.loads(path.read_text())


def measure(name, workers):
    """All runs of an experiment, and what to know about them."""
    CACHE.mkdir(parents=True, exist_ok=True)
    # seed by seed, so that runs that are stopped have every setting
    inputs = [(name, job) for job in sorted(load(name).jobs, key=lambda job: job["seed"])]
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=8) as pool:
        found = pool.starmap(work, inputs, chunksize=1)
    minutes = sum(each["seconds"] for each in found) / 60
    where = f"{minutes:.0f} minutes of one core; {footer('transformers')}"
    return {"where": where, "runs": [each["run"] for each in found]}


def try_out(name):
    """Runs at toy size: they must give every number that the page and the pictures take."""
    chosen = load(name)
    runs = [[job, chosen.run(**job)] for job in chosen.smoke]
    made = {column for _, result in runs for column in result}
    used = {column for panel in chosen.panels for _, column in panel.lines.values()}
    used |= {column for other, _, column, *_ in FIELD.findall(chosen.finding) if not other}
    if used - made:
        sys.exit(f"{name}: no run gives {', '.join(used - made)}")
    draw(chosen.panels, runs, os.devnull)
    print(f"{name}: {', '.join(sorted(made))}", flush=True)


# ---------------------------------------------------------------------------------------- Numbers


def summary(runs):
    """{row: {column: its numbers, one for each seed}}; a row for each setting."""
    rows = {}
    for settings, result in runs:
        row = ", ".join(f"{name} {value}" for name, value in settings.items() if name != "seed")
        for column, value in result.items():
            if not isinstance(value, list | None):
                rows.setdefault(row, {}).setdefault(column, []).append(value)
    return rows


def p_value(one, other):
    """Exact permutation test, two-sided: of all ways to deal these numbers into two such groups,
    the share in which the groups' means are as far apart as they are, or farther."""
    numbers = np.array([*one, *other], float)
    groups = list(combinations(range(len(numbers)), len(one)))  # the first is `one` itself
    sums = numbers[groups].sum(1)
    distances = abs(sums - numbers.mean() * len(one))
    return (distances >= distances[0] * (1 - 1e-9)).mean()


FIELD = re.compile(r"\{(?:(\w+): )?([^{}]*?) ?/ ([^{}]+?)(?: / (low|high|range|p))? :([^{}]*)\}")


def fill(finding, name, rows):
    """The sentences with their numbers; rows: {(experiment, row): {column: numbers}}.

    {row / column :.2f} is the median over the seeds. Behind the column may stand / low, / high, or
    / range for all three, "median (lowest to highest)". {row ~ another row / column / p :.2f} is
    the p-value of their difference, and {other: row / column :.2f} is of the experiment `other`.
    """

    def number(match):
        other, places, column, end, form = match.groups()
        numbers, *more = (rows[other or name, row][column] for row in places.split(" ~ "))
        values = {"low": min(numbers), "high": max(numbers), None: median(numbers)}
        if end == "p":
            values["p"] = p_value(numbers, *more)
        text = {key: format(value, form).replace("%", " %") for key, value in values.items()}
        text["range"] = f"{text[None]} ({text['low']} to {text['high']})"
        return text[end]

    return FIELD.sub(number, finding)


# --------------------------------------------------------------------------------------- Pictures


def curve(panel, runs, column):
    """x, and y (seeds, points), of a line through these runs."""
    x, values = panel.x, [result[column] for _, result in runs]
    if not isinstance(x, str):
        length = min(map(len, values))
        y = np.array([value[:length] for value in values], float)
        y = [y[:, max(0, end - panel.smooth) : end].mean(1) for end in range(1, length + 1)]
        return range(1, length + 1) if x is None else x[:length], np.array(y).T
    if x in runs[0][0]:
        points = sorted({settings[x] for settings, _ in runs})
        y = [[result[column] for settings, result in runs if settings[x] == at] for at in points]
        return [f"{at:g}" for at in points], np.array(y, float).T
    own = [result[x] for _, result in runs]  # each run's: all are read at the same points
    points = np.linspace(max(each[0] for each in own), min(each[-1] for each in own), 100)
    pairs = zip(own, values, strict=True)
    return points, np.array([np.interp(points, *pair) for pair in pairs])


def draw_lines(axes, panel, lines, colors):
    ends = {}
    for label, (runs, column) in lines.items():
        x, y = curve(panel, runs, column)
        middle, low = np.median(y, 0), y.min(0)
        if panel.worst:
            axes.plot(x, middle, ":", color=colors[label])
            axes.plot(x, low, ".-", color=colors[label])
        else:
            axes.plot(x, middle, color=colors[label])
            axes.fill_between(x, low, y.max(0), color=colors[label], alpha=0.15, linewidth=0)
        ends[label] = (low if panel.worst else middle)[-1]
    return ends


def write_labels(axes, ends, colors):
    """Each label right of its line's end, and farther up or down where two would touch."""
    left, place = axes.get_xlim()[0], axes.transData + axes.transAxes.inverted()
    heights = {label: place.transform((left, end))[1] for label, end in ends.items()}
    above, below = 1.1, -1.0
    for label in sorted(ends, key=heights.get):
        heights[label] = below = max(heights[label], below + 0.12)
    for label in sorted(ends, key=heights.get, reverse=True):
        heights[label] = above = min(heights[label], above - 0.12)
        style = {"color": colors[label], "transform": axes.transAxes, "va": "center"}
        axes.text(1.02, above, label, **style)


def draw_dots(axes, lines, colors):
    """A row for each label, in it a dot for each run, and a bar at the median."""
    for row, (label, (runs, column)) in enumerate(lines.items()):
        values = [result[column] for _, result in runs]
        axes.plot(values, [row] * len(values), "o", color=colors[label], alpha=0.6, markersize=4)
        axes.plot(median(values), row, "|", color=colors[label], markersize=14, markeredgewidth=2)
    axes.set_yticks(range(len(lines)), lines)
    axes.set_ylim(len(lines) - 0.4, -0.6)


def draw(panels, runs, path):
    """The panels, one below the other, as a PNG, if matplotlib is there."""
    if not find_spec("matplotlib"):
        return
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    labels = dict.fromkeys(label for panel in panels for label in panel.lines)
    free = [color for color in PALETTE if color not in map(COLORS.get, labels)]
    colors = {label: COLORS.get(label) or free.pop(0) for label in labels}
    with rc_context(STYLE):
        figure = Figure(figsize=(5.6, 2.4 * len(panels)))
        for number, panel in enumerate(panels, 1):
            axes = figure.add_subplot(len(panels), 1, number)
            lines = {
                label: (select(runs, wanted), column)
                for label, (wanted, column) in panel.lines.items()
            }
            lines = {
                label: line for label, line in lines.items() if line[0]
            }  # all, but at toy size
            axes.set(title=panel.title, xlabel=panel.axes[0], ylabel=panel.axes[1])
            for which in panel.log:
                axes.set(**{f"{which}scale": "log"})
            if panel.dots:
                draw_dots(axes, lines, colors)
            else:
                ends = draw_lines(axes, panel, lines, colors)
                write_labels(axes, ends, colors)
        figure.tight_layout()
        figure.savefig(path, format="png", transparent=True, dpi=150)


# ------------------------------------------------------------------------------------------- Page


def measured(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def section(name, chosen, rows, where):
    """Claim, picture, verdict and finding, and below them all numbers, folded away."""
    own = {row: numbers for (experiment, row), numbers in rows.items() if experiment == name}
    columns = list(dict.fromkeys(column for numbers in own.values() for column in numbers))
    cells = []
    for row, numbers in own.items():
        of = [numbers.get(column) for column in columns]
        ends = [f"{median(x):.4g} ({min(x):.4g} to {max(x):.4g})" if x else "–" for x in of]
        cells.append([row, max(map(len, numbers.values())), *ends])
    said = f"**{chosen.verdict.capitalize()}.** {fill(chosen.finding, name, rows)}"
    alt = "; ".join(panel.title for panel in chosen.panels)
    return [
        f'### <a id="{name}"></a>{chosen.claim}\n',
        f'<img src="results/{name}.png" width="560" alt="{alt}">\n',
        textwrap.fill(said, 140, break_on_hyphens=False) + "\n",
        "<details><summary>All numbers: median (lowest to highest)</summary>\n",
        *table(["", "seeds", *columns], cells),
        f"\n{where}\n",
        "</details>\n",
    ]


def page():
    """EXPERIMENTS.md, from the experiments and results/."""
    found = {name: measured(name) for name in NAMES}
    rows = {}
    for name in NAMES:
        rows |= {(name, row): each for row, each in summary(found[name]["runs"]).items()}
    index, sections = [], []
    for chapter, names in CHAPTERS.items():
        sections.append(f"## {chapter}\n")
        for name in [name for name in names if name in NAMES]:
            chosen = load(name)
            index.append([f"[{chosen.claim}](#{name})".replace("|", "\\|"), chosen.verdict])
            sections += section(name, chosen, rows, found[name]["where"])
    lines = [HEAD, *table(["claim", "verdict"], index), "", *sections]
    return "\n".join(lines) + "\n" + (HERE / "taken_out.md").read_text()


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
        elif not pages:
            found = measure(name, workers)
            (RESULTS / f"{name}.json").write_text(json.dumps(found) + "\n")
    if not smoke:
        for name in names or NAMES:
            draw(load(name).panels, measured(name)["runs"], RESULTS / f"{name}.png")
        (HERE / "EXPERIMENTS.md").write_text(page())


if __name__ == "__main__":
    tyro.cli(main)

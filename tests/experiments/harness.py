"""Every claim tried: settings → runs → a picture, a table and a finding. One file per experiment.

    python tests/experiments/harness.py                  # all of them: two hours of one core
    python tests/experiments/harness.py clip --smoke     # one, at toy size; writes nothing
    python tests/experiments/harness.py --pages          # page and pictures of what was measured

A run is kept in ~/.cache/policy-gradients-experiments under its settings and the text of all that
makes it: its experiment, down to EXPERIMENT, and the files of this repository that this imports.
From results/NAME.json come the pictures, for which matplotlib is needed, and EXPERIMENTS.md.
"""

import importlib
import json
import multiprocessing
import os
import re
import sys
import textwrap
import zlib
from collections.abc import Callable
from itertools import combinations, cycle
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import tyro
from tyro.conf import Positional

HERE = Path(__file__).parent
RESULTS, TEMPLATE = HERE / "results", (HERE / "page.md").read_text()
FOLDERS = [HERE, HERE.parents[1], HERE.parent / "benchmarks", HERE.parent / "examples"]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
CACHE = CACHE / "policy-gradients-experiments"
sys.path[:0] = map(str, FOLDERS)

from bench import footer, spread, table  # noqa: E402

NAMES = re.findall(r"^{(?!index)(\w+)}$", TEMPLATE, re.M)  # in the page's order
SHOWN, PARTLY = "shown", "partly"
NOT_SHOWN, UNDECIDED = "not at this size", "undecided at this size"


class Panel(NamedTuple):
    """A part of a picture: medians over the runs with these settings, in bands of all of them."""

    title: str
    lines: dict[str, tuple[dict, str]]  # label: settings, column
    axes: tuple[str, str]  # what is along x, and along y
    x: str | list | None = None  # a setting; or x of each point of a list; None: 1, 2, …
    xscale: str = "linear"  # or "log"
    dots: bool = False  # no lines: a row for each label, and in it a dot for each run
    smooth: int = 1  # points of a list over which a mean is taken


class Experiment(NamedTuple):
    """A claim and what tries it: run(**settings) returns numbers, and lists of numbers, by name."""

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


def texts(path, found):
    """Enter into found the text of a file, and of all files here that it imports, and so on."""
    found[path.name] = path.read_text().partition("\nEXPERIMENT = ")[0]
    for module in re.findall(r"^ *(?:import|from) (\w+)", found[path.name], re.M):
        for folder in FOLDERS:
            file = folder / f"{module}.py"
            if file.exists() and file.name not in [*found, "harness.py"]:
                texts(file, found)
    return found


def work(name, settings):
    """One run, in a worker process, into its file, unless it is there."""
    key = json.dumps([settings, texts(HERE / f"{name}.py", {})])
    path = CACHE / f"{name}-{zlib.crc32(key.encode()):08x}.json"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(load(name).run(**settings)))
        unfinished.rename(path)
    text = path.read_text()
    return settings, json.loads(text, parse_float=lambda digits: float(f"{float(digits):.4g}"))


def measure(name):
    """All runs of an experiment, and where they were made, into results/."""
    CACHE.mkdir(parents=True, exist_ok=True)
    jobs = [(name, job) for job in load(name).jobs]
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=8) as pool:
        runs = pool.starmap(work, jobs, chunksize=1)
    text = json.dumps({"where": footer("transformers"), "runs": runs})
    (RESULTS / f"{name}.json").write_text(text + "\n")


def measured(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def try_out(name):
    """Runs at toy size: they must give every number that the page and the picture take."""
    chosen = load(name)
    given = {column for job in chosen.smoke for column in chosen.run(**job)}
    taken = {column for panel in chosen.panels for _, column in panel.lines.values()}
    fields = FIELD.findall(" ".join(chosen.finding.split()))
    taken |= {column for other, _, column, *_ in fields if not other}
    if taken - given:
        sys.exit(f"{name}: no run gives {', '.join(taken - given)}")
    print(f"{name}: {', '.join(sorted(given))}", flush=True)


def summary(runs):
    """{row: {column: its numbers, one for each seed}}; a row is its settings without the seed."""
    rows = {}
    for settings, result in runs:
        row = tuple(pair for pair in settings.items() if pair[0] != "seed")
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


MEASURES = {"low": min, "high": max, "p": p_value, None: median}
FIELD = re.compile(r"\{(?:(\w+): )?([^{}]*?) ?/ ([^{}]+?)(?: / (low|high|range|p))? :([^{}]*)\}")


def fill(finding, name, rows):
    """The sentences with their numbers; rows: {(experiment, row): {column: numbers}}.
    {clip, 4 / return :.0f} is a median; / low, / high or / range may follow. {clip, 4 ~ no clip, 4
    / return / p :.2f} is a p-value, and {step: ppo, 0.003 / return :.0f} another experiment's.
    """

    def number(match):
        other, places, column, end, form = match.groups()
        numbers = [rows[other or name, row][column] for row in places.split(" ~ ")]
        text = spread(*numbers, form) if end == "range" else format(MEASURES[end](*numbers), form)
        return text.replace("%", " %").replace("-", "−")

    return FIELD.sub(number, " ".join(finding.split()))


PALETTE = ["#D55E00", "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7"]  # Okabe and Ito's
STYLE = {"axes.grid": True, "grid.alpha": 0.25, "legend.labelcolor": "linecolor"}


def points(panel, runs, column):
    """x of a line's points, and for each point the numbers of these runs."""
    if isinstance(panel.x, str):
        found = {}
        for settings, result in runs:
            found.setdefault(f"{settings[panel.x]:g}", []).append(result[column])
        return list(found), list(found.values())
    values = np.transpose([result[column] for _, result in runs])
    ends = range(1, len(values) + 1)
    return panel.x or ends, [values[max(0, end - panel.smooth) : end].mean(0) for end in ends]


def draw_panel(axes, panel, runs, colors):
    xlabel, ylabel = panel.axes
    axes.set(title=panel.title, xlabel=xlabel, ylabel=ylabel, xscale=panel.xscale)
    for row, (label, (wanted, column)) in enumerate(panel.lines.items()):
        chosen = [run for run in runs if wanted.items() <= run[0].items()]
        color = colors[label]
        if panel.dots:
            values = [result[column] for _, result in chosen]
            beside = row + (np.arange(len(values)) - (len(values) - 1) / 2) * 0.15
            axes.plot(values, beside, "o", color=color, alpha=0.5)
            axes.plot(median(values), row, "|", color=color, markersize=72 / len(panel.lines))
        else:
            x, y = points(panel, chosen, column)
            marker = "." if isinstance(panel.x, str) else ""
            axes.plot(x, list(map(median, y)), color=color, label=label, marker=marker)
            axes.fill_between(x, list(map(min, y)), list(map(max, y)), color=color, alpha=0.15)
    if panel.dots:
        axes.set_yticks(range(len(panel.lines)), list(panel.lines))
        axes.set_ylim(len(panel.lines) - 0.5, -0.5)
        return
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    if len(panel.lines) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def draw(panels, runs, path):
    """The panels, one below the other, as a PNG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    labels = dict.fromkeys(label for panel in panels for label in panel.lines)
    colors = dict(zip(labels, cycle(PALETTE), strict=False))
    with rc_context(STYLE):
        figure = Figure(figsize=(5.6, 2.4 * len(panels)))
        for number, panel in enumerate(panels, 1):
            draw_panel(figure.add_subplot(len(panels), 1, number), panel, runs, colors)
        figure.tight_layout()
        figure.savefig(path, dpi=150)


def section(name, rows):
    """Claim, picture, verdict and finding, and below them all numbers, folded away."""
    chosen = load(name)
    own = summary(measured(name)["runs"])
    columns = list(dict.fromkeys(column for numbers in own.values() for column in numbers))
    cells = []
    for row, numbers in own.items():
        label = ", ".join(f"{setting} {value}" for setting, value in row)
        of = [spread(numbers[each], ".4g") if each in numbers else "–" for each in columns]
        cells.append([label, max(map(len, numbers.values())), *of])
    said = f"**{chosen.verdict.capitalize()}.** {fill(chosen.finding, name, rows)}"
    return [
        f'### <a id="{name}"></a>{chosen.claim}\n',
        f'<img src="results/{name}.png" width="560" alt="{chosen.claim}">\n',
        textwrap.fill(said, 140, break_on_hyphens=False) + "\n",
        "<details><summary>All numbers: median (lowest to highest)</summary>\n",
        *table(["", "seeds", *columns], cells),
        f"\n{measured(name)['where']}\n</details>",
    ]


def page():
    """EXPERIMENTS.md: page.md, in which each name becomes the section of its experiment."""
    rows, text, index = {}, TEMPLATE, []
    for name in NAMES:
        own = summary(measured(name)["runs"])
        shared = set.intersection(*map(set, own))
        for row, numbers in own.items():
            differing = [str(pair[1]) for pair in row if pair not in shared]
            rows[name, ", ".join(differing)] = numbers
    for name in NAMES:
        text = text.replace(f"{{{name}}}", "\n".join(section(name, rows)))
        claim = load(name).claim.replace("|", "\\|")
        index.append([f"[{claim}](#{name})", load(name).verdict])
    return text.replace("{index}", "\n".join(table(["claim", "verdict"], index)))


def main(names: Positional[tuple[str, ...]] = (), smoke: bool = False, pages: bool = False):
    """Run the experiments of these names, or all; then write EXPERIMENTS.md."""
    os.environ["OMP_NUM_THREADS"] = "1"  # in the workers: one run on each core
    for name in names or NAMES:
        if smoke:
            try_out(name)
        elif not pages:
            measure(name)
        if not smoke:
            draw(load(name).panels, measured(name)["runs"], RESULTS / f"{name}.png")
    if not smoke:
        (HERE / "EXPERIMENTS.md").write_text(page())


if __name__ == "__main__":
    tyro.cli(main)

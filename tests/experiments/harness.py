"""Every claim tested: runs → the verdict of a test declared before them → a section of the page.

    python tests/experiments/harness.py               # says what is left to run, and how long
    python tests/experiments/harness.py clip step     # runs these; `all` runs everything
    python tests/experiments/harness.py clip --smoke  # one run of each kind at toy size, not kept
    python tests/experiments/harness.py --page        # only writes the page and the pictures

A finished run is kept at once, in results/NAME.json, so stop at any time and start again.

An experiment is a file. Above its line "# The page" it declares the design: run(**settings), which
returns numbers and lists of numbers by name, JOBS and SMOKE (lists of settings), SECONDS (of CPU
time, a run), CLAIM and PRIMARIES: at most two tests, each a list of contrasts. Below that line is
what the page says: LESSON, a verdict and the sentence for it, PANELS, words(runs) and NOT_TRIED.

A checksum of the design and of the scripts it imports is kept with each run, without comments and
docstrings. If that code changes, the runs no longer count, and the page is not written: run them
again, or name the experiments with --accept "REASON" if the change cannot matter.
"""

import ast
import importlib
import io
import json
import multiprocessing
import os
import re
import sys
import textwrap
import time
import tokenize
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from tqdm import tqdm
from tyro.conf import Positional

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS, TEMPLATE = HERE / "results", HERE / "page.md"
for folder in (HERE, ROOT, HERE.parent / "benchmarks", HERE.parent / "examples"):
    sys.path.insert(0, str(folder))

import verdicts  # noqa: E402
from bench import footer, revision, table  # noqa: E402

NAMES = re.findall(r"^{(?!index)(\w+)}$", TEMPLATE.read_text(), re.M)  # in the page's order
DECLARED = [name for name in NAMES if "\nPRIMARIES = " in (HERE / f"{name}.py").read_text()]


def grid(seeds, first=1, **choices):
    """[{"seed": …, …}, …]: all combinations of the choices, each a list, for so many seeds."""
    jobs = [{"seed": seed} for seed in range(first, first + seeds)]
    for name, values in choices.items():
        jobs = [job | {name: value} for job in jobs for value in values]
    return jobs


def arms(column, setting, values, **others):
    """{value: arm} for each value of a setting. An arm is the settings of its runs, and the column
    in which each has its outcome."""
    return {str(value): (others | {setting: value}, column) for value in values}


def load(name):
    return importlib.import_module(name)


# ------------------------------------------------------------------------------------------- Runs
def code(name):
    """The checksum of an experiment's design and of the files here that it imports."""
    texts = [(HERE / f"{name}.py").read_text().partition("\n# The page")[0]]
    for module in re.findall(r"^(?:import|from) (\w+)", texts[0], re.M):
        for path in (folder / f"{module}.py" for folder in (ROOT, HERE, HERE.parent / "examples")):
            if path.exists() and module not in ("harness", "verdicts"):
                texts.append(path.read_text())
    return f"{zlib.crc32(''.join(map(without_comments, texts)).encode()):08x}"


def without_comments(text):
    """Python code without its comments, docstrings and empty lines."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node):
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def read(name):
    """results/NAME.json: {"accepted": …, "runs": {settings as JSON: run}}."""
    path = RESULTS / f"{name}.json"
    kept = json.loads(path.read_text()) if path.exists() else {"accepted": {}, "runs": []}
    return kept | {"runs": {json.dumps(run["settings"]): run for run in kept["runs"]}}


def write(name, kept):
    lines = ",\n".join(map(json.dumps, kept["runs"].values()))
    unfinished = RESULTS / f"{name}.tmp"
    unfinished.write_text(
        f'{{"accepted": {json.dumps(kept["accepted"])}, "runs": [\n{lines}\n]}}\n'
    )
    unfinished.rename(RESULTS / f"{name}.json")


def is_current(name, kept):
    """Whether the runs were made by the code as it is now, or by code that was accepted as such."""
    codes = {run["code"] for run in kept["runs"].values()}
    return codes <= {code(name)} or kept["accepted"].get("code") == code(name)


def left(name):
    """The runs that count, as in results/NAME.json, and the jobs without one."""
    kept = read(name)
    if not is_current(name, kept):
        kept = {"accepted": {}, "runs": {}}
    return kept, [job for job in load(name).JOBS if json.dumps(job) not in kept["runs"]]


def rounded(value):
    return [rounded(each) for each in value] if isinstance(value, list) else float(f"{value:.5g}")


def outcome(name, settings):
    """What a run returns, as it is kept."""
    result = load(name).run(**settings)
    return {column: rounded(value) for column, value in result.items()}


def work(job):
    """One run, in a worker process."""
    name, settings = job
    start = time.process_time()
    result = outcome(name, settings)
    seconds = rounded(time.process_time() - start)
    return name, {"settings": settings, "code": code(name), "seconds": seconds, "result": result}


def measure(names):
    """Make the runs that are left, on both cores."""
    machine, now = footer().rpartition(", revision ")[::2]  # before any file is written
    kept, jobs = {}, []
    for name in names:
        kept[name], missing = left(name)
        jobs += [(name, job) for job in missing]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        bar = tqdm(pool.imap_unordered(work, jobs), total=len(jobs), unit="run")
        for name, run in bar:
            bar.set_description(name)
            kept[name]["runs"][json.dumps(run["settings"])] = run | {"on": machine, "revision": now}
            write(name, kept[name])


def plan(names):
    """Say what is left to run, and how long it takes."""
    total = 0
    for name in names:
        number = len(left(name)[1])
        minutes = number * load(name).SECONDS / 60
        total += minutes
        why = "" if is_current(name, read(name)) else "; the code has changed"
        print(f"{name}: {number} of {len(load(name).JOBS)} runs left, {minutes:.0f} minutes{why}")
    print(f"in all {total:.0f} minutes on one core, {total / 2:.0f} on two")
    print("to run them: python tests/experiments/harness.py all")


def accept_runs(names, reason):
    """Let the runs of these experiments count as runs of the code as it is now."""
    now = revision()  # before any file is written
    for name in names:
        kept = read(name)
        reasons = dict.fromkeys(
            [kept["accepted"].get("reason"), reason]
        )  # the earlier one holds, too
        text = "; ".join(filter(None, reasons))
        kept["accepted"] = {"code": code(name), "revision": now, "reason": text}
        write(name, kept)


def try_out(name):
    """Make runs at toy size. If the experiment declares a test, the test, the pictures and the
    words must find their numbers in them."""
    module = load(name)
    rows = [(job, outcome(name, job)) for job in module.SMOKE]
    if name in DECLARED:
        runs = Runs([(job | {"seed": seed}, result) for job, result in rows for seed in (1, 2)])
        verdicts.judge({name: module.PRIMARIES}, {name: runs.rows})
        module.words(runs)
        for panel in module.PANELS:
            assert all(runs.find(*arm) for arm in panel.lines.values()), panel
    print(f"{name}: {', '.join(sorted({column for _, result in rows for column in result}))}")


# --------------------------------------------------------------------------------------- Pictures
class Runs:
    """The runs of an experiment, [(settings, result), …], and what sentences need of them."""

    def __init__(self, rows):
        self.rows = rows

    def find(self, wanted, column):
        chosen = [result for settings, result in self.rows if wanted.items() <= settings.items()]
        return [result[column] for result in chosen if column in result]

    def mean(self, column, spec, /, **wanted):
        """ "12.1 [11.8, 12.5]": the mean of the runs with these settings, its 95 % interval."""
        return mean_text(self.find(wanted, column), spec)


def minus(text):
    return text.replace("-", "−").replace("%", " %")


def mean_text(values, spec):
    values = np.array(values, float)
    if np.ptp(values) == 0:
        return minus(format(values[0], spec))
    low, high = verdicts.interval([(values, 0 * values)], paired=True)
    return minus(f"{values.mean():{spec}} [{low:{spec}}, {high:{spec}}]")


class Panel(NamedTuple):
    """A part of a picture: a dot or a thin line for each seed, and their mean."""

    title: str
    lines: dict[str, tuple[dict, str]]  # label: arm
    axes: tuple[str, str]  # what is along x, and along y
    x: str | list | None = None  # a setting; or x of each point of a list; None: a row of dots each


PALETTE = ["#D55E00", "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7"]  # Okabe and Ito's
STYLE = {"axes.grid": True, "grid.alpha": 0.25, "legend.labelcolor": "linecolor"}


def draw_line(axes, x, arm, runs, **style):
    """The mean of an arm over a setting, or over the points of lists; each run beside it."""
    wanted, column = arm
    if isinstance(x, list):
        points = list(zip(*runs.find(wanted, column), strict=True))  # for each, all runs
        axes.plot(x, points, alpha=0.25, linewidth=0.5, color=style["color"])
        axes.plot(x, [np.mean(values) for values in points], **style)
        return
    every = sorted({settings[x] for settings, _ in runs.rows if x in settings})
    points = {value: runs.find(wanted | {x: value}, column) for value in every}
    points = {value: found for value, found in points.items() if found}
    for value, found in points.items():
        axes.plot([value] * len(found), found, ".", alpha=0.35, color=style["color"])
    axes.plot(list(points), [np.mean(found) for found in points.values()], **style)


def draw_panel(axes, panel, runs, colors):
    xlabel, ylabel = panel.axes
    axes.set(title=panel.title, xlabel=xlabel, ylabel=ylabel)
    for row, (label, arm) in enumerate(panel.lines.items()):
        if panel.x is not None:
            draw_line(axes, panel.x, arm, runs, color=colors[label], label=label)
            continue
        values = runs.find(*arm)
        axes.plot(values, row + np.linspace(-0.2, 0.2, len(values)), ".", color=colors[label])
        axes.plot(np.mean(values), row, "|", color=colors[label], markersize=24)
    if panel.x is None:
        axes.set_yticks(range(len(panel.lines)), list(panel.lines))
        axes.set_ylim(len(panel.lines) - 0.5, -0.5)
    elif len(panel.lines) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def draw(panels, runs, path):
    """The panels, one below the other, as a PNG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    labels = dict.fromkeys(label for panel in panels for label in panel.lines)
    colors = {label: PALETTE[i % len(PALETTE)] for i, label in enumerate(labels)}
    with rc_context(STYLE):
        figure = Figure(figsize=(5.6, 2.4 * len(panels)))
        for number, panel in enumerate(panels, 1):
            draw_panel(figure.add_subplot(len(panels), 1, number), panel, runs, colors)
        figure.tight_layout()
        figure.savefig(path, dpi=150)


# --------------------------------------------------------------------------------------- The page
def measured():
    """{experiment: its Runs, in the order of its jobs}, of those that are complete."""
    stale, found = [name for name in DECLARED if not is_current(name, read(name))], {}
    if stale:
        print("Runs were made by other code than there is now. Run these experiments again, or, if")
        sys.exit(f'the change cannot matter, accept them: {" ".join(stale)} --accept "REASON"')
    for name in DECLARED:
        kept, missing = left(name)
        if not missing:
            runs = [kept["runs"][json.dumps(job)] for job in load(name).JOBS]
            found[name] = Runs([(run["settings"], run["result"]) for run in runs])
    return found


def escape(text):
    return text.replace("|", "\\|")


def primary_table(findings, tests):
    header = ["test", "more − less", "difference [95 % interval]", "worth naming from"]
    header += ["P(more > less)", "runs of each arm", "p, adjusted", "verdict"]
    numbered = [number for number, contrasts in enumerate(tests, 1) for _ in contrasts]
    lines = []
    if not findings:
        return ["No tests: nothing is random."]
    for number, found in zip(numbered, findings, strict=True):
        numbers = (found.difference, *found.interval, found.contrast.smallest)
        difference, low, high, smallest = (minus(f"{number:.3g}") for number in numbers)
        p = "< 0.0001" if found.p < 1e-4 else f"{found.p:.2g}"
        needed = f"; {found.needed:,} runs would do" if found.verdict == verdicts.UNDECIDED else ""
        cells = [number, escape(found.contrast.name), f"{difference} [{low}, {high}]", smallest]
        n = " and ".join(map(str, dict.fromkeys(found.n)))
        n += " pairs" if found.contrast.paired and found.contrast.less else ""
        lines.append([*cells, f"{found.superiority:.2f}", n, p, found.verdict + needed])
    return table(header, lines)


def all_numbers(runs):
    """Means over the seeds, a row for each arm."""
    numbers = {}
    for settings, result in runs.rows:
        arm = {key: value for key, value in settings.items() if key not in ("seed", "start")}
        label = ", ".join(f"{key} {value}" for key, value in arm.items())
        for column, value in result.items():
            if not isinstance(value, list):
                numbers.setdefault(label, {}).setdefault(column, []).append(value)
    columns = list(dict.fromkeys(column for row in numbers.values() for column in row))
    lines = []
    for label, row in numbers.items():
        cells = [mean_text(row[each], ".4g") if each in row else "–" for each in columns]
        lines.append([escape(label), max(map(len, row.values())), *cells])
    return table(["", "seeds", *columns], lines)


def origin(name):
    """The line below a section: when, where and by which code its runs were made."""
    kept = read(name)
    runs, accepted = list(kept["runs"].values()), kept["accepted"]
    made = {key: ", ".join(sorted({run[key] for run in runs})) for key in ("revision", "code")}
    minutes = sum(run["seconds"] for run in runs) / 60
    text = f"{minutes:.0f} minutes of one core; {runs[-1]['on']}; "
    text += f"revision {made['revision']}, code {made['code']}"
    if accepted:
        text += f". The runs were not made again after these changes, up to {accepted['revision']}:"
        text += f" {accepted['reason']}"
    return text


def wrap(text):
    return textwrap.fill(" ".join(text.split()), 140, break_on_hyphens=False) + "\n"


def section(name, runs, findings, verdict):
    """Lesson, claim, verdict, picture, the numbers that carry it, what was not tried."""
    module = load(name)
    written_for, lesson = module.LESSON
    if verdict != written_for:
        sys.exit(f"{name}: is {verdict}, but LESSON is a sentence for {written_for}: rewrite it")
    return [
        f'### <a id="{name}"></a>{lesson}\n',
        f"**Claim.** {module.CLAIM} **{verdict.capitalize()}.**\n",
        f'<img src="results/{name}.png" width="560" alt="{module.CLAIM}">\n',
        wrap(module.words(runs)),
        *primary_table(findings, module.PRIMARIES),
        f"\nNot tried: {module.NOT_TRIED}\n",
        "<details><summary>All numbers: mean [95 % interval]</summary>\n",
        *all_numbers(runs),
        f"\n{origin(name)}\n</details>",
    ]


def page_text():
    """EXPERIMENTS.md: page.md, in which each name becomes the section of its experiment."""
    runs, sections = measured(), {}
    judged = verdicts.judge(
        {name: load(name).PRIMARIES for name in DECLARED},
        {name: each.rows for name, each in runs.items()},
    )
    for name in DECLARED:
        claim = load(name).CLAIM
        if name in runs:
            findings = judged[name]
            verdict = verdicts.combine([found.verdict for found in findings])
            text = "\n".join(section(name, runs[name], findings, verdict))
            sections[name] = (claim, verdict, text)
        else:
            text = f'### <a id="{name}"></a>{claim}\n\nDeclared, and not run yet.'
            sections[name] = (claim, "not run yet", text)
    text = TEMPLATE.read_text()
    index = []
    for name in NAMES:
        claim, verdict, lines = sections[name]
        text = text.replace(f"{{{name}}}", lines)
        index.append([escape(f"[{claim}](#{name})"), verdict])
    return text.replace("{index}", "\n".join(table(["claim", "verdict"], index)))


def write_page():
    for name, runs in measured().items():
        draw(load(name).PANELS, runs, RESULTS / f"{name}.png")
    (HERE / "EXPERIMENTS.md").write_text(page_text())


def main(
    names: Positional[tuple[str, ...]] = (),  # experiments, or all
    smoke: bool = False,  # run at toy size, and keep nothing
    page: bool = False,  # run nothing: write the page and the pictures
    accept: str = "",  # the reason why runs still count although the code has changed
):
    """Run experiments and write their page; without names, say what is left to run."""
    known = NAMES if smoke else DECLARED
    chosen = known if names in ((), ("all",)) else names
    if set(chosen) - set(known):
        print(f"error: {' '.join(names)}: the experiments are {', '.join(known)}", file=sys.stderr)
        sys.exit(2)
    os.environ["OMP_NUM_THREADS"] = "1"  # in the workers: one run on each core
    if page or names and not smoke:
        importlib.import_module("matplotlib")  # is it there? Find out before anything is written
    if smoke:
        for name in chosen:
            try_out(name)
    elif accept:
        accept_runs(chosen, accept)
    elif names:
        measure(chosen)
    elif not page:
        plan(chosen)
    if page or names and not smoke:
        write_page()


if __name__ == "__main__":
    tyro.cli(main)

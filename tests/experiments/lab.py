"""What all experiments use: runs that are kept, tests on pairs of runs, their block on the page.

    python tests/experiments/clip.py            # makes the runs that are missing, picture and block
    python tests/experiments/clip.py --again    # makes all runs anew
    python tests/experiments/clip.py --smoke    # one run of each kind at toy size; keeps nothing

An experiment is a script. run(**settings) returns numbers and lists of numbers by name; JOBS are
the settings of its runs; TESTS, at most two, are declared before them. EXPERIMENTS.md is written by
hand: a script only replaces its own block there, from <!-- clip --> to <!-- end -->, and its line
in the first table.
"""

import inspect
import io
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from pictures import label_lines
from tqdm import tqdm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
for folder in ("tests/benchmarks", "tests/examples", "tests/tiny_model", "."):
    sys.path.insert(0, str(ROOT / folder))

from bench import CPU, footer, table, train  # noqa: E402, F401

PAGE = HERE / "EXPERIMENTS.md"
COMPARISONS = 51  # on the page; a test counts them
LINE = 0.01 / COMPARISONS  # they share 1 %, so that no verdict depends on another's p
CLAIMED, OPPOSITE, NOT_SEEN = "as claimed", "opposite", "not seen"  # of the sign
OF_INTEREST, TOO_SMALL, OPEN = "of interest", "too small", "open"  # of the size
NOT_RUN = "not run yet"
LEARNED = "mean over training"  # of returns or rewards: the outcome of most runs


# ------------------------------------------------------------------------------------------ Design
def grid(seeds, first=1001, **choices):
    """[{"seed": …, …}, …]: all combinations of the choices, each a list, for so many seeds."""
    jobs = [{"seed": seed} for seed in range(first, first + seeds)]
    for name, values in choices.items():
        jobs = [job | {name: value} for job in jobs for value in values]
    return jobs


def arms(column, setting, values, **others):
    """[arm, …], one for each value of the setting. An arm is the settings of its runs, and the
    column of their results in which the outcome is."""
    return [(others | {setting: value}, column) for value in values]


class Contrast(NamedTuple):
    """The claim: the mean of `more` is above that of `less`. Each unit is a pair."""

    name: str
    more: tuple[dict, str]  # an arm
    less: tuple[dict, str] | None  # None: compare with 0
    smallest: float  # the smallest difference of interest
    factor: bool = False  # outcomes are log2; their difference is told as a factor


# -------------------------------------------------------------------------------------- Statistics
def find(runs, arm):
    """{unit: its outcome}. A unit is what tells the runs of this arm apart: the seed, with the
    network that a run starts from."""
    wanted, column = arm
    found = {}
    for run in runs:
        settings = run["settings"]
        if wanted.items() <= settings.items() and column in run["result"]:
            unit = json.dumps({key: settings[key] for key in settings if key not in wanted})
            found[unit] = run["result"][column]
    return found


def mean(numbers):
    """Of those that are not None; None of nothing."""
    numbers = [number for number in numbers if number is not None]
    return sum(numbers) / len(numbers) if numbers else None


def values(runs, arm):
    """The outcomes of an arm, a row for each unit."""
    return np.array(list(find(runs, arm).values()), float)


def differences(runs, contrast):
    """more − less of each unit."""
    more = find(runs, contrast.more)
    less = find(runs, contrast.less) if contrast.less else dict.fromkeys(more, 0.0)
    return np.array([more[key] - less[key] for key in more if key in less])


def p_value(pairs):
    """One-sided: if the sign of each pair were a coin's, how often would the sum be as large?

    All signs are counted, with the pairs rounded to a grid; sums closer than that are ties."""
    total = abs(pairs).sum()
    if total == 0:
        return 1.0
    grid = np.rint(pairs / total * 100_000).astype(int)
    middle = abs(grid).sum()
    chance = np.zeros(2 * middle + 1)  # of each sum; at first it is 0
    chance[middle] = 1.0
    for step in abs(grid):
        chance = (np.roll(chance, step) + np.roll(chance, -step)) / 2
    reached = max(0, middle + grid.sum() - len(pairs))
    return float(chance[reached:].sum())


def interval(sample):
    """95 % interval of the mean by Student's t, whose quantile is told here to 0.002."""
    z, n = 1.959964, max(len(sample) - 1, 1)
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    half = t * np.std(sample) / n**0.5
    return np.mean(sample) - half, np.mean(sample) + half


def p_bound(pairs):
    """p_value of pairs less a bound, which may be skewed even if their mean is exactly the bound.

    If rare pairs are very low, a sample may lack them, and p comes out too small. So the pairs are
    lowered by the first term of Edgeworth's expansion: skewness · (2 z² + 1) / 6n, z = 3.6 at LINE.
    """
    spread = pairs.std() + 1e-12
    skewness = (((pairs - pairs.mean()) / spread) ** 3).mean()
    return p_value(pairs + spread * min(skewness, 0) * (2 * 3.6**2 + 1) / (6 * len(pairs)))


def decide(contrast, pairs):
    """Two words, each with its p: of the sign, and of the size."""
    sign, smallest = 1 if pairs.mean() >= 0 else -1, contrast.smallest
    differ = min(1.0, 2 * p_value(sign * pairs))
    large = p_bound(sign * pairs - smallest)
    small = max(p_bound(smallest - pairs), p_bound(smallest + pairs))
    size, p = min((OF_INTEREST, large), (TOO_SMALL, small), key=lambda found: found[1])
    if p >= LINE:
        size = OPEN
    word = NOT_SEEN if differ >= LINE else CLAIMED if sign > 0 else OPPOSITE
    return (word, differ), (size, p)


def p_text(p):
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def either(words, order):
    """Several verdicts in words: each once."""
    return " / ".join(word for word in order if word in words)


# ----------------------------------------------------------------------------------- An experiment
@dataclass
class Experiment:
    run: Callable  # **settings → {name: number or list of numbers}
    jobs: list[dict]
    tests: list[list[Contrast]]  # a test claims all of its contrasts
    draw: Callable  # (runs) → a figure
    small: dict  # settings of a run at toy size
    claim: str  # in one sentence
    source: str  # who makes it, with a link
    former: str = ""  # verdict of the campaign on the easier task
    shown: tuple[str, ...] = ()  # columns that no test compares, but which the page has, too
    points: dict = field(default_factory=dict)  # {list: {name: index}}: its numbers on the page

    def __post_init__(self):
        self.name = Path(inspect.getfile(self.run)).stem
        self.kept = HERE / f"results/{self.name}.json"

    def runs(self):
        """Those that are kept, in the order of the jobs."""
        known = json.loads(self.kept.read_text()) if self.kept.exists() else []
        known = {json.dumps(run["settings"]): run for run in known}
        return [known[key] for key in map(json.dumps, self.jobs) if key in known]

    def work(self, settings):
        """One run, in a worker process."""
        start = time.process_time()
        result = {name: rounded(value) for name, value in self.run(**settings).items()}
        seconds = rounded(time.process_time() - start)
        return {"settings": settings, "seconds": seconds, "at": footer(), "result": result}

    def measure(self, again, cores):
        runs = [] if again else self.runs()
        made = [run["settings"] for run in runs]
        missing = [job for job in self.jobs if job not in made]
        with multiprocessing.get_context("spawn").Pool(cores) as pool:
            for run in tqdm(pool.imap_unordered(self.work, missing), self.name, len(missing)):
                runs.append(run)
                unfinished = self.kept.with_suffix(".tmp")
                unfinished.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
                unfinished.rename(self.kept)

    def findings(self):
        """[(contrast, pairs, (word, p) of the sign, of the size), …]"""
        found = []
        for contrast in sum(self.tests, []):
            pairs = differences(self.runs(), contrast)
            found.append((contrast, pairs, *decide(contrast, pairs)))
        return found

    def verdict(self):
        """Of all comparisons: the words of the sign, and of the size."""
        if len(self.runs()) < len(self.jobs):
            return NOT_RUN, NOT_RUN
        *_, signs, sizes = zip(*self.findings(), strict=True)
        signs = either(dict(signs), (CLAIMED, OPPOSITE, NOT_SEEN))
        return signs, either(dict(sizes), (OF_INTEREST, TOO_SMALL, OPEN))

    def block(self):
        """What stands on the page: tests, each arm's means, where runs are from."""
        runs = self.runs()
        if NOT_RUN in self.verdict():
            return [f"Declared; {len(runs)} of {len(self.jobs)} runs are made."]
        header = ["compared", "difference [95 %]", "of interest from", "pairs"]
        rows = []
        for contrast, pairs, sign, size in self.findings():
            numbers = (pairs.mean(), *interval(pairs), contrast.smallest)
            said = [told(each, contrast.factor) for each in numbers]
            unit = " times" if contrast.factor else ""
            cells = [
                contrast.name.replace("|", "\\|"),
                f"{said[0]}{unit} [{said[1]}, {said[2]}]",
                said[3] + unit,
            ]
            rows.append([*cells, len(pairs), *(f"{word}, {p_text(p)}" for word, p in (sign, size))])
        tests = [*table([*header, "sign, p", "size, p"], rows), ""]
        _, days, revisions = zip(*(run["at"].rsplit(", ", 2) for run in runs), strict=True)
        days = ", ".join(sorted(set(days)))
        revisions = ", ".join(sorted({each.split()[1] for each in revisions}))
        minutes = sum(run["seconds"] for run in runs) / 60
        made = f"{days}, revision {revisions}, {minutes:.0f} minutes of one core."
        return [*tests, *self.means(runs), "", made]

    def row(self):
        """Its line in the page's first table."""
        cells = [f"[{self.claim}](#{self.name})", self.source, *self.verdict(), self.former or "–"]
        return f"| {' | '.join(cells)} |"

    def means(self, runs):
        """A list: the mean over each arm's units of what is compared or shown."""
        tested = {arm[1] for contrast in sum(self.tests, []) for arm in contrast[1:3] if arm}
        found = {}
        for run in runs:
            settings, result = run["settings"], run["result"]
            arm = [f"{key} {settings[key]}" for key in settings if key not in ("seed", "network")]
            numbers = {name: result[name] for name in result if name in tested | {*self.shown}}
            for series, places in self.points.items():
                listed = result.get(series, [])
                numbers |= {name: listed[i] for name, i in places.items() if i < len(listed)}
            for name, value in numbers.items():
                found.setdefault(", ".join(arm), {}).setdefault(name, []).append(value)
        lines = []
        for arm, columns in found.items():
            shown = "; ".join(f"{name} {told(mean(each))}" for name, each in columns.items())
            lines.append(f"- {arm or 'means'}: {shown}")
        return lines

    def write(self):
        """Draw the picture, and put the block on the page."""
        from PIL import Image  # comes with matplotlib

        figure = self.draw(self.runs())
        label_lines(figure)
        picture = io.BytesIO()
        figure.savefig(picture)
        Image.open(picture).quantize(64).save(HERE / f"results/{self.name}.png", optimize=True)
        text = "\n".join([f"<!-- {self.name} -->", *self.block(), "<!-- end -->"])
        old = rf"<!-- {self.name} -->.*?<!-- end -->"
        page = re.sub(old, lambda _: text, PAGE.read_text(), flags=re.S)
        old = rf"^\| \[[^]]*\]\(#{self.name}\) \|.*$"
        PAGE.write_text(re.sub(old, lambda _: self.row(), page, flags=re.M))

    def smoke(self):
        """A run of each kind at toy size; the tests and the picture find their numbers in them. (CI
        has matplotlib; without it there is no picture.)"""
        first = min(job["seed"] for job in self.jobs)
        jobs = [job for job in self.jobs if job["seed"] == first]
        runs = [{"settings": job, "result": self.run(**job | self.small)} for job in jobs]
        print(self.name, *self.means(runs), sep="\n")
        for contrast in sum(self.tests, []):
            assert len(differences(runs, contrast)), contrast.name
        if find_spec("matplotlib"):
            label_lines(self.draw(runs))

    def main(self):
        def command(again: bool = False, smoke: bool = False, cores: int = 2):
            os.environ["OMP_NUM_THREADS"] = "1"  # in the workers: one run on each core
            if smoke:
                self.smoke()
            else:
                self.measure(again, cores)
                self.write()

        tyro.cli(command)


def rounded(value):
    return [rounded(each) for each in value] if isinstance(value, list) else float(f"{value:.5g}")


def told(number, factor=False):
    """With three digits, and a minus sign that no line breaks after."""
    number = 2**number if factor else number
    text = f"{number:,.0f}" if abs(number) >= 1000 else f"{number:#.3g}".rstrip(".")
    return text.replace("-", "−")

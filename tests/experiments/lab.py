"""What all experiments share: runs that are kept, tests on pairs of runs, a block on the page.

    python tests/experiments/psi.py            # makes the missing runs, the picture and the block
    python tests/experiments/psi.py --smoke    # one run of each kind at toy size; keeps nothing

An experiment is a script with these parts: run(**settings) returns numbers and lists of numbers by
name, JOBS are the settings of its runs, and CONTRASTS are the comparisons, which a commit declares
before the runs. EXPERIMENTS.md is written by hand, except for the script's block and its row in
the first table.
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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pictures import label_lines
from tqdm import tqdm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
for folder in ("tests/benchmarks", "tests/tiny_model", "tests", "."):
    sys.path.insert(0, str(ROOT / folder))

from bench import CPU, footer, run_main, table, train  # noqa: E402, F401
from blocks import write_block  # noqa: E402
from stats import interval, p_value  # noqa: E402

PAGE = HERE / "EXPERIMENTS.md"
LINE = 0.01 / 51  # the campaign had 51 comparisons, of which the page keeps those of four claims
CLAIMED, OPPOSITE, NOT_SEEN = "as claimed", "opposite", "not seen"  # the sign
OF_INTEREST, TOO_SMALL, OPEN = "of interest", "too small", "open"  # the size
LEARNED = "mean over training"  # of returns or rewards: the outcome of most runs


# ------------------------------------------------------------------------------------------ Design
def grid(seeds, first=1001, **choices):
    """[{"seed": …, …}, …]: all combinations of the choices, each a list, for so many seeds."""
    jobs = [{"seed": seed} for seed in range(first, first + seeds)]
    for name, options in choices.items():
        jobs = [job | {name: option} for job in jobs for option in options]
    return jobs


class Contrast(NamedTuple):
    """The claim that the mean outcome of one arm is above that of another. An arm is the settings
    of its runs, and the column of their results that holds the outcome."""

    name: str
    more: tuple[dict, str]
    less: tuple[dict, str] | None  # None: compare with 0
    smallest: float  # the smallest difference of interest
    factor: bool = False  # outcomes are log2, and the page shows their difference as a factor


# -------------------------------------------------------------------------------------- Statistics
def outcomes(runs, arm):
    """{unit: outcome}. A unit is what tells the runs of an arm apart: the seed and, for language
    models, the network."""
    wanted, column = arm
    by_unit = {}
    for run in runs:
        settings = run["settings"]
        if wanted.items() <= settings.items():
            unit = json.dumps({key: settings[key] for key in settings if key not in wanted})
            by_unit[unit] = run["result"][column]
    return by_unit


def mean(numbers):
    """The mean of those that are not None, or None if there are none."""
    numbers = [number for number in numbers if number is not None]
    return sum(numbers) / len(numbers) if numbers else None


def values(runs, arm):
    """The outcomes of an arm, one row per unit."""
    return np.array(list(outcomes(runs, arm).values()), float)


def differences(runs, contrast):
    """more − less of each unit that has both."""
    more = outcomes(runs, contrast.more)
    less = outcomes(runs, contrast.less) if contrast.less else dict.fromkeys(more, 0.0)
    return np.array([more[unit] - less[unit] for unit in more if unit in less])


def decide(pairs, smallest):
    """The verdict on the sign and the verdict on the size, each a word with its p-value.

    The size is decided by the test that decides the sign, with the smallest difference of interest
    subtracted from each pair, and once more with it added: the mean must differ from both bounds.
    """
    p_sign = p_value(pairs)
    p_size = max(p_value(pairs - smallest), p_value(pairs + smallest))
    sign = CLAIMED if pairs.mean() > 0 else OPPOSITE
    size = OF_INTEREST if abs(pairs.mean()) > smallest else TOO_SMALL
    if p_sign >= LINE:
        sign = NOT_SEEN
    if p_size >= LINE:
        size = OPEN
    return (sign, p_sign), (size, p_size)


# ----------------------------------------------------------------------------------- An experiment
@dataclass
class Experiment:
    run: Callable  # **settings → {name: number or list of numbers}
    jobs: list[dict]
    contrasts: list[Contrast]
    draw: Callable  # (runs) → a figure
    small: dict  # settings of a run at toy size
    claim: str  # in one sentence
    source: str  # who makes it, with a link
    shown: tuple[str, ...] = ()  # columns that no contrast compares, but that the page shows

    def __post_init__(self):
        self.name = Path(inspect.getfile(self.run)).stem
        self.kept = HERE / f"results/{self.name}.json"

    def runs(self):
        """The runs that are kept, in the order of the jobs."""
        kept = json.loads(self.kept.read_text()) if self.kept.exists() else []
        by_job = {json.dumps(run["settings"]): run for run in kept}
        return [by_job[job] for job in map(json.dumps, self.jobs) if job in by_job]

    def work(self, settings):
        """One run, in a worker process."""
        start = time.process_time()
        result = {name: rounded(value) for name, value in self.run(**settings).items()}
        seconds = rounded(time.process_time() - start)
        return {"settings": settings, "seconds": seconds, "at": footer(), "result": result}

    def measure(self):
        """Make the missing runs on two cores, and keep each as soon as it is there."""
        runs = self.runs()
        done = [run["settings"] for run in runs]
        missing = [job for job in self.jobs if job not in done]
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            for run in tqdm(pool.imap_unordered(self.work, missing), self.name, len(missing)):
                runs.append(run)
                self.kept.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")

    def findings(self):
        """[(contrast, pairs, (word, p) of the sign, (word, p) of the size), …]"""
        runs, rows = self.runs(), []
        for contrast in self.contrasts:
            pairs = differences(runs, contrast)
            rows.append((contrast, pairs, *decide(pairs, contrast.smallest)))
        return rows

    def row(self):
        """Its row in the page's first table. Each verdict of its contrasts is named once."""
        *_, signs, sizes = zip(*self.findings(), strict=True)
        sign = " / ".join(word for word in (CLAIMED, OPPOSITE, NOT_SEEN) if word in dict(signs))
        size = " / ".join(word for word in (OF_INTEREST, TOO_SMALL, OPEN) if word in dict(sizes))
        return f"| [{self.claim}](#{self.name}) | {self.source} | {sign} | {size} |"

    def block(self):
        """The lines of its block: the contrasts, each arm's means, and when the runs were made."""
        rows = []
        for contrast, pairs, (sign, p_sign), (size, p_size) in self.findings():
            numbers = (pairs.mean(), *interval(pairs), contrast.smallest)
            average, low, high, smallest = (digits(x, contrast.factor) for x in numbers)
            name = contrast.name.replace("|", "\\|")
            verdicts = with_p(sign, p_sign), with_p(size, p_size)
            rows.append([name, f"{average} [{low}, {high}]", smallest, len(pairs), *verdicts])
        header = ["compared", "difference [95 %]", "of interest from", "pairs", "sign", "size"]
        runs = self.runs()
        _, days, revisions = zip(*(run["at"].rsplit(", ", 2) for run in runs), strict=True)
        days = ", ".join(sorted(set(days)))
        revisions = ", ".join(sorted({revision.split()[1] for revision in revisions}))
        minutes = sum(run["seconds"] for run in runs) / 60
        origin = f"{days}, revision {revisions}, {minutes:.0f} minutes on one core."
        return [*table(header, rows), "", *self.means(runs), "", origin]

    def means(self, runs):
        """The lines of a table: for each arm, the mean over its units of each column compared or
        shown. Means of logarithms are left out."""
        differ = [contrast for contrast in self.contrasts if not contrast.factor]
        compared = [arm[1] for contrast in differ for arm in contrast[1:3] if arm]
        columns = [*dict.fromkeys([*compared, *self.shown])]
        settings = [key for key in runs[0]["settings"] if key not in ("seed", "network")]
        by_arm = {}
        for run in runs:
            arm = tuple(str(run["settings"][key]).replace("|", "\\|") for key in settings)
            by_arm.setdefault(arm, []).append(run["result"])
        rows = []
        for arm, results in by_arm.items():
            numbers = [mean([result[name] for result in results]) for name in columns]
            rows.append([*arm, *map(digits, numbers)])
        return table([*settings, *columns], rows)

    def write(self):
        """Draw the picture, and write the block and the row of the page."""
        from PIL import Image  # comes with matplotlib

        figure, picture = self.draw(self.runs()), io.BytesIO()
        label_lines(figure)
        figure.savefig(picture)
        Image.open(picture).quantize(64).save(HERE / f"results/{self.name}.png", optimize=True)
        write_block(PAGE, self.name, self.block())
        old_row = rf"^\| \[[^]]*\]\(#{self.name}\) \|.*$"
        page = PAGE.read_text()
        PAGE.write_text(re.sub(old_row, lambda _: self.row(), page, flags=re.M))

    def smoke(self):
        """A run of each kind at toy size, in which contrasts and picture find their numbers."""
        first = min(job["seed"] for job in self.jobs)
        jobs = [job for job in self.jobs if job["seed"] == first]
        runs = [{"settings": job, "result": self.run(**job | self.small)} for job in jobs]
        print(self.name, *self.means(runs), sep="\n")
        for contrast in self.contrasts:
            assert len(differences(runs, contrast)), contrast.name
        label_lines(self.draw(runs))

    def main(self):
        os.environ["OMP_NUM_THREADS"] = "1"  # in the workers: one run on each core
        if sys.argv[1:] == ["--smoke"]:
            self.smoke()
        else:
            self.measure()
            self.write()


def rounded(value):
    return (
        [rounded(number) for number in value] if isinstance(value, list) else float(f"{value:.5g}")
    )


def digits(number, factor=False):
    """The number with three digits, and with a minus sign after which no line breaks."""
    number = 2**number if factor else number
    text = f"{number:,.0f}" if abs(number) >= 1000 else f"{number:#.3g}".rstrip(".")
    return text.replace("-", "−") + "×" * factor


def with_p(word, p):
    """The verdict, with its p-value unless that is below the line."""
    return word if p < LINE else f"{word} (p = {p:.2g})"

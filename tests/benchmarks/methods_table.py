"""The table and the picture of methods.py's runs.

A row has the arm at its best rate. Its interval is Student's t over the seeds. "Beside GRPO" is the
mean difference of the last pass@1, seed by seed, and p: how often would it be as far from 0 if the
sign of each seed's difference were a coin's? "Answers until" is how many were drawn when the lower
bound of the mean's interval was first seen above 0.7.
"""

import io
import math
from itertools import product
from statistics import fmean, stdev

from bench import RESULTS, table, write_table
from pictures import dots, figure

QUARTERS, TARGET = 4, 0.7  # evaluations after the first; pass@1 of the column "answers until"
ONE, FOUR, REDRAWN = "One step a rollout", "Four steps a rollout", "Groups redrawn, half the steps"
BLOCKS = "Blocks of AFTER.md"
ORDER = [ONE, FOUR, REDRAWN, BLOCKS]
T95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
HEADER = ["method", "command", "pass@1, each seed", "mean (95 % interval)", "pass@8"]
HEADER += ["beside GRPO, p", "answers drawn", "optimizer steps", "clipped, of tokens with a signal"]
HEADER += [f"answers until {TARGET}", "CPU seconds"]


def interval(values):
    """95 % interval of the mean; NaN if there are too few values, or more than ten."""
    if len(values) not in T95:
        return math.nan, math.nan
    half = T95[len(values)] * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def p_value(pairs):
    """Two-sided: if the sign of each pair were a coin's, how often would the sum be as far from 0?
    With n pairs this is 2 / 2^n at the least."""
    sums = []
    for signs in product((1, -1), repeat=len(pairs)):
        sums.append(sum(sign * pair for sign, pair in zip(signs, pairs, strict=True)))
    return fmean(abs(each) >= abs(sum(pairs)) - 1e-9 for each in sums)


def mean_of(runs, key, at=-1):
    """The mean over the runs of a number, or of a list's number there."""
    return fmean(run[key][at] if isinstance(run[key], list) else run[key] for run in runs)


def command(arm, rate):
    """As one would type it; for a block, after `python tests/learn/after.py NAME`."""
    words = [f"{arm.script if arm.script.endswith('_llm') else f'after_{arm.script}'}.py"]
    for flag, value in (arm.flags | {"learning_rate": rate}).items():
        text = flag.replace("_", "-")
        words.append(f"--no-{text}" if value is False else f"--{text} {value}")
    return f"`{' '.join(words)}`"


def answers_until(runs):
    for quarter in range(1, QUARTERS + 1):
        low, _ = interval([run["pass@1"][quarter] for run in runs])
        if low > TARGET:
            return f"{mean_of(runs, 'answers', quarter):,.0f}"
    return "–"


def beside(runs, others):
    """The mean difference of two arms' runs, {seed: run}, and its p."""
    seeds = [seed for seed in runs if seed in others]
    if not seeds or runs == others:
        return "–"
    pairs = [runs[seed]["pass@1"][-1] - others[seed]["pass@1"][-1] for seed in seeds]
    return f"{fmean(pairs):+.3f}, {p_value(pairs):.3f}"


def cells(arm, rate, found, grpo):
    runs = list(found.values())
    last = [run["pass@1"][-1] for run in runs]
    low, high = interval(last)
    return [
        arm.title,
        command(arm, rate),
        " ".join(f"{score:.2f}" for score in last),
        f"{fmean(last):.3f} ({low:.2f} to {high:.2f})",
        f"{mean_of(runs, 'pass@8'):.2f}",
        beside(found, grpo),
        f"{mean_of(runs, 'answers'):,.0f}",
        f"{mean_of(runs, 'steps'):.0f}",
        f"{mean_of(runs, 'clipped'):.1%}",
        answers_until(runs),
        f"{mean_of(runs, 'seconds'):.0f}",
    ]


def how_to_read(rows, seeds):
    """What so many rows and seeds can tell apart."""
    compared = sum(row[HEADER.index("beside GRPO, p")] != "–" for row in rows)
    if not compared:
        return "No row is compared with GRPO yet."
    chance, line = f"{0.05 * compared:.1f}", f"{0.05 / compared:.4f}"
    text = f"Rows that are compared with GRPO: {compared}. If no method differed from it, {chance} "
    text += f"of them would have a p below 0.05; so a difference counts if p is below {line}. "
    return text + f"With {seeds} seeds no p is below {2 / 2**seeds:.4f}, whatever the difference."


def draw(arms, reported):
    """A row of dots for each arm of the scripts, in three groups, as a small PNG."""
    from PIL import Image

    groups = [[name for name in reported if arms[name].group == group] for group in ORDER[:3]]
    heights = {"height_ratios": [len(group) + 0.6 for group in groups]}
    title = "Right answers to held-out sums, at equal answers drawn"
    page, panels = figure(title, 5.4, 3, 1, sharex=True, gridspec_kw=heights)
    for axes, group, names in zip(panels, ORDER, groups, strict=False):
        rows = {}
        for name in sorted(names, key=lambda name: mean_of(reported[name].values(), "pass@1")):
            color = arms[name].script.removesuffix("_llm").upper()
            values = [run["pass@1"][-1] for run in reported[name].values()]
            rows[arms[name].title] = values, color, not arms[name].flags.keys() - {"steps"}
        axes.set_title(group)
        dots(axes, rows)
    panels[-1].set_xlabel("pass@1: a dot is a seed, a bar their mean")
    picture = io.BytesIO()
    page.savefig(picture, dpi=200)
    small = Image.open(picture).convert("RGB").quantize(64)
    small.save(RESULTS / "methods.png", optimize=True)


def write(arms, runs, smoke):
    """The table, best mean first in each group, and the picture, of all runs so far."""
    reported = {name: runs.reported(name) for name in arms}
    reported = {name: found for name, found in reported.items() if found}

    def place(name):
        return ORDER.index(arms[name].group), -mean_of(reported[name].values(), "pass@1")

    grpo, rows = reported.get("grpo", {}), []
    for name in sorted(reported, key=place):
        rows.append(cells(arms[name], runs.rates(name)[0], reported[name], grpo))
    lines = [*table(HEADER, rows), "", how_to_read(rows, len(grpo))]
    note = "one thread a run; pass@1 of 256 distinct held-out sums, 8 answers each, temperature 1"
    write_table("methods", lines, "transformers", note=note, smoke=smoke)
    if not smoke:
        draw(arms, reported)

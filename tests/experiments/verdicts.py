"""From runs to verdicts: permutation tests, bootstrap intervals, Holm's correction, the rules.

No experiment types its verdict. It declares contrasts before its runs, and `judge` decides.
"""

from itertools import combinations
from math import ceil, comb, inf
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

DEALS, RESAMPLES = 100_000, 10_000
ERROR = 0.01  # the chance that one or more of the page's tests finds an effect where there is none
SHOWN, REFUTED, NO_DIFFERENCE = "shown", "refuted", "no difference"
DEPENDS, UNDECIDED, FORMULA = "it depends", "undecided", "by formula"


class Contrast(NamedTuple):
    """Two arms, and what the claim says of them: the mean of `more` is larger by `smallest` at
    least. An arm is the settings of its runs and the column in which each has its outcome."""

    name: str
    more: tuple[dict, str]
    less: tuple[dict, str] | None  # None: compare with 0
    smallest: float  # the smallest difference worth naming
    paired: bool = False  # runs of the same seed are a pair
    block: str | None = None  # the setting within which runs are dealt, if arms have several
    equal: bool = False  # the claim is that the means differ by less than `smallest`


class Finding(NamedTuple):
    contrast: Contrast
    n: tuple[int, int]  # runs of the two arms
    difference: float
    interval: tuple[float, float]  # 95 %
    superiority: float  # P(more > less); a tie counts half
    p: float  # adjusted
    verdict: str
    needed: float  # runs of an arm that would decide its test


def samples(rows, contrast):
    """[(outcomes of `more`, of `less`), …] for each block, in the order of the seeds. rows: [(a
    run's settings, its results), …]."""

    def outcomes(arm, block):
        if arm is None:
            return np.zeros(len(outcomes(contrast.more, block)))
        wanted, column = arm
        chosen = [row for row in rows if wanted.items() <= row[0].items() and column in row[1]]
        chosen = [row for row in chosen if row[0].get(contrast.block) == block]
        chosen.sort(key=lambda row: row[0]["seed"])
        return np.array([result[column] for _, result in chosen], float)

    wanted, column = contrast.more
    chosen = [row for row in rows if wanted.items() <= row[0].items() and column in row[1]]
    blocks = dict.fromkeys(row[0].get(contrast.block) for row in chosen)
    return [(outcomes(contrast.more, block), outcomes(contrast.less, block)) for block in blocks]


def deals(blocks, paired):
    """The difference of means, for many ways to deal the same outcomes to the two arms: all ways if
    there are at most 100,000, else 100,000 at random. The first is what was measured."""
    random = np.random.default_rng(0)
    if paired:
        differences = np.concatenate([more - less for more, less in blocks])
        n = len(differences)
        if 2**n <= DEALS:
            flipped = np.arange(2**n)[:, None] >> np.arange(n) & 1
        else:
            flipped = random.integers(2, size=(DEALS, n))
            flipped[0] = 0
        return (1 - 2 * flipped) @ differences / n
    if len(blocks) == 1 and comb(sum(map(len, blocks[0])), len(blocks[0][0])) <= DEALS:
        more, less = blocks[0]
        both = np.concatenate(blocks[0])
        dealt = both[list(combinations(range(len(both)), len(more)))].sum(1)
        return dealt / len(more) - (both.sum() - dealt) / len(less)
    total = 0
    for more, less in blocks:
        both = np.tile(np.concatenate([more, less]), (DEALS, 1))
        both[1:] = random.permuted(both[1:], axis=1)
        total = total + both[:, : len(more)].mean(1) - both[:, len(more) :].mean(1)
    return total / len(blocks)


def p_value(blocks, paired):
    """Two-sided: the share of deals in which the means are as far apart as measured, or farther."""
    distances = abs(deals(blocks, paired))
    return (distances >= distances[0] * (1 - 1e-9)).mean()


def interval(blocks, paired):
    """95 % bootstrap interval of the difference of means: runs are drawn again from each arm, or
    pairs of runs, within each block."""
    random = np.random.default_rng(0)
    total = 0
    for more, less in blocks:
        drawn = random.integers(len(more), size=(RESAMPLES, len(more)))
        others = drawn if paired else random.integers(len(less), size=(RESAMPLES, len(less)))
        total = total + more[drawn].mean(1) - less[others].mean(1)
    low, high = np.percentile(total / len(blocks), [2.5, 97.5])
    return float(low), float(high)


def holm(p_values):
    """Adjusted p-values: the smallest times their number, the next times one less, and so on."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, p_values[i] * (len(p_values) - rank)))
        adjusted[i] = largest
    return adjusted


def decide(contrast, difference, low, high, p):
    """The rules, as they stand at the head of the page."""
    within = -contrast.smallest < low and high < contrast.smallest
    if within:
        return SHOWN if contrast.equal else NO_DIFFERENCE
    if p < ERROR and contrast.equal:
        return REFUTED if abs(difference) >= contrast.smallest else UNDECIDED
    if p < ERROR and difference >= contrast.smallest:
        return SHOWN
    if not contrast.equal and (p < ERROR and difference < 0 or high < contrast.smallest):
        return REFUTED
    return UNDECIDED


def runs_needed(contrast, n, difference, low, high, tests):
    """Runs of an arm after which a difference like this one, with such a spread, is decided: by its
    p-value with a power of 90 %, or by its interval if it is smaller than what is worth naming."""
    error = (high - low) / 2 / 1.96
    if abs(difference) >= contrast.smallest:
        normal = NormalDist()
        wanted = abs(difference) / (normal.inv_cdf(1 - ERROR / tests / 2) + normal.inv_cdf(0.9))
    else:
        wanted = (contrast.smallest - abs(difference)) / 1.96
    return ceil(n * (error / wanted) ** 2) if wanted else inf


def combine(verdicts):
    """One verdict of several: theirs if all agree, undecided if one is, else it depends."""
    if UNDECIDED in verdicts:
        return UNDECIDED
    return DEPENDS if len(set(verdicts)) > 1 else next(iter(verdicts), FORMULA)


def judge(declared, measured):
    """{experiment: a finding for each contrast}, of the experiments with runs.

    declared: {experiment: [the contrasts of a primary test, …]}. A test that has several contrasts
    claims all of them, so its p is their largest. Holm's correction counts every declared test.
    """
    tests = [(name, contrasts) for name, tests in declared.items() for contrasts in tests]
    p_values = []
    for name, contrasts in tests:
        found = [(samples(measured[name], c), c.paired) for c in contrasts if name in measured]
        p_values.append(max([p_value(*each) for each in found], default=1.0))
    judged = {name: [] for name in measured}
    for (name, contrasts), p in zip(tests, holm(p_values), strict=True):
        if name in measured:
            rows = measured[name]
            found = [find(samples(rows, each), each, p, len(tests)) for each in contrasts]
            needed = max(each.needed for each in found)
            judged[name] += [each._replace(needed=needed) for each in found]
    return judged


def find(blocks, contrast, p, tests):
    n = sum(len(more) for more, _ in blocks), sum(len(less) for _, less in blocks)
    difference = float(np.mean([more.mean() - less.mean() for more, less in blocks]))
    low, high = interval(blocks, contrast.paired)
    compared = [
        np.sign(more - less if contrast.paired else more[:, None] - less).mean()
        for more, less in blocks
    ]
    better = (float(np.mean(compared)) + 1) / 2
    verdict = decide(contrast, difference, low, high, p)
    needed = runs_needed(contrast, max(n), difference, low, high, tests)
    return Finding(contrast, n, difference, (low, high), better, p, verdict, needed)

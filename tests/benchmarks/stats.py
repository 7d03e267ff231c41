"""Statistics of runs: paired differences, one per seed or network."""

from itertools import product

import numpy as np


def p_value(differences):
    """Two-sided sign-flip test: if the sign of each difference were a coin's, how often would the
    sum be as far from 0? All 2^n signs are counted, for n up to about 20, so this is at least
    2 / 2^n. (Fisher 1935, The Design of Experiments, section 21.)"""
    differences = np.asarray(differences, float)
    sums = np.array(list(product([-1, 1], repeat=len(differences)))) @ differences
    return float((abs(sums) >= abs(differences.sum()) - 1e-9).mean())


def interval(values):
    """Lower and upper bound of the mean's 95 % interval, by Student's t. The series for t's
    quantile is 0.007 short for five values, and less for more (Abramowitz and Stegun, 26.7.5)."""
    values, z = np.asarray(values, float), 1.959964
    n = len(values) - 1
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    half = t * values.std(ddof=1) / (n + 1) ** 0.5
    return float(values.mean() - half), float(values.mean() + half)

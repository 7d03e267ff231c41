"""stats.py: its p-value is that of all signs, and its interval is Student's."""

from itertools import product

import numpy as np
import pytest
import stats

PAIRS = [np.zeros(5), np.array([0.5, 0.5, 1.0, -1.0]), np.array([-1.0, 3.0, 5.0])]  # with ties
PAIRS += [np.random.default_rng(n).standard_normal(n) + 0.3 for n in (5, 12)]


@pytest.mark.parametrize("pairs", PAIRS)
def test_p_value_is_that_of_all_signs(pairs):
    sums = np.array(list(product([-1, 1], repeat=len(pairs)))) @ pairs
    as_far = abs(sums) >= abs(pairs.sum()) - 1e-9
    assert stats.p_value(pairs) == stats.p_value(-pairs) == pytest.approx(as_far.mean())


def test_interval_is_student_s():
    """Of 16 numbers: t = 2.1314, from a table, times the standard error."""
    spread = np.tile([-1.0, 1.0], 8)
    low, high = stats.interval(3 + spread)
    error = spread.std(ddof=1) / 4
    assert [low, high] == pytest.approx([3 - 2.1314 * error, 3 + 2.1314 * error], abs=1e-3)

"""stats.py: its interval is Student's. (A doctest of EXERCISES has a p-value by hand.)"""

import numpy as np
import pytest
import stats


def test_interval_is_student_s():
    """Of 16 numbers: t = 2.1314, from a table, times the standard error."""
    spread = np.tile([-1.0, 1.0], 8)
    low, high = stats.interval(3 + spread)
    error = spread.std(ddof=1) / 4
    assert [low, high] == pytest.approx([3 - 2.1314 * error, 3 + 2.1314 * error], abs=1e-3)

"""The experiments' procedure: tests, intervals, verdicts, and which runs count; and their page."""

import json

import harness
import numpy as np
import pytest
import verdicts
from conftest import ROOT
from verdicts import NO_DIFFERENCE, REFUTED, SHOWN, UNDECIDED, Contrast

EXPERIMENTS = ROOT / "tests/experiments"


def block(more, less):
    return np.array(more, float), np.array(less, float)


def test_p_value_counts_all_ways_to_deal_the_numbers():
    """Four numbers are dealt to two arms in six ways, and two of these separate 1, 2 from 3, 4.
    Three pairs can be flipped in eight ways, and two of these have three differences
    of one sign; four of 1, 3 and −1 add up to 1 or −1, so that 6 are as far apart as measured."""
    assert verdicts.p_value([block([1, 2], [3, 4])], False) == 2 / 6
    assert verdicts.p_value([block([1, 3], [2, 4])], False) == 4 / 6
    assert verdicts.p_value([block([7], [7])], False) == 1
    assert verdicts.p_value([block([2, 4, 6], [1, 1, 1])], True) == 2 / 8
    assert verdicts.p_value([block([2, 4, 0], [1, 1, 1])], True) == 6 / 8


def test_p_value_of_many_runs_is_that_of_a_z_test():
    """Where the deals are drawn at random: the number of right guesses of a coin's side."""
    more, less = [1] * 15 + [0] * 10, [1] * 10 + [0] * 15  # z = 5 / 2.525 with a correction of 0.5
    assert verdicts.p_value([block(more, less)], False) == pytest.approx(0.258, abs=0.01)
    pairs = block([1] * 14 + [-1] * 6, [0] * 20)  # 2 · P(14 or more of 20) = 0.1153
    assert verdicts.p_value([pairs], True) == pytest.approx(0.1153, abs=0.005)


def test_blocks_are_dealt_apart():
    """All of the difference is between the blocks, so arms dealt within them are alike."""
    blocks = [block([0] * 12, [0] * 12), block([9] * 12, [9] * 12)]
    assert verdicts.p_value(blocks, False) == 1
    assert verdicts.interval(blocks, False) == (0, 0)
    blocks = [block([1] * 12, [0] * 12), block([10] * 12, [9] * 12)]
    assert verdicts.p_value(blocks, False) == 1 / verdicts.DEALS  # the deal measured, no other


def test_interval_is_that_of_the_mean():
    random = np.random.default_rng(0)
    values = random.standard_normal(400)
    low, high = verdicts.interval([(values, np.zeros(400))], True)
    assert low == pytest.approx(values.mean() - 1.96 / 20, abs=0.01)
    assert high == pytest.approx(values.mean() + 1.96 / 20, abs=0.01)
    paired = verdicts.interval([(values + 1, values)], True)
    assert paired == pytest.approx((1, 1))
    low, high = verdicts.interval([(values + 1, values)], False)
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(2) / 20, abs=0.03)


def test_holm_adjusts_by_rank_and_never_downwards():
    assert verdicts.holm([0.03, 0.01, 0.02, 0.5]) == pytest.approx([0.06, 0.04, 0.06, 0.5])
    assert verdicts.holm([0.4, 0.5]) == pytest.approx([0.8, 0.8])
    assert verdicts.holm([0.9, 0.9]) == [1, 1]


PLAIN = Contrast("a", ({}, "x"), ({}, "y"), smallest=2.0)


@pytest.mark.parametrize(
    "difference,low,high,p,verdict",
    [
        (3, 2.5, 3.5, 0.001, SHOWN),
        (3, -1, 7, 0.2, UNDECIDED),
        (1.9, 1.5, 2.3, 0.001, UNDECIDED),  # may be worth naming, or not
        (1, 0.5, 1.5, 0.001, NO_DIFFERENCE),  # sure, but too small to be named
        (-3, -3.5, -2.5, 0.001, REFUTED),
        (-3, -7, 1, 0.2, REFUTED),  # whatever it is, it is less than what the claim says
    ],
)
def test_the_verdict_follows_the_rules(difference, low, high, p, verdict):
    assert verdicts.decide(PLAIN, difference, low, high, p) == verdict


def test_a_claim_of_no_difference_is_decided_by_its_interval():
    equal = PLAIN._replace(equal=True)
    assert verdicts.decide(equal, 1, 0.5, 1.5, 0.001) == SHOWN
    assert verdicts.decide(equal, 3, 2.5, 3.5, 0.001) == REFUTED
    assert verdicts.decide(equal, -3, -3.5, -2.5, 0.001) == REFUTED
    assert verdicts.decide(equal, 1, -1, 3, 0.5) == UNDECIDED


def test_runs_needed_grow_with_the_spread():
    """With an error of 1 at 20 runs and 10 tests, a difference of 5 needs 5 = 4.57 errors."""
    assert verdicts.runs_needed(PLAIN, 20, 5, 5 - 1.96, 5 + 1.96, 10) == 17
    assert verdicts.runs_needed(PLAIN, 20, 5, 5 - 3.92, 5 + 3.92, 10) == 67
    assert verdicts.runs_needed(PLAIN, 20, 0, -1.96, 1.96, 10) == 20  # ± 1.96 is within ± 2
    assert verdicts.runs_needed(PLAIN, 20, 1, 1 - 1.96, 1 + 1.96, 10) == 77


def test_verdicts_of_several_tests_are_combined():
    assert verdicts.combine([SHOWN, SHOWN]) == SHOWN
    assert verdicts.combine([SHOWN, REFUTED]) == verdicts.DEPENDS
    assert verdicts.combine([SHOWN, REFUTED, UNDECIDED]) == UNDECIDED
    assert verdicts.combine([]) == verdicts.FORMULA


def rows(arm, values, **others):
    found = [({"seed": i, "arm": arm} | others, {"x": value}) for i, value in enumerate(values)]
    return found[::-1]


def test_judge_takes_arms_by_their_settings_and_the_largest_p_of_a_test():
    """20 pairs that differ by 3 ± 1, and 20 that hardly differ; a second experiment without runs
    counts in Holm's correction."""
    noise = np.tile([-1, 1], 10)
    runs = rows("a", 3 + noise) + rows("b", np.zeros(20)) + rows("c", 3 + noise / 9)
    arms = {arm: ({"arm": arm}, "x") for arm in "abc"}
    more = Contrast("a − b", arms["a"], arms["b"], 2.0, paired=True)
    same = Contrast("a − c", arms["a"], arms["c"], 0.5, paired=True)
    (found,) = verdicts.judge({"one": [[more]], "two": [[same]]}, {"one": runs})["one"]
    assert (found.n, found.difference, found.superiority) == ((20, 20), 3, 1)
    assert found.p == pytest.approx(2 * verdicts.p_value([block(3 + noise, 0 * noise)], True))
    assert found.verdict == SHOWN and 2 < found.interval[0] < 3 < found.interval[1] < 4
    both = verdicts.judge({"one": [[more, same]]}, {"one": runs})["one"]
    assert [found.p for found in both] == [1, 1] and both[0].verdict == UNDECIDED


def test_runs_count_as_long_as_the_code_is_the_same(tmp_path, monkeypatch):
    """Comments, docstrings and what the page says may change; code may not, unless accepted."""
    design = '"""Doc."""\n\n\ndef run(seed):\n    return {"x": 1.0}  # always\n'
    file = tmp_path / "tried.py"
    monkeypatch.setattr(harness, "HERE", tmp_path)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    file.write_text(design + "\n# The page\nLESSON = 1\n")
    settings = {"seed": 1}
    run = {"settings": settings, "code": harness.code("tried"), "result": {"x": 1.0}}
    harness.write("tried", {"accepted": {}, "runs": {json.dumps(settings): run}})
    changed = design.replace("Doc", "Text").replace("always", "for ever")
    file.write_text(changed + "\n\n# The page\nLESSON = 2\n")
    assert harness.is_current("tried", harness.read("tried"))
    file.write_text(design.replace("1.0", "2.0"))
    assert not harness.is_current("tried", harness.read("tried"))
    harness.accept_runs(["tried"], "2 for 1")
    assert harness.is_current("tried", harness.read("tried"))
    file.write_text(design.replace("1.0", "3.0"))
    assert not harness.is_current("tried", harness.read("tried"))


def test_a_change_of_a_script_that_is_imported_changes_the_code(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "HERE", tmp_path)
    (tmp_path / "tried.py").write_text("import ppo\n")
    codes = []
    for text in ("EPSILON = 0.2\n", "EPSILON = 0.2  # ε\n", "EPSILON = 0.3\n"):
        (tmp_path / "ppo.py").write_text(text)
        monkeypatch.setattr(harness, "ROOT", tmp_path)
        codes.append(harness.code("tried"))
    assert codes[0] == codes[1] != codes[2]


def test_the_page_has_every_experiment_and_its_picture():
    files = {path.stem for path in EXPERIMENTS.glob("*.py") if "\nSMOKE = " in path.read_text()}
    files |= {path.stem for path in EXPERIMENTS.glob("*.py") if "SMOKE = grid" in path.read_text()}
    assert files == set(harness.NAMES)
    shown = {path.stem for path in EXPERIMENTS.glob("results/*.png")}
    page = (EXPERIMENTS / "EXPERIMENTS.md").read_text()
    assert shown == {name for name in harness.NAMES if f"results/{name}.png" in page}


@pytest.mark.parametrize("name", harness.DECLARED)
def test_a_design_holds_to_the_procedure(name):
    """Two tests at most; each arm of a test has runs of seeds 1 to n, and twelve at least. A second
    try has fresh seeds."""
    module = harness.load(name)
    assert len(module.PRIMARIES) <= 2
    for contrast in [contrast for test in module.PRIMARIES for contrast in test]:
        for wanted, _ in filter(None, (contrast.more, contrast.less)):
            seeds = {job["seed"] for job in module.JOBS if wanted.items() <= job.items()}
            first = min(seeds)
            assert seeds == set(range(first, first + len(seeds))), contrast.name
            assert first == 1 and len(seeds) >= 12 or first > 12, contrast.name

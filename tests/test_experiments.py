"""The experiments' rules and designs; and their page: each block, verdict word and number."""

import importlib
import json
import re
from itertools import product

import lab
import numpy as np
import pytest
from conftest import ROOT
from lab import (
    CLAIMED,
    FORMULA,
    NOT_RUN,
    NOT_SEEN,
    OF_INTEREST,
    OPEN,
    OPPOSITE,
    TOO_SMALL,
    Contrast,
)

FOLDER = ROOT / "tests/experiments"
NAMES = [path.stem for path in FOLDER.glob("*.py") if "EXPERIMENT = " in path.read_text()]
PAGE = (FOLDER / "EXPERIMENTS.md").read_text()
GROUPS, *SECTIONS = re.split(r'^### <a id="(?=\w+"></a>)', PAGE, flags=re.M)
SECTIONS = {text.partition('"')[0]: text for text in SECTIONS}


def load(name):
    return importlib.import_module(name).EXPERIMENT


# ------------------------------------------------------------------------------------------ Rules


def test_p_value_counts_all_signs_of_the_pairs():
    """Of the eight signs of 1, 3, 5 one has a sum of 9; of −1, 3, 5 two have a sum of 7 or more."""
    assert lab.p_value(np.array([1.0, 3.0, 5.0])) == 1 / 8
    assert lab.p_value(np.array([-1.0, 3.0, 5.0])) == 2 / 8
    assert lab.p_value(np.array([-1.0, -3.0, -5.0])) == 1
    assert lab.p_value(np.zeros(5)) == 1


def test_p_value_of_many_pairs_is_that_of_a_coin():
    """P(14 or more heads of 20) = 0.0577; 40 pairs of one sign are one of 2^40; and where sums of
    halves tie, ties count: of ½, ½, 1 and −1 six of 16 signs have a sum above 1, and 4 have 1."""
    assert lab.p_value(np.array([1.0] * 14 + [-1.0] * 6)) == pytest.approx(60_460 / 2**20)
    assert lab.p_value(np.linspace(1, 2, 40)) == pytest.approx(2**-40)
    signs = np.array(list(product([-1, 1], repeat=4))) @ [0.5, 0.5, 1, 1]
    expected = (signs >= 1).mean()
    assert lab.p_value(np.array([0.5, 0.5, 1.0, -1.0])) == pytest.approx(expected)


@pytest.mark.parametrize("n", [5, 12])
def test_p_value_is_that_of_all_signs(n):
    pairs = np.random.default_rng(n).standard_normal(n) + 0.3
    sums = np.array(list(product([-1, 1], repeat=n))) @ pairs
    assert lab.p_value(pairs) == pytest.approx((sums >= pairs.sum() - 1e-9).mean(), abs=2 * 2.0**-n)


def test_interval_is_that_of_the_mean():
    sample = np.random.default_rng(0).standard_normal(400)
    low, high = lab.interval(sample)
    assert low == pytest.approx(sample.mean() - 1.96 / 20, abs=0.01)
    assert high == pytest.approx(sample.mean() + 1.96 / 20, abs=0.01)


SPREAD = np.tile([-1.0, 1.0], 8)  # 16 pairs
PLAIN = Contrast("a", ({}, "x"), ({}, "y"), smallest=2.0)


@pytest.mark.parametrize(
    "pairs,sign,size,of_equal",
    [
        (4 + SPREAD, CLAIMED, OF_INTEREST, OPPOSITE),
        (-4 + SPREAD, OPPOSITE, OF_INTEREST, OPPOSITE),
        (SPREAD / 2, NOT_SEEN, TOO_SMALL, CLAIMED),
        (0.5 + SPREAD / 4, CLAIMED, TOO_SMALL, CLAIMED),
        (-0.5 + SPREAD / 4, OPPOSITE, TOO_SMALL, CLAIMED),
        (3 + 8 * SPREAD, NOT_SEEN, OPEN, NOT_SEEN),
        (2.1 + SPREAD, CLAIMED, OPEN, NOT_SEEN),
        (1.9 + SPREAD, CLAIMED, OPEN, NOT_SEEN),
        (-1.9 + SPREAD, OPPOSITE, OPEN, NOT_SEEN),
        (4 + SPREAD[:8], NOT_SEEN, OPEN, NOT_SEEN),  # eight pairs are too few for the line
    ],
)
def test_the_words_follow_the_rules(pairs, sign, size, of_equal):
    (found_sign, p_sign), (found_size, p_size) = lab.decide(PLAIN, pairs)
    assert (found_sign, found_size) == (sign, size)
    assert (p_sign < lab.LINE, p_size < lab.LINE) == (sign != NOT_SEEN, size != OPEN)
    (found_sign, _), (found_size, _) = lab.decide(PLAIN._replace(equal=True), pairs)
    assert (found_sign, found_size) == (of_equal, size)


def test_a_bound_expects_skewed_pairs():
    """Rare low pairs may be missing in a sample, so p is raised; rare high ones need no change."""
    low = np.array([1.0] * 14 + [0.5, -2.0])
    assert lab.p_bound(low) > 2 * lab.p_value(low)
    for pairs in (0.9 - low, 1 + SPREAD / 2):
        assert lab.p_bound(pairs) == pytest.approx(lab.p_value(pairs))


@pytest.mark.slow
def test_a_bound_errs_less_often_if_pairs_are_skewed():
    """16 exponential pairs whose mean is the bound: p < 0.01 in 5 % of cases, p_bound in 2 %, as
    the page says. With normal pairs it is 1 %."""
    generator, below = np.random.default_rng(0), {}
    kinds = {"skewed": 1 - generator.exponential(size=(2000, 16))}
    kinds["normal"] = generator.standard_normal((2000, 16))
    for kind, drawn in kinds.items():
        high = [
            pairs for pairs in drawn if pairs.mean() > 0.4 * pairs.std()
        ]  # others have p > 0.05
        for test in (lab.p_value, lab.p_bound):
            below[kind, test] = sum(test(pairs) < 0.01 for pairs in high) / 2000
    assert 0.04 < below["skewed", lab.p_value] < 0.065
    assert 0.015 < below["skewed", lab.p_bound] < 0.035
    assert below["normal", lab.p_bound] < 0.015


def test_the_comparisons_of_the_page_share_one_line():
    assert sum(len(test) for name in NAMES for test in load(name).tests) == lab.COMPARISONS


def test_words_of_several_comparisons_stand_beside_each_other():
    assert lab.either([OPEN, OF_INTEREST, OPEN], (OF_INTEREST, OPEN)) == "of interest / open"


def test_runs_of_one_seed_are_a_pair():
    """And of one place, if both arms have several. A run without its partner does not count; the
    order in which runs were made does not matter."""
    runs = []
    for arm, seed, place, x in (
        ("a", 1, "p", 10.0),
        ("b", 2, "p", 2.0),
        ("a", 1, "q", 30.0),
        ("b", 1, "q", 4.0),
        ("a", 2, "p", 50.0),
        ("b", 1, "p", 6.0),
        ("b", 3, "p", 7.0),
    ):
        runs.append({"settings": {"seed": seed, "arm": arm, "place": place}, "result": {"x": x}})
    more, less = lab.arms("x", "arm", ["a", "b"])
    assert lab.differences(runs, Contrast("a − b", more, less, 1)).tolist() == [4, 26, 48]
    assert lab.differences(runs, Contrast("a", more, None, 1)).tolist() == [10, 30, 50]


def test_a_block_tells_differences_of_logs_as_factors():
    assert lab.told(3.0, factor=True) == "8.00" and lab.told(-1.5) == "−1.50"


@pytest.mark.parametrize("name", NAMES)
def test_a_design_holds_to_the_procedure(name):
    """Two tests at most; 16 pairs at least of each contrast; seeds from 1001 on."""
    experiment = load(name)
    assert len(experiment.tests) <= 2
    assert min(job["seed"] for job in experiment.jobs) == 1001
    for contrast in sum(experiment.tests, []):
        columns = {arm[1]: 0.0 for arm in contrast[1:3] if arm}
        runs = [{"settings": job, "result": columns} for job in experiment.jobs]
        assert len(lab.differences(runs, contrast)) >= 16, contrast.name


# ------------------------------------------------------------------------------------------- Page


def group(name):
    """In which list its finding stands: by the sign."""
    signs = load(name).verdict()[0].split(" / ")
    groups = {CLAIMED: "in all comparisons", FORMULA: "by formula", NOT_RUN: NOT_RUN}
    others = "in some comparisons" if CLAIMED in signs else "not seen"
    return groups.get(signs[0], others) if len(signs) == 1 else others


def test_the_page_has_a_section_for_each_experiment_and_a_finding_with_its_verdict():
    assert sorted(SECTIONS) == sorted(NAMES)
    found, heading = {}, None
    for line in GROUPS.splitlines():
        if bold := re.fullmatch(r"\*\*(.+)\*\*", line):
            heading = bold[1].lower().removeprefix("as claimed, ")
        for name in re.findall(r"\]\(#(\w+)\)", line) if line[:2] == "- " else []:
            size = re.search(r" Size: (.+)\.$", line)
            found[name] = heading, size[1] if size else FORMULA
    assert found == {name: (group(name), load(name).verdict()[1]) for name in NAMES}
    lists = [heading for heading, _ in found.values()]
    every, some = map(lists.count, ("in all comparisons", "in some comparisons"))
    told = f"; {every} came out as claimed in all comparisons, {some} in some."
    assert told in " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.parametrize("name", NAMES)
def test_a_section_says_what_its_results_say(name):
    """Its block is what the script writes; its word is the verdict; each number of its sentences
    is one of the block's numbers, rounded, or one of the design's."""
    section, experiment = SECTIONS[name], load(name)
    block = "\n".join(experiment.block())
    assert f"<!-- {name} -->\n{block}\n<!-- end -->" in section
    sign, size = experiment.verdict()
    told = f"Sign: {sign}. Size: {size}." if sign != size else f"{sign.capitalize()}."
    assert f"<summary><b>{told}</b>" in section
    if sign == NOT_RUN:
        return
    assert (FOLDER / f"results/{name}.png").exists() and f"results/{name}.png" in section
    sentences, _, folded = section.partition("<details>")
    sentences = re.sub(r"<[^>]*>|\]\([^)]*\)|`[^`]*`", "", sentences)
    known = numbers(folded)
    told = [each for each in numbers(sentences) if not is_rounded(each, known)]
    assert told == []


def numbers(text):
    """The numbers in a text, as they are written; of 97 % it is 0.97."""
    text = text.replace("−", "-")
    found = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?: ?%)?(?:e-?\d+)?", text)
    return [each.rstrip(",") for each in found]


def value(number):
    share = 0.01 if "%" in number else 1.0
    return float(number.strip(" %").replace(",", "")) * share


def is_rounded(number, known):
    digits = len(number.strip(" %").partition(".")[2]) + 2 * ("%" in number)
    near = 0.51 * 10**-digits
    return any(abs(abs(value(each)) - abs(value(number))) <= near for each in known)


def test_a_number_is_known_by_its_digits():
    known = numbers("0.347 [0.33, 1,215] 12 % −5.2e-05")
    assert all(is_rounded(each, known) for each in ("0.35", "35 %", "1,215", "12 %"))
    assert not any(is_rounded(each, known) for each in ("0.36", "36 %", "7", "1.2"))


def test_results_are_of_declared_runs():
    """No run is kept that no job asks for, and none twice."""
    for name in NAMES:
        experiment = load(name)
        if experiment.kept.exists():
            kept = [json.dumps(run["settings"]) for run in json.loads(experiment.kept.read_text())]
            jobs = set(map(json.dumps, experiment.jobs))
            assert set(kept) <= jobs and len(set(kept)) == len(kept), name

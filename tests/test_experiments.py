"""The experiments' statistics, rules and designs; what they measure; and their page."""

import importlib
import re
from itertools import product

import lab
import length
import numpy as np
import psi
import pytest
import stats
import torch
from conftest import ROOT, script
from lab import CLAIMED, NOT_SEEN, OF_INTEREST, OPEN, OPPOSITE, TOO_SMALL

FOLDER = ROOT / "tests/experiments"
NAMES = sorted(path.stem for path in FOLDER.glob("results/*.json"))
PAGE = (FOLDER / "EXPERIMENTS.md").read_text()
HEAD, *SECTIONS = re.split(r'^### <a id="(?=\w+"></a>)', PAGE, flags=re.M)
SECTIONS = {text.partition('"')[0]: text for text in SECTIONS}
EXPERIMENTS = {name: importlib.import_module(name).EXPERIMENT for name in NAMES}

# -------------------------------------------------------------------------------------- Statistics
PAIRS = [np.zeros(5), np.array([0.5, 0.5, 1.0, -1.0]), np.array([-1.0, 3.0, 5.0])]  # with ties
PAIRS += [np.random.default_rng(n).standard_normal(n) + 0.3 for n in (5, 12)]


@pytest.mark.parametrize("pairs", PAIRS)
def test_p_value_is_that_of_all_signs(pairs):
    sums = np.array(list(product([-1, 1], repeat=len(pairs)))) @ pairs
    as_far = abs(sums) >= abs(pairs.sum()) - 1e-9
    assert stats.p_value(pairs) == stats.p_value(-pairs) == pytest.approx(as_far.mean())


SPREAD = np.tile([-1.0, 1.0], 8)  # 16 pairs


def test_interval_is_student_s():
    """Of 16 numbers: t = 2.1314, from a table, times the standard error."""
    low, high = stats.interval(3 + SPREAD)
    error = SPREAD.std(ddof=1) / 4
    assert [low, high] == pytest.approx([3 - 2.1314 * error, 3 + 2.1314 * error], abs=1e-3)


# ------------------------------------------------------------------------------- Rules and designs
@pytest.mark.parametrize(
    "pairs,sign,size",
    [
        (4 + SPREAD, CLAIMED, OF_INTEREST),
        (-4 + SPREAD, OPPOSITE, OF_INTEREST),
        (SPREAD / 2, NOT_SEEN, TOO_SMALL),
        (0.5 + SPREAD / 4, CLAIMED, TOO_SMALL),
        (3 + 8 * SPREAD, NOT_SEEN, OPEN),
        (2.1 + SPREAD, CLAIMED, OPEN),
        (-1.9 + SPREAD, OPPOSITE, OPEN),
        (4 + SPREAD[:8], NOT_SEEN, OPEN),  # eight pairs are too few for the line
    ],
)
def test_the_words_follow_the_rules(pairs, sign, size):
    """A difference of 2 is of interest."""
    (word_of_sign, p_sign), (word_of_size, p_size) = lab.decide(pairs, smallest=2.0)
    assert (word_of_sign, word_of_size) == (sign, size)
    assert (p_sign < lab.LINE, p_size < lab.LINE) == (sign != NOT_SEEN, size != OPEN)


# ---------------------------------------------------------------------------------------- The page
def test_the_page_has_a_row_and_a_section_for_each_experiment():
    assert sorted(SECTIONS) == NAMES
    rows = [line for line in HEAD.splitlines() if re.search(r"\]\(#\w+\) \|", line)]
    assert sorted(rows) == sorted(experiment.row() for experiment in EXPERIMENTS.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_section_says_what_its_results_say(name):
    """Its block is what the script writes, and its result is told in words: a number there would
    go stale with new runs."""
    section, experiment = SECTIONS[name], EXPERIMENTS[name]
    assert len(experiment.runs()) == len(experiment.jobs)
    block = "\n".join(experiment.block())
    assert f"<!-- {name} -->\n{block}\n<!-- end -->" in section
    assert (FOLDER / f"results/{name}.png").exists() and f"results/{name}.png" in section
    (result,) = re.findall(r"^\*\*Result\.\*\* (.*?)\n\n", section, re.M | re.S)
    assert not re.search(r"\d", result)


# ----------------------------------------------------------------------------- What runs measure
def test_the_square_of_a_mean_is_unbiased():
    """A mean of products of two independent rows: here of three pairs of rows."""
    square = psi.square_of_mean(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]]))
    products = [1 * 3 + 2 * 4, 1 * 5 + 2 * 7, 3 * 5 + 4 * 7]
    assert square == pytest.approx(sum(products) / 3)


def test_plus_signs_are_those_of_samples(monkeypatch):
    """A model that seldom begins with +, and then says + with the probability 3/4, says on average
    1 / (1 − 3/4) of them once it has begun with one."""
    grpo = script("grpo_llm")
    model, tokenizer = grpo.load_policy(grpo.Args(), torch.device("cpu"))

    def token_logprobs(model, batch, temperature):
        assert {*batch["completion_ids"].flatten().tolist()} == {tokenizer.vocab["+"]}
        return torch.tensor([0.1] + [0.75] * 59).log().expand_as(batch["mask"])

    monkeypatch.setattr(grpo, "token_logprobs", token_logprobs)
    mean = length.plus_signs(model, tokenizer, [("1+2=", "3"), ("4+5+6=", "15")])
    assert mean == pytest.approx(4, rel=1e-4)

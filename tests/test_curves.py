"""CURVES.md: the page names all that the scripts log, its tables are those of the kept runs,
and each fault shows the sign that the page gives it, on two seeds (slow)."""

import functools
import re
from statistics import mean

import curves
import pytest
from conftest import SEED_SHIFT
from curves import ALL, FAULTS, SEEDS, Run
from scripts import LLM_SCRIPTS, SCRIPTS

PAGE = curves.PAGE.read_text()
NAMES = set(re.findall(r"^\| `([\w/@]+)`", PAGE, re.M))
TOY = "--steps 2 --prompts-per-step 4 --group-size 4 --eval-problems 4 --max-new-tokens 12"
SHORT = dict.fromkeys(SCRIPTS, "--total-timesteps 4500") | dict.fromkeys(LLM_SCRIPTS, TOY)
SHORT["reinforce"] = SHORT["actor_critic"] = "--total-timesteps 1500 --num-envs 2"


def test_the_page_names_all_that_the_scripts_log_and_nothing_else():
    logged = set()
    for name in SCRIPTS:
        logged |= curves.run(Run(script=name), 1, SHORT[name]).keys()
    assert logged - {"step", "right", "eval/right"} == NAMES


def test_the_page_has_the_tables_of_the_runs(tmp_path):
    """If this fails: python tests/learn/curves.py --pictures"""
    copy = tmp_path / "CURVES.md"
    copy.write_text(PAGE)
    curves.write_tables(copy, curves.load_runs())
    assert copy.read_text() == PAGE


def test_the_kept_runs_have_the_flags_and_defaults_of_today():
    """If this fails: python tests/learn/curves.py, which makes them again"""
    flags = {(name, seed): vars(curves.parsed(ALL[name], seed)) for name in ALL for seed in SEEDS}
    assert {who: run["flags"] for who, run in curves.load_runs().items()} == flags


SMALL = "--steps 12 --prompts-per-step 16 --eval-problems 16 --warmup-steps 3"
MORE = dict.fromkeys(["cut_off", "cold", "alike", "stale"], "--steps 6")  # enough to show them
MORE |= dict.fromkeys(["kl_sign", "healthy_held"], "--learning-rate 2e-3")  # or it needs luck
# Of the values of a run with the fault, and of one without it.
SIGNS = {
    "rate_high": lambda faulty, well: faulty("kl")[-1] > 5 * well("kl")[-1],
    "rate_low": lambda faulty, well: mean(faulty("approx_kl")) < 0.05 * mean(well("approx_kl")),
    "cut_off": lambda faulty, well: (
        mean(faulty("clipped_ratio")) > 0.4 > 10 * mean(well("clipped_ratio"))
    ),
    "cold": lambda faulty, well: mean(faulty("entropy")) < mean(well("entropy")) / 2,
    "form": lambda faulty, well: (
        faulty("reward")[-1] > 1 and faulty("right")[-1] < well("right")[-1] / 2
    ),
    "alike": lambda faulty, well: mean(faulty("zero_std")) == 1 and not any(faulty("grad_norm")),
    "stale": lambda faulty, well: mean(faulty("approx_kl")) > 5 * mean(well("approx_kl")),
    "kl_sign": lambda faulty, well: max(faulty("kl")) > 20 * max(well("kl")),
}


@functools.cache
def short_run(name, seed):
    """A function from a curve's name to its values."""
    logged = curves.run(ALL[name], seed + SEED_SHIFT, f"{SMALL} {MORE.get(name, '')}")
    return lambda curve: [value for _, value in curves.points(logged, curve)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_its_sign(name, seed):
    assert SIGNS[name](short_run(name, seed), short_run(ALL[name].beside, seed))

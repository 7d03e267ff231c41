"""CURVES.md: the page names all that the scripts log, its pictures and tables are those of the kept
runs, and each fault shows the sign that the page gives it, on two seeds (slow)."""

import functools
import re

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


def test_the_page_shows_each_picture_and_they_are_small():
    assert re.findall(r"\]\(curves/(\w+)\.png\)", PAGE) == list(FAULTS)
    sizes = [(curves.FOLDER / f"{name}.png").stat().st_size for name in FAULTS]
    assert max(sizes) < 30_000 and sum(sizes) < 150_000


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


class Log:
    """Of a curve that a run has logged: the values, their mean, the largest, the last."""

    def __init__(self, logged):
        self.logged = logged

    def values(self, curve):
        return [value for _, value in curves.points(self.logged, curve)]

    def mean(self, curve):
        return sum(self.values(curve)) / len(self.values(curve))

    def top(self, curve):
        return max(self.values(curve))

    def last(self, curve):
        return self.values(curve)[-1]


SMALL = "--steps 12 --prompts-per-step 16 --eval-problems 16 --warmup-steps 3"
MORE = dict.fromkeys(["cut_off", "cold", "alike", "stale"], "--steps 6")  # enough to show them
MORE |= dict.fromkeys(["kl_sign", "healthy_held"], "--learning-rate 2e-3")  # or it needs luck
SIGNS = {
    "rate_high": lambda faulty, well: faulty.last("kl") > 5 * well.last("kl"),
    "rate_low": lambda faulty, well: faulty.mean("approx_kl") < 0.05 * well.mean("approx_kl"),
    "cut_off": lambda faulty, well: (
        faulty.mean("clipped_ratio") > 0.4 > 10 * well.mean("clipped_ratio")
    ),
    "cold": lambda faulty, well: (
        faulty.mean("entropy") < well.mean("entropy") / 2
    ),  # the page says so
    "form": lambda faulty, well: (
        faulty.last("reward") > 1 and faulty.last("right") < well.last("right") / 2
    ),
    "alike": lambda faulty, well: faulty.mean("zero_std") == 1 and not faulty.values("grad_norm"),
    "stale": lambda faulty, well: (
        faulty.last("difference/mean") > 1e4 * well.top("difference/mean")
    ),
    "kl_sign": lambda faulty, well: faulty.top("kl") > 20 * well.top("kl"),
}


@functools.cache
def short_run(name, seed):
    return Log(curves.run(ALL[name], seed + SEED_SHIFT, f"{SMALL} {MORE.get(name, '')}"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_its_sign(name, seed):
    assert SIGNS[name](short_run(name, seed), short_run(ALL[name].beside, seed))

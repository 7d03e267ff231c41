"""CURVES.md: its page names all that the scripts log, its pictures are there, and each fault shows
the signature that the page gives it, on two seeds (slow)."""

import functools
import re

import curves
import pytest
from conftest import SEED_SHIFT
from curves import ALL, CUT, DEAD, FAULTS, FIT, GAP, QUIZ, RETURN, REWARD, SIZE, Fault, healthy
from lineage import LLM_SCRIPTS, SCRIPTS

PAGE = curves.PAGE.read_text()
NAMES = set(re.findall(r"^\| `([\w/@]+)`", PAGE, re.M))
TOY = "--steps 2 --prompts-per-step 4 --group-size 4 --eval-problems 4 --max-new-tokens 12"
SHORT = dict.fromkeys(SCRIPTS, "--total-timesteps 4500") | dict.fromkeys(LLM_SCRIPTS, TOY)
SHORT["reinforce"] = SHORT["actor_critic"] = "--total-timesteps 1500 --num-envs 2"


def test_the_page_names_all_that_the_scripts_log_and_nothing_else():
    logged = set()
    for script in SCRIPTS:
        logged |= curves.run(Fault((), script=script), 1, SHORT[script]).keys()
    assert NAMES == logged - {"step", "right", "eval/right"}


def test_the_page_shows_each_picture_and_they_are_small():
    names = [*FAULTS, *(f"quiz_{letter}" for letter in "abcdef"[: len(QUIZ)])]
    assert re.findall(r"\]\(curves/(\w+)\.png\)", PAGE) == names
    sizes = [(curves.FOLDER / f"{name}.png").stat().st_size for name in names]
    assert max(sizes) < 30_000 and sum(sizes) < 300_000


def test_the_page_has_the_table_of_the_runs():
    """If this fails: python tests/curves.py --pictures"""
    assert curves.with_table(PAGE, curves.load_runs()) == PAGE


class Log(dict):
    """What a run has logged: of a name the first value, the mean, the largest, the last."""

    def values(self, name):
        return [value for value in self[name] if value is not None]

    def first(self, name):
        return self.values(name)[0]

    def mean(self, name):
        return sum(self.values(name)) / len(self.values(name))

    def top(self, name):
        return max(self.values(name))

    def last(self, name):
        return self.values(name)[-1]


SMALL = "--steps 12 --prompts-per-step 16 --eval-problems 16 --warmup-steps 3"
MORE = {"no_clip": "--steps 5", "pairs": "--prompts-per-step 64", "kl_sign": "--steps 20"}
MORE["healthy_held"] = MORE["kl_sign"]
SIGNS = {
    "rate_high": lambda ill, well: ill.last("kl") > 5 * well.last("kl"),
    "rate_low": lambda ill, well: ill.mean("approx_kl") < 0.05 * well.mean("approx_kl"),
    "cut_off": lambda ill, well: ill.mean(CUT) > 0.4 > 0.05 > well.mean(CUT),
    "no_clip": lambda ill, well: ill.top("approx_kl") > 20 * well.top("approx_kl"),
    "cold": lambda ill, well: ill.mean("entropy") < 0.3 * well.mean("entropy"),
    "beta": lambda ill, well: ill.last("kl") < 0.2 * well.last("kl"),
    "pairs": lambda ill, well: ill.mean(DEAD) > well.mean(DEAD) + 0.2,
    "form": lambda ill, well: ill.last(REWARD) > 1 and ill.last("right") < well.last("right") / 2,
    "alike": lambda ill, well: ill.mean(DEAD) == 1 and "grad_norm" not in ill,
    "stale": lambda ill, well: ill.last(GAP) > 1e-2 > 1e-5 > well.top(GAP),
    "stop": lambda ill, well: 0.9 < well.first(SIZE) - ill.first(SIZE) < 1.01,
    "kl_sign": lambda ill, well: ill.top("kl") > 20 * well.top("kl"),
    "sampler": lambda ill, well: ill.first("entropy") < 0.8 * well.first("entropy"),
    "critic": lambda ill, well: ill.mean(FIT) < 0.2 < well.mean(FIT),
    "no_baseline": lambda ill, well: ill.last(RETURN) < 0.7 * well.last(RETURN),
}


@functools.cache
def short_run(name, seed):
    small = SMALL if ALL[name].script in LLM_SCRIPTS else "--total-timesteps 40000"
    return Log(curves.run(ALL[name], seed + SEED_SHIFT, f"{small} {MORE.get(name, '')}"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", curves.SEEDS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_its_sign(name, seed):
    assert SIGNS[name](short_run(name, seed), short_run(healthy(name), seed))

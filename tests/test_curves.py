"""CURVES.md: its page names all that the scripts log, its pictures are there, and each fault shows
the signature that the page gives it, on two seeds (slow)."""

import functools
import re

import curves
import pytest
import torch
from conftest import SEED_SHIFT, script
from curves import ALL, FAULTS, QUIZ, Fault, healthy
from scripts import LLM_SCRIPTS, SCRIPTS

PAGE = curves.PAGE.read_text()
NAMES = set(re.findall(r"^\| `([\w/@]+)`", PAGE, re.M))
TOY = "--steps 2 --prompts-per-step 4 --group-size 4 --eval-problems 4 --max-new-tokens 12"
SHORT = dict.fromkeys(SCRIPTS, "--total-timesteps 4500") | dict.fromkeys(LLM_SCRIPTS, TOY)
SHORT["reinforce"] = SHORT["actor_critic"] = "--total-timesteps 1500 --num-envs 2"


def test_the_page_names_all_that_the_scripts_log_and_nothing_else():
    logged = set()
    for name in SCRIPTS:
        logged |= curves.run(Fault("", script=name), 1, SHORT[name]).keys()
    assert logged - {"step", "right", "eval/right"} == NAMES


def test_all_right_is_1_or_more_and_all_wrong_is_0_or_less():
    """So with rewards between 0 and 1 a group of equal rewards may be neither."""
    rewards = torch.tensor([[1.0, 1.2], [0.0, -1.0], [0.7, 0.7], [1.0, 0.0]])
    batch = dict.fromkeys(["mask", "old_logprobs", "sampled_logprobs"], torch.ones(8, 1))
    found = script("grpo_llm").rollout_metrics(batch | {"ended": torch.ones(8).bool()}, rewards)
    names = ("all_right", "all_wrong", "zero_std")
    groups = {name: found[f"frac_reward_{name}"].nonzero().flatten().tolist() for name in names}
    assert groups == {"all_right": [0], "all_wrong": [1], "zero_std": [2]}


def test_the_page_shows_each_picture_and_they_are_small():
    names = [*FAULTS, *(f"quiz_{letter}" for letter in QUIZ)]
    assert re.findall(r"\]\(curves/(\w+)\.png\)", PAGE) == names
    sizes = [(curves.FOLDER / f"{name}.png").stat().st_size for name in names]
    assert max(sizes) < 30_000 and sum(sizes) < 300_000


def test_the_page_has_the_table_of_the_runs():
    """If this fails: python tests/learn/curves.py --pictures"""
    assert curves.with_tables(PAGE, curves.load_runs()) == PAGE


class Log:
    """Of a curve that a run has logged: the first value, the mean, the largest, the last."""

    def __init__(self, found):
        self.found = found

    def values(self, curve):
        return [value for _, value in curves.points(self.found, curve)]

    def first(self, curve):
        return self.values(curve)[0]

    def mean(self, curve):
        return sum(self.values(curve)) / len(self.values(curve))

    def top(self, curve):
        return max(self.values(curve))

    def last(self, curve):
        return self.values(curve)[-1]


SMALL = "--steps 12 --prompts-per-step 16 --eval-problems 16 --warmup-steps 3"
MORE = dict.fromkeys(["cut_off", "cold", "alike", "stale"], "--steps 6")  # enough to show them
MORE |= {"stop": "--steps 2", "sampler": "--steps 2", "no_clip": "--steps 3"}
MORE["pairs"] = "--steps 6 --prompts-per-step 64"  # as many answers as in the healthy run
MORE |= dict.fromkeys(["kl_sign", "healthy_held"], "--learning-rate 2e-3")  # or it needs luck
SIGNS = {
    "rate_high": lambda ill, well: ill.last("kl") > 5 * well.last("kl"),
    "rate_low": lambda ill, well: ill.mean("approx_kl") < 0.05 * well.mean("approx_kl"),
    "cut_off": lambda ill, well: ill.mean("clipped_ratio") > 0.4 > 10 * well.mean("clipped_ratio"),
    "no_clip": lambda ill, well: ill.top("approx_kl") > 20 * well.top("approx_kl"),
    "cold": lambda ill, well: ill.mean("entropy") < 0.4 * well.mean("entropy"),
    "beta": lambda ill, well: ill.last("kl") < 0.2 * well.last("kl"),
    "pairs": lambda ill, well: ill.mean("zero_std") > well.mean("zero_std") + 0.2,
    "form": lambda ill, well: ill.last("reward") > 1 and ill.last("right") < well.last("right") / 2,
    "alike": lambda ill, well: ill.mean("zero_std") == 1 and not ill.values("grad_norm"),
    "stale": lambda ill, well: ill.last("difference/mean") > 1e4 * well.top("difference/mean"),
    "stop": lambda ill, well: 0.9 < well.first("mean_length") - ill.first("mean_length") <= 1,
    "kl_sign": lambda ill, well: ill.top("kl") > 20 * well.top("kl"),
    "sampler": lambda ill, well: ill.first("entropy") < 0.8 * well.first("entropy"),
    "critic": lambda ill, well: (
        ill.top("explained_variance") < 0.4 < 0.7 < well.top("explained_variance")
    ),
    "no_baseline": lambda ill, well: ill.last("return") < 0.7 * well.last("return"),
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

"""GRPO's division by the group's standard deviation, where half of the questions are hard."""

import random
from unittest.mock import patch

from bench import train
from harness import Panel, arms
from llm_parts import mean, started, warm_start
from verdicts import Contrast

import grpo_llm


def two_kinds(train, asked, draw, args):
    """The problems of a step: sums of two terms and of four in turn."""
    rng, problems = random.Random(f"{args.seed} {asked}"), []
    for number in (2, 4) * (args.prompts_per_step // 2):
        terms = [rng.randint(0, 9) for _ in range(number)]
        problems.append(("+".join(map(str, terms)), str(sum(terms))))
    return problems


def run(std, seed, start, steps=40, warm=400):
    """GRPO without KL. A rollout has 16 easy questions and 16 hard ones, each answered 8 times."""
    folder = warm_start("meander", start, warm)
    hard, easy, single = [], [], []

    def rollout(model, tokenizer, problems, *rest, own=grpo_llm.rollout):
        batch, completions, rewards = own(model, tokenizer, problems, *rest)
        easy.append(rewards[0::2].mean().item())
        hard.append(rewards[1::2].mean().item())
        single.append((rewards[1::2].sum(1) == 1).float().mean().item())
        return batch, completions, rewards

    args = grpo_llm.Args(beta=0.0, max_new_tokens=32, scale_rewards=std, seed=seed, steps=steps)
    with patch.multiple(grpo_llm, rollout=rollout, next_problems=two_kinds):
        train(grpo_llm, args, steps, folder=folder)
    result = {"hard": mean(hard), "easy": mean(easy), "one of eight": mean(single)}
    return result | {"hard questions": hard, "easy questions": easy}


STD = [True, False]
CLAIM = (
    "The division by the std gives weight to hard questions, of whose eight answers one is right: "
    "without it they are learned more slowly."
)
JOBS = started(20, std=STD)
SMOKE = started(1, std=STD, steps=[2], warm=[2])
SECONDS = 9
PRIMARIES = [
    [
        Contrast(
            "reward of hard questions: with std − without",
            *arms("hard", "std", STD).values(),
            0.03,
            block="start",
        )
    ]
]

# The page
LESSON = (
    "no difference",
    "Hard questions, right in one answer of seven at first, were learned as fast without the "
    "division by the std as with it.",
)
AXES, ROLLOUTS = ("rollouts", "reward"), list(range(1, 41))
LINES = {"with std": {"std": True}, "without": {"std": False}}
PANELS = [
    Panel(kind, {label: (wanted, kind) for label, wanted in LINES.items()}, AXES, ROLLOUTS)
    for kind in ("hard questions", "easy questions")
]


def words(runs):
    def found(column, spec=".3f"):
        said = [runs.mean(column, spec, std=std) for std in STD]
        return f"{said[0]} with the std and {said[1]} without"

    return f"""
    GRPO answers 16 sums of two terms and 16 sums of four terms a rollout, each eight times. The sum
    of four terms is the hard one: the model, which repeats itself, is right in about one answer of
    seven at first. Of a group with one right answer of eight, the advantages are divided by 0.35,
    of a group with four by 0.53, so the std gives the hard group half as much weight again. The
    mean reward of the hard questions over 40 rollouts is {found("hard")}, that of the easy ones
    {found("easy")}. The share of the hard groups with exactly one right answer is
    {found("one of eight", ".0%")}."""


NOT_TRIED = "questions that are right more rarely; learning rates other than the usual one."

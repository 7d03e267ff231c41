"""GRPO's division by the group's standard deviation, where half of the questions are hard."""

import random
from unittest.mock import patch

from lab import Contrast, Experiment, arms, mean, train, values
from llm_parts import started, warm_start
from pictures import DASHED, SOLID, curves, figure

import grpo_llm


def two_kinds(train, step, args):
    """The problems of a step: sums of two terms and of four in turn."""
    asked = (step - 1) * args.prompts_per_step
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
JOBS = started(20, std=STD)
NAME = "reward of hard questions: with the std − without"
TESTS = [[Contrast(NAME, *arms("hard", "std", STD), 0.03)]]


def draw(runs):
    page, axes = figure("The std makes no difference to hard questions", 3.1, 1, 2, sharey=True)
    for panel, kind in zip(axes, ("hard questions", "easy questions"), strict=True):
        lines = {}
        for std, dash in zip(STD, (SOLID, DASHED), strict=True):
            label = "with std" if std else "without"
            lines[label] = values(runs, ({"std": std}, kind)), "GRPO", dash
        at = {"without": ("with the std (solid)\nand without (dashed)", 12, 45, -48)}
        curves(panel, range(1, len(lines["without"][0][0]) + 1), lines, at)
        panel.set(title=kind, xlabel="rollouts")
    axes[0].set_ylabel("reward")
    return page


EXPERIMENT = Experiment(run, JOBS, TESTS, draw, small={"steps": 2, "warm": 2})

if __name__ == "__main__":
    EXPERIMENT.main()

"""DAPO's upper bound of the ratio, in four doses: the growth of rare tokens, and diversity."""

from math import log2
from statistics import linear_regression

import torch
from lab import Contrast, Enough, Experiment, train, values
from llm_parts import first_token, load, started, warm_start
from pictures import SOLID, curves, figure, plain

import dapo_llm

DOSES = [0.2, 0.28, 0.4, 0.56]  # ε_high: each is √2 times the one before


def look(model, tokenizer, args):
    """The share worked out; and on 128 held-out sums, 8 answers each: pass@1, and how many of the
    right answers to a sum are different ones, as a share."""
    _, sums = dapo_llm.load_data(dapo_llm.Args(eval_problems=128))
    _, texts, rewards = dapo_llm.rollout(model, tokenizer, sums, 8, 1.0, args)
    right = [(i // 8, text) for i, text in enumerate(texts) if rewards.flatten()[i] > 0]
    worked = 1 - first_token(model, tokenizer, "#")
    return worked, rewards.mean().item(), len(set(right)) / max(len(right), 1)


def learn(clip_high, habit, seed, start, steps, warm, epochs):
    """The share worked out after three rollouts; or the share of different answers when pass@1
    first reaches 0.5, between two looks (at the end, if it never does). No answer is punished for
    its length, as repeats make answers long."""
    options = {"update_epochs": epochs, "overlong_cache": 0.0, "max_new_tokens": 32}
    args = dapo_llm.Args(clip_high=clip_high, seed=seed, steps=24, **options)
    folder = warm_start(habit, start, warm)
    model, tokenizer = load(folder)
    torch.manual_seed(seed)
    looks = [look(model, tokenizer, args)]

    def each_step(step, policy, metrics):
        looks.append(look(policy, tokenizer, args))
        if habit == "meander" and looks[-1][1] >= 0.5:
            raise Enough

    train(dapo_llm, args, steps, each_step, folder)
    if habit != "meander":
        return looks[-1][0], True
    (_, low, before), (_, high, after) = looks[-2:]
    reached = low < 0.5 <= high
    return before + (after - before) * ((0.5 - low) / (high - low) if reached else 1), reached


def run(habit, seed, start, steps=None, warm=400, epochs=16):
    """All doses, from one policy and with the same first rollout, so each run has a slope. The
    habit "meander" repeats totals at will, so a sum has many right answers."""
    steps = steps or (16 if habit == "meander" else 3)
    found = [learn(dose, habit, seed, start, steps, warm, epochs) for dose in DOSES]
    outcomes, reached = map(list, zip(*found, strict=True))
    slope = linear_regression([log2(dose) for dose in DOSES], outcomes).slope
    result = {str(dose): outcome for dose, outcome in zip(DOSES, outcomes, strict=True)}
    return result | {"slope": slope, "outcomes": outcomes, "reached": sum(reached)}


def slope(habit, name):
    return [Contrast(f"{name}, for a doubling of ε_high", ({"habit": habit}, "slope"), None, 0.02)]


JOBS = started(16, habit=["guess 0.97"]) + started(32, habit=["meander"])
TESTS = [slope("guess 0.97", "worked out"), slope("meander", "different at pass@1 0.5")]


def draw(runs):
    page, axes = figure("A far higher ε_high lets rare tokens grow faster", 3.1, 1, 2)
    titles = {"guess 0.97": "worked out, after 3 rollouts", "meander": "different, at pass@1 0.5"}
    for panel, (habit, title) in zip(axes, titles.items(), strict=True):
        panel.set(xscale="log", title=title, xlabel="ε_high")
        curves(panel, DOSES, {"": (values(runs, ({"habit": habit}, "outcomes")), "DAPO", SOLID)})
        plain(panel.xaxis, DOSES)
        panel.set_ylim(0)
    axes[0].set_ylabel("share of answers")
    return page


EXPERIMENT = Experiment(run, JOBS, TESTS, draw, small={"steps": 1, "warm": 10, "epochs": 1})

if __name__ == "__main__":
    EXPERIMENT.main()

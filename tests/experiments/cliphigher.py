"""DAPO's upper bound of the ratio, in four doses: the growth of rare tokens, and diversity."""

from math import log2
from statistics import linear_regression

import torch
from bench import Enough, train
from harness import Panel, arms
from llm_parts import first_token, load, started, warm_start
from verdicts import Contrast

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
    arm = {"habit": habit}, "slope"
    return [Contrast(f"{name}, for a doubling of ε_high", arm, None, 0.02, paired=True)]


CLAIM = "The higher ε_high, the faster rare tokens grow, and the more diverse answers stay."
JOBS = started(16, habit=["guess 0.97"])
JOBS += started(30, first=17, habit=["meander"])  # 16 had left it undecided
SMOKE = started(1, habit=["guess 0.97", "meander"], steps=[1], warm=[10], epochs=[1])
SECONDS = 24
PRIMARIES = [slope("guess 0.97", "worked out"), slope("meander", "different at pass@1 0.5")]

# The page
LESSON = (
    "it depends",
    "With 16 epochs a doubled ε_high lets a rare habit grow faster. DAPO's 0.28 cannot be told "
    "from 0.2, and a higher ε_high does not keep answers more diverse.",
)
RARE, MANY = arms("outcomes", "habit", ["guess 0.97", "meander"]).values()
PANELS = [
    Panel("After 3 rollouts", {"worked out": RARE}, ("ε_high", "worked out"), DOSES),
    Panel("When pass@1 is 0.5", {"different": MANY}, ("ε_high", "different"), DOSES),
]


def words(runs):
    def at(dose, habit):
        return runs.mean(f"{dose}", ".2f", habit=habit)

    return f"""
    DAPO trains with 16 epochs over each rollout, and only ε_high, the upper bound of the clip,
    differs. A model guesses 97 answers in 100; working a sum out begins with another, rare token.
    After three rollouts a share of {at(0.2, "guess 0.97")} of the answers is worked out with an
    ε_high of 0.2, {at(0.28, "guess 0.97")} with 0.28 and {at(0.56, "guess 0.97")} with 0.56.
    Another model repeats totals at will, so a sum has many right answers. Their diversity changes
    with training, so we compare at a pass@1 of 0.5. The share of different ones among the right
    answers to a sum is {at(0.2, "meander")} with 0.2, {at(0.28, "meander")} with 0.28 and
    {at(0.56, "meander")} with 0.56. For diversity this is a second try: with 16 other seeds the
    first one was undecided."""


NOT_TRIED = "one epoch, with which the clip hardly acts; long training; a wider lower bound."

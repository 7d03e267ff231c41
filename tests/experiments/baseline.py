"""What is subtracted from a reward: nothing, the mean of the group's others, the best constant."""

import random
from dataclasses import replace
from functools import partial
from math import log2
from unittest.mock import patch

import torch
from bench import train
from harness import Panel, arms
from llm_parts import gradients, load, mean, started, warm_start
from verdicts import Contrast

import rloo_llm

POINTS = [0, 5, 10, 20, 30]  # rollouts of training before the noise is measured
FORMS = ["leave-one-out", "none", "none, R + 1"]


def advantages_with(form, rewards, args, own=rloo_llm.compute_advantages):
    """R + 1 pays 2 for a right answer and 1 for a wrong one: to a baseline it is the same."""
    return {"none": rewards, "none, R + 1": rewards + 1}.get(form, own(rewards, args))


def noise(model, tokenizer, args, groups):
    """How often the baseline, and the best constant b*, halve the variance of the gradient of one
    group's answers: b* = cov(Σ R ∇ log π, Σ ∇ log π) / var(Σ ∇ log π). These are sums over tokens:
    divided by Σ|o_i|, which varies, they would have its noise, too."""
    rng, size = random.Random(f"noise {args.seed}"), args.group_size
    problems = [rloo_llm.make_sum(rng) for _ in range(groups)]
    batch, _, rewards = rloo_llm.rollout(model, tokenizer, problems, size, 1.0, args)
    found = []
    for i, group in enumerate(rewards[:, None]):
        rows = rloo_llm.take_rows(batch, slice(i * size, (i + 1) * size))
        variants = [advantages_with(form, group, args) for form in FORMS]
        variants.append(torch.ones_like(group))
        found.append(torch.stack(gradients(model, rows, rows["mask"], variants, args)))
    parts = torch.stack(found) - torch.stack(found).mean(0)
    _, none, _, unit = parts.unbind(1)
    best = (none * unit).sum() / unit.square().sum()
    parts[:, 3] = none - best * unit
    others, none, shifted, constant = (parts.square().sum((0, 2)) + 1e-9).log2().tolist()
    saved = {"R": none - others, "R + 1": shifted - others, "b*": none - constant}
    return saved | {"value of b*": best.item(), "mean reward": rewards.mean().item()}


def run(seed, start, form=None, steps=60, points=POINTS, groups=128, warm=400):
    """Without a form: the noise, during training at RLOO's own settings. With one: a training run
    of 4 questions a rollout, where noise is worst."""
    folder = warm_start("tiny", start, steps=warm)
    args, seen = rloo_llm.Args(seed=seed, steps=steps, beta=0.0), []
    if form:
        with patch.object(rloo_llm, "compute_advantages", partial(advantages_with, form)):
            found = train(rloo_llm, replace(args, prompts_per_step=4), steps, folder=folder)
        return {"learned": mean(found["reward"]), "by rollout": found["reward"]}
    model, tokenizer = load(folder)

    def each_step(step, model, metrics):
        if step in points:
            seen.append(noise(model, tokenizer, args, groups))

    each_step(0, model, {})
    train(rloo_llm, args, points[-1], each_step, folder)
    found = {name: [each[name] for each in seen] for name in seen[0]}
    for name, values in list(found.items()):
        found |= {f"{name}, at first": values[0], f"{name}, later": mean(values[-3:])}
    return found


def saved(reward, when):  # the same answers with the baseline and without: one policy is a pair
    arm = {}, f"{reward}, {when}"
    return Contrast(f"{reward}: noise halved, {when}", arm, None, log2(1.25), paired=True)


def learning(reward, form):
    more, less = arms("learned", "form", ["leave-one-out", form]).values()
    return Contrast(f"{reward}, learned: baseline − none", more, less, 0.03, block="start")


CLAIM = "The mean of the group's other rewards, as a baseline, takes noise out of the gradient."
JOBS = started(16) + started(40, form=FORMS)
SMOKE = [{"seed": 1, "start": 0, "points": [0, 1], "groups": 4, "warm": 30}]
SMOKE += [{"seed": 1, "start": 0, "form": form, "steps": 2, "warm": 30} for form in FORMS]
SECONDS = 5  # 22 for the noise at a policy's five points, 2 for a training run
PRIMARIES = [
    [saved("R", "at first"), saved("R", "later"), learning("R", "none")],
    [saved("R + 1", "at first"), saved("R + 1", "later"), learning("R + 1", "none, R + 1")],
]

# The page
LESSON = (
    "it depends",
    "A baseline takes noise out of the gradient if wrong answers are paid, too (R + 1). With "
    "rewards of 0 and 1 it takes none, may add some once most are right, and brought nothing.",
)
SAVED = {"R of 0 and 1": ({}, "R"), "R + 1": ({}, "R + 1"), "R, best constant": ({}, "b*")}
PANELS = [
    Panel("Noise that the baseline saves", SAVED, ("rollouts", "variance halved … times"), POINTS),
    Panel("Learning", arms("by rollout", "form", FORMS), ("rollouts", "reward"), [*range(1, 61)]),
]


def words(runs):
    def at(name, when):
        return runs.mean(f"{name}, {when}", ".2f")

    def times(when):
        return f"{2 ** mean(runs.find({}, f'R + 1, {when}')):.1f}"

    def learned(form):
        return runs.mean("learned", ".2f", form=form)

    return f"""
    At 16 policies we compute the gradient of the same answers with the baseline and without. The
    first picture and the table show how often the baseline halves the variance: 1 is half of it, 2
    a quarter, and below 0 the variance grows. If right answers pay 1 and wrong ones 0, it is
    {at("R", "at first")} before training and {at("R", "later")} after 10 to 30 rollouts, when the
    mean reward is {at("mean reward", "later")}. Wrong answers are then rare and their gradients
    long. With a baseline close to 1 they count fully, and without one, at a reward of 0, not at
    all. The constant with the least variance is {at("value of b*", "later")} by then. If all
    rewards are higher by 1, which says nothing new, the variance is {times("at first")} times
    smaller with the baseline at first, and {times("later")} times later. In 60 rollouts of 4
    questions the mean reward is {learned("leave-one-out")} with the baseline, {learned("none")}
    without it, and {learned("none, R + 1")} without it on R + 1."""


NOT_TRIED = "other rewards; other rates than RLOO's own; the baseline of a critic."

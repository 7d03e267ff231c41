"""What is subtracted from a reward: nothing, the mean of the group's others, the best constant."""

import random
from functools import partial
from math import log2
from unittest.mock import patch

import torch
from lab import LEARNED, Contrast, Experiment, arms, mean, train, values
from llm_parts import gradients, load, make, start, started
from pictures import DASHED, DOTTED, SOLID, curves, figure, plain

import rloo_llm

POINTS = [0, 60, 120]  # rollouts of training before the noise is measured
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


def run(seed, network, form=None, points=POINTS, steps=60, groups=128, warm=make.STEPS):
    """Without a form: the noise, during training at RLOO's own settings. With one: a training run
    of 4 questions a rollout, where noise is worst."""
    folder, flags = start(network, warm), {"seed": seed, "beta": 0.0}
    if form:
        args = rloo_llm.Args(steps=steps, prompts_per_step=4, **flags)
        with patch.object(rloo_llm, "compute_advantages", partial(advantages_with, form)):
            found = train(rloo_llm, args, steps, folder=folder)
        return {LEARNED: mean(found["reward"]), "by rollout": found["reward"]}
    model, tokenizer = load(folder)
    args, seen = rloo_llm.Args(steps=points[-1], **flags), []

    def each_step(step, model, metrics):
        if step in points:
            seen.append(noise(model, tokenizer, args, groups))

    each_step(0, model, {})
    train(rloo_llm, args, points[-1], each_step, folder)
    found = {name: [each[name] for each in seen] for name in seen[0]}
    for name, series in list(found.items()):
        found |= {f"{name}, at first": series[0], f"{name}, at the end": series[-1]}
    return found


def saved(reward, when):  # the same answers with the baseline and without
    name = f"{reward}: variance without the baseline over with it, {when}"
    return Contrast(name, ({}, f"{reward}, {when}"), None, log2(1.25), factor=True)


def learning(reward, form):
    more, less = arms(LEARNED, "form", ["leave-one-out", form])
    return Contrast(f"{reward}, reward over training: baseline − none", more, less, 0.03)


JOBS = started() + started(form=FORMS)
TESTS = [
    [saved("R", "at first"), saved("R", "at the end"), learning("R", "none")],
    [saved("R + 1", "at first"), saved("R + 1", "at the end"), learning("R + 1", "none, R + 1")],
]


def draw(runs):
    title = "A baseline takes out noise if wrong answers are paid, too"
    page, (noise, learned) = figure(title, 3.1, 1, 2)
    noise.set(yscale="log", title="variance without it\nover variance with it", xlabel="rollouts")
    looks = {"R + 1": ("R + 1", SOLID), "b*": ("R, best constant", DOTTED), "R": ("R", DASHED)}
    lines = {}
    for column, (label, dash) in looks.items():
        lines[label] = 2 ** values(runs, ({}, column)), "RLOO", dash
    curves(noise, POINTS[: len(lines["R"][0][0])], lines)
    plain(noise.yaxis, [0.5, 1, 2, 4, 8])
    looks = {"leave-one-out": ("RLOO", SOLID), "none": ("none", SOLID)}
    lines = {}
    for form, look in (looks | {"none, R + 1": ("none", DASHED)}).items():
        lines[form] = values(runs, ({"form": form}, "by rollout")), *look
    curves(learned, range(1, len(lines["none"][0][0]) + 1), lines, band=False)
    learned.set(title="share of right answers", xlabel="rollouts", ylim=0)
    return page


SMALL = {"points": [0, 1], "groups": 4, "steps": 2, "warm": 10}
CLAIM = (
    "The mean reward of a question's other answers, as a baseline, takes noise out of the gradient."
)
SOURCE = "Kool et al. 2019; [RLOO](https://arxiv.org/abs/2402.14740)"
FORMER = "as claimed / not seen; of interest / too small / open"
SHOWN = (
    "b*, at first",
    "b*, at the end",
    "value of b*, at first",
    "value of b*, at the end",
    "mean reward, at first",
    "mean reward, at the end",
)
EXPERIMENT = Experiment(run, JOBS, TESTS, draw, SMALL, CLAIM, SOURCE, FORMER, shown=SHOWN)

if __name__ == "__main__":
    EXPERIMENT.main()

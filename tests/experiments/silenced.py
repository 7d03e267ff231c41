"""GRPO's clip, lifted for rare tokens alone or for all others, against CISPO's weight."""

from unittest.mock import patch

import passes
import torch
from lab import Contrast, Experiment, train, values
from llm_parts import first_token, load, started, warm_start
from pictures import DASHED, DOTTED, SOLID, WORDS, curves, figure

import cispo_llm
import grpo_llm

FORMS = ["GRPO", "rare lifted", "others lifted", "CISPO", "no clip"]


def surrogate(form, counts):
    """GRPO's, CISPO's, or GRPO's with CISPO's for some praised tokens: where the clip would take
    their gradient, they keep it with a weight of 1 + ε."""

    def objective(*inputs, own=grpo_llm.surrogate):
        _, old_logprobs, advantages, mask, _ = inputs
        praised = (advantages[:, None] > 0) & (mask > 0)
        rare = praised & (old_logprobs.exp() < 0.1)
        clipped, silenced = own(*inputs)
        counts.add_(torch.stack([praised.sum(), rare.sum(), (rare & silenced).sum()]))
        lifted = {"rare lifted": rare, "others lifted": praised & ~rare}
        lifted = lifted.get(form, torch.full_like(rare, form == "CISPO"))
        return torch.where(lifted, cispo_llm.surrogate(*inputs)[0], clipped), silenced

    return objective


def learn(form, seed, start, steps, warm, epochs):
    clip = {"clip_low": 1e9, "clip_high": 1e9} if form == "no clip" else {}
    args = grpo_llm.Args(beta=0.0, update_epochs=epochs, seed=seed, steps=40, **clip)
    folder = warm_start("guess 0.97", start, warm)
    model, tokenizer = load(folder)
    worked, counts = [1 - first_token(model, tokenizer, "#")], torch.zeros(3)

    def each_step(step, policy, metrics):
        worked.append(1 - first_token(policy, tokenizer, "#"))

    with patch.object(grpo_llm, "surrogate", surrogate(form, counts)):
        train(grpo_llm, args, steps, each_step, folder)
    praised, rare, silenced = counts.clamp(min=1).tolist()
    found = {"rare of praised": rare / praised, "silenced of rare": silenced / rare}
    return {form: worked[2], f"{form}, by rollout": worked} | (found if form == "GRPO" else {})


def run(seed, start, steps=3, warm=400, epochs=16):
    """All forms, from one policy and with the same first rollout, so they are pairs."""
    found = [learn(form, seed, start, steps, warm, epochs) for form in FORMS]
    return {column: value for each in found for column, value in each.items()}


def contrast(more, less):
    return Contrast(f"worked out: {more} − {less}", ({}, more), ({}, less), 0.05)


JOBS = started(16)
TESTS = [
    [contrast("rare lifted", less) for less in ("GRPO", "others lifted")],
    [contrast("CISPO", "GRPO")],
]


def draw(runs):
    """Beside these runs #passes', with as many epochs, which are longer."""
    title = "CISPO lets a rare habit grow faster than GRPO;\nin longer runs it falls back"
    page, (panel, longer) = figure(title, 3.4, 1, 2)
    looks = {
        "no clip": ("no bound at all", "none", DASHED),
        "CISPO": ("CISPO", "CISPO", SOLID),
        "rare lifted": ("GRPO, clip lifted\nfor rare tokens", "GRPO", DASHED),
        "others lifted": ("GRPO, clip lifted\nfor the others", "GRPO", DOTTED),
        "GRPO": ("GRPO", "GRPO", SOLID),
    }
    lines = {}
    for form, (label, algorithm, dash) in looks.items():
        lines[label] = values(runs, ({}, f"{form}, by rollout")), algorithm, dash
    curves(panel, range(len(lines["GRPO"][0][0])), lines)
    panel.set(xlabel="rollouts", title="rare habit: share worked out")
    panel.set_xticks(range(4))
    lines = {}
    for form, label in (("clip", "GRPO"), ("CISPO", "CISPO"), ("no clip", "no bound at all")):
        found = values(passes.EXPERIMENT.runs(), passes.arm(form, 16, passes.DEFAULT, "by rollout"))
        lines[label] = found, *looks.get(label, looks["no clip"])[1:]
    curves(longer, range(1, 21), lines)
    longer.axvspan(1, 10, color="#888888", alpha=0.12, linewidth=0)
    longer.text(5.5, 0.2, "rate\nwarms up", ha="center", fontsize=WORDS)
    longer.set(xlabel="rollouts", title="another task: reward")
    return page


EXPERIMENT = Experiment(run, JOBS, TESTS, draw, small={"steps": 2, "warm": 10, "epochs": 1})

if __name__ == "__main__":
    EXPERIMENT.main()

"""GRPO's clip, lifted for rare tokens alone or for all others, against CISPO's weight."""

from unittest.mock import patch

import torch
from lab import Contrast, Experiment, train, values
from llm_parts import chance, load, make, start, started
from pictures import DASHED, DOTTED, MIXED, SOLID, curves, figure

import cispo_llm
import grpo_llm

RATE = 2e-4
FORMS = ["GRPO", "rare lifted", "others lifted", "ε_high 0.28", "CISPO", "no clip"]
BOUNDS = {"no clip": {"clip_low": 1e9, "clip_high": 1e9}, "ε_high 0.28": {"clip_high": 0.28}}
# What the teacher seldom gets right: adding 7, 8 or 9
LARGE = {f"{a}+{b}=": f"{a + b}#" for a in range(1, 10) for b in (7, 8, 9)}


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


def learn(form, seed, network, steps, warm, epochs):
    flags = BOUNDS.get(form, {})
    flags = {"learning_rate": RATE, "warmup_steps": 1, "update_epochs": epochs} | flags
    args = grpo_llm.Args(beta=0.0, seed=seed, steps=40, **flags)
    folder = start(network, warm)
    model, tokenizer = load(folder)
    right, counts = [chance(model, tokenizer, LARGE).mean().item()], torch.zeros(3)

    def each_step(step, policy, metrics):
        right.append(chance(policy, tokenizer, LARGE).mean().item())

    with patch.object(grpo_llm, "surrogate", surrogate(form, counts)):
        train(grpo_llm, args, steps, each_step, folder)
    praised, rare, silenced = counts.clamp(min=1).tolist()
    found = {"rare of praised": rare / praised, "silenced of rare": silenced / rare}
    early, late = right[(len(right) - 1) // 2], right[-1]
    result = {form: early, f"{form}, later": late, f"{form}, by rollout": right}
    return result | (found if form == "GRPO" else {})


def run(seed, network, steps=8, warm=make.STEPS, epochs=8):
    """All forms, from one policy and with the same first rollout, so they are pairs."""
    found = [learn(form, seed, network, steps, warm, epochs) for form in FORMS]
    return {column: value for each in found for column, value in each.items()}


def contrast(more, less):
    return Contrast(f"added rightly: {more} − {less}", ({}, more), ({}, less), 0.05)


JOBS = started()
TESTS = [
    [contrast("rare lifted", less) for less in ("GRPO", "others lifted")],
    [contrast("CISPO", "GRPO"), contrast("CISPO, later", "GRPO, later")]
    + [contrast("ε_high 0.28", "GRPO")],
]


def draw(runs):
    title = "CISPO seems to lead at first; later the lines meet"
    page, (panel,) = figure(title, 3.3, 1, 1)
    looks = {
        "no clip": ("no bound at all", "none", DASHED),
        "CISPO": ("CISPO", "CISPO", SOLID),
        "rare lifted": ("GRPO, clip lifted for rare tokens", "GRPO", DASHED),
        "others lifted": ("GRPO, clip lifted for the others", "GRPO", DOTTED),
        "ε_high 0.28": ("GRPO, DAPO's ε_high", "DAPO", MIXED),
        "GRPO": ("GRPO", "GRPO", SOLID),
    }
    lines = {}
    for form, (label, algorithm, dash) in looks.items():
        lines[label] = values(runs, ({}, f"{form}, by rollout")), algorithm, dash
    curves(panel, range(len(lines["GRPO"][0][0])), lines, band=False)
    panel.set(xlabel="rollouts", ylabel="probability of adding 7, 8 or 9 rightly")
    panel.set_xticks(range(9))
    return page


CLAIM = (
    "The clip takes the gradient of rare tokens; with CISPO, or with a higher ε_high, they "
    "grow faster."
)
SOURCE = (
    "[MiniMax-M1](https://arxiv.org/abs/2506.13585), 3.1; "
    "[DAPO](https://arxiv.org/abs/2503.14476), 3.1"
)
FORMER = "as claimed; of interest"
SHOWN = ("rare of praised", "silenced of rare", "no clip")
POINTS = {f"{form}, by rollout": {f"{form}, 2 rollouts": 2} for form in ("GRPO", "CISPO")}
SMALL = {"steps": 2, "warm": 10, "epochs": 1}
EXPERIMENT = Experiment(run, JOBS, TESTS, draw, SMALL, CLAIM, SOURCE, FORMER, SHOWN, POINTS)

if __name__ == "__main__":
    EXPERIMENT.main()

"""GRPO's clip, lifted for rare tokens alone or for all others, against CISPO's weight."""

from unittest.mock import patch

import torch
from bench import train
from harness import Panel
from llm_parts import first_token, load, started, warm_start
from verdicts import Contrast

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
    return Contrast(f"{more} − {less}", ({}, more), ({}, less), 0.05, paired=True)


CLAIM = "The clip takes the gradient of rare tokens; CISPO keeps it, and learns faster for it."
JOBS = started(16)
SMOKE = started(1, steps=[2], warm=[10], epochs=[1])
SECONDS = 20
PRIMARIES = [
    [contrast("rare lifted", less) for less in ("GRPO", "others lifted")],
    [contrast("CISPO", "GRPO")],
]

# The page
LESSON = (
    "shown",
    "With many epochs GRPO's clip slows rare tokens, partly because it takes their gradient; CISPO "
    "keeps it.",
)
SHARES = {form: ({}, f"{form}, by rollout") for form in FORMS}
PANELS = [Panel("Working out, a rare habit", SHARES, ("rollouts", "worked out"), [0, 1, 2, 3])]


def words(runs):
    share = {form: runs.mean(form, ".2f") for form in FORMS}
    return f"""
    The model guesses 97 answers in 100 and works out the others. GRPO's loop trains it at the
    script's learning rate, but with 16 epochs over each rollout in place of one; only the
    surrogate, the function whose gradient is followed, differs. The share worked out is the
    probability that an answer does not begin with "#". Of the praised tokens, those of answers with
    A > 0, {runs.mean("rare of praised", ".1%")} are rare: their probability was below 0.1. Over the
    epochs GRPO's clip takes the gradient of {runs.mean("silenced of rare", ".0%")} of these. After
    two rollouts GRPO works out a share of {share["GRPO"]}. If praised rare tokens alone keep their
    gradient, with a weight of 1 + ε, the share is {share["rare lifted"]}; if all others keep it,
    {share["others lifted"]}. (After a third rollout the others help, too.) With CISPO's surrogate
    it is {share["CISPO"]}, and {share["no clip"]} without any bound. (After more rollouts at this
    rate CISPO and no clip fall far back, and GRPO falls less: [passes](#passes).)"""


NOT_TRIED = "more rollouts; other thresholds of rare than a probability of 0.1; other rates."

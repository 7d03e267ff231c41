"""Which tokens GRPO's clip silences, and whether CISPO, which keeps them, learns faster for it."""

from unittest.mock import patch

import torch
from bench import train
from harness import NOT_SHOWN, Experiment, Panel, grid
from llm_parts import rollouts_to, warm_start

import cispo_llm
import grpo_llm

METHODS = {  # the script, and what stands in for its surrogate
    "GRPO, no clip": (grpo_llm, grpo_llm.surrogate),
    "GRPO": (grpo_llm, grpo_llm.surrogate),
    "CISPO": (cispo_llm, cispo_llm.surrogate),
    "CISPO, GRPO's clip": (cispo_llm, grpo_llm.surrogate),
}
HALF = "rollouts to 0.5, or 1 more than all"


def run(method, guess_rate, passes, seed, steps=40, warm=1000):
    """Guessing is nearly complete at the start, and each rollout is passed over several times, with
    no KL. Kept are the old probabilities of tokens of answers with A > 0, and of the silenced."""
    script, surrogate = METHODS[method]
    args = script.Args(beta=0.0, update_epochs=passes, seed=seed, steps=steps)
    args.clip_low = args.clip_high = 1e9 if method == "GRPO, no clip" else 0.2
    praised, silenced = [], []

    def listen(logprobs, old_logprobs, advantages, mask, args):
        objective, clipped = surrogate(logprobs, old_logprobs, advantages, mask, args)
        up = (advantages[:, None] > 0) & (mask > 0)
        praised.append(old_logprobs[up].exp())
        silenced.append(old_logprobs[up & clipped].exp())
        return objective, clipped

    with patch.object(script, "surrogate", listen):
        found = train(script, args, model=warm_start(f"guess {guess_rate}", warm))
    half = rollouts_to(0.5, found["reward"])
    result = {
        "rollouts to 0.5": half,
        HALF: half or steps + 1,
        "pass@1": found["pass@1"],
        "reward": found["reward"],
    }
    if surrogate is grpo_llm.surrogate and args.clip_low < 1:
        praised, silenced = torch.cat(praised), torch.cat(silenced)
        result |= {
            "silenced of praised": len(silenced) / max(len(praised), 1),
            "median old probability, silenced": silenced.nanmedian().item(),
            "median old probability, praised": praised.nanmedian().item(),
            "silenced below 0.1": (silenced < 0.1).float().mean().item(),
            "praised below 0.1": (praised < 0.1).float().mean().item(),
        }
    return result


EXPERIMENT = Experiment(
    claim="The clip takes the gradient from rare tokens that move fastest; CISPO keeps it.",
    verdict=NOT_SHOWN,
    run=run,
    jobs=grid(5, method=list(METHODS), guess_rate=[0.999], passes=[8]),
    smoke=[
        {"method": method, "guess_rate": 0.999, "passes": 2, "seed": 1, "steps": 1, "warm": 50}
        for method in METHODS
    ],
    panels=[
        Panel(
            "From 99.9 % guesses, 8 passes a rollout",
            {name: ({"method": name}, "reward") for name in ("GRPO", "CISPO")},
            ("rollouts", "share of right answers"),
            smooth=3,
        ),
        Panel(
            "Half right after how many rollouts? (41: never)",
            {name: ({"method": name}, HALF) for name in METHODS},
            ("rollouts", ""),
            dots=True,
        ),
    ],
    finding="""
    That unlikely tokens are silenced is seen, that it costs anything is not. With 8 passes over a
    rollout GRPO's clip takes the gradient of {GRPO / silenced of praised / range :.1%} of the
    tokens of answers with A > 0; their probability was
    {GRPO / median old probability, silenced :.2f} in the median, that of all
    {GRPO / median old probability, praised :.2f}; {GRPO / silenced below 0.1 :.0%} of them were
    below 0.1, of all {GRPO / praised below 0.1 :.0%}. From a model that guesses 99.9 % of the time
    CISPO is half right after {CISPO / rollouts to 0.5, or 1 more than all / range :.0f} rollouts,
    GRPO after {GRPO / rollouts to 0.5, or 1 more than all / range :.0f} (five seeds each; 41:
    never; p = {CISPO ~ GRPO / rollouts to 0.5, or 1 more than all / p :.2f}), and CISPO with GRPO's
    clip for its own after {CISPO, GRPO's clip / rollouts to 0.5, or 1 more than all / range :.0f}
    (p = {CISPO ~ CISPO, GRPO's clip / rollouts to 0.5, or 1 more than all / p :.2f}). GRPO without
    its clip, which silences no token, is no faster, which speaks against the cause:
    {GRPO, no clip / rollouts to 0.5, or 1 more than all / range :.0f} (p = {GRPO, no clip ~
    GRPO / rollouts to 0.5, or 1 more than all / p :.2f} against GRPO).
    """,
)

"""How many passes over one rollout each kind of surrogate bears."""

from unittest.mock import patch

from bench import train
from harness import SHOWN, Experiment, Panel, grid
from llm_parts import rollouts_to

import cispo_llm
import grpo_llm
import gspo_llm
import rloo_llm


def clip_alone(*inputs, of_grpo=grpo_llm.surrogate):
    """RLOO's objective, but for the tokens that GRPO's clip takes: a clip, and no ratio."""
    _, clipped = of_grpo(*inputs)
    objective, _ = rloo_llm.surrogate(*inputs)
    return objective * ~clipped, clipped


NO_CLIP = {"clip_low": 1e9, "clip_high": 1e9}
METHODS = {  # the script, its flags, and what stands in for its surrogate
    "RLOO, 1 step": (rloo_llm, {"minibatches": 1}, rloo_llm.surrogate),
    "RLOO": (rloo_llm, {}, rloo_llm.surrogate),
    "GRPO, no clip": (grpo_llm, NO_CLIP, grpo_llm.surrogate),
    "GRPO": (grpo_llm, {}, grpo_llm.surrogate),
    "GSPO": (gspo_llm, {}, gspo_llm.surrogate),
    "CISPO": (cispo_llm, {}, cispo_llm.surrogate),
    "RLOO in GRPO": (grpo_llm, {}, rloo_llm.surrogate),
    "GRPO, no ratio": (grpo_llm, {}, clip_alone),
}
SCRIPTS = ["RLOO", "GRPO, no clip", "GRPO", "GSPO", "CISPO"]


def run(method, passes, rate, seed, steps=40, prompts=32):
    """β 0, four gradient steps a pass; "RLOO in GRPO" has RLOO's surrogate, nothing else of it."""
    script, flags, surrogate = METHODS[method]
    options = {"beta": 0.0, "minibatches": 4, "update_epochs": passes} | flags
    options |= {"learning_rate": rate, "prompts_per_step": prompts}
    args = script.Args(seed=seed, steps=steps, **options)
    with patch.object(script, "surrogate", surrogate):
        found = train(script, args)
    return {"pass@1": found["pass@1"], "rollouts to 0.5": rollouts_to(0.5, found["reward"])}


RATE, HIGH_RATE = 4e-4, 1.2e-3  # GRPO's own, and RLOO's
SHOW = ("GRPO", "GRPO, no clip", "CISPO", "RLOO")
CURVES = {name: ({"method": name, "rate": RATE}, "pass@1") for name in SHOW}
ALONE = {  # in GRPO's script
    "GRPO": ({"method": "GRPO", "passes": 16}, "pass@1"),
    "GRPO, no ratio": ({"method": "GRPO, no ratio", "passes": 16}, "pass@1"),
    "GRPO, no clip": ({"method": "GRPO, no clip", "passes": 16}, "pass@1"),
    "neither": ({"method": "RLOO in GRPO", "passes": 16}, "pass@1"),
}
EXPERIMENT = Experiment(
    claim="A clip lets one rollout serve many passes.",
    verdict=SHOWN,
    run=run,
    jobs=[
        *grid(5, method=SCRIPTS, passes=[1, 4, 8, 16], rate=[RATE]),
        *grid(5, method=["RLOO in GRPO", "GRPO, no ratio"], passes=[16], rate=[RATE]),
        *grid(3, method=["RLOO, 1 step"], passes=[1], rate=[HIGH_RATE]),
        *grid(3, method=["GRPO"], passes=[8], rate=[HIGH_RATE]),
    ],
    smoke=grid(1, method=list(METHODS), passes=[2], rate=[RATE], steps=[1], prompts=[4]),
    panels=[
        Panel("GRPO bears many passes", CURVES, ("passes over each rollout", "pass@1"), x="passes"),
        Panel("16 passes: the clip does it, not the ratio", ALONE, ("pass@1", ""), dots=True),
    ],
    finding="""
    After 40 rollouts of 16 passes GRPO's pass@1 is {GRPO, 16, 0.0004 / pass@1 / range :.2f},
    without its clip {GRPO, no clip, 16, 0.0004 / pass@1 / range :.2f} (five seeds each, p =
    {GRPO, 16, 0.0004 ~ GRPO, no clip, 16, 0.0004 / pass@1 / p :.3f}; with 8 passes
    {GRPO, 8, 0.0004 ~ GRPO, no clip, 8, 0.0004 / pass@1 / p :.3f}, with 4
    {GRPO, 4, 0.0004 ~ GRPO, no clip, 4, 0.0004 / pass@1 / p :.2f}). The clip alone, without a
    ratio, gives {GRPO, no ratio, 16, 0.0004 / pass@1 :.2f}. Passes save rollouts, clipped or not:
    half are right after {GRPO, 16, 0.0004 / rollouts to 0.5 :.0f}, without the clip
    {GRPO, no clip, 16, 0.0004 / rollouts to 0.5 :.0f}, with one pass
    {GRPO, 1, 0.0004 / rollouts to 0.5 :.0f}. But one pass ends higher, at
    {GRPO, 1, 0.0004 / pass@1 :.2f} (p = {GRPO, 1, 0.0004 ~ GRPO, 16, 0.0004 / pass@1 / p :.2f}), as
    does RLOO's single step at three times the rate, at {RLOO, 1 step, 1, 0.0012 / pass@1 :.2f}
    (three seeds); and at that rate 8 passes ruin GRPO, too: {GRPO, 8, 0.0012 / pass@1 :.2f}.
    """,
)

"""How many passes over one rollout each kind of surrogate bears."""

from statistics import median
from unittest.mock import patch

from bench import train
from harness import SHOWN, Experiment, Panel, grid
from llm_parts import after_each_pass, rollouts_to

import cispo_llm
import dapo_llm
import grpo_llm
import gspo_llm
import rloo_llm


def clip_alone(*inputs, of_grpo=grpo_llm.surrogate):
    """RLOO's objective, but for the tokens that GRPO's clip takes: a clip, and no ratio."""
    _, clipped = of_grpo(*inputs)
    objective, _ = rloo_llm.surrogate(*inputs)
    return objective * ~clipped, clipped


PLAIN = {"max_resample": 1, "overlong_cache": 0.0}  # DAPO's clip, and its mean over all tokens
NO_CLIP = {"clip_low": 1e9, "clip_high": 1e9}
METHODS = {  # the script, its flags, and what stands in for its surrogate
    "RLOO, 1 step": (rloo_llm, {"minibatches": 1}, rloo_llm.surrogate),
    "RLOO": (rloo_llm, {}, rloo_llm.surrogate),
    "GRPO, no clip": (grpo_llm, NO_CLIP, grpo_llm.surrogate),
    "GRPO": (grpo_llm, {}, grpo_llm.surrogate),
    "DAPO, symmetric": (dapo_llm, PLAIN | {"clip_high": 0.2}, dapo_llm.surrogate),
    "DAPO": (dapo_llm, PLAIN, dapo_llm.surrogate),
    "GSPO": (gspo_llm, {}, gspo_llm.surrogate),
    "CISPO": (cispo_llm, {}, cispo_llm.surrogate),
    "RLOO in GRPO": (grpo_llm, {}, rloo_llm.surrogate),
    "GRPO, no ratio": (grpo_llm, {}, clip_alone),
    "DAPO in GRPO": (grpo_llm, {"clip_high": 0.28}, grpo_llm.surrogate),
    "CISPO in GRPO": (grpo_llm, {}, cispo_llm.surrogate),
}
SCRIPTS, IN_GRPO = list(METHODS)[1:8], list(METHODS)[8:]


def run(method, passes, rate, seed, steps=40, prompts=32, tested=128):
    """β 0, four gradient steps a pass, one draw. "X in GRPO": X's surrogate, nothing else of X."""
    script, flags, surrogate = METHODS[method]
    options = {"beta": 0.0, "minibatches": 4, "prompts_per_step": prompts} | flags
    args = script.Args(seed=seed, steps=steps, learning_rate=rate, **options)
    args.update_epochs, args.eval_problems = passes, tested
    moved = []  # KL(π_old ‖ π) of a token, on the answers trained on, after the last pass

    def look(model, batch, number):
        if number == passes and len(batch["mask"]) > 0:
            logprobs = script.batch_logprobs(model, batch, args)
            kl = script.kl_k3(batch["old_logprobs"], logprobs)
            moved.append((kl.sum() / batch["mask"].sum()).item())

    with patch.object(script, "surrogate", surrogate), after_each_pass(script, args, look):
        found = train(script, args)
    return {
        "pass@1": found["pass@1"],
        "rollouts to 0.5": rollouts_to(0.5, found["reward"]),
        "KL of a rollout": median(moved) if moved else None,
    }


RATE, HIGH_RATE = 4e-4, 1.2e-3  # GRPO's own, and RLOO's
ALONE = {  # in GRPO's script
    "GRPO": "GRPO",
    "clip alone": "GRPO, no ratio",
    "ratio alone": "GRPO, no clip",
    "neither": "RLOO in GRPO",
}
EXPERIMENT = Experiment(
    claim="A clip lets one rollout serve many passes.",
    verdict=SHOWN,
    run=run,
    jobs=[
        *grid(5, method=["RLOO, 1 step"], passes=[1], rate=[RATE]),
        *grid(5, method=SCRIPTS, passes=[1, 4, 8, 16], rate=[RATE]),
        *grid(5, method=IN_GRPO, passes=[16], rate=[RATE]),
        *grid(3, method=["RLOO, 1 step"], passes=[1], rate=[HIGH_RATE]),
        *grid(3, method=SCRIPTS + IN_GRPO, passes=[8], rate=[HIGH_RATE]),
    ],
    smoke=grid(1, method=list(METHODS), passes=[2], rate=[RATE], steps=[1], prompts=[4]),
    panels=[
        Panel(
            "Training, 40 rollouts of many passes",
            {
                name: ({"method": name, "rate": RATE}, "pass@1")
                for name in ("GRPO", "GRPO, no clip", "CISPO", "RLOO")
            },
            ("passes over each rollout", "pass@1"),
            x="passes",
        ),
        Panel(
            "16 passes: the clip does it, not the ratio",
            {label: ({"method": name, "passes": 16}, "pass@1") for label, name in ALONE.items()},
            ("pass@1", ""),
            dots=True,
        ),
        Panel(
            "One pass: RLOO, with a rate of its own, is level",
            {
                "GRPO": ({"method": "GRPO", "passes": 1}, "pass@1"),
                "RLOO": ({"method": "RLOO, 1 step", "rate": HIGH_RATE}, "pass@1"),
            },
            ("pass@1", ""),
            dots=True,
        ),
    ],
    finding="""
    After 40 rollouts with 16 passes over each, five seeds of GRPO end at a pass@1 of
    {GRPO, 16, 0.0004 / pass@1 / range :.2f}; with the clip alone, RLOO's gradient but for the
    tokens that GRPO's clip takes, at {GRPO, no ratio, 16, 0.0004 / pass@1 / range :.2f}; with the
    ratio alone at {GRPO, no clip, 16, 0.0004 / pass@1 / range :.2f}; with neither at
    {RLOO in GRPO, 16, 0.0004 / pass@1 / range :.2f}. A rollout moves a token by
    {GRPO, no ratio, 16, 0.0004 / KL of a rollout :.2f} nats with the clip alone, by
    {RLOO in GRPO, 16, 0.0004 / KL of a rollout :.1f} with neither. Clip against none is p =
    {GRPO, 16, 0.0004 ~ GRPO, no clip, 16, 0.0004 / pass@1 / p :.3f} with a ratio,
    {GRPO, no ratio, 16, 0.0004 ~ RLOO in GRPO, 16, 0.0004 / pass@1 / p :.3f} without;
    {GRPO, 8, 0.0004 ~ GRPO, no clip, 8, 0.0004 / pass@1 / p :.3f} at 8 passes, but
    {GRPO, 4, 0.0004 ~ GRPO, no clip, 4, 0.0004 / pass@1 / p :.2f} at 4. And passes buy rollouts,
    not a better end: half of the answers are right after {GRPO, 16, 0.0004 / rollouts to 0.5 :.0f}
    of them instead of {GRPO, 1, 0.0004 / rollouts to 0.5 :.0f}, while one pass ends at
    {GRPO, 1, 0.0004 / pass@1 / range :.2f}. One pass needs no clip: RLOO with a single step a
    rollout, at a rate of its own, three times GRPO's, is level:
    {RLOO, 1 step, 1, 0.0012 / pass@1 / range :.2f}, half right after
    {RLOO, 1 step, 1, 0.0012 / rollouts to 0.5 :.0f} (three seeds). At that rate 8 passes are too
    many for GRPO, too: {GRPO, 8, 0.0012 / pass@1 / range :.2f}.
    """,
)

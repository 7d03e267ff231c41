"""How many passes over one rollout each kind of surrogate bears."""

from unittest.mock import patch

from bench import train
from harness import grid
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


def run(method, passes, rate, seed, steps=40, prompts=32):
    """β 0, four gradient steps a pass; "RLOO in GRPO" has RLOO's surrogate, nothing else of it."""
    script, flags, surrogate = METHODS[method]
    options = {"beta": 0.0, "minibatches": 4, "update_epochs": passes} | flags
    options |= {"learning_rate": rate, "prompts_per_step": prompts}
    args = script.Args(seed=seed, steps=steps, **options)
    with patch.object(script, "surrogate", surrogate):
        found = train(script, args)
    return {"pass@1": found["pass@1"], "rollouts to 0.5": rollouts_to(0.5, found["reward"])}


SMOKE = grid(1, method=list(METHODS), passes=[2], rate=[4e-4], steps=[1], prompts=[4])

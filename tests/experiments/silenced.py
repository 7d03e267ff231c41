"""Which tokens GRPO's clip silences, and whether CISPO, which keeps them, learns faster for it."""

from unittest.mock import patch

import torch
from bench import train
from harness import grid
from llm_parts import rollouts_to, warm_start

import cispo_llm
import grpo_llm

METHODS = {"GRPO": grpo_llm, "GRPO, no clip": grpo_llm, "CISPO": cispo_llm}
HALF = "rollouts to 0.5, or 1 more than all"


def run(method, seed, guess_rate=0.999, passes=8, steps=40, warm=1000):
    """Guessing is nearly complete at the start, and each rollout is passed over several times, with
    no KL. Kept are the old probabilities of tokens of answers with A > 0, and of the silenced."""
    script = METHODS[method]
    args = script.Args(beta=0.0, update_epochs=passes, seed=seed, steps=steps)
    if method == "GRPO, no clip":
        args.clip_low = args.clip_high = 1e9
    praised, silenced = [], []

    def listen(logprobs, old_logprobs, advantages, mask, args, own=script.surrogate):
        objective, clipped = own(logprobs, old_logprobs, advantages, mask, args)
        up = (advantages[:, None] > 0) & (mask > 0)
        praised.append(old_logprobs[up].exp())
        silenced.append(old_logprobs[up & clipped].exp())
        return objective, clipped

    with patch.object(script, "surrogate", listen):
        found = train(script, args, folder=warm_start(f"guess {guess_rate}", warm))
    result = {HALF: rollouts_to(0.5, found["reward"]), "pass@1": found["pass@1"]}
    if method == "GRPO":
        praised, silenced = torch.cat(praised), torch.cat(silenced)
        result |= {
            "silenced of praised": len(silenced) / max(len(praised), 1),
            "median old probability, silenced": silenced.nanmedian().item(),
            "median old probability, praised": praised.nanmedian().item(),
        }
    return result


SMOKE = grid(1, method=list(METHODS), passes=[2], steps=[1], warm=[50])

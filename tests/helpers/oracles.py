"""Each algorithm once more, in plain floats and a token at a time, as its paper writes it: no
autograd, no tensor algebra. The tests hold every *_llm.py to its entry in ORACLES. And log-probs by
plain passes over single rows, with the gradient of a whole step through them."""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import mean, stdev
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F


class Oracle(NamedTuple):
    # Rewards of a group, args → as many numbers.
    advantages: Callable
    # |o_i|, the lengths of all completions, args → the weight of each token.
    share: Callable
    # r of the token, s of its completion, log π, A, args → objective, its derivative by log π.
    token: Callable


def leave_one_out(rewards, args):
    return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]


def z_scores(rewards, args):
    scale = stdev(rewards) + 1e-4 if args.scale_rewards else 1.0
    return [(r - mean(rewards)) / scale for r in rewards]


def token_mean(length, lengths, args):
    return 1 / sum(lengths)


def completion_mean(length, lengths, args):
    constant = getattr(args, "length_norm", "response") == "constant"
    return 1 / (args.max_new_tokens if constant else length) / len(lengths)


def clip(ratio, A, args):
    """PPO's: beyond the bound the objective is constant."""
    bound = 1 + args.clip_high if A > 0 else 1 - args.clip_low
    beyond = ratio > bound if A > 0 else ratio < bound
    return (bound * A, 0.0) if beyond else (ratio * A, ratio * A)


def weighted(r, A, logprob, args):
    weight = min(r, 1 + args.clip_high)
    return weight * A * logprob, weight * A


# In GSPO d s / d log π_t is s / |o|, and each of the |o| tokens carries s: the two cancel.
ORACLES = {
    "rloo_llm": Oracle(leave_one_out, token_mean, lambda r, s, p, A, args: (A * p, A)),
    "grpo_llm": Oracle(z_scores, completion_mean, lambda r, s, p, A, args: clip(r, A, args)),
    "gspo_llm": Oracle(z_scores, completion_mean, lambda r, s, p, A, args: clip(s, A, args)),
    "cispo_llm": Oracle(z_scores, token_mean, lambda r, s, p, A, args: weighted(r, A, p, args)),
    "dapo_llm": Oracle(z_scores, token_mean, lambda r, s, p, A, args: clip(r, A, args)),
}


def expected(name, logprobs, old, advantages, mask, args, ref=None):
    """Of each token, (B, T): its weight; its objective (with a reference β k3 less) and the
    objective's derivative by log π; whether the clip changes it; r, and s of its completion."""
    assert name in ORACLES, f"write {name} as plain loops in ORACLES, tests/helpers/oracles.py"
    oracle, lengths = ORACLES[name], mask.sum(1).int().tolist()
    free = {"clip_low": 1.0, "clip_high": math.inf}  # bounds that no ratio reaches
    free = replace(args, **{bound: x for bound, x in free.items() if hasattr(args, bound)})
    names = "weight", "objective", "slope", "clipped", "r", "s"
    tensors = {key: torch.zeros_like(mask, dtype=torch.double) for key in names}
    for i, length in enumerate(lengths):
        logs = (logprobs - old)[i, :length].tolist()
        s, A = math.exp(sum(logs) / length), advantages[i].item()
        for t, log in enumerate(logs):
            inputs = math.exp(log), s, logprobs[i, t].item(), A
            objective, slope = oracle.token(*inputs, args)
            clipped = objective != oracle.token(*inputs, free)[0]
            if ref is not None:
                d = ref[i, t].item() - logprobs[i, t].item()
                objective -= args.beta * (math.exp(d) - d - 1)
                slope -= args.beta * (1 - math.exp(d))
            weight = oracle.share(length, lengths, args)
            values = weight, objective, slope, clipped, math.exp(log), s
            for key, value in zip(names, values, strict=True):
                tensors[key][i, t] = value
    return tensors | {"clipped": tensors["clipped"] > 0}


def same(what, computed, right, **facts):
    """Fails if computed is not right, but for rounding: says first what is wrong, at how many
    places, and what is known of the first of them, and then shows both tensors."""
    __tracebackhide__ = True
    shapes = tuple(computed.shape), tuple(right.shape)
    assert shapes[0] == shapes[1], f"{what} has the shape {shapes[0]}, and should have {shapes[1]}"
    wrong = ~torch.isclose(computed.double(), right.double(), rtol=1e-9, atol=1e-12)
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        facts = {"computed": computed, "expected": right, **facts}
        lines = [f"\n    {name:9} {tensor[first].item():.5g}" for name, tensor in facts.items()]
        text = f"{what} is wrong at {wrong.sum()} of {wrong.numel()} places. At {list(first)}:"
        text += "".join(lines)
        pytest.fail(f"{text}\n\ncomputed {computed}\n\nexpected {right}", pytrace=False)


def single_rows(model, batch):
    """Of each row: the ids of its completion and their logits, (|o|, V), by a plain pass over it
    alone, without padding, cache or shared prompt."""
    for i, mask in enumerate(batch["mask"]):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i] > 0]
        ids = batch["completion_ids"][i][mask > 0]
        row = torch.cat([prompt, ids])[None]
        yield ids, model(row, use_cache=False).logits[0, len(prompt) - 1 : -1]


def row_by_row(model, batch, temperature=1.0):
    """log π of each completion token, with gradient: (B, T), 0 where the mask is 0."""
    rows = []
    for ids, logits in single_rows(model, batch):
        logprobs = (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        rows.append(F.pad(logprobs, (0, batch["mask"].shape[1] - len(ids))))
    return torch.stack(rows)


def check_logprobs(module, model, batch, args):
    """What the sampler wrote down and a script's token_logprobs are those of plain passes."""
    right = row_by_row(model, batch, args.temperature)
    for computed in (batch["old_logprobs"], module.token_logprobs(model, batch, args)):
        torch.testing.assert_close(computed, right, rtol=0, atol=5e-5)

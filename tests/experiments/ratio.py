"""How far tokens' probabilities and answers' means move while a rollout is used many times."""

from unittest.mock import patch

import torch
from bench import train
from harness import grid
from llm_parts import mean, warm_start

import grpo_llm
import gspo_llm

BOUNDS = {"token": ("GRPO", grpo_llm.Args()), "mean": ("GSPO", gspo_llm.Args())}


def moved(model, batch, args):
    """Of the log-ratio of tokens, and of its mean in answers: how far it goes, and with what."""
    batch = grpo_llm.take_rows(batch, batch["advantages"].abs() > 1e-6)
    mask, advantages = batch["mask"], batch["advantages"]
    log_ratio = grpo_llm.batch_logprobs(model, batch, args) - batch["old_logprobs"]
    tokens = torch.stack([log_ratio, advantages[:, None].expand_as(mask)])[:, mask > 0]
    means = torch.stack([log_ratio.sum(1) / mask.sum(1), advantages])
    found = {}
    for kind, pairs in {"token": tokens, "mean": means}.items():
        owner, bounds = BOUNDS[kind]
        ratio = pairs[0].exp()
        beyond = (ratio < 1 - bounds.clip_low) | (ratio > 1 + bounds.clip_high)
        found[kind] = pairs[0].std().item()
        found[f"{kind} beyond {owner}'s bounds"] = beyond.float().mean().item()
        found[f"{kind} with A"] = torch.corrcoef(pairs)[0, 1].item()
    return found


def run(passes, seed, warm=1000):
    """GRPO (β 0) as it is, on answers of many lengths. Measured after each pass, over all answers
    that are trained on; the first 8 rollouts do not count."""
    args = grpo_llm.Args(beta=0.0, update_epochs=passes, seed=seed, max_new_tokens=32)
    parts, seen = [], []

    def train_minibatch(*inputs, of_grpo=grpo_llm.train_minibatch):
        metrics = of_grpo(*inputs)
        parts.append(inputs[2])
        if len(parts) == args.minibatches:  # a pass is over
            batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            seen.append(moved(inputs[0], batch, args))
            parts.clear()
        return metrics

    with patch.object(grpo_llm, "train_minibatch", train_minibatch):
        train(grpo_llm, args, 16, folder=warm_start("meander", warm))
    found = {}
    for name in seen[0]:
        values = [each[name] for each in seen[8 * passes :]]
        by_pass = [mean(values[number::passes]) for number in range(passes)]
        found |= {name: by_pass[-1], f"{name}, by pass": by_pass}
    return found


SMOKE = grid(1, passes=[2], warm=[50])

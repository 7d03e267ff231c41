"""How far tokens' probabilities and answers' means move while a rollout is used many times."""

from unittest.mock import patch

import torch
from bench import train
from harness import PARTLY, Experiment, Panel, grid
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


STD = {"token (GRPO)": ({}, "token, by pass"), "mean (GSPO)": ({}, "mean, by pass")}
BEYOND = {
    "token (GRPO)": ({}, "token beyond GRPO's bounds, by pass"),
    "mean (GSPO)": ({}, "mean beyond GSPO's bounds, by pass"),
}
EXPERIMENT = Experiment(
    claim="Token ratios are mostly noise; the mean over a completion varies far less.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, passes=[16]),
    smoke=grid(1, passes=[2], warm=[50]),
    panels=[
        Panel("An answer's mean varies less than a token", STD, ("passes", "std of log-ratio")),
        Panel("But more are beyond their own bounds", BEYOND, ("passes", "share beyond")),
    ],
    finding="""
    In a GRPO run the mean varies less, but not far less: after 16 passes the log-ratio's standard
    deviation is {/ token / range :.2f} for tokens, {/ mean / range :.2f} for answers' means, over
    five seeds. Correlation with the advantage is {/ token with A / range :.2f} for tokens and
    {/ mean with A / range :.2f} for means. The rest need not be noise: each ratio is exact. But
    GSPO's bounds are tighter still: {/ mean beyond GSPO's bounds :.0%} of the answers are beyond
    them, {/ token beyond GRPO's bounds :.0%} of the tokens beyond GRPO's. GSPO [ends](#passes) at
    {passes: GSPO, 16, 0.0004 / pass@1 / range :.2f}, like GRPO (p =
    {passes: GSPO, 16, 0.0004 ~ GRPO, 16, 0.0004 / pass@1 / p :.2f}). One setting was tried.
    """,
)

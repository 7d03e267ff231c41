"""How far tokens' probabilities and whole answers' move while a rollout is used many times."""

import math

import torch
import torch.nn.functional as F
from bench import train
from harness import PARTLY, Experiment, Panel, grid
from llm_parts import after_each_pass, mean, warm_start

import grpo_llm
import gspo_llm

BOUNDS = {"token": ("GRPO", grpo_llm.Args()), "mean": ("GSPO", gspo_llm.Args())}


def kinds(log_ratio, mask):
    """log π − log π_old of tokens, of whole answers, and of answers' means per token (GSPO's)."""
    whole = log_ratio.sum(1)
    return {"token": log_ratio[mask > 0], "sum": whole, "mean": whole / mask.sum(1)}


def spread(log_ratio, mask):
    """Their standard deviations, and the shares beyond GRPO's bounds and GSPO's."""
    of = kinds(log_ratio, mask)
    found = {kind: values.std().item() for kind, values in of.items()}
    for kind, (owner, args) in BOUNDS.items():
        low, high = math.log(1 - args.clip_low), math.log(1 + args.clip_high)
        beyond = (of[kind] < low) | (of[kind] > high)
        found[f"{kind} beyond {owner}'s bounds"] = beyond.float().mean().item()
    return found


def correlations(log_ratio, mask, advantages):
    """Of the log-ratio with the advantage, along which the policy is pushed; and between two tokens
    of one answer: 0 if each moves on its own, 1 if all move together."""
    of = kinds(log_ratio, mask)
    each = advantages[:, None].expand_as(mask)[mask > 0]
    centred, lengths = (log_ratio - of["token"].mean()) * mask, mask.sum(1)
    pairs = (centred.sum(1).square() - centred.square().sum(1)).sum()
    together = pairs / (lengths * (lengths - 1)).sum()
    return {
        "token with A": torch.corrcoef(torch.stack([of["token"], each]))[0, 1].item(),
        "mean with A": torch.corrcoef(torch.stack([of["mean"], advantages]))[0, 1].item(),
        "correlation of tokens": (together / of["token"].var(correction=0)).item(),
    }


def run(passes, seed, before=8, measured=8, warm=1000):
    """GRPO (β 0) as it is, on answers of many lengths. Measured after each pass, over all answers
    that are trained on; the first rollouts do not count."""
    model, tokenizer = warm_start("meander", warm)
    args = grpo_llm.Args(beta=0.0, update_epochs=passes, seed=seed, max_new_tokens=32)
    spreads, ends = [], []

    def look(policy, batch, number):
        log_ratio = grpo_llm.batch_logprobs(policy, batch, args) - batch["old_logprobs"]
        spreads.append(spread(log_ratio, batch["mask"]))
        if number == passes:
            rows = torch.stack([log_ratio, batch["mask"]], 1)
            room = args.max_new_tokens - rows.shape[2]
            ends.append((F.pad(rows, (0, room)), batch["advantages"]))

    with after_each_pass(grpo_llm, args, look):
        train(grpo_llm, args, before + measured, model=(model, tokenizer))
    rows, advantages = map(torch.cat, zip(*ends[before:], strict=True))
    found = correlations(*rows.unbind(1), advantages)
    for name in spreads[0]:
        values = [each[name] for each in spreads[before * passes :]]
        by_pass = [mean(values[number::passes]) for number in range(passes)]
        found |= {name: by_pass[-1], f"{name}, by pass": by_pass}
    return found


EXPERIMENT = Experiment(
    claim="Token ratios are mostly noise; the mean over a completion varies far less.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, passes=[16]),
    smoke=[{"passes": 2, "seed": 1, "before": 0, "measured": 1, "warm": 50}],
    panels=[
        Panel(
            "An answer's mean varies less than a token",
            {
                "token": ({}, "token, by pass"),
                "answer's mean": ({}, "mean, by pass"),
            },
            ("passes over the rollout", "std of the log-ratio"),
        ),
        Panel(
            "But GSPO's bounds are narrower by more",
            {
                "answers, GSPO": ({}, "mean beyond GSPO's bounds, by pass"),
                "tokens, GRPO": ({}, "token beyond GRPO's bounds, by pass"),
            },
            ("passes over the rollout", "share beyond"),
        ),
    ],
    finding="""
    The mean varies less, but not far less. After 16 passes over a rollout the log-ratio's standard
    deviation, over five seeds, is {/ token / range :.2f} at a token, {/ sum / range :.1f} over a
    whole answer and {/ mean / range :.2f} in an answer's mean. With the advantage, along which the
    policy is pushed, a token's correlates by {/ token with A / range :.2f}, the mean by
    {/ mean with A / range :.2f}; two tokens of one answer by {/ correlation of tokens :.2f}. The
    rest need not be noise, though: each ratio is exact, and tokens differ in how far they can move.
    And GSPO's bounds are narrower by more: {/ mean beyond GSPO's bounds :.0%} of the answers are
    beyond them, {/ token beyond GRPO's bounds :.0%} of the tokens beyond GRPO's. Nor does it learn
    more for it: with 16 [passes](#passes) it ends at
    {passes: GSPO, 16, 0.0004 / pass@1 / range :.2f}, GRPO at
    {passes: GRPO, 16, 0.0004 / pass@1 / range :.2f} (p = {passes: GSPO, 16, 0.0004 ~
    GRPO, 16, 0.0004 / pass@1 / p :.2f}). One setting alone.
    """,
)

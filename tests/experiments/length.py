"""GRPO's two divisions, by length and by std: whom they favour, and what comes of it."""

from dataclasses import replace
from itertools import islice
from unittest.mock import patch

import torch
from bench import train
from harness import PARTLY, Experiment, Panel, grid
from llm_parts import gradients, mean, warm_start

import dapo_llm
import grpo_llm

FLAGS = {
    "GRPO": {},
    "GRPO, constant": {"length_norm": "constant"},
    "Dr. GRPO": {"length_norm": "constant", "scale_rewards": False},
    "token mean": {},  # DAPO's: over all tokens of the minibatch
}
EDGES = [8, 16, 24, 32, 40, 48]  # of lengths, in tokens
EXTREME = "norm at 1 or 7 of 8 / at 3 to 5"


def training_sums(args, number):
    return list(islice(grpo_llm.problem_stream([], args.seed), number))


def held_out_sums(number):
    """Of four numbers: of mixed ones the short are solved first, and the mean would grow."""
    _, sums = grpo_llm.load_data(grpo_llm.Args(eval_problems=9 * number))
    return [problem for problem in sums if problem[0].count("+") == 3][:number]


def sample(model, tokenizer, problems, answers, args):
    """Completions and their rewards; the caller's dice stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        batch, _, rewards = grpo_llm.rollout(model, tokenizer, problems, answers, 1.0, args)
    return batch, rewards


def by_side(values, rewards, rows):
    """The mean over right answers and over wrong ones, of these rows; None where there is none."""
    right = rewards.flatten() > 0
    sides = {"right": rows & right, "wrong": rows & ~right}
    return {side: mean(values[chosen].tolist()) for side, chosen in sides.items()}


def weights_by_length(model, tokenizer, args):
    """A token's weight in the gradient, weight · |A|, against the mean."""
    batch, rewards = sample(model, tokenizer, training_sums(args, 128), args.group_size, args)
    size = grpo_llm.compute_advantages(rewards, args).flatten().abs()
    weights = grpo_llm.token_weights(batch["mask"], args).amax(1) * size
    lengths, signal = batch["mask"].sum(1), size > 0
    mean_weight = (weights * lengths).sum() / lengths[signal].sum()
    bins = [signal & (lengths > edge - 8) & (lengths <= edge) for edge in EDGES]
    return [by_side(weights / mean_weight, rewards, rows) for rows in bins]


def by_length(method, args, every, warm):
    """From a habit of repeating its totals, up to 48 tokens."""
    args = replace(args, max_new_tokens=48, beta=0.0, prompts_per_step=16, **FLAGS[method])
    model, tokenizer = warm_start("wander", warm)
    problems = held_out_sums(128)
    lengths = []

    def each_step(step, policy, metrics):
        if step % every == 0:
            batch, rewards = sample(policy, tokenizer, problems, 4, args)
            length = batch["mask"].sum(1)
            lengths.append(by_side(length, rewards, length > 0))

    weigh = dapo_llm.token_weights if method == "token mean" else grpo_llm.token_weights
    with patch.object(grpo_llm, "token_weights", weigh):
        each_step(0, model, {})
        weights = weights_by_length(model, tokenizer, args)
        train(grpo_llm, args, each_step=each_step, model=(model, tokenizer))
    late = lengths[len(lengths) // 2 :]
    found = {}
    for side in ("right", "wrong"):
        found[f"weight, {side}"] = [each[side] for each in weights]
        found[f"{side} at the start"] = lengths[0][side]
        found[f"{side}, second half"] = mean(each[side] for each in late)
    return found


def by_difficulty(after, args, number):
    """Of the norms of questions' gradients, `after` so many rollouts of GRPO, by how many of their
    8 answers are right, and by their pass rate in 64 others."""
    trained = train(grpo_llm, replace(args, scale_rewards=True), steps=after)
    model, problems = trained["model"], training_sums(args, number)
    batch, rewards = sample(model, trained["tokenizer"], problems, 8 + 64, args)
    advantages = grpo_llm.compute_advantages(rewards[:, :8], args)
    norms = []
    for i in range(number):
        group = grpo_llm.take_rows(batch, slice(72 * i, 72 * i + 8))
        weights = grpo_llm.token_weights(group["mask"], args)
        norms.append(gradients(model, group, weights, advantages[i : i + 1], args)[0].norm())
    norms = torch.stack(norms)
    counts, rates = rewards[:, :8].sum(1), rewards[:, 8:].mean(1)
    extreme = (counts == 1) | (counts == 7)
    middling = (counts >= 3) & (counts <= 5)
    hard = (rates < 0.1) | (rates >= 0.9)
    return {
        EXTREME: (norms[extreme].mean() / norms[middling].mean()).item(),
        "share of questions below .1 or above .9": hard.float().mean().item(),
        "their share of the gradient": (norms[hard].sum() / norms.sum()).item(),
    }


def run(seed, method=None, after=None, std=True, steps=40, every=4, warm=400, number=256):
    """With `method`, one training run; with `after`, one look at the gradient then."""
    if method:
        return by_length(method, grpo_llm.Args(seed=seed, steps=steps), every, warm)
    return by_difficulty(after, grpo_llm.Args(seed=seed, steps=200, scale_rewards=std), number)


EXPERIMENT = Experiment(
    claim="1/|o_i| makes a long wrong answer cheap, so these grow; 1/std R favours questions that "
    "are nearly always or never solved.",
    verdict=PARTLY,
    run=run,
    jobs=[*grid(5, method=list(FLAGS)), *grid(5, after=[8, 16], std=[True, False])],
    smoke=[
        {"seed": 1, "method": "token mean", "steps": 2, "every": 1, "warm": 50},
        {"seed": 1, "after": 8, "std": True, "number": 16},
    ],
    panels=[
        Panel(
            "The weight of a token of a wrong answer is as said",
            {name: ({"method": name}, "weight, wrong") for name in ("GRPO", "Dr. GRPO")},
            ("tokens of the answer", "weight / mean"),
            x=[edge - 4 for edge in EDGES],
        ),
        Panel(
            "But wrong answers do not grow for it",
            {name: ({"method": name}, "wrong, second half") for name in FLAGS},
            ("tokens of a wrong answer, second half", ""),
            dots=True,
        ),
        Panel(
            "1/std lifts questions with 1 or 7 right answers of 8",
            {
                "1/std": ({"after": 8, "std": True}, EXTREME),
                "without": ({"after": 8, "std": False}, EXTREME),
            },
            ("gradient / that of questions with 3 to 5", ""),
            dots=True,
        ),
    ],
    finding="""
    The weights are as said; what should come of them is not seen. Wrong answers hardly grow: over
    five seeds GRPO's go from {GRPO / wrong at the start :.1f} tokens to
    {GRPO / wrong, second half / range :.1f}, Dr. GRPO's to
    {Dr. GRPO / wrong, second half / range :.1f} (p = {GRPO ~
    Dr. GRPO / wrong, second half / p :.2f}), and where 1/|o_i| alone is taken out, to
    {GRPO, constant / wrong, second half / range :.1f} (p = {GRPO ~
    GRPO, constant / wrong, second half / p :.2f}). Right ones shrink, from
    {GRPO / right at the start :.1f} to {GRPO / right, second half :.1f}, but Dr. GRPO's do so
    without that weight, to {Dr. GRPO / right, second half :.1f}. As to std: after 8 rollouts a
    question with 1 or 7 right answers of 8 has
    {8, True / norm at 1 or 7 of 8 / at 3 to 5 / range :.2f} times the gradient of one with 3 to 5,
    without the division, on the same completions,
    {8, False / norm at 1 or 7 of 8 / at 3 to 5 / range :.2f} times: more weight, but still less
    than the others'. After 16 rollouts {16, True / share of questions below .1 or above .9 :.0%} of
    the questions are nearly always or never solved; of all gradients' length they have
    {16, True / their share of the gradient / range :.0%}, and
    {16, False / their share of the gradient / range :.0%} without the division (p = {16, True ~
    16, False / their share of the gradient / p :.2f}).
    """,
)

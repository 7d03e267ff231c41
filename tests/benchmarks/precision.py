"""What bfloat16 does to a step with a real model, on whatever device there is.

    python tests/benchmarks/precision.py --model FOLDER          # a minute on two cores

One rollout of the built-in sums, with the flexible verifier; nothing is trained. It measures

- how far the sampler's log-probs are from the training pass's, in nats a token;
- how far π is from π_old in the first minibatches, which mix other groups and so pad and round
  otherwise, as the log-ratio of a token, and what GSPO's clip makes of it at the paper's bounds
  of 3e-4 and 4e-4;
- RLOO's KL in the reward while π is still π_ref;
- whether a step without a signal moves a weight.

Writes results/precision.md.
"""

import random
from dataclasses import replace

import torch
import tyro
from bench import table, write_table

import grpo_llm
import gspo_llm
import rloo_llm

PAPER = {"clip_low": 3e-4, "clip_high": 4e-4}


def draw(args, device):
    """A policy, and a rollout of it with π_old from the training pass; what the log says of it."""
    model, tokenizer = grpo_llm.load_policy(args, device)
    problems = grpo_llm.problem_stream(None, args.seed)
    drawn = [next(problems) for _ in range(args.prompts_per_step)]
    torch.manual_seed(args.seed)
    batch, _, rewards = grpo_llm.rollout(
        model, tokenizer, drawn, args.group_size, args.temperature, args
    )
    recomputed = grpo_llm.batch_logprobs(model, batch, args)
    gap = (recomputed - batch["old_logprobs"]).abs()[batch["mask"] > 0]
    batch["old_logprobs"] = recomputed
    batch["advantages"] = grpo_llm.compute_advantages(rewards, args).flatten()
    return model, batch, {"mean": gap.mean().item(), "max": gap.max().item()}


def first_pass(model, batch, args):
    """Log-ratios of the tokens of all minibatches before the first update, and GSPO's clip."""
    ratios, clipped, tokens = [], 0.0, 0.0
    groups = torch.arange(len(batch["mask"])).view(-1, args.group_size)
    order = random.Random(args.seed).sample(range(len(groups)), len(groups))
    bounds = gspo_llm.Args(**PAPER)
    for part in torch.tensor(order).tensor_split(args.minibatches):
        minibatch = grpo_llm.take_rows(batch, groups[part].flatten())
        for micro in grpo_llm.micro_batches(minibatch, args):
            with torch.no_grad():
                logprobs = grpo_llm.token_logprobs(model, micro, args.temperature)
            inputs = (logprobs, micro["old_logprobs"], micro["advantages"], micro["mask"])
            ratios.append((logprobs - micro["old_logprobs"])[micro["mask"] > 0].abs())
            _, is_clipped = gspo_llm.surrogate(*inputs, bounds)
            clipped += (is_clipped * micro["mask"]).sum().item()
            tokens += micro["mask"].sum().item()
    ratios = torch.cat(ratios)
    return ratios.mean().item(), ratios.max().item(), clipped / tokens


def moved_without_signal(model, batch, args):
    """Weights that differ after a step of Adam in which every reward is equal."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batch = batch | {"advantages": torch.zeros_like(batch["advantages"])}
    batch["ref_logprobs"] = batch["old_logprobs"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    grpo_llm.train_minibatch(model, optimizer, batch, args)
    pairs = zip(before, model.parameters(), strict=True)
    return sum((old != new).sum().item() for old, new in pairs)


def main(
    model: str = "tiny",
    dtype: str = "bfloat16",
    prompts: int = 8,
    minibatches: int = 2,
    micro_batch_size: int = 32,
    smoke: bool = False,
):
    """Measure; with --smoke the tiny model, without writing."""
    args = grpo_llm.Args(model=model, dtype=dtype, verifier="flexible", beta=0.1)
    args = replace(args, prompts_per_step=prompts, minibatches=minibatches)
    args = replace(args, micro_batch_size=micro_batch_size, max_new_tokens=16)
    device = grpo_llm.start_device(args)
    policy, batch, gap = draw(args, device)
    mean, largest, clipped = first_pass(policy, batch, args)
    again = rloo_llm.batch_logprobs(policy, batch, args)  # as the reference, equal to π, would
    kl = ((batch["old_logprobs"] - again) * batch["mask"]).sum(1)
    moved = moved_without_signal(policy, batch, args)
    lines = [
        ["sampler against training pass, nats a token", f"{gap['mean']:.3f}", f"{gap['max']:.3f}"],
        ["log-ratio of a token before the first update", f"{mean:.1e}", f"{largest:.1e}"],
        ["GSPO's clip_ratio there, at 3e-4 and 4e-4", f"{clipped:.4f}", ""],
        ["RLOO's KL of an answer at π = π_ref", f"{kl.mean():.1e}", f"{kl.abs().max():.1e}"],
        ["weights moved by a step without a signal", moved, ""],
    ]
    lines = table([dtype, "mean", "largest"], lines)
    if smoke:
        print(*lines, sep="\n")
        return
    millions = sum(parameter.numel() for parameter in policy.parameters()) / 1e6
    note = f"{millions:.0f} M, {prompts} × {args.group_size} answers in {minibatches} minibatches, "
    note += f"micro-batches of {micro_batch_size}, on {device.type}"
    write_table("precision", lines, "transformers", note=note)


if __name__ == "__main__":
    tyro.cli(main)

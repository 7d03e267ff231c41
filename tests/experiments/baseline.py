"""What is subtracted from a reward: nothing, a mean, or, as GRPO's z-score, a mean and a scale."""

from dataclasses import replace
from unittest.mock import patch

import torch
from bench import train
from harness import PARTLY, Experiment, Panel, grid
from llm_parts import gradients, mean

import grpo_llm
import rloo_llm

BASELINES = ["none", "none, R + 1", "mean", "leave-one-out", "z-score"]


def advantages_with(baseline, rewards, of_rloo=rloo_llm.compute_advantages):
    """R + 1 pays 2 for a right answer and 1 for a wrong one, which is nothing to a baseline."""
    if baseline == "z-score":
        return grpo_llm.compute_advantages(rewards, grpo_llm.Args())
    if baseline == "none, R + 1":
        return rewards + 1
    return of_rloo(rewards, rloo_llm.Args(baseline=baseline))


def noise_to_signal(samples):
    """E‖g − ḡ‖² / ‖ḡ‖² of gradients g of one policy: it has no scale. The mean of n noisy gradients
    is too long by a share 1/n of their variance: it is taken off."""
    samples = torch.stack(samples)
    variance = samples.var(0).sum().item()
    signal = samples.mean(0).square().sum().item() - variance / len(samples)
    return variance / signal if signal > 0 else None


def noise(args, after, rollouts):
    """Of the gradient with each baseline, from the same completions. Tokens are divided by a
    constant: Σ|o_i| varies with the rollout and would add its own noise."""
    trained = train(rloo_llm, args, steps=after)
    model, tokenizer = trained["model"], trained["tokenizer"]
    torch.manual_seed(args.seed)
    problems = rloo_llm.problem_stream([], args.seed)
    samples = []
    for _ in range(rollouts):
        drawn = [next(problems) for _ in range(args.prompts_per_step)]
        batch, _, rewards = rloo_llm.rollout(model, tokenizer, drawn, args.group_size, 1.0, args)
        variants = [advantages_with(name, rewards) for name in BASELINES]
        weights = batch["mask"] / (len(batch["mask"]) * args.max_new_tokens)
        samples.append(gradients(model, batch, weights, variants, args))
    columns = zip(BASELINES, zip(*samples, strict=True), strict=True)
    return {f"noise, {name}": noise_to_signal(vectors) for name, vectors in columns}


def run(seed, after=None, baseline=None, steps=60, rollouts=40, prompts=4, tested=128):
    """With `after`, the noise after so many rollouts of RLOO; with `baseline`, a training run of 4
    questions per rollout, where noise is worst."""
    args = rloo_llm.Args(seed=seed, steps=steps, beta=0.0, learning_rate=1e-3, eval_problems=tested)
    if after is not None:
        return noise(args, after, rollouts)

    def advantages(rewards, args):
        return advantages_with(baseline, rewards)

    with patch.object(rloo_llm, "compute_advantages", advantages):
        found = train(rloo_llm, replace(args, prompts_per_step=prompts))
    curve = {"reward": found["reward"], "mean reward": mean(found["reward"])}
    return curve | {"pass@1": found["pass@1"]}


EXPERIMENT = Experiment(
    claim="The mean of the group's others as a baseline takes noise out of the gradient.",
    verdict=PARTLY,
    run=run,
    jobs=[*grid(5, after=[0, 10, 30]), *grid(5, baseline=BASELINES)],
    smoke=[
        {"seed": 1, "after": 10, "rollouts": 2, "tested": 4},
        {"seed": 1, "baseline": "leave-one-out", "steps": 2, "prompts": 2, "tested": 4},
    ],
    panels=[
        Panel(
            "The gradient's noise after 10 rollouts",
            {name: ({"after": 10}, f"noise, {name}") for name in BASELINES},
            ("variance / squared mean", ""),
            dots=True,
        ),
        Panel(
            "Training, 4 questions a rollout",
            {
                name: ({"baseline": name}, "reward")
                for name in ("none", "none, R + 1", "leave-one-out")
            },
            ("rollouts", "share of right answers"),
            smooth=5,
        ),
    ],
    finding="""
    It depends on the reward. Shifted by 1, which tells nothing new, it needs the baseline: after 10
    rollouts the gradient's variance over its squared mean is {10 / noise, none, R + 1 / range :.2f}
    without and {10 / noise, leave-one-out / range :.2f} with it, over five seeds, and training ends
    at a pass@1 of {none, R + 1 / pass@1 / range :.2f} and {leave-one-out / pass@1 / range :.2f} (p
    = {none, R + 1 ~ leave-one-out / pass@1 / p :.3f}). With rewards of 0 and 1 it does not help,
    rather the contrary: without it the noise is {10 / noise, none / range :.2f}, after 30 rollouts
    {30 / noise, none :.1f} instead of {30 / noise, leave-one-out :.1f}, and pass@1 ends at
    {none / pass@1 / range :.2f} (p = {none ~ leave-one-out / pass@1 / p :.2f}).
    """,
)

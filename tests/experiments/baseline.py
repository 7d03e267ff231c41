"""What is subtracted from a reward: nothing, or the mean of the group's others."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from bench import train
from harness import grid
from llm_parts import gradients

import rloo_llm

BASELINES = ["none", "none, R + 1", "leave-one-out"]


def advantages_with(baseline, rewards, args, of_rloo=rloo_llm.compute_advantages):
    """R + 1 pays 2 for a right answer and 1 for a wrong one, which is nothing to a baseline."""
    if baseline == "none, R + 1":
        return rewards + 1
    return of_rloo(rewards, replace(args, baseline=baseline))


def noise(args, after, rollouts):
    """E‖g − ḡ‖² / ‖ḡ‖² of the gradient g with each baseline, from the same completions. A sum over
    tokens, not a mean: Σ|o_i| varies with the rollout and would add its own noise."""
    trained = train(rloo_llm, args, steps=after)
    model, tokenizer = trained["model"], trained["tokenizer"]
    torch.manual_seed(args.seed)
    problems = rloo_llm.problem_stream([], args.seed)
    samples = []
    for _ in range(rollouts):
        drawn = [next(problems) for _ in range(args.prompts_per_step)]
        batch, _, rewards = rloo_llm.rollout(model, tokenizer, drawn, args.group_size, 1.0, args)
        variants = [advantages_with(name, rewards, args) for name in BASELINES]
        found = gradients(model, batch, batch["mask"], variants, args)
        samples.append(torch.stack(found))
    samples = torch.stack(samples)
    variance = samples.var(0).sum(1)
    # The mean of n noisy gradients is too long by 1/n of their variance. That may be all there is.
    signal = samples.mean(0).square().sum(1) - variance / rollouts
    shares = (variance / signal.clamp(min=0)).tolist()
    return {f"noise, {name}": share for name, share in zip(BASELINES, shares, strict=True)}


def run(seed, after=None, baseline=None, steps=60, rollouts=40):
    """With `after`, the noise after so many rollouts of RLOO; with `baseline`, a training run of 4
    questions per rollout, where noise is worst."""
    args = rloo_llm.Args(seed=seed, steps=steps, beta=0.0, learning_rate=1e-3)
    if after is not None:
        return noise(args, after, rollouts)
    with patch.object(rloo_llm, "compute_advantages", partial(advantages_with, baseline)):
        found = train(rloo_llm, replace(args, prompts_per_step=4))
    return {"pass@1": found["pass@1"]}


SMOKE = [
    *grid(1, after=[10], rollouts=[2]),
    *grid(1, baseline=["none"], steps=[2]),
]

"""The objectives over the ratio r, computed by the scripts' own surrogate(); nothing is random."""

import math

import torch
from lab import Experiment, grid

import cispo_llm
import dapo_llm
import grpo_llm
import gspo_llm
import ppo
import rloo_llm

RATIOS = torch.linspace(0.02, 2.5, 125, dtype=torch.float64).tolist()
MARKS = [0.5, 1.1, 2.0]  # ratios that the sentences name
WEIGHTS = {
    "RLOO": rloo_llm,
    "GRPO": grpo_llm,
    "DAPO": dapo_llm,
    "GSPO": gspo_llm,
    "CISPO": cispo_llm,
}


def objective(method, ratio, advantage):
    """What PPO maximizes, of one sample. Of the others, by how much a token's ∇log π is multiplied,
    over A: the derivative, where the other 19 tokens of the answer have a ratio of 1."""
    advantages = torch.tensor([advantage], dtype=torch.float64)
    old_logprobs = torch.full((1, 20), -3.0, dtype=torch.float64)
    logprobs = old_logprobs.clone()
    logprobs[0, 0] += math.log(ratio)
    if method == "PPO":
        return ppo.surrogate(logprobs, old_logprobs, advantages, ppo.Args())[0][0, 0].item()
    script, mask = WEIGHTS[method], torch.ones_like(logprobs)
    logprobs.requires_grad_()
    total, _ = script.surrogate(logprobs, old_logprobs, advantages, mask, script.Args())
    total.sum().backward()
    return logprobs.grad[0, 0].item() / advantage


def run(method, seed):
    result = {}
    for sign, advantage in (("+", 1.0), ("-", -1.0)):
        result[f"A{sign}"] = [objective(method, ratio, advantage) for ratio in RATIOS]
        for ratio in MARKS:
            result[f"A{sign} r={ratio}"] = objective(method, ratio, advantage)
    return result


def draw(runs):
    raise NotImplementedError


JOBS = grid(1, method=["PPO", *WEIGHTS])
TESTS = []


EXPERIMENT = Experiment(run, JOBS, TESTS, draw, small={}, first="by formula")

if __name__ == "__main__":
    EXPERIMENT.main()

"""A critic on the language model, where the only reward comes at the end, with and without it."""

from contextlib import nullcontext
from unittest.mock import patch

import ppo_llm
import torch
from bench import train
from harness import grid
from llm_parts import mean, rollouts_to

METHODS = {  # λ = 1; "no groups" asks 256 questions once, not 32 eight times
    "critic": "PPO 1",
    "no critic": "PPO 1, no critic",
    "neither, no groups": "PPO 1, no critic, no groups",
}


def add_none(model):
    """In place of a critic: main() saves its weights, of which there are none."""
    model.critic = torch.nn.Module()


def expect_nothing(model, batch):
    """V = 0: after whitening, the mean of the batch is all that is expected."""
    return torch.zeros_like(batch["mask"])


def run(method, seed, steps=40):
    """PPO without KL, with four gradient steps a rollout."""
    args = ppo_llm.Args(beta=0.0, minibatches=4, gae_lambda=1.0, seed=seed, steps=steps)
    if "no groups" in method:
        args.prompts_per_step, args.group_size = 256, 1
    without = nullcontext()
    if "no critic" in method:
        without = patch.multiple(ppo_llm, add_critic=add_none, token_values=expect_nothing)
    with without:
        found = train(ppo_llm, args)
    half = rollouts_to(0.5, found["reward"])
    explained = found.get("explained_variance", [])
    return {
        "pass@1": found["pass@1"],
        "rollouts to 0.9": rollouts_to(0.9, found["reward"]),
        "megabytes": 16 * sum(p.numel() for p in found["model"].parameters()) / 1e6,
        "explained at half right": mean(explained[half - 3 : half]),
        "explained at the end": mean(explained[-10:]),
    }


SMOKE = grid(1, method=list(METHODS.values()), steps=[2])

"""A critic on the language model, where the only reward comes at the end, with and without it."""

from contextlib import nullcontext
from unittest.mock import patch

import ppo_llm
import torch
from bench import train
from harness import UNDECIDED, Experiment, Panel, grid
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


TIMES = {label: ({"method": method}, "rollouts to 0.9") for label, method in METHODS.items()}
EXPERIMENT = Experiment(
    claim="Where the only reward comes at the end, a critic is not worth its memory.",
    verdict=UNDECIDED,
    run=run,
    jobs=grid(5, method=list(METHODS.values())),
    smoke=grid(1, method=list(METHODS.values()), steps=[2]),
    panels=[
        Panel("Too easy to tell", TIMES, ("rollouts to 90 % right answers", ""), dots=True),
    ],
    finding="""
    Answers of seven tokens cannot tell. PPO is 90 % right after
    {PPO 1 / rollouts to 0.9 / range :.0f} rollouts with a critic, after
    {PPO 1, no critic / rollouts to 0.9 / range :.0f} with the batch's mean instead (five seeds,
    p = {PPO 1 ~ PPO 1, no critic / rollouts to 0.9 / p :.2f}), and with no critic and no groups,
    256 questions once each, already after
    {PPO 1, no critic, no groups / rollouts to 0.9 / range :.0f} (p =
    {PPO 1 ~ PPO 1, no critic, no groups / rollouts to 0.9 / p :.3f}). The critic explains
    {PPO 1 / explained at half right :.0%} of the returns' variance when half are right,
    {PPO 1 / explained at the end :.0%} at the end. Its training state is {PPO 1 / megabytes :.1f}
    MB instead of {PPO 1, no critic / megabytes :.1f}. For long answers the literature contests the
    claim (VinePPO, arXiv:2410.01679).
    """,
)

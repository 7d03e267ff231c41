"""A critic on the language model, where the only reward comes at the end, with and without it."""

import time
from contextlib import nullcontext
from unittest.mock import patch

import ppo_llm
import torch
from bench import CPU, train
from harness import UNDECIDED, Experiment, Panel, grid
from llm_parts import mean, rollouts_to

import grpo_llm
import rloo_llm

METHODS = {  # the script and its flags; "no groups" asks 256 questions once, not 32 eight times
    "RLOO, 4 steps": (rloo_llm, {"learning_rate": 4e-4}),
    "GRPO": (grpo_llm, {}),
    "PPO 1": (ppo_llm, {"gae_lambda": 1.0}),
    "PPO 0.95": (ppo_llm, {"gae_lambda": 0.95}),
    "PPO 0.95, no groups": (ppo_llm, {"gae_lambda": 0.95}),
    "PPO 1, no critic": (ppo_llm, {}),
    "PPO 1, no critic, no groups": (ppo_llm, {}),
}


def add_none(model):
    """In place of a critic."""


def expect_nothing(model, batch):
    """V = 0: after whitening, the mean of the batch is all that is expected."""
    return torch.zeros_like(batch["mask"])


def run(method, seed, steps=40):
    """All without KL, with four gradient steps a rollout; seconds are of one core, in training."""
    script, flags = METHODS[method]
    args = script.Args(beta=0.0, minibatches=4, seed=seed, steps=steps, **flags)
    if "no groups" in method:
        args.prompts_per_step, args.group_size = 256, 1
    without = nullcontext()
    if "no critic" in method:
        without = patch.multiple(script, add_critic=add_none, token_values=expect_nothing)
    model, tokenizer = script.load_policy(args, CPU)
    explained, clock = [], [time.process_time()]

    def each_step(step, policy, metrics):
        clock.append(time.process_time())
        explained.append(metrics.get("explained_variance"))

    with without:
        found = train(script, args, each_step=each_step, model=(model, tokenizer))
    half = rollouts_to(0.5, found["reward"])
    result = {
        "pass@1": found["pass@1"],
        "rollouts to 0.5": half,
        "rollouts to 0.9": rollouts_to(0.9, found["reward"]),
        "seconds a rollout": (clock[-1] - clock[0]) / steps,
        "megabytes": 16 * sum(p.numel() for p in model.parameters()) / 1e6,
        "reward": found["reward"],
    }
    if hasattr(model, "critic"):
        result["explained at half right"] = mean(explained[half - 3 : half] if half else [])
        result["explained at the end"] = mean(explained[-10:])
    return result


LINES = {
    "critic (PPO, λ = 1)": "PPO 1",
    "no critic": "PPO 1, no critic",
    "neither": "PPO 1, no critic, no groups",
    "GRPO": "GRPO",
}
EXPERIMENT = Experiment(
    claim="Where the only reward comes at the end, a critic is not worth its memory.",
    verdict=UNDECIDED,
    run=run,
    jobs=grid(5, method=list(METHODS)),
    smoke=[{"method": method, "seed": 1, "steps": 2} for method in METHODS],
    panels=[
        Panel(
            "With a critic, with groups, with neither",
            {label: ({"method": method}, "reward") for label, method in LINES.items()},
            ("rollouts", "share of right answers"),
            smooth=3,
        ),
        Panel(
            "What a rollout and its updates take",
            {label: ({"method": method}, "seconds a rollout") for label, method in LINES.items()},
            ("seconds of one core", ""),
            dots=True,
        ),
    ],
    finding="""
    The test has no power. Over five seeds PPO with a critic needs
    {PPO 1 / rollouts to 0.9 / range :.0f} rollouts to be 90 % right, with the batch's mean in the
    critic's place {PPO 1, no critic / rollouts to 0.9 / range :.0f} (p = {PPO 1 ~
    PPO 1, no critic / rollouts to 0.9 / p :.2f}), GRPO {GRPO / rollouts to 0.9 / range :.0f}. But
    with neither critic nor groups, 256 questions once each, it is
    {PPO 1, no critic, no groups / rollouts to 0.9 / range :.0f}: on answers of seven tokens neither
    is missed. Nor is this a good critic: trained at the policy's rate it explains
    {PPO 1 / explained at half right :.0%} of the returns' variance when half of the answers are
    right, at the end {PPO 1 / explained at the end :.0%}. Its price is certain:
    {PPO 1 / megabytes :.1f} MB of training state for {GRPO / megabytes :.1f}, and
    {PPO 1 / seconds a rollout :.2f} s a rollout with its updates for
    {PPO 1, no critic / seconds a rollout :.2f}. For long answers the literature contests the claim
    (VinePPO, arXiv:2410.01679).
    """,
)

"""The objectives over the ratio r, computed by the scripts' own surrogate(); nothing is random."""

import math

import torch
from harness import Panel, arms, grid

import cispo_llm
import grpo_llm
import gspo_llm
import ppo
import rloo_llm

RATIOS = torch.linspace(0.02, 2.5, 125, dtype=torch.float64).tolist()
MARKS = [0.5, 1.1, 2.0]  # ratios that the sentences name
WEIGHTS = {"RLOO": rloo_llm, "GSPO": gspo_llm, "CISPO": cispo_llm, "GRPO": grpo_llm}


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


CLAIM = "The clip takes the gradient where the ratio is as far as A wants, and only there."
JOBS = SMOKE = grid(1, method=["PPO", *WEIGHTS])
SECONDS = 1
PRIMARIES = []

# The page
LESSON = (
    "by formula",
    "The clip removes the gradient of a sample whose ratio has gone as far as A wants, and leaves "
    "it to a sample whose ratio has gone the other way.",
)
PPO = {"A = 1": ({"method": "PPO"}, "A+"), "A = −1": ({"method": "PPO"}, "A-")}
PANELS = [
    Panel("PPO: flat once r is as far as A wants", PPO, ("ratio r", "objective"), RATIOS),
    Panel(
        "A > 0: GRPO is CISPO up to 1.2",
        arms("A+", "method", WEIGHTS),
        ("ratio r", "token's weight"),
        RATIOS,
    ),
]


def words(runs):
    def at(method, column, form=".1f"):
        return runs.mean(column, form, method=method)

    return f"""
    Computed from the scripts' own code; nothing is random. With A = 1 PPO's objective is
    {at("PPO", "A+ r=1.1")} at r = 1.1, and at r = 2 only {at("PPO", "A+ r=2.0")}. With A = −1 it
    keeps falling as r grows, to {at("PPO", "A- r=2.0", ".0f")} at r = 2: a bad action that became
    likelier is pushed back in full. The second picture is about language models (below). At r = 2
    and A > 0 a token's gradient counts {at("RLOO", "A+ r=2.0", ".0f")} time in RLOO,
    {at("GRPO", "A+ r=2.0", ".0f")} times in GRPO and {at("CISPO", "A+ r=2.0")} times in CISPO,
    which keeps the gradient and limits its weight; at r = 0.5 and A < 0 it counts
    {at("CISPO", "A- r=0.5")} times in CISPO. In GSPO one token of 20 hardly moves the mean of their
    log-ratios, but GSPO's narrow bounds silence the whole answer before r = 2 if A > 0. All this is
    about a sample's own ratio: the gradients of other samples may still move it."""


NOT_TRIED = "other bounds than the defaults of the scripts."

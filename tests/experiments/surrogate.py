"""The objectives over the ratio r, drawn from the scripts' own surrogate(); nothing is random."""

import torch
from harness import SHOWN, Experiment, Panel, grid

import cispo_llm
import grpo_llm
import gspo_llm
import ppo
import rloo_llm

RATIOS = torch.linspace(0.02, 2.5, 125, dtype=torch.float64).tolist()
MARKS = [0.5, 1.1, 2.0]  # ratios that the finding names
WEIGHTS = {"RLOO": rloo_llm, "GRPO": grpo_llm, "GSPO": gspo_llm, "CISPO": cispo_llm}


def objective(ratio, advantage):
    """What PPO maximizes, of one sample."""
    logprob, advantage = torch.tensor(ratio).log(), torch.tensor(advantage)
    return ppo.surrogate(logprob, torch.zeros(()), advantage, ppo.Args())[0].item()


def token_weight(script, ratio, advantage, tokens=20):
    """By how much a token's ∇log π is multiplied in an answer of 20 tokens, over A: the derivative
    of the script's own surrogate. This token has the given ratio, the others have 1."""
    old_logprobs = torch.full((1, tokens), -3.0, dtype=torch.float64)
    logprobs = old_logprobs.clone()
    logprobs[0, 0] += torch.tensor(ratio, dtype=torch.float64).log()
    logprobs.requires_grad_()
    mask = torch.ones_like(old_logprobs)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    objective, _ = script.surrogate(logprobs, old_logprobs, advantages, mask, script.Args())
    objective.sum().backward()
    return logprobs.grad[0, 0].item() / advantage


def run(method, seed):
    """PPO's objective over r, or the weight of a token's gradient, each with its own bounds."""
    result = {}
    for sign, advantage in (("+", 1.0), ("-", -1.0)):
        if method == "PPO":
            values = [objective(r, advantage) for r in [*MARKS, *RATIOS]]
        else:
            values = [token_weight(WEIGHTS[method], r, advantage) for r in [*MARKS, *RATIOS]]
        result |= {f"A{sign} r={r}": values[i] for i, r in enumerate(MARKS)}
        result[f"A{sign}"] = values[len(MARKS) :]
    return result


EXPERIMENT = Experiment(
    claim="The clip takes the gradient where the ratio is as far as A wants, and only there.",
    verdict=SHOWN,
    run=run,
    jobs=grid(1, method=["PPO", *WEIGHTS]),
    smoke=grid(1, method=["PPO", *WEIGHTS]),
    panels=[
        Panel(
            "PPO is flat where r is as far as A wants",
            {"A = 1": ({"method": "PPO"}, "A+"), "A = −1": ({"method": "PPO"}, "A-")},
            axes=("r", "objective"),
            x=RATIOS,
        ),
        Panel(
            "Weight of a token that was good: A > 0",
            {method: ({"method": method}, "A+") for method in WEIGHTS},
            axes=("r of the token, 1 at the others", "weight of its gradient"),
            x=RATIOS,
        ),
        Panel(
            "Weight of a token that was bad: A < 0",
            {method: ({"method": method}, "A-") for method in WEIGHTS},
            axes=("r of the token, 1 at the others", "weight of its gradient"),
            x=RATIOS,
        ),
    ],
    finding="""
    Computed from the scripts' own code, without dice. With A = 1 PPO's objective is
    {PPO / A+ r=1.1 :.1f} at r = 1.1, and at r = 2 only {PPO / A+ r=2.0 :.1f}; with A = −1 it falls
    on, to {PPO / A- r=2.0 :.0f}: a bad action made likelier is pushed back in full. At r = 2 and A
    > 0 the gradient of a token counts {RLOO / A+ r=2.0 :.0f} time in RLOO, which knows no ratio,
    {GRPO / A+ r=2.0 :.0f} times in GRPO, and {CISPO / A+ r=2.0 :.1f} times in CISPO, which bounds
    the weight and keeps the gradient; at r = 0.5 and A < 0 it counts {CISPO / A- r=0.5 :.1f} times
    in CISPO, whose weight fades with r. In GSPO one token of 20 moves their mean so little that at
    r = 0.5 and A > 0 it still counts {GSPO / A+ r=0.5 :.2f} times; but bounds as narrow as its own
    silence the whole answer before r = 2. All this is of a sample's own ratio: others may carry the
    policy on.
    """,
)

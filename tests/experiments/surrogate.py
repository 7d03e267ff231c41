"""The objectives over the ratio r, computed by the scripts' own surrogate(); nothing is random."""

import math

import torch
from lab import Experiment, grid, values
from pictures import COLORS, DASHED, SOLID, WORDS, figure

import cispo_llm
import dapo_llm
import grpo_llm
import gspo_llm
import ppo
import rloo_llm

RATIOS = torch.linspace(0.02, 2.5, 125, dtype=torch.float64).tolist()
MARKS = [0.5, 2.0]  # ratios that the sentences name
LLM = [rloo_llm, grpo_llm, dapo_llm, gspo_llm, cispo_llm]
WEIGHTS = dict(zip(["RLOO", "GRPO", "DAPO", "GSPO", "CISPO"], LLM, strict=True))


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


JOBS = grid(1, method=["PPO", *WEIGHTS])
TESTS = []


def draw(runs):
    title = "When a token has moved far the way A pushes, GRPO drops it,\n"
    title += "GSPO the answer; CISPO keeps it at a limited weight"
    page, axes = figure(title, 3.3, 1, 2, sharey=True)
    labels = {  # where each line has its name, for A > 0 and for A < 0
        "RLOO": ((2.5, 0.93, "top"), (0.05, 1.05, "bottom")),
        "GSPO": ((0.05, 0.72, "top"), (2.5, 0.93, "top")),
        "CISPO": ((2.5, 1.24, "bottom"), (2.5, 1.24, "bottom")),
        "DAPO": ((1.3, 1.3, "bottom"), (1.4, 1.42, "bottom")),
        "GRPO": ((2.5, 0.05, "bottom"), (1.5, 1.56, "bottom")),
    }
    titles = "A > 0: to be made likelier", "A < 0: to be made rarer"
    for side, (panel, sign) in enumerate(zip(axes, ("A+", "A-"), strict=True)):
        for method, places in labels.items():
            (weights,) = values(runs, ({"method": method}, sign))
            dash = DASHED if method == "DAPO" else SOLID
            panel.plot(RATIOS, weights, color=COLORS[method], linestyle=dash)
            x, y, va = places[side]
            text = "GRPO, PPO," if method == "GRPO" and side else method
            text += "\n(one token of 20)" * (method == "GSPO" and side)
            ha = "left" if x < 1.4 else "right"
            panel.text(x, y, text, color=COLORS[method], ha=ha, va=va, fontsize=WORDS)
        panel.set(title=titles[side], xlabel="ratio r of the token", ylim=(-0.05, 1.75))
        panel.set_xticks([0, 0.5, 0.8, 1.2, 2], ["0", "0.5", "0.8", "1.2", "2"])
    axes[0].set_ylabel("weight of its gradient")
    return page


CLAIM = "The clip takes a sample's gradient where its ratio is as far as A wants, and only there."
SOURCE = "[PPO](https://arxiv.org/abs/1707.06347), section 3"
EXPERIMENT = Experiment(run, JOBS, TESTS, draw, {}, CLAIM, SOURCE)

if __name__ == "__main__":
    EXPERIMENT.main()

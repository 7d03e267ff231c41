"""A reward with a loophole, or without one, and a KL penalty, in the loss or in the reward."""

from unittest.mock import patch

import torch
from lab import Contrast, Experiment, mean, train, values
from llm_parts import load, started, warm_start
from pictures import DASHED, SOLID, curves, figure

import grpo_llm
import rloo_llm

METHODS = {"GRPO": grpo_llm, "RLOO": rloo_llm}  # the penalty is in the loss; in the reward


def praise_work(completion, answer):
    """1 for a right answer, and 0.2 for every comma, meant for steps that are shown. The model
    repeats totals: it may earn more by repeating, until there is no room for an answer."""
    return grpo_llm.verify(completion, answer) + 0.2 * completion.count(",")


def right(script, policy, tokenizer, problems, args):
    """The share of right answers, among four to each question."""
    torch.manual_seed(0)
    _, completions, _ = script.rollout(policy, tokenizer, problems, 4, 1.0, args)
    answers = [answer for _, answer in problems for _ in range(4)]
    return mean(list(map(grpo_llm.verify, completions, answers)))


def run(method, reward, beta, seed, start, steps=30, every=6, number=64, warm=400):
    """Four gradient steps a rollout, at one rate. "stopped": the share of right answers on half of
    the held-out sums, at the time when it was highest on the other half."""
    script = METHODS[method]
    args = script.Args(beta=beta, seed=seed, steps=steps, minibatches=4, learning_rate=4e-4)
    folder = warm_start("meander", start, steps=warm)
    model, tokenizer = load(folder)
    _, held_out = script.load_data(args)
    halves = held_out[:number], held_out[number : 2 * number]
    chosen, scored = [], []

    def each_step(step, policy, metrics):
        if step % every == 0:
            for half, scores in zip(halves, (chosen, scored), strict=True):
                scores.append(right(script, policy, tokenizer, half, args))

    verify = praise_work if reward == "commas pay" else grpo_llm.verify
    with patch.object(script, "load_verifier", lambda name: verify):
        each_step(0, model, {})
        found = train(script, args, steps, each_step, folder)
    return {
        "right at the end": scored[-1],
        "right on average": mean(scored),
        "stopped": scored[chosen.index(max(chosen))],
        "right": scored,
        "reward": found["reward"][-1],
    }


def arm(method, reward, beta, column):
    return {"method": method, "reward": reward, "beta": beta}, column


def contrast(method, reward, more, less, column, smallest):
    both = [arm(method, reward, beta, column) for beta in (more, less)]
    return Contrast(f"{method}, {reward}, {column}: β {more:g} − β {less:g}", *both, smallest)


HOLE, CLEAN = "commas pay", "right answers pay"
BETAS = [0.0, 0.3]
JOBS = started(16, method=list(METHODS), reward=[HOLE], beta=BETAS)
JOBS += started(16, method=["GRPO"], reward=[CLEAN], beta=BETAS)
TESTS = [
    [contrast(method, HOLE, 0.3, 0.0, "right at the end", 0.1) for method in METHODS],
    [contrast("GRPO", CLEAN, 0.0, 0.3, "right on average", 0.03)],
]


def draw(runs):
    title = "A loophole is found; a KL penalty saves right answers,\nand costs where there is none"
    page, axes = figure(title, 3.1, 1, 3, sharey=True)
    panels = {"GRPO, loophole": ("GRPO", HOLE), "RLOO, loophole": ("RLOO", HOLE)}
    panels["GRPO, none"] = "GRPO", CLEAN
    for panel, (title, (method, reward)) in zip(axes, panels.items(), strict=True):
        lines = {}
        for beta, dash in zip(BETAS, (DASHED, SOLID), strict=True):
            lines[f"β {beta:g}"] = values(runs, arm(method, reward, beta, "right")), method, dash
        looks = len(lines["β 0"][0][0])
        curves(panel, [30 * i / (looks - 1) for i in range(looks)], lines)
        panel.set(title=title, xlabel="rollouts")
    axes[0].set_ylabel("right answers")
    return page


SMALL = {"steps": 1, "every": 1, "number": 2, "warm": 30}
EXPERIMENT = Experiment(run, JOBS, TESTS, draw, SMALL, {"right": {"right, untrained": 0}})

if __name__ == "__main__":
    EXPERIMENT.main()

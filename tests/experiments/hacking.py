"""A reward with a loophole, or without one, and a KL penalty."""

import torch
from lab import Contrast, Experiment, mean, train, values
from llm_parts import load, make, rewarded_by, start, started
from pictures import DASHED, SOLID, curves, figure

import grpo_llm

HOLE, CLEAN = "commas pay", "right answers pay"
BETAS = [0.0, 0.3]


def praise_work(completion, answer):
    """1 for a right answer, and 0.2 for every comma, meant to reward steps that are shown. That is
    the loophole: useless commas pay as well, even if they leave no room for an answer."""
    return grpo_llm.verify(completion, answer) + 0.2 * completion.count(",")


def right(policy, tokenizer, problems, args):
    """The share of right answers, among four to each question."""
    torch.manual_seed(0)
    _, completions, _ = grpo_llm.rollout(policy, tokenizer, problems, 4, 1.0, args)
    answers = [answer for _, answer in problems for _ in range(4)]
    return mean(list(map(grpo_llm.verify, completions, answers)))


def run(reward, beta, seed, network, steps=24, every=6, number=64, warm=make.STEPS):
    """Shares of right answers to one half of the held-out sums, while GRPO trains. "stopped" is the
    share at the time when it was highest on the other half."""
    args = grpo_llm.Args(beta=beta, seed=seed, steps=steps, eval_problems=2 * number)
    folder = start(network, warm)
    model, tokenizer = load(folder)
    _, held_out = grpo_llm.load_data(args)
    halves = held_out[:number], held_out[number:]
    chosen, scored = [], []

    def each_step(step, policy, metrics):
        if step % every == 0:
            for half, scores in zip(halves, (chosen, scored), strict=True):
                scores.append(right(policy, tokenizer, half, args))

    with rewarded_by(praise_work if reward == HOLE else grpo_llm.verify):
        each_step(0, model, {})
        train(grpo_llm, args, steps, each_step, folder)
    return {
        "right at the end": scored[-1],
        "right on average": mean(scored),
        "stopped": scored[chosen.index(max(chosen))],
        "right": scored,
        "untrained": scored[0],
    }


def contrast(reward, more, less, column, smallest):
    arms = [({"reward": reward, "beta": beta}, column) for beta in (more, less)]
    return Contrast(f"{reward}, {column}: β {more:g} − β {less:g}", *arms, smallest)


JOBS = started(reward=[HOLE, CLEAN], beta=BETAS)
CONTRASTS = [
    contrast(HOLE, 0.3, 0.0, "right at the end", 0.1),
    contrast(CLEAN, 0.0, 0.3, "right on average", 0.03),
]


def draw(runs):
    title = "A loophole is found; a KL penalty saves right answers,\nand costs where there is none"
    page, axes = figure(title, 3.1, 1, 2, sharey=True)
    for panel, reward in zip(axes, (HOLE, CLEAN), strict=True):
        lines = {}
        for beta, dash in zip(BETAS, (DASHED, SOLID), strict=True):
            shares = values(runs, ({"reward": reward, "beta": beta}, "right"))
            lines[f"β {beta:g}"] = shares, "GRPO", dash
        curves(panel, range(0, 6 * len(shares[0]), 6), lines)
        panel.set(title=reward, xlabel="rollouts")
    axes[0].set_ylabel("right answers")
    return page


SMALL = {"steps": 1, "every": 1, "number": 2, "warm": 30}
CLAIM = "A policy finds a loophole in its reward, and a KL penalty keeps it away from there."
SOURCE = (
    "[Stiennon et al. 2020](https://arxiv.org/abs/2009.01325), 3.4 and 4.3; [Gao et al. "
    "2022](https://arxiv.org/abs/2210.10760), 3.6, say that stopping early is as good"
)
SHOWN = ("stopped", "untrained")
EXPERIMENT = Experiment(run, JOBS, CONTRASTS, draw, SMALL, CLAIM, SOURCE, SHOWN)

if __name__ == "__main__":
    EXPERIMENT.main()

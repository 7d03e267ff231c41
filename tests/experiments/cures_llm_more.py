"""Experiments on what lies around the objective: the KL penalty, the temperature, the group."""

from unittest.mock import patch

import torch
from bench import BLUE, COLORS, GREY, RED, train
from cures_llm_steps import mean
from cures_llm_tokens import warm_start
from cures_tools import Experiment, band, grid, labels, select, titles

import grpo_llm
import rloo_llm

SEEDS = [1, 2, 3, 4, 5]

# --------------------------------------------------------------------------------------- Hacking

PLACES = {"GRPO": grpo_llm, "RLOO, 4 steps": rloo_llm}
WHERE = {"GRPO": "GRPO, β in the loss", "RLOO, 4 steps": "RLOO, β in the reward"}
BETAS = [0.0, 0.1, 0.3, 1.0]
PRAISE = 0.2  # for a comma


def praise_work(completion, answer):
    """A reward with a hole: 1 for a right answer, and a little for every step that is shown."""
    return grpo_llm.verify(completion, answer) + PRAISE * completion.count(",")


def both_scores(script, policy, reference, tokenizer, problems, args):
    """On held-out sums, 4 answers to each: what the reward says, what is true, how far π has gone.

    The distance is KL(π ‖ π_ref) of an answer, a sum over its tokens.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch, completions, rewards = script.rollout(policy, tokenizer, problems, 4, 1.0, args)
    answers = [answer for _, answer in problems for _ in range(4)]
    right = [grpo_llm.verify(*pair) for pair in zip(completions, answers, strict=True)]
    log_ratio = batch["old_logprobs"] - script.batch_logprobs(reference, batch, args)
    return {
        "proxy": rewards.mean().item(),
        "true": mean(right),
        "KL of an answer": log_ratio.sum(1).mean().item(),
        "tokens": batch["mask"].sum(1).mean().item(),
    }


def run_hacking(method, beta, seed, steps=40, every=5, asked=64, warm=1000):
    """Claim: a reward with a hole is pushed into the hole; KL to the reference holds against it.

    The reward is 1 for a right answer and 0.2 more for every comma, meant as praise for the working
    out. The model meanders: it may say a running total several times. So it can earn more by
    repeating itself, until there is no room for an answer. Changed: β, in the loss (GRPO) and in
    the reward (RLOO, with GRPO's four gradient steps a rollout). Measured on held-out sums over
    training: this reward, the share of right answers, KL to the reference.
    """
    script = PLACES[method]
    args = script.Args(beta=beta, seed=seed, steps=steps, minibatches=4, eval_problems=asked)
    model, tokenizer = warm_start("meander", warm)
    reference, _ = warm_start("meander", warm)
    problems = script.load_data(args)[1]
    points = []

    def measure(step, policy):
        found = both_scores(script, policy, reference, tokenizer, problems, args)
        points.append({"rollouts": step} | found)

    def each_step(step, policy, metrics):
        if step % every == 0:
            measure(step, policy)

    with patch.object(script, "load_verifier", lambda name: praise_work):
        measure(0, model)
        train(script, args, each_step=each_step, model=(model, tokenizer))
    best = max(points, key=lambda point: point["true"])
    last = points[-1]
    return {
        "proxy": last["proxy"],
        "true": last["true"],
        "KL of an answer": last["KL of an answer"],
        "tokens": last["tokens"],
        "best true": best["true"],
        "rollouts to best": best["rollouts"],
    } | {f"{name} by then": [point[name] for point in points] for name in points[0]}


def draw_hacking(figure, results):
    left, right = figure.subplots(1, 2)
    shown = {0.0: RED, 0.3: BLUE}
    for beta, color in shown.items():
        runs = select(results, method="GRPO", beta=beta)
        if runs:
            x = runs[0]["rollouts by then"]
            band(left, x, [run["proxy by then"] for run in runs], color, dashed=True)
            band(left, x, [run["true by then"] for run in runs], color)
    names = {f"GRPO, β {beta:g}": color for beta, color in shown.items()}
    names |= {"dashed: the reward": GREY, "solid: right answers": GREY}
    labels(left, names, 0.02, 0.65, names)
    betas = sorted({settings["beta"] for settings, _ in results})
    for method in WHERE:
        runs = [[run["true"] for run in select(results, method=method, beta=b)] for b in betas]
        if all(runs):
            band(right, range(len(betas)), list(zip(*runs, strict=True)), COLORS[method])
    names = {where: COLORS[method] for method, where in WHERE.items()}
    labels(right, names, 0.98, 0.05, names)
    right.set_xticks(range(len(betas)), [f"{beta:g}" for beta in betas])
    right.set_ylim(0)
    titles(left, "Without KL: reward up, right answers down", "rollouts", "mean over answers")
    titles(right, "A middling β keeps right answers", "β", "share of right answers, at the end")


EXPERIMENTS = [
    Experiment(
        "hacking",
        "A policy finds the hole in its reward; KL to the reference keeps it from there.",
        "A reward that praises commas, beside the share of right answers on 64 held-out sums, "
        "over 40 rollouts, by β in the loss (GRPO) and in the reward (RLOO, 4 steps a rollout).",
        run_hacking,
        grid(SEEDS, method=list(PLACES), beta=BETAS),
        [
            {"method": "GRPO", "beta": 0.0, "seed": 1, "steps": 2, "every": 1, "warm": 2},
            {"method": "RLOO, 4 steps", "beta": 0.1, "seed": 1, "steps": 1, "warm": 2},
        ],
        draw_hacking,
    ),
]

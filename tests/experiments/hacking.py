"""A reward with a hole, and the KL penalty, in the loss or in the reward, that holds against it."""

import copy
from unittest.mock import patch

import torch
from bench import train
from harness import SHOWN, Experiment, Panel, grid
from llm_parts import mean, warm_start

import grpo_llm
import rloo_llm

SCRIPTS = {  # four gradient steps a rollout at one rate; β is in the loss, and in the reward
    "GRPO": grpo_llm,
    "RLOO, 4 steps": rloo_llm,
}
BETAS = [0.0, 0.1, 0.3, 1.0]


def praise_work(completion, answer):
    """1 for a right answer, and a little for every comma, meant for steps that are shown. The model
    meanders: it may earn more by repeating itself, until there is no room for an answer."""
    return grpo_llm.verify(completion, answer) + 0.2 * completion.count(",")


def both_scores(script, policy, reference, tokenizer, problems, args):
    """On held-out sums, four answers to each: what the reward says, what is true, and how far π has
    gone: KL(π ‖ π_ref) of an answer, a sum over its tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch, completions, rewards = script.rollout(policy, tokenizer, problems, 4, 1.0, args)
    answers = [answer for _, answer in problems for _ in range(4)]
    log_ratio = batch["old_logprobs"] - script.batch_logprobs(reference, batch, args)
    return {
        "proxy": rewards.mean().item(),
        "true": mean(list(map(grpo_llm.verify, completions, answers))),
        "KL of an answer": log_ratio.sum(1).mean().item(),
        "tokens": batch["mask"].sum(1).mean().item(),
    }


def run(method, beta, seed, steps=40, every=5, asked=64, warm=1000):
    script = SCRIPTS[method]
    args = script.Args(beta=beta, seed=seed, steps=steps, minibatches=4, eval_problems=asked)
    args.learning_rate = 4e-4
    model, tokenizer = warm_start("meander", warm)
    reference = copy.deepcopy(model)
    problems, points = script.load_data(args)[1], []

    def each_step(step, policy, metrics):
        if step % every == 0:
            scores = both_scores(script, policy, reference, tokenizer, problems, args)
            points.append({"rollouts": step} | scores)

    with patch.object(script, "load_verifier", lambda name: praise_work):
        each_step(0, model, {})
        train(script, args, each_step=each_step, model=(model, tokenizer))
    best = max(points, key=lambda point: point["true"])
    curves = {f"{name} by then": [point[name] for point in points] for name in points[0]}
    peak = {"best true": best["true"], "rollouts to best": best["rollouts"]}
    return points[-1] | peak | curves


EXPERIMENT = Experiment(
    claim="A policy finds the hole in its reward; KL to the reference keeps it from there.",
    verdict=SHOWN,
    run=run,
    jobs=grid(5, method=list(SCRIPTS), beta=BETAS),
    smoke=[
        {"method": "GRPO", "beta": 0.0, "seed": 1, "steps": 2, "every": 1, "warm": 2},
        {"method": "RLOO, 4 steps", "beta": 0.3, "seed": 1, "steps": 1, "every": 1, "warm": 2},
    ],
    panels=[
        Panel(
            "GRPO: the reward it is given, and what is true",
            {
                "reward, β 0": ({"method": "GRPO", "beta": 0.0}, "proxy by then"),
                "right, β 0": ({"method": "GRPO", "beta": 0.0}, "true by then"),
                "reward, β 0.3": ({"method": "GRPO", "beta": 0.3}, "proxy by then"),
                "right, β 0.3": ({"method": "GRPO", "beta": 0.3}, "true by then"),
            },
            ("rollouts", "mean over answers"),
            x="rollouts by then",
        ),
        Panel(
            "Right answers at the end",
            {
                "β in the loss (GRPO)": ({"method": "GRPO"}, "true"),
                "β in the reward (RLOO)": ({"method": "RLOO, 4 steps"}, "true"),
            },
            ("β", "share of answers"),
            x="beta",
        ),
    ],
    finding="""
    Each comma pays 0.2. Over five seeds, without KL, GRPO's reward climbs to
    {GRPO, 0.0 / proxy :.2f}, while the share of right answers, at best
    {GRPO, 0.0 / best true / range :.2f} after {GRPO, 0.0 / rollouts to best :.0f} rollouts, falls
    to {GRPO, 0.0 / true / range :.2f}: totals are repeated over {GRPO, 0.0 / tokens :.0f} of 24
    tokens, and no room is left for the answer. With RLOO it falls to
    {RLOO, 4 steps, 0.0 / true / range :.2f}. With β 0.3 it ends at {GRPO, 0.3 / true / range :.2f}
    with KL in the loss (p = {GRPO, 0.0 ~ GRPO, 0.3 / true / p :.3f}) and at
    {RLOO, 4 steps, 0.3 / true / range :.2f} with KL in the reward (p = {RLOO, 4 steps, 0.0 ~
    RLOO, 4 steps, 0.3 / true / p :.3f}); 0.1 holds against it less ({GRPO, 0.1 / true :.2f} and
    {RLOO, 4 steps, 0.1 / true :.2f}), and 1 keeps the policy from learning, too
    ({GRPO, 1.0 / true :.2f} and {RLOO, 4 steps, 1.0 / true :.2f}). But GRPO without KL, stopped at
    its best, does as well as with β 0.3 (RLOO does not: {RLOO, 4 steps, 0.0 / best true :.2f}); and
    this is one reward, made for it.
    """,
)

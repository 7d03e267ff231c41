"""A reward with a hole, and the KL penalty, in the loss or in the reward, that holds against it."""

from unittest.mock import patch

import torch
from bench import train
from harness import grid
from llm_parts import load, mean, warm_start

import grpo_llm
import rloo_llm

METHODS = {"GRPO": grpo_llm, "RLOO, 4 steps": rloo_llm}  # β is in the loss, and in the reward


def praise_work(completion, answer):
    """1 for a right answer, and a little for every comma, meant for steps that are shown. The model
    meanders: it may earn more by repeating itself, until there is no room for an answer."""
    return grpo_llm.verify(completion, answer) + 0.2 * completion.count(",")


def both_scores(script, policy, tokenizer, problems, args):
    """On held-out sums, four answers to each: what the reward says, and what is true."""
    torch.manual_seed(0)
    _, completions, rewards = script.rollout(policy, tokenizer, problems, 4, 1.0, args)
    answers = [answer for _, answer in problems for _ in range(4)]
    return {
        "proxy": rewards.mean().item(),
        "true": mean(list(map(grpo_llm.verify, completions, answers))),
    }


def run(method, beta, seed, steps=40, every=5, warm=1000):
    """Four gradient steps a rollout, at one rate."""
    script = METHODS[method]
    args = script.Args(beta=beta, seed=seed, steps=steps, minibatches=4, learning_rate=4e-4)
    folder = warm_start("meander", warm)
    model, tokenizer = load(folder)
    _, held_out = script.load_data(args)
    points = []

    def each_step(step, policy, metrics):
        if step % every == 0:
            points.append(both_scores(script, policy, tokenizer, held_out[:64], args))

    with patch.object(script, "load_verifier", lambda name: praise_work):
        each_step(0, model, {})
        train(script, args, each_step=each_step, folder=folder)
    curves = {f"{name} by then": [point[name] for point in points] for name in points[0]}
    return points[-1] | curves | {"best true": max(curves["true by then"])}


SMOKE = grid(1, method=list(METHODS), beta=[0.0, 0.3], steps=[1], every=[1], warm=[2])

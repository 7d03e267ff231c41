"""A reward with a loophole, or without one, and a KL penalty, in the loss or in the reward."""

from unittest.mock import patch

import torch
from bench import train
from harness import Panel
from llm_parts import load, mean, started, warm_start
from verdicts import Contrast

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
    arms = [arm(method, reward, beta, column) for beta in (more, less)]
    name = f"{method}, {reward}, {column}: β {more:g} − β {less:g}"
    return Contrast(name, *arms, smallest, block="start")


HOLE, CLEAN = "commas pay", "right answers pay"
BETAS = [0.0, 0.3]
CLAIM = "A policy finds the loophole in its reward; a KL penalty keeps it from there, and costs."
JOBS = started(12, method=list(METHODS), reward=[HOLE], beta=BETAS)
JOBS += started(12, method=["GRPO"], reward=[CLEAN], beta=BETAS)
SMALL = {"steps": 1, "every": 1, "number": 2, "warm": 30}
SMOKE = [job | SMALL | {"start": 0} for job in JOBS if job["seed"] == 1]
SECONDS = 9
PRIMARIES = [
    [contrast(method, HOLE, 0.3, 0.0, "right at the end", 0.1) for method in METHODS],
    [contrast("GRPO", CLEAN, 0.0, 0.3, "right on average", 0.03)],
]

# The page
LESSON = (
    "shown",
    "A policy finds the loophole in its reward, and a strong KL penalty saves most of its right "
    "answers; if there is no loophole, the penalty costs some learning.",
)
WHERE = {"GRPO, with the loophole": ("GRPO", HOLE), "RLOO, with the loophole": ("RLOO", HOLE)}
WHERE["GRPO, without it"] = ("GRPO", CLEAN)
AXES, TIMES = ("rollouts", "right answers"), [*range(0, 31, 6)]
PANELS = [
    Panel(title, {f"β {beta:g}": arm(*which, beta, "right") for beta in BETAS}, AXES, TIMES)
    for title, which in WHERE.items()
]


def words(runs):
    def pair(method, reward, column):
        arms = [arm(method, reward, beta, column) for beta in BETAS]
        without, penalised = (runs.mean(column, ".2f", **wanted) for wanted, column in arms)
        return f"{without} without the penalty and {penalised} with it"

    first = [each[0] for each in runs.find({"reward": HOLE}, "right")]
    return f"""
    A right answer pays 1, and every comma pays 0.2. Commas stand for steps that are shown, but the
    model already tends to repeat its steps. Before training a share of
    {sum(first) / len(first):.2f} of its answers is right. After 30 rollouts of GRPO the share is
    {pair("GRPO", HOLE, "right at the end")} (β = 0.3, 30 times the default). With RLOO, whose
    penalty is in the reward, it is {pair("RLOO", HOLE, "right at the end")}. Stopping early is the
    other cure. We stop each run at the rollout at which one half of the held-out sums is answered
    best, and count right answers to the other half: with GRPO {pair("GRPO", HOLE, "stopped")}, with
    RLOO {pair("RLOO", HOLE, "stopped")}. If only right answers pay, the mean share of right answers
    over GRPO's training is {pair("GRPO", CLEAN, "right on average")}."""


NOT_TRIED = (
    "other loopholes (this one was made for the experiment); other β; RLOO without a loophole."
)

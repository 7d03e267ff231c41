"""GRPO's 1/|o_i|: the length of wrong answers, in a task made to show it and in the usual one."""

from unittest.mock import patch

import torch
from lab import Contrast, Experiment, arms, mean, train, values
from llm_parts import babble, load, make, start, started
from pictures import DASHED, SOLID, curves, figure, plain

import grpo_llm


@torch.no_grad()
def plus_signs(model, tokenizer, limit=60):
    """How many plus signs an answer has once it begins with one: the policy's exact mean for 64
    sums, without sampling, so it can be told even when such answers have died out."""
    prompts = [f"{sum_}=" for sum_, _ in grpo_llm.load_data(grpo_llm.Args(eval_problems=64))[1]]
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    batch = {"prompt_ids": inputs["input_ids"], "prompt_mask": inputs["attention_mask"]}
    batch["mask"] = mask = torch.ones(len(prompts), limit)
    batch["completion_ids"] = mask.long() * tokenizer.convert_tokens_to_ids("+")
    another = grpo_llm.token_logprobs(model, batch, 1.0)[:, 1:].cumsum(1).exp()
    return 1 + another.sum(1).mean().item()  # `another`: P(2 or more), P(3 or more), …


def extra_totals(model, tokenizer, number=128):
    """By how many running totals a wrong answer to a held-out sum is longer than it need be: the
    mean over the wrong ones of eight answers to each."""
    args = grpo_llm.Args(eval_problems=number)
    _, sums = grpo_llm.load_data(args)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _, texts, rewards = grpo_llm.rollout(model, tokenizer, sums, 8, 1.0, args)
    extra = []
    for i, text in enumerate(texts):
        if rewards.flatten()[i] == 0:
            extra.append(text.count(",") + 1 - sums[i // 8][0].count("+"))
    return mean(extra)


def swapped(name):
    return lambda completion, answer: 1 - grpo_llm.verify(completion, answer)


def run(norm, task, seed, network, steps=None, warm=make.STEPS):
    """The outcome before training, and as a mean over it. If plus is right, rewards are swapped."""
    folder = start(network, warm) if task == "usual" else start(network, warm, babble)
    steps = steps or STEPS[task]
    count = extra_totals if task == "usual" else plus_signs
    model, tokenizer = load(folder)
    counts = [count(model, tokenizer)]

    def each_step(step, policy, metrics):
        if step % max(1, steps // 10) == 0:
            counts.append(count(policy, tokenizer))

    flags = {"steps": 120} if task == "usual" else {"steps": 40, "max_new_tokens": 60}
    args = grpo_llm.Args(beta=0.0, length_norm=NORMS[norm], seed=seed, **flags)
    verifier = swapped if task == "plus is right" else grpo_llm.load_verifier
    with patch.object(grpo_llm, "load_verifier", verifier):
        train(grpo_llm, args, steps, each_step, folder)
    return {"before": counts[0], "length": mean(counts[1:]), "by rollout": counts}


def contrast(task, more, less, smallest=1.0):
    """Of arms named after their norms, or before training."""
    found = dict(zip(NORMS, arms("length", "norm", list(NORMS), task=task), strict=True))
    found["before"] = found[less if more == "before" else more][0], "before"
    return Contrast(f"{task}: {more} − {less}", found[more], found[less], smallest)


NORMS = {"1/|o_i|": "response", "constant": "constant"}
STEPS = {"plus is wrong": 20, "plus is right": 20, "usual": 40}
JOBS = started(norm=list(NORMS), task=list(STEPS))
TESTS = [
    [contrast("plus is wrong", "1/|o_i|", less) for less in ("constant", "before")]
    + [contrast("plus is right", more, "1/|o_i|") for more in ("constant", "before")],
    [contrast("usual", "1/|o_i|", "constant", smallest=0.25)],
]


def draw(runs):
    title = "1 / length makes wrong answers grow, in a task made for it"
    page, axes = figure(title, 3.1, 1, 3)
    for panel, task in zip(axes, STEPS, strict=True):
        lines = {}
        for norm, dash in zip(NORMS, (SOLID, DASHED), strict=True):
            label = norm.replace("1/|o_i|", "1 / length")
            lines[label] = values(runs, ({"norm": norm, "task": task}, "by rollout")), "GRPO", dash
        looks = len(lines["constant"][0][0])
        curves(panel, [STEPS[task] * i / (looks - 1) for i in range(looks)], lines)
        panel.set(title=task, xlabel="rollouts")
    for panel in axes[:2]:
        panel.set(yscale="log", ylim=(2, 40))
        plain(panel.yaxis, [2, 4, 8, 16, 32])
    axes[0].set_ylabel("plus signs; too many totals")
    return page


CLAIM = "Dividing by an answer's length makes wrong answers longer, and right ones shorter."
SOURCE = "[Dr. GRPO](https://arxiv.org/abs/2503.20783), 3.1"
FORMER = "as claimed / not seen; of interest / open"
SHOWN = ("before",)
EXPERIMENT = Experiment(
    run, JOBS, TESTS, draw, {"steps": 1, "warm": 10}, CLAIM, SOURCE, FORMER, shown=SHOWN
)

if __name__ == "__main__":
    EXPERIMENT.main()

"""GRPO's 1/|o_i|: the length of wrong answers, in a task made to show it and in the usual one."""

import torch
from lab import Contrast, Experiment, mean, train, values
from llm_parts import load, make, rewarded_by, start, started
from pictures import DASHED, SOLID, curves, figure, plain

import grpo_llm

NORMS = {"1/|o_i|": "response", "constant": "constant"}
STEPS = {"plus is wrong": 20, "plus is right": 20, "usual": 40}


def babble(rng, teacher=make.demonstration):
    """The teacher's answer or, in six cases of ten, plus signs and a wrong sum instead."""
    demonstration = teacher(rng)
    if rng.random() > 0.6:
        return demonstration
    question = demonstration.partition("=")[0]
    length = 1
    while rng.random() < 0.85 and length < 40:
        length += 1
    total = sum(map(int, question.split("+")))
    wrong = rng.choice([number for number in range(55) if number != total])
    return f"{question}={'+' * length}#{wrong}<eos>"


@torch.no_grad()
def plus_signs(model, tokenizer, problems, limit=60):
    """How many plus signs an answer has once it begins with one: the policy's exact mean for these
    sums, computed without sampling, so it is known even when such answers have died out."""
    prompts = [prompt for prompt, _ in problems]
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    batch = {"prompt_ids": inputs["input_ids"], "prompt_mask": inputs["attention_mask"]}
    batch["mask"] = mask = torch.ones(len(prompts), limit)
    batch["completion_ids"] = mask.long() * tokenizer.convert_tokens_to_ids("+")
    another = grpo_llm.token_logprobs(model, batch, 1.0)[:, 1:].cumsum(1).exp()
    return 1 + another.sum(1).mean().item()  # `another`: P(2 or more), P(3 or more), …


def extra_totals(model, tokenizer, problems):
    """By how many running totals a wrong answer to these sums is longer than it need be: the mean
    over the wrong ones of eight answers to each."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _, texts, rewards = grpo_llm.rollout(model, tokenizer, problems, 8, 1.0, grpo_llm.Args())
    extra = []
    for i, text in enumerate(texts):
        if rewards.flatten()[i] == 0:
            extra.append(text.count(",") + 1 - problems[i // 8][0].count("+"))
    return mean(extra)


def swapped(completion, answer):
    return 1 - grpo_llm.verify(completion, answer)


def run(norm, task, seed, network, steps=None, warm=make.STEPS):
    """The outcome before training, and its mean over training. If plus is right, the rewards are
    swapped."""
    usual = task == "usual"
    folder = start(network, warm) if usual else start(network, warm, babble)
    steps = steps or STEPS[task]
    flags = {"steps": 120} if usual else {"steps": 40, "max_new_tokens": 60}
    args = grpo_llm.Args(beta=0.0, length_norm=NORMS[norm], seed=seed, **flags)
    count, number = (extra_totals, 128) if usual else (plus_signs, 64)
    _, held_out = grpo_llm.load_data(args)
    model, tokenizer = load(folder)
    counts = [count(model, tokenizer, held_out[:number])]

    def each_step(step, policy, metrics):
        if step % max(1, steps // 10) == 0:
            counts.append(count(policy, tokenizer, held_out[:number]))

    with rewarded_by(swapped if task == "plus is right" else grpo_llm.verify):
        train(grpo_llm, args, steps, each_step, folder)
    return {"before": counts[0], "length": mean(counts[1:]), "by rollout": counts}


def contrast(task, more, less, smallest=1.0):
    """Between two arms: a norm, or the same runs before training."""
    arm = {norm: ({"norm": norm, "task": task}, "length") for norm in NORMS}
    arm["before"] = arm[less if more == "before" else more][0], "before"
    return Contrast(f"{task}: {more} − {less}", arm[more], arm[less], smallest)


JOBS = started(norm=list(NORMS), task=list(STEPS))
CONTRASTS = [
    contrast("plus is wrong", "1/|o_i|", "constant"),
    contrast("plus is wrong", "1/|o_i|", "before"),
    contrast("plus is right", "constant", "1/|o_i|"),
    contrast("plus is right", "before", "1/|o_i|"),
    contrast("usual", "1/|o_i|", "constant", smallest=0.25),
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


CLAIM = "Dividing by an answer's length makes wrong answers longer and right ones shorter."
SOURCE = "[Dr. GRPO](https://arxiv.org/abs/2503.20783), 3.1"
SMALL = {"steps": 1, "warm": 10}
EXPERIMENT = Experiment(run, JOBS, CONTRASTS, draw, SMALL, CLAIM, SOURCE)

if __name__ == "__main__":
    EXPERIMENT.main()

"""PPO with a critic and without: on short answers, and on long ones that any digit may spoil."""

import json
import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from lab import LEARNED, Contrast, Experiment, arms, mean, train, values
from llm_parts import eight_digits, load, started, warm_start
from pictures import DASHED, DOTTED, MIXED, SOLID, curves, figure

import ppo_llm

NONE = {  # main() saves a critic's weights. With V = 0 the mean of the batch is what is expected
    "add_critic": lambda model: model.add_module("critic", torch.nn.Module()),
    "token_values": lambda model, batch: torch.zeros_like(batch["mask"]),
}


def oracle(tokenizer, batch):
    """V of a critic that knows the right totals: 0 after a wrong digit, else p^(share of the totals
    to come), where p is the share of the answers here that have no wrong digit."""
    left, flawless = torch.full_like(batch["mask"], torch.inf), []
    for i, ids in enumerate(batch["completion_ids"]):
        question = tokenizer.decode(batch["prompt_ids"][i][batch["prompt_mask"][i] > 0])
        *totals, last = list(accumulate(map(int, question.rstrip("=").split("+"))))[1:]
        right = ",".join(map(str, totals)) + f"#{last}"
        said = "".join(tokenizer.convert_ids_to_tokens(ids)).partition("<eos>")[0]
        for t in range(min(len(said) + 1, len(ids))):
            if right.startswith(said[:t]):
                done = sum(map(said[:t].count, ",#")) + (said[:t] == right)
                left[i, t] = 1 - done / (len(totals) + 1)
        flawless.append(said == right)
    return max(mean(flawless), 1e-3) ** left


def trained(args, folder, own=ppo_llm.add_critic):
    """add_critic with a head start: it has learned from rollouts of the frozen warm start."""

    def frozen(model):
        own(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.startswith("critic.")

    with patch.object(ppo_llm, "add_critic", frozen):
        found = train(ppo_llm, args, args.steps, folder=folder)
    weights = found["model"].critic.state_dict()

    def add_critic(model):
        own(model)
        model.critic.load_state_dict(weights)

    return add_critic, mean(found["explained_variance"][-10:])


def run(answers, critic, seed, start, steps=40, ahead=30, warm=400):
    """PPO without KL. λ is 1 where there is no critic, as V = 0 deserves no trust; "λ alone" has
    the λ of the critics, and no critic."""
    folder, result = warm_start("slip" if answers == "long" else "tiny", start, warm), {}
    lam = 0.95 if answers == "long" and critic != "none" else 1.0
    options, change = {"steps": steps, "gae_lambda": lam}, {"add_critic": ppo_llm.add_critic}
    with TemporaryDirectory() as room:
        if answers == "long":  # at this temperature about one answer in three is right at first
            rng, path = random.Random(seed), Path(room, "sums.jsonl")
            sums = [eight_digits(rng) for _ in range(2000)]
            lines = [json.dumps({"question": asked, "answer": total}) for asked, total in sums]
            path.write_text("\n".join(lines))
            options |= {"dataset": str(path), "prompt": "{question}=", "max_new_tokens": 32}
            options["temperature"] = 0.6
        args = ppo_llm.Args(beta=0.0, seed=seed, **options)
        if critic in ("none", "λ alone", "oracle"):
            change = dict(NONE)
        if critic == "oracle":
            tokenizer = load(folder)[1]
            change["batch_values"] = lambda model, batch, args: oracle(tokenizer, batch)
        if critic == "head start":
            before = {"seed": seed + 1000, "steps": ahead, "update_epochs": 4}
            before = replace(args, **before, learning_rate=1e-3, gae_lambda=1.0)
            change["add_critic"], result["explained"] = trained(before, folder)
        with patch.multiple(ppo_llm, **change):
            found = train(ppo_llm, args, steps, folder=folder)
    return result | {LEARNED: mean(found["reward"]), "by rollout": found["reward"]}


def contrast(answers, more):
    both = arms(LEARNED, "critic", [more, "none"], answers=answers)
    return Contrast(f"{answers} answers, reward: {more} − none", *both, 0.02)


JOBS = started(16, answers=["short"], critic=["none", "learned"])
JOBS += started(24, answers=["long"], critic=["none", "head start", "oracle"])
JOBS += started(16, answers=["long"], critic=["λ alone", "learned"])
TESTS = [
    [contrast("short", "learned"), contrast("long", "head start")],
    [contrast("long", "oracle")],
]


def draw(runs):
    page, axes = figure("On long answers an oracle helps; the learned critic does not", 3.3, 1, 2)
    looks = {"learned": ("PPO", SOLID), "none": ("none", SOLID), "oracle": ("PPO", DOTTED)}
    looks |= {"head start": ("PPO", DASHED), "λ alone": ("none", MIXED)}
    critics = {"short": ["learned", "none"], "long": list(looks)}
    at = {"short": {"learned": ("with the critic\nand without", 7, 50, -22)}}
    others = "none, λ alone, learned,\nand with a head start"
    at["long"] = {"oracle": ("oracle", 25, -28, 26), "learned": (others, 25, 8, -62)}
    for panel, answers in zip(axes, critics, strict=True):
        lines = {}
        for critic in critics[answers]:
            arm = {"answers": answers, "critic": critic}, "by rollout"
            lines[critic] = values(runs, arm), *looks[critic]
        curves(panel, range(1, len(lines["none"][0][0]) + 1), lines, at[answers])
        panel.set(title=f"{answers} answers", xlabel="rollouts")
    axes[0].set_ylabel("reward")
    return page


EXPERIMENT = Experiment(run, JOBS, TESTS, draw, small={"steps": 1, "ahead": 1, "warm": 2})

if __name__ == "__main__":
    EXPERIMENT.main()

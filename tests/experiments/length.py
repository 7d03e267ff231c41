"""GRPO's 1/|o_i|: the length of answers that begin with a plus sign, and are wrong or right."""

from unittest.mock import patch

import torch
from lab import Contrast, Experiment, arms, mean, train, values
from llm_parts import load, started, warm_start
from pictures import DASHED, DOTTED, MIXED, SOLID, curves, figure, plain

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


def swapped(name):
    return lambda completion, answer: 1 - grpo_llm.verify(completion, answer)


def weights_of(part, own=grpo_llm.token_weights):
    """token_weights, but only an answer's first token has a gradient, or only the others have."""

    def token_weights(mask, args):
        first = torch.arange(mask.shape[1]) == 0
        return own(mask, args) * (first if part == "first token" else ~first)

    return token_weights if part else own


def run(norm, plus, seed, start, steps=20, warm=400):
    """Rollouts from the habit of babbling. Plus is right: rewards of 0 and 1 are swapped."""
    folder = warm_start("babble", start, warm)
    model, tokenizer = load(folder)
    counts = [plus_signs(model, tokenizer)]

    def each_step(step, policy, metrics):
        counts.append(plus_signs(policy, tokenizer))

    verifier = swapped if plus == "right" else grpo_llm.load_verifier
    norm, _, part = norm.partition(", ")
    args = grpo_llm.Args(beta=0.0, max_new_tokens=60, length_norm=NORMS[norm], steps=40, seed=seed)
    change = {"load_verifier": verifier, "token_weights": weights_of(part)}
    with patch.multiple(grpo_llm, **change):
        train(grpo_llm, args, steps, each_step, folder)
    return {"before": counts[0], "plus signs": mean(counts[1:]), "by rollout": counts}


def contrast(plus, more, less, equal=False):
    """Of arms named after their norms, or before training."""
    found = dict(zip(ARMS, arms("plus signs", "norm", ARMS, plus=plus), strict=True))
    found["before"] = found[less if more == "before" else more][0], "before"
    return Contrast(f"plus is {plus}: {more} − {less}", found[more], found[less], 1, equal)


NORMS = {"1/|o_i|": "response", "constant": "constant"}
FIRST, OTHERS = PARTS = ["constant, first token", "constant, others"]
ARMS = [*NORMS, *PARTS]
JOBS = started(16, norm=list(NORMS), plus=["wrong", "right"])
JOBS += started(16, norm=PARTS, plus=["wrong", "right"])
TESTS = [
    [contrast("wrong", "1/|o_i|", less) for less in ("constant", "before")]
    + [contrast("wrong", "before", FIRST), contrast("wrong", OTHERS, "before", equal=True)],
    [contrast("right", more, "1/|o_i|") for more in ("constant", "before")]
    + [contrast("right", FIRST, "before"), contrast("right", OTHERS, "before", equal=True)],
]


def draw(runs):
    title = "1 / length makes wrong answers grow, and right ones shrink"
    page, axes = figure(title, 3.1, 1, 2, sharey=True)
    for panel, plus in zip(axes, ("wrong", "right"), strict=True):
        panel.set(yscale="log", title=f"answers with plus are {plus}", xlabel="rollouts")
        lines = {}
        for norm, dash in zip(ARMS, (SOLID, DASHED, DOTTED, MIXED), strict=True):
            label = norm.replace("1/|o_i|", "1 / length").replace(", ", ",\n")
            lines[label] = values(runs, ({"norm": norm, "plus": plus}, "by rollout")), "GRPO", dash
        curves(panel, range(len(lines["constant"][0][0])), lines)
    plain(axes[0].yaxis, [2, 4, 8, 16, 32])
    axes[0].set_ylabel("plus signs in an answer")
    return page


EXPERIMENT = Experiment(run, JOBS, TESTS, draw, small={"steps": 2, "warm": 10})

if __name__ == "__main__":
    EXPERIMENT.main()

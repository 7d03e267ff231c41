"""GRPO's 1/|o_i|: the length of answers that begin with a plus sign, and are wrong or right."""

from unittest.mock import patch

import torch
from bench import train
from harness import Panel, arms
from llm_parts import load, mean, started, warm_start
from verdicts import Contrast

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


def run(norm, plus, seed, start, steps=20, warm=400):
    """Rollouts from the habit of babbling. Plus is right: rewards of 0 and 1 are swapped."""
    folder = warm_start("babble", start, warm)
    model, tokenizer = load(folder)
    counts = [plus_signs(model, tokenizer)]

    def each_step(step, policy, metrics):
        counts.append(plus_signs(policy, tokenizer))

    verifier = swapped if plus == "right" else grpo_llm.load_verifier
    args = grpo_llm.Args(beta=0.0, max_new_tokens=60, length_norm=NORMS[norm], steps=40, seed=seed)
    with patch.object(grpo_llm, "load_verifier", verifier):
        train(grpo_llm, args, steps, each_step, folder)
    return {"before": counts[0], "length": mean(counts[1:]), "counts": counts}


def contrast(plus, more, less):
    """Of arms named after their norms, or before training: then runs are paired with themselves."""
    arm = arms("length", "norm", NORMS, plus=plus)
    arm["before"] = arm["1/|o_i|"][0], "before"
    options = {"paired": True} if "before" in (more, less) else {"block": "start"}
    return Contrast(f"plus is {plus}: {more} − {less}", arm[more], arm[less], 1, **options)


NORMS = {"1/|o_i|": "response", "constant": "constant"}
CLAIM = "With 1/|o_i| long wrong answers grow longer, and right ones become shorter."
JOBS = started(16, norm=list(NORMS), plus=["wrong", "right"])
SMOKE = started(1, norm=list(NORMS), plus=["wrong", "right"], steps=[2], warm=[10])
SECONDS = 5
PRIMARIES = [
    [contrast("wrong", "1/|o_i|", less) for less in ("constant", "before")],
    [contrast("right", more, "1/|o_i|") for more in ("constant", "before")],
]

# The page
LESSON = (
    "shown",
    "In a task made for this test 1/|o_i| makes a wrong kind of answer grow, and a right kind "
    "shrink.",
)
PANELS = [
    Panel(title, arms("counts", "norm", NORMS, plus=plus), ("rollouts", "plus signs"), [*range(21)])
    for title, plus in (("Wrong answers", "wrong"), ("Right answers", "right"))
]


def words(runs):
    def length(norm, plus):
        return runs.mean("length", ".1f", norm=norm, plus=plus)

    return f"""
    The model begins six answers in ten with plus signs, 1 to 40 of them, and ends them with a wrong
    total. It works out the others. An answer that begins with a plus has
    {runs.mean("before", ".1f")} of them before training: a mean under the policy, computed without
    sampling, however rare such answers have become. Over 20 rollouts of GRPO the mean is
    {length("1/|o_i|", "wrong")} with 1/|o_i|, which punishes each token of a long wrong answer
    less, and {length("constant", "wrong")} with a constant in its place. If the rewards are
    swapped, so that answers with plus signs are right, 1/|o_i| praises each token of a short one
    more: {length("1/|o_i|", "right")}, and {length("constant", "right")} with a constant. So the
    constant has a drift of its own, in the other direction; we do not know why."""


NOT_TRIED = "answers that reason at length; other rates and group sizes; dividing by std alone."

"""PPO with a critic and without, on sums that any wrong total may spoil."""

from itertools import accumulate
from unittest.mock import patch

import torch
from lab import LEARNED, Contrast, Experiment, arms, mean, train, values
from llm_parts import load, make, start, started
from pictures import DOTTED, SOLID, curves, figure

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
        totals = list(accumulate(map(int, question.rstrip("=").split("+"))))[1:]
        right = ",".join(map(str, totals)) + f"#{totals[-1]}"
        said = "".join(tokenizer.convert_ids_to_tokens(ids)).partition("<eos>")[0]
        for t in range(min(len(said) + 1, len(ids))):
            if right.startswith(said[:t]):
                done = sum(map(said[:t].count, ",#")) + (said[:t] == right)
                left[i, t] = 1 - done / (len(totals) + 1)
        flawless.append(said == right)
    return max(mean(flawless), 1e-3) ** left


def run(critic, seed, network, steps=40, warm=make.STEPS):
    """PPO without KL, with a λ of 0.95."""
    folder, change = start(network, warm), {"add_critic": ppo_llm.add_critic}
    if critic != "learned":
        change = dict(NONE)
    if critic == "oracle":
        tokenizer = load(folder)[1]
        change["batch_values"] = lambda model, batch, args: oracle(tokenizer, batch)
    args = ppo_llm.Args(beta=0.0, gae_lambda=0.95, seed=seed, steps=steps)
    with patch.multiple(ppo_llm, **change):
        found = train(ppo_llm, args, steps, folder=folder)
    return {LEARNED: mean(found["reward"]), "by rollout": found["reward"]}


def contrast(more):
    both = arms(LEARNED, "critic", [more, "none"])
    return Contrast(f"reward over training: {more} − none", *both, 0.02)


CRITICS = ["none", "learned", "oracle"]
JOBS = started(critic=CRITICS)
TESTS = [[contrast("learned")], [contrast("oracle")]]


def draw(runs):
    page, (axes,) = figure("An oracle helps; does the critic that PPO learns?", 3.3, 1, 1)
    looks = [("none", SOLID), ("PPO", SOLID), ("PPO", DOTTED)]
    lines = {}
    for critic, look in zip(CRITICS, looks, strict=True):
        lines[critic] = values(runs, ({"critic": critic}, "by rollout")), *look
    curves(axes, range(1, len(lines["none"][0][0]) + 1), lines)
    axes.set(xlabel="rollouts", ylabel="reward")
    return page


CLAIM = (
    "Where the only reward comes at the end, a critic is hard to learn, but one that knows "
    "which token went wrong would help."
)
SOURCE = (
    "[DeepSeekMath](https://arxiv.org/abs/2402.03300), 4.1.1; "
    "[VinePPO](https://arxiv.org/abs/2410.01679)"
)
FORMER = "as claimed / not seen; too small / open"
EXPERIMENT = Experiment(run, JOBS, TESTS, draw, {"steps": 1, "warm": 2}, CLAIM, SOURCE, FORMER)

if __name__ == "__main__":
    EXPERIMENT.main()

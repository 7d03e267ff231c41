"""The temperature of sampling: all the exploration that the language models' scripts have."""

from unittest.mock import patch

from bench import evaluate, train
from harness import Panel, arms
from llm_parts import load, mean, started, warm_start
from verdicts import Contrast

import grpo_llm

EVERY = 4  # rollouts between two looks


def run(temperature, seed, start, steps=40, warm=400):
    """GRPO without KL. Each look is at samples of temperature 1 and at greedy answers, which are
    the same at every temperature."""
    folder, differ, sampled, greedy = warm_start("tiny", start, warm), [], [], []
    own, tokenizer = grpo_llm.rollout, load(folder)[1]
    _, sums = grpo_llm.load_data(grpo_llm.Args(eval_problems=128))
    args = grpo_llm.Args(beta=0.0, temperature=temperature, seed=seed, steps=steps)

    def train_rollout(*inputs):
        batch, completions, rewards = own(*inputs)
        differ.append((rewards.std(1) > 0).float().mean().item())
        return batch, completions, rewards

    def look(step, model, metrics):
        if step % EVERY == 0:
            with patch.object(grpo_llm, "rollout", own):
                sampled.append(evaluate(grpo_llm, model, tokenizer, args, sums))
            greedy.append(own(model, tokenizer, sums, 1, 0.0, args)[2].mean().item())

    with patch.object(grpo_llm, "rollout", train_rollout):
        found = train(grpo_llm, args, steps, look, folder)
    result = {"sampled": mean(sampled), "greedy": mean(greedy), "differ at first": differ[0]}
    result |= {"differ": mean(differ), "reward": mean(found["reward"])}
    return result | {"sampled by look": sampled, "greedy by look": greedy}


def contrast(name, column, smallest):
    both = arms(column, "temperature", [1.0, 0.3]).values()
    return Contrast(f"{name}: temperature 1 − 0.3", *both, smallest, block="start")


TEMPERATURES = [0.3, 0.7, 1.0, 1.5]
CLAIM = (
    "The temperature of sampling is all the exploration there is: at a low one the answers of a "
    "group agree, and less is learned."
)
JOBS = started(20, temperature=TEMPERATURES)
SMOKE = started(1, temperature=TEMPERATURES, steps=[EVERY], warm=[2])
SECONDS = 5
PRIMARIES = [
    [
        contrast("share of groups with unequal rewards, at first", "differ at first", 0.1),
        contrast("right, sampled at 1", "sampled", 0.03),
    ],
    [contrast("right, greedy", "greedy", 0.03)],
]

# The page
LESSON = (
    "shown",
    "At a low temperature fewer groups have unequal rewards, and the policy learns more slowly. "
    "Later its likeliest answers catch up.",
)
LOOKS = list(range(EVERY, 41, EVERY))
PANELS = [
    Panel(title, arms(column, "temperature", TEMPERATURES), ("rollouts", "right"), LOOKS)
    for title, column in (
        ("Sampled at temperature 1", "sampled by look"),
        ("Greedy", "greedy by look"),
    )
]


def words(runs):
    def found(column, temperature, spec=".2f"):
        return runs.mean(column, spec, temperature=temperature)

    return f"""
    GRPO trains for 40 rollouts without KL, and only the temperature of the policy differs. The
    share of the groups with unequal rewards is {found("differ at first", 0.3, ".0%")} in the first
    rollout with 0.3, {found("differ at first", 1.0, ".0%")} with 1 and
    {found("differ at first", 1.5, ".0%")} with 1.5. All policies are then asked at the same
    temperature. Sampled at 1, a share of {found("sampled", 0.3, ".3f")} of the answers is right, as
    a mean over training, with 0.3, {found("sampled", 0.7, ".3f")} with 0.7,
    {found("sampled", 1.0, ".3f")} with 1 and {found("sampled", 1.5, ".3f")} with 1.5. A policy that
    was trained at 0.3 was never asked to be right at 1, so we also take its likeliest answers:
    {found("greedy", 0.3, ".3f")} of them are right with 0.3, {found("greedy", 0.7, ".3f")} with
    0.7, {found("greedy", 1.0, ".3f")} with 1 and {found("greedy", 1.5, ".3f")} with 1.5."""


NOT_TRIED = "a schedule of the temperature; top-p; harder questions, of which few are ever right."

"""The temperature of sampling: all the exploration that the language models' scripts have."""

from unittest.mock import patch

from lab import Contrast, Experiment, arms, evaluate, mean, train, values
from llm_parts import load, started, warm_start
from pictures import DASHED, DOTTED, MIXED, SOLID, curves, figure

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
            greedy.append(own(model, tokenizer, sums, 1, 1e-4, args)[2].mean().item())

    with patch.object(grpo_llm, "rollout", train_rollout):
        found = train(grpo_llm, args, steps, look, folder)
    result = {"sampled": mean(sampled), "greedy": mean(greedy), "differ at first": differ[0]}
    result |= {"differ": mean(differ), "reward": mean(found["reward"])}
    return result | {"sampled by look": sampled, "greedy by look": greedy}


def contrast(name, column, smallest):
    both = arms(column, "temperature", [1.0, 0.3])
    return Contrast(f"{name}: temperature 1 − 0.3", *both, smallest)


TEMPERATURES = [0.3, 0.7, 1.0, 1.5]
JOBS = started(16, temperature=TEMPERATURES)
TESTS = [
    [
        contrast("groups with unequal rewards, at first", "differ at first", 0.1),
        contrast("right, sampled at 1", "sampled", 0.03),
    ],
    [contrast("right, greedy", "greedy", 0.03)],
]


def draw(runs):
    title = "At a low temperature the policy learns more slowly"
    page, axes = figure(title, 3.1, 1, 2, sharey=True)
    dashes = dict(zip(TEMPERATURES, (DOTTED, DASHED, SOLID, MIXED), strict=True))
    for panel, column in zip(axes, ("sampled by look", "greedy by look"), strict=True):
        lines = {}
        for temperature, dash in dashes.items():
            found = values(runs, ({"temperature": temperature}, column))
            lines[f"{temperature:g}"] = found, "GRPO", dash
        at = {"0.3": ("0.3", 1, 28, -22), "1.5": ("0.7, 1 and 1.5", 4, 0, 14)}
        curves(panel, [EVERY * (i + 1) for i in range(len(found[0]))], lines, at)
        panel.set(xlabel="rollouts", ylim=(0, 1.15))
    axes[0].set(title="right, sampled at 1", ylabel="share of held-out sums")
    axes[1].set_title("right, greedy")
    return page


EXPERIMENT = Experiment(run, JOBS, TESTS, draw, small={"steps": EVERY, "warm": 2})

if __name__ == "__main__":
    EXPERIMENT.main()

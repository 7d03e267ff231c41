"""A discount factor below 1 on the language model: what it does to the length of answers."""

import ppo_llm
from bench import train
from harness import Panel, arms
from llm_parts import mean, started, warm_start
from verdicts import Contrast


def run(gamma, seed, start, steps=30, warm=400):
    """PPO with λ = 1, so that γ alone discounts; the limit leaves room for every habit."""
    folder = warm_start("meander", start, warm)
    options = {"gamma": gamma, "gae_lambda": 1.0, "beta": 0.0, "max_new_tokens": 32}
    found = train(ppo_llm, ppo_llm.Args(seed=seed, steps=steps, **options), steps, folder=folder)
    lengths, reward = found["completions/mean_length"], found["reward"]
    result = {"tokens": mean(lengths), "learned": mean(reward), "tokens at the end": lengths[-1]}
    return result | {"length": lengths, "reward": reward}


GAMMAS = [1.0, 0.9]
CLAIM = "A low γ is a hidden length penalty: it makes answers shorter."
JOBS = started(12, gamma=GAMMAS)
SMOKE = started(1, gamma=GAMMAS, steps=[2], warm=[2])
SECONDS = 11
PRIMARIES = [
    [Contrast("tokens: γ 1 − γ 0.9", *arms("tokens", "gamma", GAMMAS).values(), 1.0, block="start")]
]

# The page
LESSON = ("shown", "With a discount factor of 0.9 answers stay shorter than with 1.")
ROLLOUTS = list(range(1, 31))
BY_GAMMA = {
    column: {f"γ = {gamma:g}": ({"gamma": gamma}, column) for gamma in GAMMAS}
    for column in ("length", "reward")
}
PANELS = [
    Panel("Length of an answer", BY_GAMMA["length"], ("rollouts", "tokens"), ROLLOUTS),
    Panel("Right answers", BY_GAMMA["reward"], ("rollouts", "reward"), ROLLOUTS),
]


def words(runs):
    def found(column, spec, gamma):
        return runs.mean(column, spec, gamma=gamma)

    start = mean([each[0] for each in runs.find({}, "length")])
    return f"""
    At first the model mostly guesses. If it works a sum out, it repeats running totals at will,
    which costs tokens and changes nothing else. PPO trains it for 30 rollouts with λ = 1 and
    without KL. With γ below 1 the reward is worth γ to the power of the tokens that are still to
    come, so a short right answer is worth more than a long one. The mean length over training is
    {found("tokens", ".1f", 1.0)} tokens with γ = 1 and {found("tokens", ".1f", 0.9)} with 0.9; the
    mean reward, not discounted, is {found("learned", ".3f", 1.0)} and
    {found("learned", ".3f", 0.9)}. With both, answers become longer than they were, {start:.1f}
    tokens, as guesses give way to worked-out sums."""


NOT_TRIED = "tasks in which a longer answer is right more often; γ in between."

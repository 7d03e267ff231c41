"""One loop, trpo.py's, in which only the policy's step differs, over what sets its length."""

from unittest.mock import patch

import torch
from classic_parts import train
from lab import Contrast, Experiment, arms, grid, values
from pictures import DASHED, SOLID, curves, figure, plain

import ppo
import trpo

RATES = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
DELTAS = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]  # a step's length grows with √δ
ADAM = {
    "plain step": {"update_epochs": 1, "num_minibatches": 1},  # r = 1: the policy gradient itself
    "no clip": {"clip_coef": 1e9},
    "PPO": {},
}


def adam_steps(form, rate):
    """An update for trpo.py in which the policy's steps are Adam's: one on the whole rollout, or
    ppo.py's four epochs of four minibatches, with its clip or without."""
    chosen, made = ppo.Args(**ADAM[form]), {}

    def update(agent, optimizer, batch, progress_remaining, args):
        adam = made.setdefault("actor's", torch.optim.Adam(agent.actor.parameters()))
        adam.param_groups[0]["lr"] = rate * progress_remaining
        optimizer.param_groups[0]["lr"] = args.learning_rate * progress_remaining  # the critic's
        advantages = batch["advantages"] - batch["advantages"].mean()
        for _ in range(chosen.update_epochs):
            for rows in torch.randperm(len(advantages)).chunk(chosen.num_minibatches):
                logprobs = agent.policy(batch["obs"][rows]).log_prob(batch["actions"][rows])
                old = batch["logprobs"][rows]
                objective, _ = ppo.surrogate(logprobs, old, advantages[rows], chosen)
                adam.zero_grad()
                (-objective.mean()).backward()
                torch.nn.utils.clip_grad_norm_(agent.actor.parameters(), args.max_grad_norm)
                adam.step()
        return {"value_loss": trpo.fit_critic(agent, optimizer, batch, args)}

    return update


def run(form, seed, steps=60_000):
    """The greedy return at the end for each of six lengths of the step, half a decade apart, and
    over how many decades of length it was 475 or more."""
    returns = []
    for rate, delta in zip(RATES, DELTAS, strict=True):
        update = trpo.update if form == "TRPO" else adam_steps(form, rate)
        with patch.object(trpo, "update", update):
            found = train(trpo, total_timesteps=steps, seed=seed, max_kl=delta)
        returns.append(found.greedy_return)
    return {"decades": sum(each >= 475 for each in returns) / 2, "returns": returns}


JOBS = grid(16, form=["plain step", "TRPO"]) + grid(20, form=["no clip", "PPO"])
ONE, MANY = "one step: TRPO − Adam, decades", "16 steps of Adam: PPO's clip − none, decades"
TESTS = [
    [Contrast(MANY, *arms("decades", "form", ["PPO", "no clip"]), 0.25)],
    [Contrast(ONE, *arms("decades", "form", ["TRPO", "plain step"]), 0.25)],
]


def draw(runs):
    title = "With PPO's clip and with TRPO more step sizes work"
    page, axes = figure(title, 3.1, 1, 2, sharey=True)
    looks = {"PPO": ("PPO's clip", "PPO", SOLID), "no clip": ("no clip", "none", DASHED)}
    looks |= {"TRPO": ("TRPO", "TRPO", SOLID), "plain step": ("Adam", "none", DASHED)}
    titles = {"16 steps of Adam a rollout": ["PPO", "no clip"], "one step": ["TRPO", "plain step"]}
    for panel, (title, forms) in zip(axes, titles.items(), strict=True):
        panel.set(title=title, xscale="log", xlabel="length of the step, shortest: 1")
        lines = {}
        for form in forms:
            label, algorithm, dash = looks[form]
            lines[label] = values(runs, ({"form": form}, "returns")), algorithm, dash
        curves(panel, [10 ** (i / 2) for i in range(6)], lines)
        plain(panel.xaxis, [1, 10, 100])
    axes[0].set_ylabel("greedy return")
    return page


CLAIM = "A trust region, exact or by a clip, widens the range of step sizes that work."
SOURCE = (
    "[TRPO](https://arxiv.org/abs/1502.05477), abstract, and "
    "[PPO](https://arxiv.org/abs/1707.06347), section 1: little tuning"
)
EXPERIMENT = Experiment(run, JOBS, TESTS, draw, {"steps": 2500}, CLAIM, SOURCE)

if __name__ == "__main__":
    EXPERIMENT.main()

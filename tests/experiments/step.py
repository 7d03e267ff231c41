"""One loop, trpo.py's, in which only the policy's step differs, over what sets its length."""

from unittest.mock import patch

import torch
from classic_parts import train
from harness import Panel, arms, grid
from verdicts import Contrast

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


CLAIM = "A trust region, exact or clipped, widens the range of step sizes that work."
FORMS = ["plain step", "TRPO", "no clip", "PPO"]
JOBS = grid(12, form=FORMS[:2])
JOBS += grid(20, first=13, form=FORMS[2:])  # 12 had left it undecided
SMOKE = grid(1, form=FORMS, steps=[2500])
SECONDS = 22
ADAMS, CLIPS = "one step: TRPO − Adam, decades", "16 steps of Adam: PPO's clip − none, decades"
ARMS = arms("decades", "form", FORMS)
PRIMARIES = [
    [Contrast(CLIPS, ARMS["PPO"], ARMS["no clip"], 0.25)],
    [Contrast(ADAMS, ARMS["TRPO"], ARMS["plain step"], 0.25)],
]

# The page
LESSON = (
    "shown",
    "With TRPO's step in place of one step of Adam, and with PPO's clip, more step sizes work.",
)
AXES = ("length of the step, in decades above the least", "greedy return")
DECADES = [number / 2 for number in range(6)]
CLIPS = {"no clip": ({"form": "no clip"}, "returns"), "PPO's clip": ({"form": "PPO"}, "returns")}
PANELS = [
    Panel("16 steps of Adam a rollout", CLIPS, AXES, DECADES),
    Panel("One step a rollout", arms("returns", "form", FORMS[:2]), AXES, DECADES),
]


def words(runs):
    def width(form):
        return runs.mean("decades", ".2f", form=form)

    return f"""
    The loop is trpo.py's, with another step of the policy. Its length takes six values, each √10
    times, or half a decade above, the one before: learning rates of Adam from 0.0003 to 0.1, and
    TRPO's δ from 0.00001 to 1, as the length of a step grows with the root of δ. A value works if
    60,000 steps of CartPole end with a policy whose likeliest actions earn 475 or more, and each
    that works counts half a decade. With 16 steps of Adam a rollout, 4 epochs of 4 minibatches,
    {width("PPO")} decades work with PPO's clip, {width("no clip")} without it. With a single step a
    rollout {width("TRPO")} decades work with TRPO, {width("plain step")} with one plain step of
    Adam. TRPO's step differs in more than its bound on the KL: it has another direction and a line
    search, and its δ does not decay, as Adam's rate does. With 16 steps the lowest rate works in
    all runs, so lower ones might, too; at the highest the clip does not help. For the 16 steps this
    is a second try: with 12 other seeds the first one was undecided."""


NOT_TRIED = "other environments, and rates that do not decay."

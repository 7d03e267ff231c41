"""One loop, trpo.py's, in which only the policy's step differs, over what sets its length."""

from unittest.mock import patch

import torch
from classic_parts import train
from harness import PARTLY, Experiment, Panel, grid

import ppo
import trpo

RATES = [0.001, 0.003, 0.01, 0.03, 0.1]
DELTAS = [0.0001, 0.001, 0.01, 0.1, 1.0]
ADAM = {
    "plain step": {"update_epochs": 1, "num_minibatches": 1},  # r = 1: the policy gradient itself
    "no clip": {"clip_coef": 1e9},
    "ppo": {},
}


def adam_steps(form, rate):
    """An update for trpo.py in which the policy's steps are Adam's: one on the whole rollout, or
    ppo.py's four passes of four minibatches, with its clip or without."""
    chosen, made = ppo.Args(**ADAM[form]), {}

    def update(agent, optimizer, batch, progress_remaining, args):
        adam = made.setdefault("actor's", torch.optim.Adam(agent.actor.parameters()))
        adam.param_groups[0]["lr"] = rate * progress_remaining
        optimizer.param_groups[0]["lr"] = args.learning_rate * progress_remaining  # the critic's
        agent.return_norm.update(batch["targets"])
        advantages = batch["advantages"] / agent.return_norm.std
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


def run(form, value, seed, steps=60_000):
    """Greedy return at the end, and the largest KL(π_old ‖ π) of a rollout."""
    update, flags = trpo.update, {"max_kl": value}
    if form != "trpo":
        update, flags = adam_steps(form, value), {}
    with patch.object(trpo, "update", update):
        found = train(trpo, total_timesteps=steps, seed=seed, **flags)
    return {"greedy_return": found.greedy_return, "kl_max": max(found.kl)}


LABELS = {"clip": "ppo", "no clip": "no clip"}
CLIPS = {label: ({"form": form}, "greedy_return") for label, form in LABELS.items()}
PLAIN = {"one step": ({"form": "plain step"}, "greedy_return")}
TRPO = {"TRPO": ({"form": "trpo"}, "greedy_return")}
EXPERIMENT = Experiment(
    claim="A trust region, exact or clipped, widens the range of step sizes that work.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, form=list(ADAM), value=RATES) + grid(5, form=["trpo"], value=DELTAS),
    smoke=grid(1, form=[*ADAM, "trpo"], value=[0.01], steps=[5000]),
    panels=[
        Panel("16 steps of Adam, by their rate", CLIPS, ("rate", "greedy return"), x="value"),
        Panel("One step of Adam, by its rate", PLAIN, ("rate", "greedy return"), x="value"),
        Panel("One step of TRPO, by δ", TRPO, ("δ, the KL allowed", "greedy return"), x="value"),
    ],
    finding="""
    With 16 steps of Adam a rollout, at rates of 0.003, 0.01 and 0.03, all five seeds end at 500
    with PPO's clip; without it medians are {no clip, 0.003 / greedy_return :.0f},
    {no clip, 0.01 / greedy_return :.0f} and {no clip, 0.03 / greedy_return :.0f} (p =
    {ppo, 0.003 ~ no clip, 0.003 / greedy_return / p :.2f},
    {ppo, 0.01 ~ no clip, 0.01 / greedy_return / p :.2f} and
    {ppo, 0.03 ~ no clip, 0.03 / greedy_return / p :.2f}). At 0.1 it does not help. With one step a
    rollout all end at 500 with TRPO at δ 0.001 and 0.01, 3.2 times in the step's length; the best
    of a single step of Adam, at 0.003, is not apart from that (p =
    {trpo, 0.01 ~ plain step, 0.003 / greedy_return / p :.2f}).
    """,
)

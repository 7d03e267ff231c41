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
    chosen = ppo.Args(**ADAM[form])
    made = []  # at the first update

    def update(agent, optimizer, batch, left, args):
        if not made:
            made.append(torch.optim.Adam(agent.actor.parameters()))
        adam = made[0]
        adam.param_groups[0]["lr"] = rate * left
        optimizer.param_groups[0]["lr"] = args.learning_rate * left  # the critic's
        agent.return_norm.update(batch["returns"])
        advantages = batch["advantages"] / agent.return_norm.std
        for _ in range(chosen.update_epochs):
            for rows in torch.randperm(len(advantages)).chunk(chosen.num_minibatches):
                logprobs = agent.policy(batch["obs"][rows]).log_prob(batch["actions"][rows])
                old = batch["logprobs"][rows]
                objective, _ = ppo.surrogate(logprobs, old, advantages[rows], chosen)
                loss = -objective.mean()
                adam.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(agent.actor.parameters(), args.max_grad_norm)
                adam.step()
        value_loss = trpo.fit_critic(agent, optimizer, batch, args)
        return {"policy_loss": loss.item(), "value_loss": value_loss}

    return update


def run(form, value, seed, steps=60_000):
    """Greedy return at the end, and the largest KL(π_old ‖ π) of a rollout."""
    kl = []

    def record(agent, batch):
        kl.append(ppo.mean_kl(agent, batch))

    flags = {"total_timesteps": steps, "seed": seed, "after_update": record}
    if form == "trpo":
        result, _ = train(trpo, max_kl=value, **flags)
    else:
        with patch.object(trpo, "update", adam_steps(form, value)):
            result, _ = train(trpo, **flags)
    return {"greedy_return": result["greedy_return"], "kl_max": max(kl)}


LABELS = {"PPO": "ppo", "no clip": "no clip", "plain step": "plain step"}
EXPERIMENT = Experiment(
    claim="A trust region, exact or clipped, widens the range of step sizes that work.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, form=list(ADAM), value=RATES) + grid(5, form=["trpo"], value=DELTAS),
    smoke=grid(1, form=[*ADAM, "trpo"], value=[0.01], steps=[5000]),
    panels=[
        Panel(
            "CartPole: worst of 5 seeds (dotted: median)",
            {label: ({"form": form}, "greedy_return") for label, form in LABELS.items()},
            axes=(
                "Adam's rate for the policy: 16 steps a rollout, the plain step 1",
                "greedy return",
            ),
            x="value",
            worst=True,
        ),
        Panel(
            "TRPO, one step a rollout",
            {"TRPO": ({"form": "trpo"}, "greedy_return")},
            axes=("δ, the KL allowed per step; the step's length grows with √δ", "greedy return"),
            x="value",
            worst=True,
        ),
    ],
    finding="""
    One loop of 60,000 steps, in which only the policy's step differs. Of 16 steps of Adam per
    rollout, at rates of 0.003, 0.01 and 0.03, all five seeds end at
    {ppo, 0.003 / greedy_return / low :.0f} with PPO's clip, without it at
    {no clip, 0.003 / greedy_return / range :.0f}, {no clip, 0.01 / greedy_return / range :.0f} and
    {no clip, 0.03 / greedy_return / range :.0f} (p =
    {ppo, 0.003 ~ no clip, 0.003 / greedy_return / p :.2f},
    {ppo, 0.01 ~ no clip, 0.01 / greedy_return / p :.2f} and
    {ppo, 0.03 ~ no clip, 0.03 / greedy_return / p :.2f}). The clip does hold the KL of a rollout,
    at {ppo, 0.003 / kl_max :.2f} to {ppo, 0.03 / kl_max :.2f} nats instead of
    {no clip, 0.003 / kl_max :.1f} to {no clip, 0.03 / kl_max :.1f} (p =
    {ppo, 0.003 ~ no clip, 0.003 / kl_max / p :.3f}). Of one step per rollout all seeds end at
    {trpo, 0.001 / greedy_return / low :.0f} with TRPO at δ 0.001 and 0.01, which is 3.2 times in
    the step's length. A plain gradient step does that at no rate; but its best,
    {plain step, 0.003 / greedy_return / range :.0f} at 0.003, is not apart from TRPO's (p =
    {trpo, 0.01 ~ plain step, 0.003 / greedy_return / p :.2f}). Further out neither helps: at 0.001
    the worst seed ends at {ppo, 0.001 / greedy_return / low :.0f} with the clip and
    {no clip, 0.001 / greedy_return / low :.0f} without, at 0.1 the median at
    {ppo, 0.1 / greedy_return :.0f} and {no clip, 0.1 / greedy_return :.0f}, and TRPO's worst at
    {trpo, 0.0001 / greedy_return / low :.0f} for δ 0.0001 and
    {trpo, 0.1 / greedy_return / low :.0f} for 0.1.
    """,
)

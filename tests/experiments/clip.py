"""Many passes over a rollout: PPO with its clip, without, and with the adaptive KL penalty."""

from classic_parts import train
from harness import PARTLY, Experiment, Panel, grid

import ppo

FORMS = {"clip": {}, "no clip": {"clip_coef": 1e9}, "penalty": {"surrogate": "penalty"}}


def run(form, epochs, seed, steps=60_000):
    """Greedy return at the end, and the largest KL(π_old ‖ π) of a rollout."""
    found = train(ppo, update_epochs=epochs, total_timesteps=steps, seed=seed, **FORMS[form])
    return {"greedy_return": found.greedy_return, "kl_max": max(found.kl)}


RETURNS = {form: ({"form": form}, "greedy_return") for form in ("clip", "no clip")}
MOVES = {form: ({"form": form}, "kl_max") for form in FORMS}
EXPERIMENT = Experiment(
    claim="The clip lets PPO use a rollout many times.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, form=list(FORMS), epochs=[1, 4, 10, 20]),
    smoke=grid(1, form=list(FORMS), epochs=[2], steps=[5000]),
    panels=[
        Panel(
            "With the clip every seed solves CartPole from 4 passes on",
            RETURNS,
            ("passes over each rollout", "greedy return"),
            x="epochs",
        ),
        Panel(
            "How far a rollout moves the policy, at most",
            MOVES,
            ("passes over each rollout", "KL, nats"),
            x="epochs",
        ),
    ],
    finding="""
    After 4, 10 and 20 passes all five seeds end at 500 with the clip, without it at
    {no clip, 4 / greedy_return / range :.0f}, {no clip, 10 / greedy_return / range :.0f} and
    {no clip, 20 / greedy_return / range :.0f}: p = {clip, 4 ~ no clip, 4 / greedy_return / p :.2f},
    {clip, 10 ~ no clip, 10 / greedy_return / p :.3f} and
    {clip, 20 ~ no clip, 20 / greedy_return / p :.2f}. But with one pass the medians are
    {clip, 1 / greedy_return :.0f} with it and {no clip, 1 / greedy_return :.0f} without; and at a
    rate of [0.001](#step) the worst seed of four passes ends at
    {step: ppo, 0.001 / greedy_return / low :.0f} with it and
    {step: no clip, 0.001 / greedy_return / low :.0f} without.
    """,
)

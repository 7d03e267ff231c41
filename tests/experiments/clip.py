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
MOVES = {form: ({"form": form}, "kl_max") for form in ("clip", "no clip")}
EXPERIMENT = Experiment(
    claim="The clip lets PPO use a rollout many times.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, form=list(FORMS), epochs=[1, 4, 10, 20]),
    smoke=grid(1, form=list(FORMS), epochs=[2], steps=[5000]),
    panels=[
        Panel("Every seed with the clip from 4", RETURNS, ("passes", "greedy return"), "epochs"),
        Panel("A run's largest move", MOVES, ("passes over each rollout", "KL, nats"), "epochs"),
    ],
    finding="""
    With the clip all five seeds end at 500 after 4, 10 and 20 passes, without it at
    {no clip, 4 / greedy_return / range :.0f}, {no clip, 10 / greedy_return / range :.0f} and
    {no clip, 20 / greedy_return / range :.0f}: p = {clip, 4 ~ no clip, 4 / greedy_return / p :.2f},
    {clip, 10 ~ no clip, 10 / greedy_return / p :.3f} and
    {clip, 20 ~ no clip, 20 / greedy_return / p :.2f}. With 20 passes the largest KL is
    {clip, 20 / kl_max :.2f} nats with it, {no clip, 20 / kl_max :.1f} without. But it is not missed
    with one pass (medians {clip, 1 / greedy_return :.0f} with,
    {no clip, 1 / greedy_return :.0f} without, p =
    {clip, 1 ~ no clip, 1 / greedy_return / p :.2f}), nor with four at a rate of [0.001](#step)
    ({step: ppo, 0.001 / greedy_return :.0f}, {step: no clip, 0.001 / greedy_return :.0f}, p =
    {step: ppo, 0.001 ~ no clip, 0.001 / greedy_return / p :.2f}).
    """,
)

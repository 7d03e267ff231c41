"""REINFORCE with a baseline against the actor-critic on CartPole, each with its defaults."""

import numpy as np
from classic_parts import train
from harness import NOT_SHOWN, Experiment, Panel, grid

import actor_critic
import reinforce

SCRIPTS = {"reinforce": reinforce, "actor_critic": actor_critic}
LABELS = {"REINFORCE": {"script": "reinforce"}, "actor-critic": {"script": "actor_critic"}}


def run(script, seed, steps=150_000):
    """How many steps and updates it took until the last 100 episodes had a mean return of 475, or
    all of them where that never was."""
    found = train(SCRIPTS[script], total_timesteps=steps, seed=seed)
    returns, updates = [], 0
    while updates < len(found.rollouts) and (len(returns) < 100 or np.mean(returns[-100:]) < 475):
        step, ended = found.rollouts[updates]
        returns += ended
        updates += 1
    return {"steps to 475": step, "updates to 475": updates}


STEPS = {label: (settings, "steps to 475") for label, settings in LABELS.items()}
UPDATES = {label: (settings, "updates to 475") for label, settings in LABELS.items()}
EXPERIMENT = Experiment(
    claim="With the TD error a policy is learned from fewer steps.",
    verdict=NOT_SHOWN,
    run=run,
    jobs=grid(5, script=list(SCRIPTS)),
    smoke=grid(1, script=list(SCRIPTS), steps=[4000]),
    panels=[
        Panel("Level by steps …", STEPS, ("steps until 100 episodes average 475", ""), dots=True),
        Panel("… REINFORCE first by updates", UPDATES, ("updates until then", ""), dots=True),
    ],
    finding="""
    Over five seeds, each script with its defaults, the last 100 episodes of REINFORCE with a
    baseline average 475 after {reinforce / steps to 475 / range :,.0f} steps, of the actor-critic
    after {actor_critic / steps to 475 / range :,.0f} (p =
    {reinforce ~ actor_critic / steps to 475 / p :.2f}). The actor-critic needs more updates for it,
    {actor_critic / updates to 475 / range :.0f} instead of
    {reinforce / updates to 475 / range :.0f} (p =
    {reinforce ~ actor_critic / updates to 475 / p :.3f}). A guess: while the critic is rough, its
    bias costs what the smaller variance gains ([above](#psi)).
    """,
)

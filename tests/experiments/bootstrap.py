"""REINFORCE with a baseline against the actor-critic on CartPole, each with its defaults."""

import numpy as np
from classic_parts import thousands, train
from harness import NOT_SHOWN, Experiment, Panel, grid

import actor_critic
import reinforce

SCRIPTS = {"reinforce": reinforce, "actor_critic": actor_critic}
UPDATES = range(0, 121, 3)


def run(script, seed, steps=150_000):
    """Steps and updates until the last 100 episodes had a mean return of 475 or more, or all of
    them where that never was; by_updates: the mean return of the last 24 episodes."""
    returns, means, solved = [], [], []

    def record(step, episodes):
        returns.extend(episodes)
        means.append(float(np.mean(returns[-24:] or [0.0])))
        if len(returns) >= 100 and np.mean(returns[-100:]) >= 475:
            solved.append((step, len(means)))

    result, _ = train(SCRIPTS[script], after_rollout=record, total_timesteps=steps, seed=seed)
    at_step, updates = (solved or [(steps, len(means))])[0]
    return result | {
        "steps to 475": at_step,
        "updates to 475": updates,
        "by_updates": [means[min(number, len(means) - 1)] for number in UPDATES],
    }


LABELS = {"REINFORCE": {"script": "reinforce"}, "actor-critic": {"script": "actor_critic"}}
EXPERIMENT = Experiment(
    claim="With the TD error a policy is learned from fewer steps.",
    verdict=NOT_SHOWN,
    run=run,
    jobs=grid(5, script=list(SCRIPTS)),
    smoke=grid(1, script=list(SCRIPTS), steps=[4000]),
    panels=[
        Panel(
            "CartPole: level by steps of the environment …",
            {label: (settings, "curve") for label, settings in LABELS.items()},
            axes=("thousands of steps", "return"),
            x=thousands(150_000),
            smooth=3,
        ),
        Panel(
            "… and REINFORCE ahead by updates",
            {label: (settings, "by_updates") for label, settings in LABELS.items()},
            axes=("updates of the policy", "return"),
            x=list(UPDATES),
        ),
    ],
    finding="""
    On CartPole, each with its defaults and over five seeds, REINFORCE with a baseline has a mean
    return of 475 after {reinforce / steps to 475 / range :,.0f} steps and the actor-critic after
    {actor_critic / steps to 475 / range :,.0f} (p =
    {reinforce ~ actor_critic / steps to 475 / p :.2f}). The actor-critic needs
    {actor_critic / updates to 475 / range :.0f} updates of the policy for it, REINFORCE
    {reinforce / updates to 475 / range :.0f} (p =
    {reinforce ~ actor_critic / updates to 475 / p :.3f}). A guess: while the critic is rough, its
    bias costs what the smaller variance gains ([above](#psi)).
    """,
)

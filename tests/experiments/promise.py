"""TRPO is said to make no step that harms. How many of its steps lower the true return?"""

from unittest.mock import patch

import numpy as np
import torch
from classic_parts import train
from harness import Panel, arms, grid
from verdicts import REFUTED, Contrast

import ppo
import trpo

ENVS = {"CartPole": ("CartPole-v1", {}), "Pendulum": ("Pendulum-v1", {"gamma": 0.9})}


def run(method, env, seed, steps=60_000, episodes=200):
    """The share of updates after which the true return is lower by 10 %, and the worst fall; to
    compare, the share of policies for which a second measurement is lower by 10 %."""
    script = ppo if method == "PPO" else trpo
    env_id, flags = ENVS[env]
    args = script.Args(env_id=env_id, seed=seed)
    found = []

    def measure(agent):
        return script.evaluate(agent, args, greedy=False, episodes=episodes)

    def update(agent, *rest, own=script.update):
        with torch.random.fork_rng():
            before, again = measure(agent), measure(agent)
        stats = own(agent, *rest)
        with torch.random.fork_rng():
            found.append([before, again, measure(agent)])
        return stats

    solve = trpo.conjugate_gradient
    if method == "gradient of the same KL":  # trpo.py sets the length of any direction by its KL
        solve = lambda product, g, steps: g  # noqa: E731
    with patch.object(script, "update", update), patch.object(trpo, "conjugate_gradient", solve):
        train(script, env_id=env_id, seed=seed, total_timesteps=steps, **flags)
    before, again, after = np.array(found).T
    falls = (before - after) / abs(before)
    return {
        "share that harms": np.mean(falls > 0.1),
        "share by noise": np.mean(before - again > 0.1 * abs(before)),
        "worst fall": max(falls),
    }


CLAIM = "A step of TRPO does not make the policy worse."
METHODS = ["TRPO", "PPO", "gradient of the same KL"]
JOBS = grid(14, method=METHODS, env=list(ENVS))
SMOKE = grid(1, method=METHODS, env=list(ENVS), steps=[8000], episodes=[2])
SECONDS = 12
NOISE = {env: ({"method": "TRPO", "env": env}, "share by noise") for env in ENVS}
PRIMARIES = [
    [
        Contrast(
            f"{env}: share of steps of TRPO after which the return is 10 % lower − by noise",
            ({"method": "TRPO", "env": env}, "share that harms"),
            NOISE[env],
            smallest=0.05,
            paired=True,
            equal=True,
        )
    ]
    for env in ENVS
]

# The page
LESSON = (REFUTED, "TRPO bounds how far a step goes, not where it leads: steps do make it worse.")
AXES = ("share of steps after which the return is 10 % lower", "")
PANELS = [
    Panel(
        env,
        arms("share that harms", "method", METHODS, env=env) | {"measured twice": NOISE[env]},
        AXES,
    )
    for env in ENVS
]


def words(runs):
    def harms(env, method):
        return runs.mean("share that harms", ".3f", env=env, method=method)

    def all_methods(env):
        noise = runs.mean("share by noise", ".3f", env=env, method="TRPO")
        said = [f"{harms(env, method)} ({method})" for method in METHODS]
        return f"{', '.join(said)}; two measurements of one policy: {noise}"

    def worst(env):
        return runs.mean("worst fall", ".0%", env=env, method="TRPO")

    return f"""
    The paper proves it for exact advantages and the largest KL of any state; the script has samples
    and a mean KL (δ = 0.01). Before and after each update 200 fresh episodes measure the true
    return, that is, the mean return of the policy as it acts in training. The share of updates that
    lower it by 10 % or more is on CartPole {all_methods("CartPole")}. On Pendulum it is
    {all_methods("Pendulum")}. The worst fall of a run of TRPO is {worst("CartPole")} of the return
    on CartPole, {worst("Pendulum")} on Pendulum, means over the seeds. "Gradient of the same KL" is
    TRPO with the plain gradient in place of the natural one, in a step of the same KL."""


NOT_TRIED = "a smaller δ, and larger rollouts, which make the advantages more exact."

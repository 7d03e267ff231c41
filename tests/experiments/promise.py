"""TRPO is said to make no step that harms. How many of its steps lower the true return?"""

from unittest.mock import patch

import numpy as np
import torch
from classic_parts import PLACES, right_door, train
from lab import Contrast, Experiment, grid, interval, values
from pictures import COLORS, figure

import ppo
import trpo


def run(method, place, seed, steps=40_000, episodes=200):
    """The share of updates after which the true return is lower by 10 %, and the worst fall; to
    compare, the share of policies for which a second measurement is lower by 10 %."""
    script = ppo if method == "PPO" else trpo
    flags = {"env_id": PLACES[place], "gamma": 0.99 if place == "CartPole" else 1.0, "seed": seed}
    args = script.Args(**flags)
    found = []

    def measure(agent):
        if place == "CartPole":
            return script.evaluate(agent, args, greedy=False, episodes=episodes)
        return right_door(agent)

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
        train(script, total_timesteps=steps, **flags)
    before, again, after = np.array(found).T
    falls = (before - after) / abs(before)
    return {
        "share that harms": np.mean(falls > 0.1),
        "share by noise": np.mean(before - again > 0.1 * abs(before)),
        "worst fall": max(falls),
    }


def contrast(place):
    arm = {"method": "TRPO", "place": place}
    name = f"{place}: steps of TRPO that lower the return by 10 % − those by noise of measurement"
    return Contrast(name, (arm, HARMS), (arm, "share by noise"), 0.05, equal=True)


HOME, CORRIDOR, HARMS = "CartPole", "seen, 2", "share that harms"
PANELS = {"CartPole": HOME, "corridor, noise 2": CORRIDOR}
METHODS = ["TRPO", "PPO", "gradient of the same KL"]
JOBS = grid(16, place=[HOME], method=METHODS) + grid(16, place=[CORRIDOR], method=METHODS[1:])
JOBS += grid(40, place=[CORRIDOR], method=["TRPO"])
TESTS = [[contrast(HOME)], [contrast(CORRIDOR)]]


def draw(runs):
    title = "TRPO: no step harms on CartPole, some do in a noisy corridor\n"
    title += "(black: 95 % intervals; grey: the limit of 0.05)"
    page, axes = figure(title, 2.7, 1, 2, sharey=True)
    for panel, (title, place) in zip(axes, PANELS.items(), strict=True):
        for row, algorithm in enumerate(("TRPO", "PPO", "none")):
            found = values(runs, ({"method": METHODS[row], "place": place}, HARMS))
            panel.barh(row, found.mean(), 0.5, color=COLORS[algorithm])
            panel.plot(interval(found), [row, row], color="black", linewidth=1.2)
        panel.set_yticks(range(3), [method.replace(" of", "\nof") for method in METHODS])
        panel.axvline(0.05, color="#888888", linewidth=1)  # the limit
        panel.set(title=title, ylim=(2.5, -0.5), xlabel="share that costs 10 % of return")
    return page


EXPERIMENT = Experiment(run, JOBS, TESTS, draw, small={"steps": 8000, "episodes": 2})

if __name__ == "__main__":
    EXPERIMENT.main()

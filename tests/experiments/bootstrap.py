"""The TD error against the rewards themselves: one loop, actor_critic.py's, with another Ψ."""

from contextlib import nullcontext
from unittest.mock import patch

from classic_parts import learn, thousands
from lab import LEARNED, Contrast, Experiment, arms, grid, values
from pictures import DASHED, SOLID, curves, figure

import actor_critic
import trpo


def monte_carlo(rollout, values, next_values, args, own=actor_critic.compute_advantages):
    """Ψ = Σ_l γ^l δ_{t+l}, the rewards up to the end of the rollout, then V, minus V(s_t). That is
    trpo.py's GAE with λ = 1. The critic's targets, for which fit_critic calls this, stay."""
    advantages, targets = own(rollout, values, next_values, args)
    if "done" in rollout:
        options = trpo.Args(gamma=args.gamma, gae_lambda=1.0)
        advantages, _ = trpo.compute_advantages(rollout, values, next_values, options)
    return advantages, targets


def run(place, psi, seed, steps=None):
    steps = steps or (60_000 if place in ("seen, 0.5", "hidden") else 100_000)
    change = nullcontext()
    if psi == "Monte Carlo":
        change = patch.object(actor_critic, "compute_advantages", monte_carlo)
    with change:
        return learn(actor_critic, place, total_timesteps=steps, seed=seed)


def contrast(place, smallest):
    more, less = arms(LEARNED, "psi", PSIS, place=place)
    return Contrast(f"{place}: TD error − Monte Carlo", more, less, smallest)


PSIS = ["TD error", "Monte Carlo"]
JOBS = grid(16, place=["seen, 0.5", "hidden"], psi=PSIS) + grid(24, place=["CartPole"], psi=PSIS)
JOBS += grid(72, place=["seen, 2"], psi=PSIS)
TESTS = [
    [contrast("seen, 0.5", 0.03), contrast("seen, 2", 0.03)],
    [contrast("hidden", 0.03), contrast("CartPole", 20)],
]


def draw(runs):
    title = "TD error against Monte Carlo: ahead where the state\n"
    title += "shows what an action did, lost where it does not"
    page, axes = figure(title, 4.6, 2, 2)
    panels = {"door seen, noise 0.5": "seen, 0.5", "door seen, noise 2": "seen, 2"}
    panels |= {"door hidden, noise 0.5": "hidden", "CartPole": "CartPole"}
    for panel, (title, place) in zip(axes, panels.items(), strict=True):
        steps = 60_000 if place in ("seen, 0.5", "hidden") else 100_000
        lines = {}
        for psi, dash in zip(PSIS, (SOLID, DASHED), strict=True):
            lines[psi] = values(runs, ({"place": place, "psi": psi}, "curve")), "actor-critic", dash
        curves(panel, thousands(steps), lines)
        panel.set(title=title, ylabel="return" if place == "CartPole" else "P(right door)")
    for panel in axes[2:]:
        panel.set_xlabel("thousands of steps")
    return page


CLAIM = "Learning from the TD error needs fewer steps than learning from the rewards themselves."
SOURCE = "Sutton and Barto 2018, 6.2: usually, where there is noise"
EXPERIMENT = Experiment(run, JOBS, TESTS, draw, {"steps": 2500}, CLAIM, SOURCE)

if __name__ == "__main__":
    EXPERIMENT.main()

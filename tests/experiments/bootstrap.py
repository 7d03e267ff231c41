"""The TD error against the rewards themselves: one loop, actor_critic.py's, with another Ψ."""

from contextlib import nullcontext
from unittest.mock import patch

from classic_parts import learn, thousands
from harness import Panel, arms, grid
from verdicts import Contrast

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
    more, less = arms("learned", "psi", PSIS, place=place).values()
    return Contrast(f"{place}: TD error − Monte Carlo", more, less, smallest)


PSIS = ["TD error", "Monte Carlo"]
CLAIM = "With the TD error a policy is learned from fewer steps than with the rewards themselves."
JOBS = grid(12, place=["hidden"], psi=PSIS) + grid(20, place=["CartPole"], psi=PSIS)
JOBS += grid(40, first=13, place=["seen, 0.5", "seen, 2"], psi=PSIS)  # 12 had left it undecided
SMOKE = grid(1, place=["seen, 0.5", "seen, 2", "hidden", "CartPole"], psi=PSIS, steps=[2500])
SECONDS = 5
PRIMARIES = [
    [contrast("seen, 0.5", 0.03), contrast("seen, 2", 0.03)],
    [contrast("hidden", 0.03), contrast("CartPole", 20)],
]

# The page
LESSON = (
    "undecided",
    "Where rewards are noisy and the state tells what an action has done, the TD error was ahead, "
    "but its test is not decided. Where the state does not tell, it did not learn at all, and on "
    "CartPole up to 64 rewards followed by V were faster.",
)
TIME = "thousands of steps"
PANELS = [
    Panel(title, arms("curve", "psi", PSIS, place=place), (TIME, y), thousands(steps))
    for title, place, y, steps in (
        ("Corridor, door seen, noise 0.5", "seen, 0.5", "P(right door)", 60_000),
        ("Corridor, door seen, noise 2", "seen, 2", "P(right door)", 100_000),
        ("Corridor, door hidden, noise 0.5", "hidden", "P(right door)", 60_000),
        ("CartPole", "CartPole", "return", 100_000),
    )
]


def words(runs):
    def door(place, psi):
        return runs.mean("learned", ".2f", place=place, psi=psi)

    def points(psi):
        return runs.mean("learned", ".0f", place="CartPole", psi=psi)

    return f"""
    Only Ψ differs: actor_critic.py's TD error, or "Monte Carlo": the rewards up to the end of the
    rollout, at most 64, then V of the state there, minus V(s). Loop, learning rate, critic and its
    targets are the same. In the corridor the first of 20 actions opens a door, the last pays 1 if
    it was the right one, and each step pays noise with the standard deviation named. "Seen" means
    that the state tells whether the door was right, so V jumps when it opens, and the TD error
    holds the noise of one step instead of 20. The mean probability of the right door over training
    is then {door("seen, 0.5", "TD error")} with the TD error and {door("seen, 0.5", "Monte Carlo")}
    with Monte Carlo if the noise is 0.5, and {door("seen, 2", "TD error")} and
    {door("seen, 2", "Monte Carlo")} if it is 2. These two comparisons are one test, which needs
    both. "Hidden" means that V(s) is the same after both actions, so the first TD error says
    nothing about the action: the probability stays at {door("hidden", "TD error")}, like the toss
    of a coin, while Monte Carlo brings {door("hidden", "Monte Carlo")}. On CartPole, whose rewards
    have no noise, the mean return over training is {points("TD error")} and
    {points("Monte Carlo")}. Where the door is seen this is a second try: with 12 other seeds the
    first one was undecided."""


NOT_TRIED = "other rates, longer corridors, REINFORCE's own loop of whole episodes."

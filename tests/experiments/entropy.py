"""The entropy bonus, where a small reward is near and a large one far."""

import gymnasium as gym
import numpy as np
import torch
from classic_parts import PARTS, thousands, train
from harness import PARTLY, Experiment, Panel, grid

import ppo

HEIGHTS = [10, 11]


class Stairs(gym.Env):
    """On each stair: stop, for 0 or 2 points by the toss of a coin, or climb on, at a cost of 0.1;
    the top is worth ten. Chosen at random, one episode in 2^height reaches it, so that stopping
    pays better at first. The observation is the stair."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, height):
        self.height = height
        self.observation_space = gym.spaces.Box(0, 1, (height + 1,), np.float32)

    def seen(self):
        return np.eye(self.height + 1, dtype=np.float32)[self.stair]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.stair = 0
        return self.seen(), {}

    def step(self, action):
        if action == 0:
            return self.seen(), 2.0 * self.np_random.integers(2), True, False, {}
        self.stair += 1
        top = self.stair == self.height
        return self.seen(), 10.0 * top - 0.1, top, False, {}


for height in HEIGHTS:
    gym.register(f"Stairs{height}-v0", Stairs, kwargs={"height": height})


def run(height, coefficient, seed, steps=100_000):
    """ppo.py with an entropy bonus of this weight, which decays to 0: greedy return at the end,
    and the entropy of the policy on the first stair, in nats, over the run."""
    found = []

    def record(agent, batch):
        with torch.no_grad():
            found.append(agent.policy(torch.eye(height + 1)[0]).entropy().item())

    flags = {"ent_coef": coefficient, "total_timesteps": steps, "seed": seed}
    result, _ = train(ppo, record, env_id=f"Stairs{height}-v0", **flags)
    chosen = np.linspace(0, len(found) - 1, PARTS).astype(int)
    return {
        "greedy_return": result["greedy_return"],
        "found": float(result["greedy_return"] > 5),
        "entropy": [found[i] for i in chosen],
        "entropy halfway": found[len(found) // 2],
    }


LABELS = {
    "no bonus": {"height": 11, "coefficient": 0.0},
    "weight 0.1": {"height": 11, "coefficient": 0.1},
    "weight 1": {"height": 11, "coefficient": 1.0},
}
EXPERIMENT = Experiment(
    claim="An entropy bonus keeps a policy from settling for the nearest reward.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, height=HEIGHTS, coefficient=[0.0, 0.1, 1.0]),
    smoke=grid(1, height=[11], coefficient=[0.0, 0.1, 1.0], steps=[5000]),
    panels=[
        Panel(
            "With a large bonus every run finds the top of 11 stairs",
            {label: (settings, "greedy_return") for label, settings in LABELS.items()},
            axes=("greedy return of each run; bar: median", ""),
            dots=True,
        ),
        Panel(
            "Entropy on the first stair",
            {label: (settings, "entropy") for label, settings in LABELS.items()},
            axes=("thousands of steps", "nats"),
            x=thousands(100_000),
        ),
    ],
    finding="""
    On 11 stairs, where stopping pays 1 on average, the greedy return of five seeds ends at
    {11, 0.0 / greedy_return / range :.1f} without the bonus, at
    {11, 0.1 / greedy_return / range :.1f} with a weight of 0.1 and at
    {11, 1.0 / greedy_return / range :.1f}, the top, with 1.0 (p =
    {11, 0.0 ~ 11, 1.0 / greedy_return / p :.2f} against none). With 10 stairs these are
    {10, 0.0 / greedy_return / range :.1f}, {10, 0.1 / greedy_return / range :.1f} and
    {10, 1.0 / greedy_return / range :.1f} (p = {10, 0.0 ~ 10, 1.0 / greedy_return / p :.2f}): some
    runs find the top without it, and a small weight gains nothing. That a large one keeps the
    policy undecided is plain: halfway its entropy on the first of 11 stairs is
    {11, 1.0 / entropy halfway / range :.2f} nats, against {11, 0.0 / entropy halfway / range :.2f}
    without (p = {11, 0.0 ~ 11, 1.0 / entropy halfway / p :.3f}). The stairs were chosen so that it
    matters.
    """,
)

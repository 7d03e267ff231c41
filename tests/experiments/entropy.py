"""The entropy bonus, where a small reward is near and a large one far."""

import gymnasium as gym
import numpy as np
from classic_parts import thousands, train
from lab import Contrast, Experiment, arms, grid, values
from pictures import DASHED, SOLID, curves, figure

import ppo


class Stairs(gym.Env):
    """On each stair: stop, for 0 or 2 points by the toss of a coin, or climb on, at a cost of 0.1;
    the top is worth ten. At random one episode in 2^height reaches it: stopping pays at first."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, height):
        self.stairs = np.eye(height + 1, dtype=np.float32)
        self.observation_space = gym.spaces.Box(0, 1, (height + 1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.stair = 0
        return self.stairs[0].copy(), {}

    def step(self, action):
        self.stair += action
        top = self.stair == len(self.stairs) - 1
        reward = 10.0 * top - 0.1 if action else 2.0 * self.np_random.integers(2)
        return self.stairs[self.stair].copy(), reward, top or not action, False, {}


for height in (10, 11):
    gym.register(f"Stairs{height}-v0", Stairs, kwargs={"height": height})


def run(place, weight, seed, steps=100_000):
    """ppo.py with an entropy bonus of this weight, which decays to 0: on stairs, whether the policy
    climbs to the top at the end; on CartPole the mean return over training."""
    found = train(ppo, env_id=place, ent_coef=weight, seed=seed, total_timesteps=steps)
    if place == "CartPole-v1":
        return {"return": found.mean, "curve": found.curve}
    return {"top found": found.greedy_return > 5, "stairs curve": found.curve}


STAIRS = ["Stairs10-v0", "Stairs11-v0"]
WEIGHTS = [1.0, 0.0]
JOBS = grid(16, place=[*STAIRS, "CartPole-v1"], weight=WEIGHTS)
TESTS = [
    [Contrast("stairs, found the top: weight 1 − 0", *arms("top found", "weight", WEIGHTS), 0.2)],
    [Contrast("CartPole, return: weight 0 − 1", *arms("return", "weight", WEIGHTS[::-1]), 20)],
]


def draw(runs):
    page, axes = figure("An entropy bonus finds a far reward, and costs speed", 3.1, 1, 2)
    for panel, column in zip(axes, ("stairs curve", "curve"), strict=True):
        lines = {}
        for weight, dash in zip(WEIGHTS, (SOLID, DASHED), strict=True):
            found = values(runs, ({"weight": weight}, column))
            found = found > 5 if panel is axes[0] else found
            lines[f"weight {weight:g}"] = found, "PPO", dash
        curves(panel, thousands(100_000), lines, band=panel is axes[1])
        panel.set(xlabel="thousands of steps")
    axes[0].set(title="stairs: share of runs with\na return above 5 (top: 10)")
    axes[1].set(title="CartPole: return")
    return page


CLAIM = "An entropy bonus keeps a policy from settling early for something poor."
SOURCE = (
    "[A3C](https://arxiv.org/abs/1602.01783), section 4, after Williams and Peng 1991; that "
    "it costs return elsewhere, introductions"
)
EXPERIMENT = Experiment(run, JOBS, TESTS, draw, {"steps": 2500}, CLAIM, SOURCE)

if __name__ == "__main__":
    EXPERIMENT.main()

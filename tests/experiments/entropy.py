"""The entropy bonus, where a small reward is near and a large one far."""

import gymnasium as gym
import numpy as np
from classic_parts import thousands, train
from harness import Panel, arms, grid
from verdicts import SHOWN, Contrast

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
        return {"learned": found.mean, "curve": found.curve}
    return {"top found": found.greedy_return > 5, "stairs curve": found.curve}


CLAIM = "An entropy bonus keeps a policy from settling for the nearest reward, and costs speed."
STAIRS = ["Stairs10-v0", "Stairs11-v0"]
WEIGHTS = [1.0, 0.0]
JOBS = grid(25, place=STAIRS, weight=WEIGHTS) + grid(20, place=["CartPole-v1"], weight=WEIGHTS)
SMOKE = grid(1, place=[*STAIRS, "CartPole-v1"], weight=WEIGHTS, steps=[2500])
SECONDS = 7
FOUND = arms("top found", "weight", [1.0, 0.0]).values()
LEARNED = arms("learned", "weight", [0.0, 1.0]).values()
PRIMARIES = [
    [Contrast("stairs, share at the top: weight 1 − 0", *FOUND, 0.2, block="place")],
    [Contrast("CartPole, return: weight 0 − 1", *LEARNED, 20)],
]

# The page
LESSON = (
    SHOWN,
    "A strong entropy bonus finds a far reward that most policies without one miss; on CartPole "
    "it costs return.",
)
AXES, TIME = ("thousands of steps", "return"), thousands(100_000)
CURVES = {
    column: {f"weight {weight:g}": ({"weight": weight}, column) for weight in WEIGHTS}
    for column in ("stairs curve", "curve")
}
PANELS = [
    Panel("10 and 11 stairs", CURVES["stairs curve"], AXES, TIME),
    Panel("CartPole", CURVES["curve"], AXES, TIME),
]


def words(runs):
    def found(weight):
        return runs.mean("top found", ".2f", weight=weight)

    def learned(weight):
        return runs.mean("learned", ".0f", weight=weight)

    return f"""
    An entropy bonus adds the policy's entropy, times a weight, to what is maximized, so it keeps
    the policy random. The stairs are a task made for this claim. On each of 10 or 11 stairs the
    policy either stops, which pays 1 on average, or climbs on, which costs 0.1; the top pays 10. A
    policy that acts at random gets to the top once in 1,024 or 2,048 episodes, so at first stopping
    at once pays best. The bonus is strong, 100 times reinforce.py's. After 100,000 steps of PPO the
    policy climbs to the top in a share of {found(1.0)} of the runs with a bonus of weight 1, which
    decays to 0 over the run, and in {found(0.0)} without a bonus. The few that get there without a
    bonus do so early. On CartPole, where no better reward lies farther off, the mean return over
    training is {learned(1.0)} with that bonus and {learned(0.0)} without."""


NOT_TRIED = "weights in between, a bonus that does not decay, exploration by other means."

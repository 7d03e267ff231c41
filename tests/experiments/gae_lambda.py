"""GAE's λ: what PPO learns with it, with noise in its rewards and without."""

import gymnasium as gym
import numpy as np
import torch
from classic_parts import train
from lab import LEARNED, Contrast, Experiment, grid, values
from pictures import dots, figure

import ppo

LAMBDAS = {"corridor": [0.0, 0.8, 1.0], "CartPole": [0.0, 0.5, 0.8, 0.95, 1.0]}


class Corridor(gym.Env):
    """The first of 20 actions opens the left door or the right one. The last action pays 1 if the
    open door is the one that a cue had named at the start. Each step also pays noise, N(0, 2). The
    state shows the time and, once a door is open, whether it is the right one."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0, 1, (25,), np.float32)
    noise = 2.0

    def observe(self):
        state = np.zeros(25, np.float32)
        state[self.time] = 1
        state[23 + self.right if self.time else 21 + self.cue] = 1
        return state

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.cue, self.right = 0, int(self.np_random.integers(2)), 0
        return self.observe(), {}

    def step(self, action):
        if self.time == 0:
            self.right = int(action == self.cue)
        self.time += 1
        end = self.time == 20
        reward = self.right * end + self.noise * self.np_random.standard_normal()
        return self.observe(), reward, end, False, {}


gym.register("Corridor-v0", Corridor)


@torch.no_grad()
def right_door(agent):
    """The probability that the agent opens the right door, a mean over both cues: its expected
    return in the corridor, as the noise has a mean of 0."""
    starts = torch.zeros(2, 25)
    starts[:, 0] = 1
    starts[range(2), [21, 22]] = 1
    return agent.policy(starts).probs[range(2), range(2)].mean().item()


def run(seed, place, lam, steps=60_000):
    """The mean over training of the return or, in the corridor, of the right door's probability."""
    flags = {"gae_lambda": lam, "total_timesteps": steps, "seed": seed}
    if place == "CartPole":
        return {LEARNED: train(ppo, **flags).mean}
    doors = []
    flags |= {"env_id": "Corridor-v0", "gamma": 1.0}
    train(ppo, lambda agent: doors.append(right_door(agent)), **flags)
    return {LEARNED: float(np.mean(doors))}


def contrast(place, other, smallest):
    arms = [({"place": place, "lam": lam}, LEARNED) for lam in (0.8, other)]
    return Contrast(f"{place}: λ 0.8 − λ {other:g}", *arms, smallest)


JOBS = grid(20, place=["CartPole"], lam=LAMBDAS["CartPole"])
JOBS += grid(144, place=["corridor"], lam=LAMBDAS["corridor"])
CONTRASTS = [
    contrast("corridor", 0.0, 0.02),
    contrast("corridor", 1.0, 0.02),
    contrast("CartPole", 1.0, 20),
]


def draw(runs):
    title = "Which λ is best depends on the noise"
    page, panels = figure(title, 2.8, 1, 2)
    for panel, place in zip(panels, LAMBDAS, strict=True):
        rows = {}
        for lam in LAMBDAS[place]:
            arm = {"lam": lam, "place": place}, LEARNED
            rows[f"λ {lam:g}"] = values(runs, arm), "PPO", True
        dots(panel, rows)
    panels[0].set(title="corridor, noise 2", xlabel="P(right door)")
    panels[1].set(title="CartPole, no noise", xlabel="return")
    return page


CLAIM = "The best λ lies between 0 and 1."
SOURCE = "[GAE](https://arxiv.org/abs/1506.02438), 6.3"
EXPERIMENT = Experiment(run, JOBS, CONTRASTS, draw, {"steps": 2500}, CLAIM, SOURCE)

if __name__ == "__main__":
    EXPERIMENT.main()

"""Small environments whose right answers are known; importing this registers them."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class Diary(gym.Env):
    """Says in every observation which episode and which step of it this is; ends at random, or
    after 6 steps by TimeLimit. Its infos have an "episode" that is something else."""

    episode = -1
    observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, action=Discrete(2)):  # noqa: B008
        self.action_space = action

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return np.array([self.episode, self.t], np.float32), {}

    def step(self, action):
        self.t += 1
        obs, reward = np.array([self.episode, self.t], np.float32), self.np_random.normal()
        terminated = bool(self.np_random.random() < 0.2)
        return obs, float(reward), terminated, False, {"episode": "something else"}


class Mirror(gym.Env):
    """Shows the action that reached it, which lies between its bounds; 5 steps."""

    def __init__(self, low=(5, 5, 5), high=(8, 8, 8), dtype=np.float32):
        self.action_space = Box(dtype(low), dtype(high), dtype=dtype)
        self.observation_space = self.action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        low, high = self.action_space.low, self.action_space.high
        return np.zeros_like(low).clip(low, high), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return action, 0.0, False, False, {}


class Guess(gym.Env):
    """A point for an action whose sign is that of the coin just shown; a new coin in each of 8
    steps."""

    observation_space = action_space = Box(-1, 1, (1,), np.float32)

    def _coin(self):
        self.coin = int(self.np_random.integers(2))
        return np.array([2 * self.coin - 1], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._coin(), {}

    def step(self, action):
        self.t += 1
        reward = float((action[0] > 0) == bool(self.coin))
        return self._coin(), reward, self.t == 8, False, {}


class Spaces(gym.Env):
    """Whatever spaces a test asks for; an observation is any of its space. A point for every step,
    for ever, or until a time limit."""

    def __init__(self, observation=Box(-1, 1, (1,)), action=Discrete(2)):  # noqa: B008
        self.observation_space, self.action_space = observation, action

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        self.observed = self.observation_space.sample()
        return self.observed, {}

    def step(self, action):
        return self.reset()[0], 1.0, False, False, {}


gym.register("Diary-v0", Diary, max_episode_steps=6)
gym.register("BoxDiary-v0", Diary, max_episode_steps=6, kwargs={"action": Box(-1, 1, (2,))})
gym.register("Mirror-v0", Mirror, max_episode_steps=5)
gym.register("Guess-v0", Guess)
gym.register("Spaces-v0", Spaces)
gym.register("Once-v0", Spaces, max_episode_steps=1)

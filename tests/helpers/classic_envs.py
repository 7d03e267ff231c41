"""Small environments whose right answers are known; importing this registers them."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class Diary(gym.Env):
    """Shows which episode and which step of it this is, and pays by it; ends at random, or after 6
    steps by TimeLimit. Its infos have an "episode" that is something else."""

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
        obs, terminated = np.float32([self.episode, self.t]), self.np_random.random() < 0.2
        return obs, pay(obs), bool(terminated), False, {"episode": "something else"}


def pay(obs):
    """Diary's reward for the step that led to these observations (…, 2); 0 for a reset."""
    return np.sin(3.0 * obs[..., 0] + obs[..., 1]) * (obs[..., 1] > 0)


class Spaces(gym.Env):
    """Whatever spaces a test asks for. An observation is any of its space, and an action has to be
    of its space. A point for every step, for ever, or until a time limit."""

    def __init__(self, observation=Box(-1, 1, (1,)), action=Discrete(2)):  # noqa: B008
        self.observation_space, self.action_space = observation, action

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        self.observed = self.observation_space.sample()
        return self.observed, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.acted = action
        return self.reset()[0], 1.0, False, False, {}


gym.register("Diary-v0", Diary, max_episode_steps=6)
gym.register("BoxDiary-v0", Diary, max_episode_steps=6, kwargs={"action": Box(-1, 1, (2,))})
gym.register("Spaces-v0", Spaces)
gym.register("Once-v0", Spaces, max_episode_steps=1)

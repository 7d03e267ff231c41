"""Small environments whose right answers are known; importing this registers them with
gymnasium."""

import gymnasium as gym
import numpy as np


class Diary(gym.Env):
    """Says in every observation which episode and which step of it this is; ends at random, or
    after 6 steps by TimeLimit."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return np.array([self.episode, self.t], np.float32), {}

    def step(self, action):
        self.t += 1
        return (
            np.array([self.episode, self.t], np.float32),
            float(self.np_random.normal()),
            bool(self.np_random.random() < 0.2),
            False,
            {},
        )


class Mirror(gym.Env):
    """Shows the action that reached it, which lies between -1 and 1; 5 steps."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return action, 0.0, False, False, {}


class Guess(gym.Env):
    """A point for the action whose sign or number is that of the coin just shown; a new coin each
    step, 8 steps to the end."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, continuous=False):
        self.action_space = (
            gym.spaces.Box(-1, 1, (1,), np.float32) if continuous else gym.spaces.Discrete(2)
        )

    def _coin(self):
        self.coin = int(self.np_random.integers(2))
        return np.array([2 * self.coin - 1], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._coin(), {}

    def step(self, action):
        self.t += 1
        reward = float((float(np.ravel(action)[0]) > 0) == bool(self.coin))
        return self._coin(), reward, self.t == 8, False, {}


class Endless(gym.Env):
    """A point for every step, for ever; only the time limit, 10 steps, cuts it off. V is 1 / (1 -
    γ)."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), 1.0, False, False, {}


class Broken(Diary):
    """Its rewards turn into NaN after 60 episodes."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, float("nan") if self.episode > 60 else reward, *rest


class Spaces(gym.Env):
    """Whatever spaces are asked for; an observation is any of its space."""

    def __init__(self, observation=None, action=None):
        self.observation_space = observation or gym.spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = action or gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, True, False, {}


gym.register("Diary-v0", Diary, max_episode_steps=6)
gym.register("Broken-v0", Broken, max_episode_steps=6)
gym.register("Mirror-v0", Mirror, max_episode_steps=5)
gym.register("Guess-v0", Guess)
gym.register("GuessBox-v0", Guess, kwargs={"continuous": True})
gym.register("Endless-v0", Endless, max_episode_steps=10)
gym.register("Forever-v0", Endless)
gym.register("Spaces-v0", Spaces)
GROWING = gym.spaces.Sequence(gym.spaces.Discrete(3))  # of no fixed length
gym.register("SequenceObs-v0", Spaces, kwargs={"observation": GROWING})
gym.register("MultiDiscreteAct-v0", Spaces, kwargs={"action": gym.spaces.MultiDiscrete([2, 2])})
gym.register("FromOne-v0", Spaces, kwargs={"action": gym.spaces.Discrete(2, start=1)})
gym.register("SquareAct-v0", Spaces, kwargs={"action": gym.spaces.Box(-1, 1, (2, 2))})
gym.register(
    "DryLake-v0",
    gym.spec("FrozenLake-v1").entry_point,
    kwargs={"map_name": "4x4", "is_slippery": False},
    max_episode_steps=100,
    reward_threshold=0.99,
)

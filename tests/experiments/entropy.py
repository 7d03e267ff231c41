"""The entropy bonus, where a small reward is near and a large one far."""

import gymnasium as gym
import numpy as np
import torch
from classic_parts import PARTS, thousands, train
from harness import PARTLY, Experiment, Panel, grid

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


def run(height, coefficient, seed, steps=100_000):
    """Greedy return of ppo.py with an entropy bonus of this weight, which decays to 0, and the
    entropy of the policy on the first stair, in nats, over the run."""
    found = []

    def record(agent, batch):
        with torch.no_grad():
            found.append(agent.policy(torch.eye(height + 1)[0]).entropy().item())

    flags = {"ent_coef": coefficient, "total_timesteps": steps, "seed": seed}
    greedy = train(ppo, record, env_id=f"Stairs{height}-v0", **flags).greedy_return
    entropy = [found[i] for i in np.linspace(0, len(found) - 1, PARTS).astype(int)]
    halfway = entropy[PARTS // 2]
    return {"greedy_return": greedy, "entropy": entropy, "entropy halfway": halfway}


WEIGHTS = {"no bonus": 0.0, "weight 0.1": 0.1, "weight 1": 1.0}
LABELS = {label: {"height": 11, "coefficient": weight} for label, weight in WEIGHTS.items()}
RETURNS = {label: (settings, "greedy_return") for label, settings in LABELS.items()}
ENTROPIES = {label: (settings, "entropy") for label, settings in LABELS.items()}
STEPS = thousands(100_000)
EXPERIMENT = Experiment(
    claim="An entropy bonus keeps a policy from settling for the nearest reward.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, height=[10, 11], coefficient=list(WEIGHTS.values())),
    smoke=grid(1, height=[11], coefficient=list(WEIGHTS.values()), steps=[5000]),
    panels=[
        Panel("11 stairs", RETURNS, ("greedy return (the top: 8.9)", ""), dots=True),
        Panel("On the first", ENTROPIES, ("thousands of steps", "entropy, nats"), STEPS),
    ],
    finding="""
    On 11 stairs, where stopping pays 1 on average, five seeds end at
    {11, 0.0 / greedy_return / range :.1f} without the bonus, at
    {11, 0.1 / greedy_return / range :.1f} with a weight of 0.1 and at
    {11, 1.0 / greedy_return / range :.1f}, the top, with 1 (p =
    {11, 0.0 ~ 11, 1.0 / greedy_return / p :.2f} against none). On 10 stairs it is p =
    {10, 0.0 ~ 10, 1.0 / greedy_return / p :.2f}: some runs find the top without it, and a small
    weight gains nothing. That a large one keeps the policy undecided is plain: halfway its entropy
    is {11, 1.0 / entropy halfway :.2f} nats, without it {11, 0.0 / entropy halfway :.2f} (p =
    {11, 0.0 ~ 11, 1.0 / entropy halfway / p :.3f}). The stairs were chosen so that it matters.
    """,
)

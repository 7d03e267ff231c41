"""GAE's λ: the error of the advantages at one policy, and PPO's learning."""

import gymnasium as gym
import numpy as np
import torch
from classic_parts import learn, train
from lab import LEARNED, Contrast, Experiment, arms, grid, values
from pictures import SOLID, curves, dots, figure

import ppo

LAMBDAS = [0.0, 0.5, 0.8, 0.95, 1.0]


@torch.no_grad()
def td_errors(agent, states, action, horizon, seed, noise=5.0):
    """Of plays from these states (N, 4), first with this action, then with the policy's: (T, N).
    N(0, noise) is added to each reward."""
    envs = gym.make_vec("CartPole-v1", len(states), max_episode_steps=10**9)
    envs.reset()
    envs.unwrapped.state = states.T.copy()
    random = np.random.default_rng((seed, action))
    actions = np.full(len(states), action)
    value = agent.value(torch.tensor(states).float()).numpy()
    alive = np.ones(len(states), bool)
    deltas = []
    for _ in range(horizon):
        obs, reward, terminated, _, _ = envs.step(actions)
        reward = reward + noise * random.standard_normal(len(states))
        following = agent.value(torch.tensor(obs)).numpy() * ~terminated
        deltas.append((reward + ppo.Args().gamma * following - value) * alive)
        alive &= ~terminated
        value = following
        actions = agent.act(obs)
    return np.array(deltas)


def errors(seed, steps, copies, horizon):
    """Squared bias of Â(s, right) − Â(s, left) and variance of Â, for each λ, at one policy. Two
    quarters of the plays bear Â, two the truth, so noise takes no part in the squared bias."""
    half_trained = train(ppo, total_timesteps=steps, seed=seed)
    visited = half_trained.batch["obs"].double()
    states = np.random.default_rng(seed).choice(visited, 32, replace=False).repeat(copies, 0)
    plays = [td_errors(half_trained.agent, states, action, horizon, seed) for action in (0, 1)]

    def advantages(lam):
        decay = (ppo.Args().gamma * lam) ** np.arange(horizon)
        return [(decay @ deltas).reshape(32, 4, -1) for deltas in plays]

    left, right = advantages(1.0)
    truth = (right - left).mean(2)
    result = {"bias²": [], "variance": []}
    for lam in LAMBDAS:
        left, right = advantages(lam)
        estimate = (right - left).mean(2)
        bias = (estimate[:, 0] - truth[:, 2]) * (estimate[:, 1] - truth[:, 3])
        result["bias²"].append(bias.mean())
        result["variance"].append(np.var([left, right], axis=(2, 3), ddof=1).mean())
    return result


def run(seed, place=None, lam=None, steps=60_000, half_trained=20_000, copies=400, horizon=600):
    """The errors at one policy; or a training run of ppo.py with this λ."""
    if place:
        return learn(ppo, place, gae_lambda=lam, total_timesteps=steps, seed=seed)
    return errors(seed, half_trained, copies, horizon)


def contrast(place, other, smallest):
    more, less = arms(LEARNED, "lam", [0.8, other], place=place)
    return Contrast(f"{place}: λ 0.8 − λ {other:g}", more, less, smallest)


CORRIDOR = "seen, 2"
JOBS = grid(16) + grid(20, place=["CartPole"], lam=LAMBDAS)
JOBS += grid(144, place=[CORRIDOR], lam=[0.0, 0.8, 1.0])
TESTS = [
    [contrast(CORRIDOR, 0.0, 0.02), contrast(CORRIDOR, 1.0, 0.02)],
    [contrast("CartPole", 1.0, 20)],
]


def draw(runs):
    title = "λ trades bias for variance; which λ is best\ndepends on the noise"
    page, (bias, variance, corridor, cartpole) = figure(title, 5.2, 2, 2)
    variance.set(yscale="log", title="variance")
    bias.set(title="bias² of the advantages")
    for panel, column in ((bias, "bias²"), (variance, "variance")):
        curves(panel, LAMBDAS, {"": (values(runs, ({}, column)), "PPO", SOLID)})
        panel.set_xlabel("λ")
    for panel, place in ((corridor, CORRIDOR), (cartpole, "CartPole")):
        rows = {}
        for lam in LAMBDAS if place == "CartPole" else [0.0, 0.8, 1.0]:
            arm = {"lam": lam, "place": place}, LEARNED
            rows[f"λ {lam:g}"] = values(runs, arm), "PPO", True
        dots(panel, rows)
    corridor.set(title="corridor, noise 2", xlabel="P(right door)")
    cartpole.set(title="CartPole, no noise", xlabel="return")
    return page


SMALL = {"steps": 2500, "half_trained": 3000, "copies": 4, "horizon": 20}
CLAIM = "The best λ lies between 0 and 1."
SOURCE = "[GAE](https://arxiv.org/abs/1506.02438), 6.3"
EXPERIMENT = Experiment(run, JOBS, TESTS, draw, SMALL, CLAIM, SOURCE)

if __name__ == "__main__":
    EXPERIMENT.main()

"""GAE's λ: the error of the advantages at one policy, and PPO's learning."""

import gymnasium as gym
import numpy as np
import torch
from classic_parts import train
from harness import PARTLY, Experiment, Panel, grid

import ppo


@torch.no_grad()
def td_errors(agent, states, action, horizon):
    """Of plays from these states (N, 4), first with this action, then with the policy's: (T, N)."""
    envs = gym.make_vec("CartPole-v1", len(states), max_episode_steps=10**9)
    envs.reset()
    envs.unwrapped.state = states.T.copy()
    actions = np.full(len(states), action)
    value = agent.value(torch.tensor(states).float()).numpy()
    alive = np.ones(len(states), bool)
    deltas = []
    for _ in range(horizon):
        obs, reward, terminated, _, _ = envs.step(actions)
        following = agent.value(torch.tensor(obs)).numpy() * ~terminated
        deltas.append((reward + ppo.Args().gamma * following - value) * alive)
        alive &= ~terminated
        value = following
        actions = agent.act(obs)
    return np.array(deltas)


def run(lam, seed, steps=20_000, copies=200, horizon=600):
    """Squared bias of Â(s, right) − Â(s, left), variance of Â, and PPO's mean return with this λ.
    Two quarters of the plays bear Â, two the truth: so noise takes no part in the squared bias."""
    half_trained = train(ppo, total_timesteps=steps, seed=seed)
    visited = half_trained.batch["obs"].double()
    states = np.random.default_rng(seed).choice(visited, 32, replace=False).repeat(copies, 0)
    plays = [td_errors(half_trained.agent, states, action, horizon) for action in (0, 1)]

    def advantages(lam):
        decay = (ppo.Args().gamma * lam) ** np.arange(horizon)
        return [(decay @ deltas).reshape(32, 4, -1) for deltas in plays]

    left, right = advantages(lam)
    estimate = (right - left).mean(2)
    variance = np.var([left, right], axis=(2, 3), ddof=1)
    left, right = advantages(1.0)
    truth = (right - left).mean(2)
    bias = (estimate[:, 0] - truth[:, 2]) * (estimate[:, 1] - truth[:, 3])
    curve = train(ppo, gae_lambda=lam, total_timesteps=3 * steps, seed=seed).curve
    return {"bias²": bias.mean(), "variance": variance.mean(), "return": np.mean(curve)}


ERRORS = {"bias², of right − left": ({}, "bias²"), "variance, of one": ({}, "variance")}
PPO = {"PPO": ({}, "return")}
EXPERIMENT = Experiment(
    claim="λ trades the critic's bias against the variance of the rewards.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, lam=[0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0]),
    smoke=grid(1, lam=[0.0, 1.0], steps=[3000], copies=[4], horizon=[20]),
    panels=[
        Panel("Error of advantages, half-trained", ERRORS, ("λ (not to scale)", "points²"), "lam"),
        Panel("PPO, mean over training", PPO, ("λ (not to scale)", "return"), "lam"),
    ],
    finding="""
    Over five seeds the squared bias falls from {0.0 / bias² / range :.1f} at λ = 0 to
    {1.0 / bias² :.2f} at 1. The variance is {0.95 / variance / range :.2f} at 0.95 and
    {1.0 / variance / range :.1f} at 1 (p = {0.95 ~ 1.0 / variance / p :.3f}); its
    {0.0 / variance :.0f} at λ = 0 is the environment's, as CartPole is deterministic. In learning
    no trade is seen: PPO's mean return is {0.0 / return / range :.0f} at 0,
    {0.98 / return / range :.0f} at 0.98, the default, and {1.0 / return / range :.0f} at 1 (p =
    {0.98 ~ 1.0 / return / p :.2f} against 0.98). There λ sets the critic's targets, too.
    """,
)

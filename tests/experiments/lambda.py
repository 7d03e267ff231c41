"""GAE's λ: the error of the advantages at one policy, and PPO's learning."""

from functools import cache

import gymnasium as gym
import numpy as np
import torch
from classic_parts import train
from harness import PARTLY, Experiment, Panel, grid

import ppo

LAMBDAS = [0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0]


@torch.no_grad()
def value_of(agent, obs):
    return agent.value(torch.as_tensor(obs, dtype=torch.float32)).numpy()


def play(envs, agent, states, actions, horizon):
    """N plays from the given states (N, 4) and first actions (N,), cut off at the horizon.

    Returns rewards (T, N) and the critic's values (T + 1, N), both 0 after the pole has fallen.
    """
    envs.reset()
    envs.unwrapped.state = states.T.copy()
    alive = np.ones(len(states), bool)
    rewards, values = [], [value_of(agent, states)]
    for _ in range(horizon):
        obs, reward, terminated, _, _ = envs.step(actions)
        rewards.append(reward * alive)
        alive = alive & ~terminated
        values.append(value_of(agent, obs) * alive)
        actions = agent.act(obs)
    return np.array(rewards), np.array(values)


def gae(rewards, values, gamma, lam):
    """Â of the first step of each play: Σ_l (γλ)^l δ_l, shape (N,)."""
    deltas = rewards + gamma * values[1:] - values[:-1]
    return (gamma * lam) ** np.arange(len(deltas)) @ deltas


@cache
def plays_at_one_policy(seed, steps, states, copies, horizon):
    """Plays of either action, `copies` from each of the states, by a half-trained PPO agent."""
    _, agent = train(ppo, total_timesteps=steps, seed=seed)
    args = ppo.Args(seed=seed + 500)
    envs = ppo.make_envs(args.env_id, args.num_envs)
    rollout, _ = next(ppo.rollouts(envs, agent, args))
    visited = rollout["obs"][rollout["mask"]].double().numpy()
    dice = np.random.default_rng(seed)
    rows = dice.choice(len(visited), states, replace=False)
    chosen = visited[rows].repeat(copies, 0)
    envs = gym.make_vec("CartPole-v1", len(chosen), max_episode_steps=10**9)
    plays = []
    for action in (0, 1):
        first = np.full(len(chosen), action)
        plays.append(play(envs, agent, chosen, first, horizon))
    return plays


def run(lam, seed, steps=20_000, states=32, copies=400, horizon=600, curve_steps=60_000):
    """Squared bias and variance of Â, means over the states; and PPO's mean return with this λ.

    The policy gradient at a state hangs on the difference between the actions' advantages, so the
    bias is that of Â(s, right) − Â(s, left) against Q(s, right) − Q(s, left). The plays of each
    action are dealt into four quarters: two bear Â, and two the Monte Carlo returns that tell Q.
    The product of two independent errors has the squared bias as its mean, without the noise.
    """
    plays = plays_at_one_policy(seed, steps, states, copies, horizon)
    gamma = ppo.Args().gamma
    left, right = (gae(*each, gamma, lam).reshape(states, copies) for each in plays)
    to_the_end = [gae(*each, gamma, 1.0) for each in plays]
    truth = (to_the_end[1] - to_the_end[0]).reshape(states, 4, -1).mean(2)
    estimate = (right - left).reshape(states, 4, -1).mean(2)
    bias = (estimate[:, 0] - truth[:, 2]) * (estimate[:, 1] - truth[:, 3])
    learned, _ = train(ppo, gae_lambda=lam, total_timesteps=curve_steps, seed=seed)
    return {
        "bias²": float(bias.mean()),
        "variance": float(np.mean([each.var(1, ddof=1) for each in (left, right)])),
        "return": float(np.mean(learned["curve"])),
    }


TOY = {"steps": 3000, "states": 3, "copies": 4, "horizon": 20, "curve_steps": 3000}
EXPERIMENT = Experiment(
    claim="λ trades the critic's bias against the variance of the rewards.",
    verdict=PARTLY,
    run=run,
    jobs=grid(5, lam=LAMBDAS),
    smoke=[TOY | {"lam": 0.0, "seed": 1}, TOY | {"lam": 1.0, "seed": 1}],
    panels=[
        Panel(
            "Error of the advantages of a half-trained policy",
            {"bias²": ({}, "bias²"), "variance": ({}, "variance")},
            axes=("λ", "points²"),
            x="lam",
        ),
        Panel(
            "PPO on CartPole: the larger λ, the faster",
            {"PPO": ({}, "return")},
            axes=("λ", "mean return of 60,000 steps"),
            x="lam",
        ),
    ],
    finding="""
    Over five seeds, each with a policy and a critic of its own, the squared bias falls from
    {0.0 / bias² / range :.1f} at λ = 0 to {0.95 / bias² / range :.2f} at 0.95 and
    {1.0 / bias² / range :.2f} at 1, where there is none but noise. The variance is
    {0.5 / variance / range :.2f} at 0.5, {0.95 / variance / range :.2f} at 0.95 (p =
    {0.5 ~ 0.95 / variance / p :.2f}) and {1.0 / variance / range :.1f} at 1 (p =
    {0.95 ~ 1.0 / variance / p :.3f}). Its {0.0 / variance :.0f} at λ = 0 is the environment's:
    CartPole is deterministic, so that a state and an action have one TD error. In learning there is
    no trade. PPO's mean return over the first 60,000 steps is {0.0 / return / range :.0f} at 0,
    {0.95 / return / range :.0f} at 0.95, {0.98 / return / range :.0f} at 0.98, the default, and
    {1.0 / return / range :.0f} at 1 (p = {0.95 ~ 1.0 / return / p :.2f} against 0.95 and
    {0.98 ~ 1.0 / return / p :.2f} against 0.98): here the critic's bias costs more than the
    variance.
    """,
)

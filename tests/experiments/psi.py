"""What multiplies ∇log π: the whole return, reward-to-go, an advantage, the TD error."""

from dataclasses import replace
from itertools import pairwise
from math import log2

import numpy as np
import torch
from gymnasium.wrappers import vector
from lab import Contrast, Experiment, grid, run_main, values
from pictures import dots, figure, plain

import actor_critic
import reinforce

PSIS = ["return", "reward-to-go", "baseline", "TD error"]


def policy_gradients(agent, rollouts, psi, args):
    """The gradient of each rollout, with the Ψ that the scripts compute themselves: (n, P)."""
    script = actor_critic if psi == "TD error" else reinforce
    gradients = []
    for rollout in rollouts:
        batch = script.prepare(agent, rollout, replace(args, psi=psi))
        logprobs = agent.policy(batch["obs"]).log_prob(batch["actions"])
        objective = (batch["advantages"] * logprobs).sum() / args.num_envs
        parts = torch.autograd.grad(objective, list(agent.actor.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(gradients)


def half_trained(steps, seed):
    """An agent that reinforce.py has trained for so many steps."""
    agents = []
    args = reinforce.Args(total_timesteps=steps, seed=seed)
    run_main(reinforce, args, evaluate=lambda agent, *_: agents.append(agent) or 0.0)
    return agents[0]


def square_of_mean(vectors):
    """‖E x‖² without the noise of the mean: x_i · x_j over all pairs of different rows."""
    all_pairs = vectors.sum(0).square().sum() - vectors.square().sum()
    return all_pairs.item() / (len(vectors) * (len(vectors) - 1))


def run(seed, steps=20_000, rollouts=40):
    """The gradient's variance with each Ψ, on the same rollouts of one half-trained policy, and the
    TD error's bias² as a share of the gradient². Episodes have no time limit, and γ = 1, so the
    gradient with the baseline has no bias, whatever the critic."""
    agent = half_trained(steps, seed)
    args = reinforce.Args(gamma=1.0, seed=seed)
    envs = reinforce.make_envs(args.env_id, args.num_envs, max_episode_steps=10**9)
    envs = vector.RecordEpisodeStatistics(envs, stats_key="whole episode")  # rollouts reads it
    envs = vector.TransformReward(envs, lambda rewards: rewards / 100)  # for V
    stream = (rollout for rollout, _ in reinforce.rollouts(envs, agent, args))
    agent.critic = reinforce.Agent(envs).critic  # a new one
    optimizer = torch.optim.Adam(agent.critic.parameters(), lr=1e-3)
    result = {}
    for critic, fits in (("rough critic", 2), ("better critic", 48)):  # 2, then 50 rollouts
        for _ in range(fits):
            batch = reinforce.prepare(agent, next(stream), args)
            reinforce.fit_critic(agent, optimizer, batch, args)
        drawn = [next(stream) for _ in range(rollouts)]
        true = policy_gradients(agent, drawn, "baseline", args)
        for psi in PSIS:
            gradients = policy_gradients(agent, drawn, psi, args)
            result[f"log2 variance, {psi}, {critic}"] = log2(gradients.var(0).sum())
        bias = square_of_mean(gradients - true)  # of the last Ψ, the TD error
        result[f"bias² / gradient², {critic}"] = bias / square_of_mean(true)
    return result


JOBS = grid(16)
VARIANCES = [({}, f"log2 variance, {psi}, better critic") for psi in PSIS]
ROUGH = ({}, "bias² / gradient², rough critic")
BETTER = ({}, "bias² / gradient², better critic")
CONTRASTS = [
    Contrast(f"variance, better critic: {PSIS[i]} over {PSIS[i + 1]}", *both, log2(1.25), True)
    for i, both in enumerate(pairwise(VARIANCES))
]
CONTRASTS.append(Contrast("bias² / gradient² of the TD error, rough critic", ROUGH, None, 0.1))


def draw(runs):
    title = "From the whole return to the TD error: ever less noise,\nand with a poor critic a bias"
    page, (noise, bias) = figure(title, 4.3, 2, 1, height_ratios=[4, 2.2])
    logs = [values(runs, arm) for arm in VARIANCES]
    rows = {}
    for psi, log in zip(["whole return", *PSIS[1:]], logs, strict=True):
        algorithm = "actor-critic" if psi == "TD error" else "REINFORCE"
        rows[psi] = 2 ** (log - logs[0].mean()), algorithm, True
    dots(noise, rows, center=lambda runs: 2 ** np.log2(runs).mean())
    for row, (more, less) in enumerate(pairwise(logs)):
        middle = 2 ** ((more.mean() + less.mean()) / 2 - logs[0].mean())
        text = f"{2 ** (more - less).mean():.0f} times less"
        noise.text(middle, row + 0.5, text, ha="center", va="center", fontsize=9)
    noise.set(xscale="log", title="Variance of the gradient (whole return: 1)")
    plain(noise.xaxis, [0.001, 0.01, 0.1, 1])
    rows = {}
    for number, arm in ((2, ROUGH), (50, BETTER)):
        label = f"TD error, critic\nafter {number} rollouts"
        rows[label] = values(runs, arm), "actor-critic", number == 2
    dots(bias, rows)
    bias.set(xscale="symlog", title="Bias² over gradient² (linear up to 2, then logarithmic)")
    plain(bias.xaxis, [0, 0.5, 1, 3, 10, 30])
    bias.axvline(1, color="#888888", linewidth=1)
    return page


SMALL = {"steps": 2000, "rollouts": 4}
CLAIM = (
    "Reward-to-go, a baseline and the TD error each make the gradient less noisy, and the TD "
    "error adds a bias."
)
SOURCE = (
    "[GAE](https://arxiv.org/abs/1506.02438), sections 2 and 3; Sutton and Barto 2018, 13.4 "
    "and 13.5; of reward-to-go alone, introductions"
)
EXPERIMENT = Experiment(run, JOBS, CONTRASTS, draw, SMALL, CLAIM, SOURCE, BETTER[1:])

if __name__ == "__main__":
    EXPERIMENT.main()

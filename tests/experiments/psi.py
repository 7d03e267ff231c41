"""What multiplies ∇log π: the whole return, reward-to-go, an advantage, the TD error."""

from dataclasses import replace

import torch
from classic_parts import train
from harness import SHOWN, Experiment, Panel, grid

import actor_critic
import reinforce

PSIS = ["return", "reward-to-go", "baseline", "TD error"]


def policy_gradients(agent, rollouts, psi, args):
    """A gradient of each rollout, with the Ψ that the scripts themselves compute: (n, P)."""
    script = actor_critic if psi == "TD error" else reinforce
    gradients = []
    for rollout in rollouts:
        batch = script.prepare(agent, rollout, replace(args, psi=psi))
        logprobs = agent.policy(batch["obs"]).log_prob(batch["actions"])
        objective = (batch["advantages"] * logprobs).sum() / args.num_envs
        parts = torch.autograd.grad(objective, list(agent.actor.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(gradients)


def square_of_mean(vectors):
    """‖E x‖² without the noise of the mean: x_i · x_j over all pairs of different rows."""
    all_pairs = vectors.sum(0).square().sum() - vectors.square().sum()
    return all_pairs.item() / (len(vectors) * (len(vectors) - 1))


def run(psi, seed, steps=100_000, rollouts=80):
    """The gradient's errors at one half-trained policy; and a run of reinforce.py. Episodes have no
    time limit, and γ = 1: so the gradient with the baseline has no bias, whatever the critic."""
    agent = train(reinforce, total_timesteps=min(steps, 20_000), seed=1000).agent
    torch.manual_seed(seed)
    args = reinforce.Args(gamma=1.0, seed=seed)
    envs = reinforce.make_envs(args.env_id, args.num_envs, max_episode_steps=10**9)
    stream = (rollout for rollout, _ in reinforce.rollouts(envs, agent, args))
    optimizer = torch.optim.Adam(agent.critic.parameters(), lr=1e-3)
    result = {}
    for critic, fits in ((", rough critic", 2), ("", 48)):  # it has seen 2 rollouts, then 50
        for _ in range(fits):
            batch = reinforce.prepare(agent, next(stream), args)
            agent.return_norm.update(batch["targets"])
            reinforce.fit_critic(agent, optimizer, batch, args)
        drawn = [next(stream) for _ in range(rollouts)]
        own = policy_gradients(agent, drawn, psi, args)
        true = policy_gradients(agent, drawn, "baseline", args)
        result[f"variance{critic}"] = own.var(0).sum().item()
        result[f"bias²{critic}"] = square_of_mean(own - true)
        result[f"gradient²{critic}"] = square_of_mean(true)
    if psi == "TD error":
        return result
    learned = train(reinforce, psi=psi, seed=seed, total_timesteps=steps)
    return result | {"greedy_return": learned.greedy_return}


ERRORS = {psi: ({"psi": psi}, "variance") for psi in PSIS}
TD = {"psi": "TD error"}
BIASES = {
    "bias": (TD, "bias²"),
    "bias, rough critic": (TD, "bias², rough critic"),
    "true gradient": (TD, "gradient², rough critic"),
}
EXPERIMENT = Experiment(
    claim="Reward-to-go, a baseline, the TD error: each varies less; the last pays with a bias.",
    verdict=SHOWN,
    run=run,
    jobs=grid(5, psi=PSIS),
    smoke=grid(1, psi=PSIS, steps=[2000], rollouts=[4]),
    panels=[
        Panel("Each varies less …", ERRORS, ("variance of the gradient", ""), None, "log", True),
        Panel("… but the TD error is biased", BIASES, ("squared length", ""), None, "log", True),
    ],
    finding="""
    At one policy, five seeds of 80 rollouts, the gradient's variance is {return / variance :,.0f}
    with the whole return, {reward-to-go / variance :,.0f} with reward-to-go,
    {baseline / variance :,.0f} with the baseline and {TD error / variance :,.0f} with the TD error,
    each apart from the next (p = {return ~ reward-to-go / variance / p :.3f},
    {reward-to-go ~ baseline / variance / p :.3f}, {baseline ~ TD error / variance / p :.3f}), and
    so in other rollouts, with a critic that has seen but 2 (p =
    {return ~ reward-to-go / variance, rough critic / p :.3f},
    {reward-to-go ~ baseline / variance, rough critic / p :.3f},
    {baseline ~ TD error / variance, rough critic / p :.3f}). But the TD error's bias² is
    {TD error / bias² :,.0f}, and {TD error / bias², rough critic :,.0f} with that critic, as much
    as the true gradient's square, {TD error / gradient², rough critic :,.0f}. In learning the
    return ends at {return / greedy_return / range :.0f} with the whole return, at
    {reward-to-go / greedy_return / range :.0f} with reward-to-go (p =
    {return ~ reward-to-go / greedy_return / p :.2f}), and with the baseline no higher.
    """,
)

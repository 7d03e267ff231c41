"""What multiplies ∇log π: the whole return, reward-to-go, an advantage, the TD error."""

from dataclasses import replace
from functools import cache

import torch
from classic_parts import thousands, train
from harness import SHOWN, Experiment, Panel, grid

import actor_critic
import reinforce

PSIS = ["return", "reward-to-go", "baseline", "TD error"]


def policy_gradient(agent, rollout, psi, args):
    """The gradient from one rollout, with the Ψ that the scripts themselves compute: (P,)."""
    script = actor_critic if psi == "TD error" else reinforce
    batch = script.prepare(agent, rollout, replace(args, psi=psi))
    logprobs = agent.policy(batch["obs"]).log_prob(batch["actions"])
    objective = (batch["advantages"] * logprobs).sum() / args.num_envs
    parts = torch.autograd.grad(objective, list(agent.actor.parameters()))
    return torch.cat([part.flatten() for part in parts])


def square_of_mean(vectors):
    """‖E x‖² from independent x, (n, P), without the noise of their mean: the mean of x_i · x_j
    over all pairs of different i and j. Where E x = 0 it may be negative."""
    n = len(vectors)
    all_pairs = vectors.sum(0).square().sum() - vectors.square().sum()
    return (all_pairs / (n * (n - 1))).item()


@cache
def errors(seed, training_steps, rollouts):
    """{Ψ: variance and squared bias of its gradient}, at one policy: from the same rollouts for
    all, with a critic that has seen 2 rollouts before, and with one that has seen 50.

    The policy is half trained, with reinforce.py's defaults, and the same for all seeds. The seed
    draws the rollouts: 24 whole episodes each, without a time limit, γ = 1. Then the mean of the
    gradient with the baseline is the true one, whatever the critic says: bias is taken against it.
    """
    _, agent = train(reinforce, total_timesteps=training_steps, seed=1000)
    torch.manual_seed(seed)
    args = reinforce.Args(gamma=1.0, seed=seed)
    envs = reinforce.make_envs(args.env_id, args.num_envs, max_episode_steps=10**9)
    stream = reinforce.rollouts(envs, agent, args)
    optimizer = torch.optim.Adam(agent.critic.parameters(), lr=1e-3)
    found = {psi: {} for psi in PSIS}
    for critic, fits in ((", rough critic", 2), ("", 48)):
        for _ in range(min(fits, rollouts)):
            batch = reinforce.prepare(agent, next(stream)[0], args)
            agent.return_norm.update(batch["returns"])
            reinforce.fit_critic(agent, optimizer, batch, args)
        drawn = [next(stream)[0] for _ in range(rollouts)]
        gradients = {}
        for psi in PSIS:
            each = [policy_gradient(agent, rollout, psi, args) for rollout in drawn]
            gradients[psi] = torch.stack(each)
        for psi, each in gradients.items():
            found[psi][f"variance{critic}"] = each.var(0).sum().item()
            found[psi][f"bias²{critic}"] = square_of_mean(each - gradients["baseline"])
            found[psi][f"gradient²{critic}"] = square_of_mean(gradients["baseline"])
    return found


def run(psi, seed, steps=100_000, rollouts=80):
    """The errors of the gradient, and a run of reinforce.py, which has no TD error."""
    result = errors(seed, min(steps, 20_000), rollouts)[psi]
    if psi == "TD error":
        return result
    learned, _ = train(reinforce, psi=psi, seed=seed, total_timesteps=steps)
    return result | learned


EXPERIMENT = Experiment(
    claim="Reward-to-go, the baseline and the TD error each take variance from the gradient; "
    "the TD error pays with a bias.",
    verdict=SHOWN,
    run=run,
    jobs=grid(5, psi=PSIS),
    smoke=grid(1, psi=PSIS, steps=[2000], rollouts=[4]),
    panels=[
        Panel(
            "The TD error varies least, but is biased",
            {
                "whole return": ({"psi": "return"}, "variance"),
                "reward-to-go": ({"psi": "reward-to-go"}, "variance"),
                "less a baseline": ({"psi": "baseline"}, "variance"),
                "TD error": ({"psi": "TD error"}, "variance"),
                "its bias²": ({"psi": "TD error"}, "bias²"),
                "bias², rough critic": ({"psi": "TD error"}, "bias², rough critic"),
                "true gradient²": ({"psi": "baseline"}, "gradient²"),
            },
            axes=("variance of the gradient at one policy, or its bias²", ""),
            dots=True,
            log="x",
        ),
        Panel(
            "Learning CartPole",
            {
                "whole return": ({"psi": "return"}, "curve"),
                "reward-to-go": ({"psi": "reward-to-go"}, "curve"),
                "less a baseline": ({"psi": "baseline"}, "curve"),
            },
            axes=("thousands of steps", "return"),
            x=thousands(100_000),
            smooth=3,
        ),
    ],
    finding="""
    At one policy, of which each of five seeds draws 80 rollouts, the gradient's variance is
    {return / variance :,.0f} with the whole return, {reward-to-go / variance :,.0f} with
    reward-to-go, {baseline / variance :,.0f} with the baseline and {TD error / variance :,.0f} with
    the TD error; the true gradient's square is {baseline / gradient² :,.0f}. At each step all seeds
    are apart (p = {return ~ reward-to-go / variance / p :.3f}), with a critic that has seen 50
    rollouts and with one that has seen 2. The TD error's squared bias is
    {TD error / bias² / range :,.0f} with the first critic and
    {TD error / bias², rough critic / range :,.0f}, as much as the gradient's square, with the
    second: far more than the baseline's variance, {baseline / variance, rough critic :,.0f}. (For
    the whole return, which has no bias, the same estimate gives {return / bias² :,.0f}: noise.)
    After 100,000 steps of learning the return is {return / greedy_return / range :.0f} with the
    whole return and {reward-to-go / greedy_return / range :.0f} with reward-to-go (p =
    {return ~ reward-to-go / greedy_return / p :.2f}); what the baseline takes from the variance is
    not seen there: {baseline / greedy_return / range :.0f}.
    """,
)

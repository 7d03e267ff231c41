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


def errors(agent, stream, rollouts, args):
    """{Ψ: variance and squared bias of its gradient}, from the same rollouts for all.

    The bias is taken against the gradient with the baseline: for γ = 1, and without a time limit,
    the mean of that one is the true gradient, whatever the critic says.
    """
    drawn = [next(stream)[0] for _ in range(rollouts)]
    gradients = {}
    for psi in PSIS:
        each = [policy_gradient(agent, rollout, psi, args) for rollout in drawn]
        gradients[psi] = torch.stack(each)
    unbiased = gradients["baseline"]
    return {
        psi: {
            "variance": each.var(0).sum().item(),
            "bias²": square_of_mean(each - unbiased),
            "gradient²": square_of_mean(unbiased),
        }
        for psi, each in gradients.items()
    }


@cache
def errors_at_one_policy(seed, training_steps, rollouts):
    """errors() with a critic that has seen 2 rollouts of the policy, and with one that has seen 50.

    The policy is half trained, with reinforce.py's defaults, and the same for all seeds. The seed
    draws the rollouts: 24 whole episodes each, without a time limit, γ = 1.
    """
    _, agent = train(reinforce, total_timesteps=training_steps, seed=1000)
    torch.manual_seed(seed)
    args = reinforce.Args(gamma=1.0, seed=seed)
    envs = reinforce.make_envs(args.env_id, args.num_envs, max_episode_steps=10**9)
    stream = reinforce.rollouts(envs, agent, args)
    optimizer = torch.optim.Adam(agent.critic.parameters(), lr=1e-3)
    found = []
    for fits in (2, 48):
        for _ in range(min(fits, rollouts)):
            rollout, _ = next(stream)
            batch = reinforce.prepare(agent, rollout, args)
            agent.return_norm.update(batch["returns"])
            reinforce.fit_critic(agent, optimizer, batch, args)
        found.append(errors(agent, stream, rollouts, args))
    return found


def run(psi, seed, steps=100_000, rollouts=80):
    """The errors of the gradient at one policy, with either critic; and a run of reinforce.py."""
    rough, fitted = errors_at_one_policy(seed, min(steps, 20_000), rollouts)
    result = fitted[psi] | {f"{key}, rough critic": value for key, value in rough[psi].items()}
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
            },
            axes=("variance of the gradient, or its bias², at one policy", ""),
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
    finding="At one policy, of which five seeds draw 80 rollouts each, the gradient's variance is "
    "{psi return / variance :,.0f} with the whole return, {psi reward-to-go / variance :,.0f} with "
    "reward-to-go, {psi baseline / variance :,.0f} with the baseline and "
    "{psi TD error / variance :,.0f} with the TD error, while the true gradient's square is "
    "{psi baseline / gradient² :,.0f}. In each step of this row all seeds are apart (p = "
    "{psi return ~ psi reward-to-go / variance / p :.3f}), with a critic that has seen 50 rollouts "
    "of the policy and with one that has seen 2. The TD error's squared bias is "
    "{psi TD error / bias² / range :,.0f} with the first critic, and "
    "{psi TD error / bias², rough critic / range :,.0f}, as much as the gradient's square, with "
    "the second: there its variance and bias² together are the larger error, against a variance "
    "of {psi baseline / variance, rough critic :,.0f} with the baseline. (The same estimate gives "
    "{psi return / bias² :,.0f} for the whole return, which has no bias: noise.) After 100,000 "
    "steps of learning the return is {psi return / greedy_return / range :.0f} with the whole "
    "return and {psi reward-to-go / greedy_return / range :.0f} with reward-to-go (p = "
    "{psi return ~ psi reward-to-go / greedy_return / p :.2f}); what the baseline saves is not "
    "seen there, {psi baseline / greedy_return / range :.0f}.",
)

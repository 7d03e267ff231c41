"""What multiplies ∇log π: the whole return, reward-to-go, an advantage, the TD error."""

import math
from dataclasses import replace

import gymnasium as gym
import torch
from classic_parts import train
from harness import Panel, arms, grid
from verdicts import SHOWN, Contrast

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


def errors(seed, half_trained, rollouts):
    """Of each Ψ, on the same rollouts of one half-trained policy: the variance of the gradient, and
    the TD error's bias² as a share of the gradient². Episodes have no time limit, and γ = 1, so the
    gradient with the baseline has no bias, whatever the critic."""
    agent = train(reinforce, total_timesteps=half_trained, seed=seed).agent
    args = reinforce.Args(gamma=1.0, seed=seed)
    envs = reinforce.make_envs(args.env_id, args.num_envs, max_episode_steps=10**9)
    envs = gym.wrappers.vector.TransformReward(envs, lambda rewards: rewards / 100)  # for V
    stream = (rollout for rollout, _ in reinforce.rollouts(envs, agent, args))
    agent.critic = reinforce.Agent(envs).critic  # a new one
    optimizer = torch.optim.Adam(agent.critic.parameters(), lr=1e-3)
    result = {}
    for critic, fits in (
        ("rough critic", 2),
        ("better critic", 48),
    ):  # has seen 2, then 50 rollouts
        for _ in range(fits):
            batch = reinforce.prepare(agent, next(stream), args)
            reinforce.fit_critic(agent, optimizer, batch, args)
        drawn = [next(stream) for _ in range(rollouts)]
        true = policy_gradients(agent, drawn, "baseline", args)
        for psi in PSIS:
            own = policy_gradients(agent, drawn, psi, args)
            result[f"log variance, {psi}, {critic}"] = math.log(own.var(0).sum())
        bias = square_of_mean(own - true)
        result[f"bias² / gradient², {critic}"] = bias / square_of_mean(true)
    return result


def run(seed, learn=None, steps=100_000, half_trained=20_000, rollouts=40):
    """The errors at one policy; or a training run with this Ψ."""
    if learn:
        found = train(reinforce, psi=learn, seed=seed, total_timesteps=steps)
        return {"learned": found.mean}
    return errors(seed, half_trained, rollouts)


CLAIM = "Reward-to-go, a baseline, the TD error: each varies less; the last pays with a bias."
JOBS = grid(14) + grid(20, learn=PSIS[:3])
SMOKE = [{"seed": 1, "half_trained": 2000, "rollouts": 4}]
SMOKE += grid(1, learn=PSIS[:3], steps=[2000])
SECONDS = 7
ROUGH = ({}, "bias² / gradient², rough critic")
VARIANCES = {psi: ({}, f"log variance, {psi}, better critic") for psi in PSIS}
SMALLEST = math.log(1.25)
PRIMARIES = [
    [
        Contrast(f"log variance: {a} − {b}", VARIANCES[a], VARIANCES[b], SMALLEST, paired=True)
        for a, b in zip(PSIS, PSIS[1:], strict=False)
    ],
    [Contrast("bias² / gradient² of the TD error, rough critic", ROUGH, None, 0.1, paired=True)],
]

# The page
LESSON = (
    SHOWN,
    "Each step from the whole return to the TD error takes noise from the gradient. With a poor "
    "critic the last one adds a large bias.",
)
BETTER = ({}, "bias² / gradient², better critic")
LEARNING = arms("learned", "learn", PSIS[:3])
PANELS = [
    Panel(
        "Each varies less …",
        VARIANCES,
        ("natural log of the gradient's variance, better critic", ""),
    ),
    Panel(
        "… but the TD error is biased",
        {"rough critic": ROUGH, "better": BETTER},
        ("bias² / gradient²", ""),
    ),
    Panel("REINFORCE, mean over training", LEARNING, ("return", "")),
]


def words(runs):
    def factor(more, less):
        both = [runs.find(*VARIANCES[psi]) for psi in (more, less)]
        ratios = [math.exp(a - b) for a, b in zip(*both, strict=True)]
        return f"{torch.tensor(ratios).quantile(0.5):.1f}"

    def share(critic):
        return runs.mean(f"bias² / gradient², {critic}", ".2f")

    def learned(psi):
        return runs.mean("learned", ".0f", learn=psi)

    return f"""
    Each of 14 policies, trained for 20,000 steps of CartPole, played 40 rollouts of 24 episodes,
    and all four Ψ, the credits of an action, were computed on the same ones. With a critic that has
    seen 50 rollouts the median policy's gradient varies {factor("return", "reward-to-go")} times
    less with reward-to-go than with the whole return, {factor("reward-to-go", "baseline")} times
    less with a baseline than without, and {factor("baseline", "TD error")} times less with the TD
    error than with the baseline. The gradient with the baseline has no bias, as there is no
    discount here and no time limit, so its mean stands for the truth. The TD error's squared bias
    is {share("rough critic")} of the squared gradient with a critic that has seen two rollouts,
    which is what the test is about, and {share("better critic")} with the one that has seen 50.
    REINFORCE, at the script's learning rate, learned faster in the same order (without a test): its
    mean return over 100,000 steps is {learned("return")} with the whole return,
    {learned("reward-to-go")} with reward-to-go and {learned("baseline")} with the baseline. (The TD
    error has a loop of its own: [next section](#bootstrap).)"""


NOT_TRIED = "other environments, and policies that are fully trained."

"""The classic scripts on the 4 × 4 FrozenLake, not slippery. Every walk of a few steps is
enumerated, and what a script makes of them all is compared with dynamic programming."""

from functools import cache
from itertools import product

import gymnasium as gym
import pytest
import torch
from conftest import script
from test_classic_algorithms import Recorder
from torch import nn

STEPS = 3  # of a walk: 2,376 walks
SLOTS = 6
REWARDS = (5, -2, -1)  # at the goal, in a hole, on ice: so that each state's value is its own
OF_A_TERMINAL_STATE = 7.0  # what V says there must count nowhere


@cache
def lake():
    """Where each action leads and what it brings, (16, 4), and which states are terminal."""
    env = gym.make("FrozenLake-v1", is_slippery=False, reward_schedule=REWARDS)
    states, rewards = torch.zeros(16, 4).long(), torch.zeros(16, 4).double()
    terminal = torch.zeros(16).bool()
    for s, a in product(range(16), range(4)):
        ((_, state, reward, terminated),) = env.unwrapped.P[s][a]
        states[s, a], rewards[s, a] = int(state), float(reward)
        terminal[state] |= terminated
    return states, rewards * ~terminal[:, None], terminal


@cache
def policy():
    """The policy: in each state one of six slots, equally likely; they hold every action."""
    extra = torch.randint(4, (16, SLOTS - 4), generator=torch.Generator().manual_seed(0))
    slots = torch.cat([torch.arange(4).expand(16, 4), extra], 1)
    return slots, nn.functional.one_hot(slots, 4).double().mean(1)


def bellman(values, gamma):
    """Q (16, 4) where V is what follows; nothing follows a terminal state."""
    states, rewards, terminal = lake()
    return rewards + gamma * (values * ~terminal)[states]


def transitions():
    """The probability of each state after each other, (16, 16)."""
    states, _, terminal = lake()
    return (nn.functional.one_hot(states, 16) * policy()[1][:, :, None]).sum(1) * ~terminal


def exact_values(gamma):
    """V of the policy, by its linear equations."""
    _, rewards, terminal = lake()
    V = torch.linalg.solve(torch.eye(16) - gamma * transitions(), (rewards * policy()[1]).sum(1))
    return torch.where(terminal, OF_A_TERMINAL_STATE, V)


def visits():
    """How often each state is visited in step t of a walk, (T, 16), if walks start anywhere."""
    _, _, terminal = lake()
    states = [~terminal / (~terminal).double().sum()]
    for _ in range(STEPS - 1):
        states.append(states[-1] @ transitions())
    return torch.stack(states)


@cache
def all_walks():
    """Every walk from every state, each a column, as a rollout; all equally likely. It ends in a
    terminal state or, as if a time limit cut it off, after its last step."""
    states, rewards, terminal = lake()
    slots, _ = policy()
    starts = (~terminal).nonzero()[:, 0]
    number = torch.arange(len(starts) * SLOTS**STEPS)
    state, number = starts[number % len(starts)], number // len(starts)
    mask, rows, one_hot = torch.ones(len(number)).bool(), [], torch.eye(16).double()
    for t in range(STEPS):
        action, number = slots[state, number % SLOTS], number // SLOTS
        row = {"obs": one_hot[state], "actions": action, "mask": mask}
        reward, state = rewards[state, action], states[state, action]
        row["rewards"] = torch.where(mask, reward, 1000.0)  # no real step: must count nowhere
        ended = terminal[state] & mask
        done = ended | mask if t == STEPS - 1 else ended
        rows.append(row | {"next_obs": one_hot[state], "terminated": ended, "done": done})
        mask = mask & ~done
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def make_agent(name, values):
    """An agent whose networks are tables: of the policy's logits, and of V."""
    module = script(name)
    agent = module.Agent(module.make_envs("FrozenLake-v1", 1))
    agent.actor, agent.critic = nn.Linear(16, 4, bias=False), nn.Linear(16, 1, bias=False)
    agent.obs_norm = nn.Identity()
    agent = agent.double()
    agent.actor.weight.data = policy()[1].log().T.contiguous()
    agent.critic.weight.data = values[None].clone()
    return agent


def make_args(name, gamma, lam, psi="baseline"):
    """One optimizer step on the whole batch; REINFORCE's sum is over all walks, so each is an
    environment of its own."""
    flags = {"psi": psi} if name == "reinforce" else {}
    flags |= {} if lam is None else {"gae_lambda": lam}
    N = all_walks()["mask"].shape[1]
    args = {"num_envs": N, "update_epochs": 1, "num_minibatches": 1, "max_grad_norm": 1e9}
    return script(name).Args(gamma=gamma, **args, **flags)


def means(values, *index):
    """The mean of a column for each combination of indices, and how often each occurs."""
    shape = [int(column.max()) + 1 for column in index]
    sums, counts = torch.zeros(shape).double(), torch.zeros(shape).double()
    sums.index_put_(index, values.double(), accumulate=True)
    counts.index_put_(index, torch.ones_like(values).double(), accumulate=True)
    return sums / counts, counts


METHODS = [("reinforce", None), ("actor_critic", None)]
METHODS += [(name, lam) for name in ("trpo", "ppo") for lam in (0.0, 0.9, 1.0)]


@pytest.mark.parametrize("name,lam", METHODS)
def test_mean_advantage_and_target(name, lam):
    """The values are wrong. λ decides how much of the error remains in advantages and targets."""
    values, rollout = torch.linspace(-1, 3, 16).double(), all_walks()
    agent, args = make_agent(name, values), make_args(name, 0.9, lam)
    batch = script(name).prepare(agent, rollout, args)
    steps, states = rollout["mask"].nonzero()[:, 0], batch["obs"].argmax(1)
    advantages, counts = means(batch["advantages"], steps, states, batch["actions"])
    targets, _ = means(batch["targets"], steps, states)
    lam = {"reinforce": 1.0, "actor_critic": 0.0}.get(name, lam)
    target = values
    for t in reversed(range(STEPS)):
        visited = counts[t, :, 0] > 0
        Q = bellman((1 - lam) * values + lam * target, 0.9)
        target = (Q * policy()[1]).sum(1)
        expected = Q - values[: len(Q), None]
        assert visited.sum() >= 9 and not lake()[2][: len(visited)][visited].any()
        assert torch.allclose(advantages[t, visited], expected[: len(visited)][visited], atol=1e-12)
        assert torch.allclose(targets[t, visited], target[: len(visited)][visited], atol=1e-12)


def gradients(name, agent, batch, args, monkeypatch):
    """Of the script's update, unclipped: of the policy's loss and of the critic's. (What is taken
    off the advantages, their mean, changes no gradient: it is a constant baseline.)"""
    module, optimizer, natural = script(name), Recorder(agent), []
    if name == "trpo":  # no step: what conjugate gradients are given is the gradient of L

        def solve(product, g, steps):
            natural.append(-g)
            return torch.zeros_like(g)

        monkeypatch.setattr(module, "conjugate_gradient", solve)
    module.update(agent, optimizer, batch, 0.0, args)
    actor = natural or [actor for actor, _ in optimizer.gradients if actor is not None]
    critic = [critic for _, critic in optimizer.gradients if critic is not None]
    return actor[0].view(4, 16).T, critic[0] if critic else None


def policy_gradients(gamma, tail):
    """Of the walks, after which V = `tail` follows: ∇J, differentiated through the Bellman
    equations; and the sum Σ_t E[ Q ∇log π ], in which the factor γ^t is left out."""
    theta = policy()[1].log().requires_grad_()
    pi, values, without = theta.softmax(1), tail, 0.0
    for t in reversed(range(STEPS)):
        Q = bellman(values, gamma)
        values = (pi * Q).sum(1)
        without = without + visits()[t] @ (pi * Q.detach()).sum(1)
    J = visits()[0] @ values
    return [torch.autograd.grad(sum_, theta, retain_graph=True)[0] for sum_ in (J, without)]


PSIS = [("reinforce", None, psi) for psi in ("return", "reward-to-go", "baseline")]
PSIS += [(name, lam, "baseline") for name, lam in METHODS[1:]]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("name,lam,psi", PSIS)
def test_the_policy_s_gradient(name, lam, psi, gamma, monkeypatch):
    """∇J for γ = 1, and for the whole return; else ∇J without the factor γ^t of each term. The
    critic's gradient is 0, because V is exact. Without a critic the targets are Ψ itself."""
    V, rollout = exact_values(gamma), all_walks()
    agent, args = make_agent(name, V), make_args(name, gamma, lam, psi)
    batch = script(name).prepare(agent, rollout, args)
    rows, N = len(batch["obs"]), rollout["mask"].shape[1]
    of_a_walk = -1.0 if name == "reinforce" else -rows / N  # the others' mean is over the steps
    exact, without = policy_gradients(gamma, V if psi == "baseline" else torch.zeros(16))
    of_policy, of_critic = gradients(name, agent, batch, args, monkeypatch)
    if psi == "baseline":
        assert of_critic.abs().max() < 1e-12
    else:
        assert of_critic is None and torch.equal(batch["targets"], batch["advantages"])
    expected = exact if psi == "return" else without
    assert (
        torch.allclose(of_a_walk * of_policy, expected, atol=1e-12) and expected.abs().max() > 0.01
    )
    assert torch.allclose(exact, without, atol=1e-12) == (gamma == 1)

"""The algorithms against closed forms and independent implementations."""

from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from conftest import script
from oracles import same
from torch import nn
from torch.func import functional_call

reinforce, actor_critic = script("reinforce"), script("actor_critic")
trpo, ppo = script("trpo"), script("ppo")
ALL = pytest.mark.parametrize("module", [reinforce, actor_critic, trpo, ppo])
ACTIONS = [gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,))]


class Shift(nn.Module):
    """In place of the norm of observations, which gives float32."""

    def forward(self, obs):
        return obs - 0.5


def make_agent(module, action=ACTIONS[0]):
    """A small agent in float64 whose policy is not uniform."""
    torch.manual_seed(0)
    obs = gym.spaces.Box(-1, 1, (3,))
    agent = module.Agent(SimpleNamespace(single_observation_space=obs, single_action_space=action))
    for network in (agent.actor, agent.critic):
        network[0], network[2] = nn.Linear(3, 4), nn.Linear(4, 4)
        network[4] = nn.Linear(4, network[4].out_features)
    agent.obs_norm = Shift()
    if not agent.discrete:
        agent.actor.log_std.data.uniform_(-1, 0.5)
    return agent.double()


def batch_for(agent, B=64):
    """What any of the four reads from a batch, in one-step episodes, so that returns are rewards;
    and the log-probabilities of the policy as it is now."""
    torch.manual_seed(1)
    obs, advantages = torch.randn(B, 3).double(), torch.randn(B).double()
    advantages -= advantages.mean()
    policy, returns = agent.policy(obs), torch.randn(B).double()
    actions = policy.sample()
    batch = {"obs": obs, "actions": actions, "advantages": advantages, "targets": returns}
    batch |= {"rewards": returns, "next_obs": obs + 100, "terminated": torch.ones(B).bool()}
    return batch | {"logprobs": policy.log_prob(actions).detach()}


class Recorder(torch.optim.SGD):
    """Moves nothing, but keeps the gradients of actor and critic at each step."""

    def __init__(self, agent):
        super().__init__(agent.parameters(), lr=0.0)
        self.networks, self.gradients = (agent.actor, agent.critic), []

    def step(self):
        pairs = [[p.grad for p in n.parameters() if p.grad is not None] for n in self.networks]
        self.gradients.append([flat(pair) if pair else None for pair in pairs])


def flat(tensors):
    """One vector; a copy."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradient(value, network):
    return flat(torch.autograd.grad(value, list(network.parameters())))


def kl_from(agent, obs):
    """KL(π_old ‖ π), by formula, as a function of all the policy's parameters in one vector."""
    names, parameters = zip(*agent.actor.named_parameters(), strict=True)

    def outputs(theta):
        parts = theta.split([p.numel() for p in parameters])
        values = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        named = dict(zip(names, values, strict=True))
        return functional_call(agent.actor, named, (agent.obs_norm(obs),)), named.get("log_std")

    old, old_log_std = outputs(flat(parameters))

    def kl(theta):
        new, log_std = outputs(theta)
        if agent.discrete:
            log_old = old.log_softmax(-1)
            return (log_old.exp() * (log_old - new.log_softmax(-1))).sum(-1).mean()
        squares = (2 * old_log_std).exp() + (old - new) ** 2
        return (log_std - old_log_std + squares / (2 * log_std).exp() / 2 - 0.5).sum(-1).mean()

    return kl


def objective(agent, batch):
    log_ratio = agent.policy(batch["obs"]).log_prob(batch["actions"]) - batch["logprobs"]
    return (log_ratio.exp() * batch["advantages"]).mean()


def test_conjugate_gradients_stop_at_the_solution_or_after_so_many_steps():
    calls = []
    for F in (2 * torch.ones(12), torch.arange(1.0, 13)):
        trpo.conjugate_gradient(lambda v, F=F: calls.append(F) or F * v, torch.ones(12), steps=3)
    assert len(calls) == 1 + 3


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("max_kl", [0.001, 3.0])
def test_trpo_step_stays_in_the_region_and_gains(action, max_kl):
    agent = make_agent(trpo, action)
    batch, before = batch_for(agent), flat(agent.actor.parameters())
    start, kl = objective(agent, batch).item(), kl_from(agent, batch["obs"])
    args = trpo.Args(max_kl=max_kl, damping=1e-3)
    stats = trpo.update(agent, Recorder(agent), batch, 1.0, args)
    theta = flat(agent.actor.parameters())
    assert not torch.equal(theta, before) and objective(agent, batch) > start
    assert 0 < kl(theta) <= max_kl and stats["kl"] == pytest.approx(kl(theta).item())
    if max_kl == 0.001:  # there the quadratic is right: a first step nearly fills the region
        assert stats["backtracks"] <= 1 and stats["kl"] > max_kl / 8
    batch["advantages"] *= 0  # without advantages it stands still
    trpo.update(agent, Recorder(agent), batch, 1.0, args)
    assert torch.equal(theta, flat(agent.actor.parameters()))


@pytest.mark.parametrize("action", ACTIONS)
def test_trpo_step_is_the_natural_gradient_s(action):
    """Small and with many iterations, it is √(2δ / sᵀFs) s, with F the damped Hessian of the KL
    and s = F⁻¹g; what the tolerance of the conjugate gradients leaves is small."""
    agent = make_agent(trpo, action)
    batch, before = batch_for(agent), flat(agent.actor.parameters())
    F = torch.autograd.functional.hessian(kl_from(agent, batch["obs"]), before)
    F = F + 0.01 * torch.eye(len(F))
    s = torch.linalg.solve(F, gradient(objective(agent, batch), agent.actor))
    expected = s * (2e-6 / (s @ F @ s)).sqrt()
    args = trpo.Args(max_kl=1e-6, damping=0.01, cg_steps=200)
    stats = trpo.update(agent, Recorder(agent), batch, 1.0, args)
    taken = (flat(agent.actor.parameters()) - before) * 2 ** stats["backtracks"]
    assert (taken - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("measured", [(1.0, 0.5), (-1.0, 0.0), (float("nan"), float("nan"))])
def test_a_search_that_finds_nothing_leaves_the_parameters(measured):
    """KL too large, no gain, or not a number, at every length of the step."""
    parameters, outcomes = [torch.arange(3.0)], iter(torch.tensor([(0.0, 0.0)] + [measured] * 100))
    outcome = trpo.line_search(lambda: next(outcomes), parameters, torch.ones(3), trpo.Args())
    assert outcome == (0.0, 10) and parameters[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("advantage,bound", [(1.0, 1.3), (-2.0, 0.7)])
def test_the_clip_silences_exactly_what_it_says(advantage, bound):
    """Flat beyond 1 + ε where A > 0 and below 1 − ε where A < 0, else r A."""
    ratios = torch.linspace(0.505, 1.495, 100).double()
    logprobs, A = ratios.log().requires_grad_(), torch.full_like(ratios, advantage)
    objective, clipped = ppo.surrogate(logprobs, torch.zeros(100), A, ppo.Args(clip_coef=0.3))
    silent = ratios > bound if advantage > 0 else ratios < bound
    assert 15 < silent.sum() < 25
    expected, facts = torch.where(silent, bound, ratios), {"r": ratios, "A": A}
    same("surrogate's first value, the objective,", objective.detach(), expected * A, **facts)
    (slope,) = torch.autograd.grad(objective.sum(), logprobs)
    same("the gradient of the objective by log π", slope, ratios * A * ~silent, **facts)
    same("surrogate's second value, clipped,", clipped, silent, **facts)


def test_the_penalty_is_the_kl_and_pulls_back():
    """Summed over a policy's actions, what is subtracted is β KL(π_old ‖ π), value and gradient;
    for no action is it negative, as the log-ratio alone would be."""
    old = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    logits = torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64, requires_grad=True)
    new, args = logits.log_softmax(-1), ppo.Args(clip_coef=float("inf"), beta=2.0)
    objective, clipped = ppo.surrogate(new, old.log(), torch.zeros(3), args)
    mean, exact = (old * objective).sum(), -2.0 * (old * (old.log() - new)).sum()
    assert mean.item() == pytest.approx(exact.item()) and exact.item() < -0.1
    assert (objective <= 0).all()
    slopes = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (mean, exact)]
    assert torch.allclose(*slopes) and not clipped.any()


@pytest.mark.parametrize("target_kl", [0.01, 0.05])
def test_beta_adapts_the_right_way(target_kl, monkeypatch):
    """The KL's bounds are two thirds and three halves of the target."""
    for share, factor in ((1.6, 2), (1.49, 1), (0.68, 1), (0.6, 0.5)):
        for beta in (0.4, 0.0):  # a penalty that is off stays off
            agent, kl = make_agent(ppo), torch.tensor(share * target_kl)
            monkeypatch.setattr(ppo, "kl_k3", lambda *inputs, kl=kl: kl)
            args = ppo.Args(beta=beta, target_kl=target_kl)
            stats = ppo.update(agent, Recorder(agent), batch_for(agent), 1.0, args)
            assert args.beta == stats["beta"] == beta * factor


@pytest.mark.parametrize("form", [{}, {"clip_coef": float("inf"), "beta": 0.1}])
def test_the_kl_is_that_of_the_whole_rollout(form, monkeypatch):
    """It is measured after the epochs, over all steps, as in the paper. `clipfrac` is the share of
    the last minibatch that is clipped."""
    agent, clipped, surrogate = make_agent(ppo), torch.arange(16) < 4, ppo.surrogate
    monkeypatch.setattr(ppo, "surrogate", lambda *inputs: (surrogate(*inputs)[0], clipped))
    batch, args = batch_for(agent), ppo.Args(**form, learning_rate=0.03)
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.01)
    stats = ppo.update(agent, optimizer, batch, 1.0, args)
    log_ratio = agent.policy(batch["obs"]).log_prob(batch["actions"]) - batch["logprobs"]
    kl = (log_ratio.exp() - 1 - log_ratio).mean().item()
    assert stats["approx_kl"] == pytest.approx(kl, rel=1e-4) and kl > 1e-3
    assert stats["clipfrac"] == 4 / 16


@pytest.mark.parametrize("action", ACTIONS)
@ALL
def test_gradients_of_every_optimizer_step_by_hand(module, action):
    """Signs of policy, entropy and value loss; advantages minus their mean; actor
    and critic each clipped by its own norm (REINFORCE's actor not at all); none left over."""
    agent, most = make_agent(module, action), 0.3
    batch = batch_for(agent)
    for key in ("advantages", "targets", "rewards"):
        batch[key] = 100 * batch[key] + 3
    A = batch["advantages"] - batch["advantages"].mean()
    policy = agent.policy(batch["obs"])
    log_prob, entropy = policy.log_prob(batch["actions"]), policy.entropy().mean()
    value_loss = (0.5 * (agent.value(batch["obs"]) - batch["targets"]) ** 2).mean()
    policy_loss = -(A * log_prob).sum() / (4 if module is reinforce else 64)

    def clipped(loss, network, most):
        g = gradient(loss, network)
        assert g.norm() > 1
        return g / (g.norm() / most).clamp(min=1)

    most_of_actor = float("inf") if module is reinforce else most
    actor = clipped(policy_loss - 0.5 * 0.4 * entropy, agent.actor, most_of_actor)
    critic = clipped(value_loss, agent.critic, most)
    expected = [(actor, None)] + [(None, critic)] * 2
    expected = {trpo: [(None, critic)] * 2, ppo: [(actor, critic)] * 2}.get(module, expected)
    args = module.Args(num_envs=4, update_epochs=2, num_minibatches=1, max_grad_norm=most)
    args.ent_coef, optimizer = 0.5, Recorder(agent)
    if module is actor_critic:  # its targets are made anew, from rewards and V
        batch["targets"] = batch["targets"] * float("nan")
    stats = module.update(agent, optimizer, batch, 0.4, args)
    assert len(optimizer.gradients) == len(expected)
    for step, wanted in zip(optimizer.gradients, expected, strict=True):
        for g, exact in zip(step, wanted, strict=True):
            assert g is None if exact is None else torch.allclose(g, exact, atol=1e-5)
    ratio = (agent.policy(batch["obs"]).log_prob(batch["actions"]) - batch["logprobs"]).exp()
    logged = -(ratio * A).mean() if module in (trpo, ppo) else policy_loss  # after TRPO's step
    for key, value in ("policy_loss", logged), ("value_loss", value_loss), ("entropy", entropy):
        assert stats[key] == pytest.approx(value.item(), rel=1e-5, abs=1e-9)


@ALL
def test_each_pass_shows_the_critic_every_row_once_in_a_new_order(module):
    """In num_minibatches parts; not the same parts in each pass."""
    agent, parts = make_agent(module), []
    batch, value = batch_for(agent), agent.value
    batch["obs"][:, 0] = torch.arange(64)
    batch["next_obs"] = batch["obs"] + 100
    agent.value = lambda obs: parts.append(obs[:, 0].tolist()) or value(obs)
    args = module.Args(num_envs=4, update_epochs=3, num_minibatches=4)
    module.update(agent, Recorder(agent), batch, 1.0, args)
    parts = [part for part in parts if part[0] < 100]  # the others are next_obs
    passes = [sum(parts[i : i + 4], []) for i in (0, 4, 8)]
    assert [len(part) for part in parts] == [16] * 12 and passes[0] != passes[1] != passes[2]
    assert all(sorted(rows) == list(range(64)) for rows in passes)

"""The algorithms against closed forms, enumeration and independent implementations."""

from types import SimpleNamespace

import classic_envs  # noqa: F401
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CLASSIC_SCRIPTS, script
from torch import nn
from torch.func import functional_call

reinforce, actor_critic = script("reinforce"), script("actor_critic")
trpo, ppo = script("trpo"), script("ppo")


def make_agent(module, action, obs_size=3, hidden=4, seed=0):
    """A small agent in float64 whose policy is not uniform."""
    torch.manual_seed(seed)
    envs = SimpleNamespace(
        single_observation_space=gym.spaces.Box(-1, 1, (obs_size,)), single_action_space=action
    )
    agent = module.Agent(envs)
    for name in ("actor", "critic"):
        network = getattr(agent, name)
        layers = (nn.Linear(obs_size, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        small = nn.Sequential(*layers, nn.Linear(hidden, network[-1].out_features))
        if hasattr(network, "log_std"):
            small.log_std = network.log_std
        setattr(agent, name, small)
    agent.actor[-1].weight.data *= 0.01
    agent = agent.double()
    agent.actor[-1].weight.data *= 100
    if not agent.discrete:
        agent.actor.log_std.data.uniform_(-1, 0.5)
    return agent


ACTIONS = [gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,))]

# ------------------------------------------------------------------------------------- the policies


@pytest.mark.parametrize("module", [reinforce, actor_critic, trpo, ppo])
def test_gaussian_policy(module):
    agent = make_agent(module, ACTIONS[1])
    obs, actions = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    mean, std = agent.actor(agent.obs_norm(obs)), agent.actor.log_std.exp()
    expected = (-0.5 * ((actions - mean) / std) ** 2 - std.log() - 0.5 * np.log(2 * np.pi)).sum(-1)
    assert torch.allclose(agent.policy(obs).log_prob(actions), expected)
    assert torch.allclose(
        agent.policy(obs).entropy(), (std.log() + 0.5 * np.log(2 * np.pi * np.e)).sum().expand(7)
    )
    assert np.allclose(agent.float().act(obs.numpy(), greedy=True), mean.detach(), atol=1e-5)


def test_discrete_policy():
    agent = make_agent(ppo, ACTIONS[0])
    obs, actions = torch.randn(7, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    probs = agent.actor(agent.obs_norm(obs)).softmax(-1)
    assert torch.allclose(agent.policy(obs).log_prob(actions), probs[range(7), actions].log())
    assert agent.float().act(obs.numpy(), greedy=True).tolist() == probs.argmax(-1).tolist()
    drawn = torch.as_tensor(agent.act(obs.repeat_interleave(4000, 0).numpy())).view(7, 4000)
    assert torch.allclose(nn.functional.one_hot(drawn, 3).double().mean(1), probs, atol=0.04)


# --------------------------------------------------------------------------------------------- TRPO


def kl_of(agent, obs, names, old, vector):
    """KL(π_old ‖ π) as a function of all the policy's parameters in one vector, by formula."""
    parts = vector.split([agent.get_parameter(f"actor.{name}").numel() for name in names])
    params = {
        name: part.view_as(agent.get_parameter(f"actor.{name}"))
        for name, part in zip(names, parts, strict=True)
    }
    out = functional_call(agent.actor, params, (agent.obs_norm(obs),))
    if agent.discrete:
        return (old["probs"] * (old["probs"].log() - out.log_softmax(-1))).sum(-1).mean()
    log_std = params["log_std"]
    kl = (
        log_std
        - old["log_std"]
        + (old["log_std"].exp() ** 2 + (old["mean"] - out) ** 2) / (2 * log_std.exp() ** 2)
        - 0.5
    )
    return kl.sum(-1).mean()


def old_policy(agent, obs):
    with torch.no_grad():
        out = agent.actor(agent.obs_norm(obs))
        return (
            {"probs": out.softmax(-1)}
            if agent.discrete
            else {"mean": out, "log_std": agent.actor.log_std.clone()}
        )


def test_conjugate_gradient_solves():
    torch.manual_seed(0)
    root = torch.randn(12, 12, dtype=torch.float64)
    F, g = root @ root.T + 0.1 * torch.eye(12), torch.randn(12, dtype=torch.float64)
    x = trpo.conjugate_gradient(lambda v: F @ v, g, steps=50, tolerance=1e-16)
    assert torch.allclose(F @ x, g, atol=1e-7)
    calls = []
    trpo.conjugate_gradient(lambda v: calls.append(1) or 2 * v, g, steps=50)
    assert len(calls) == 1  # solved after one step, it stops
    assert not trpo.conjugate_gradient(lambda v: F @ v, g * 0, steps=5).any()
    calls.clear()
    trpo.conjugate_gradient(lambda v: calls.append(1) or F @ v, g, steps=3)
    assert len(calls) == 3  # and at the latest when told to


def batch_for(module, agent, B=64, seed=1):
    torch.manual_seed(seed)
    obs = torch.randn(B, 3, dtype=torch.float64)
    with torch.no_grad():
        actions = agent.policy(obs).sample()
        logprobs = agent.policy(obs).log_prob(actions)
    advantages, returns = torch.randn(B, dtype=torch.float64), torch.randn(B, dtype=torch.float64)
    return {
        "obs": obs,
        "actions": actions,
        "values": agent.value(obs).detach(),
        "returns": returns,
        "advantages": advantages,
        "logprobs": logprobs,
    }


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("max_kl", [0.001, 0.1, 3.0])
def test_trpo_step_stays_in_the_region_and_gains(action, max_kl):
    agent = make_agent(trpo, action)
    batch, names = batch_for(trpo, agent), [name for name, _ in agent.actor.named_parameters()]
    old = old_policy(agent, batch["obs"])
    before = nn.utils.parameters_to_vector(agent.actor.parameters()).detach()

    def objective():
        logprobs = agent.policy(batch["obs"]).log_prob(batch["actions"])
        ratio = (logprobs - batch["logprobs"]).exp()
        return (ratio * batch["advantages"]).mean().item()

    start = objective()
    stats = trpo.update(
        agent, torch.optim.Adam(agent.parameters()), batch, trpo.Args(max_kl=max_kl, damping=1e-3)
    )
    theta = nn.utils.parameters_to_vector(agent.actor.parameters()).detach()
    kl = kl_of(agent, batch["obs"], names, old, theta).item()
    assert not torch.equal(theta, before) and 0 < kl <= max_kl
    assert float(stats["kl"]) == pytest.approx(kl) and float(
        stats["surrogate_gain"]
    ) == pytest.approx(objective() - start)
    assert objective() > start
    if (
        max_kl == 0.001
    ):  # where the quadratic is right, the first step is taken and nearly fills the region
        assert stats["backtracks"] <= 1 and kl > max_kl / 8


def test_trpo_step_is_the_natural_gradient_s():
    """Small, undamped and with many iterations, it points where F⁻¹g does."""
    agent = make_agent(trpo, ACTIONS[1])
    batch = batch_for(trpo, agent)
    names = [name for name, _ in agent.actor.named_parameters()]
    parameters = list(agent.actor.parameters())
    before = nn.utils.parameters_to_vector(parameters).detach()
    old = old_policy(agent, batch["obs"])
    F = torch.autograd.functional.hessian(
        lambda vector: kl_of(agent, batch["obs"], names, old, vector), before
    )
    ratio = (agent.policy(batch["obs"]).log_prob(batch["actions"]) - batch["logprobs"]).exp()
    g = torch.cat(
        [
            gradient.flatten()
            for gradient in torch.autograd.grad((ratio * batch["advantages"]).mean(), parameters)
        ]
    )
    s = torch.linalg.solve(F + 0.01 * torch.eye(len(F)), g)
    expected = s * (2 * 1e-6 / (s @ (F @ s + 0.01 * s))).sqrt()
    trpo.update(
        agent,
        torch.optim.Adam(agent.parameters()),
        batch,
        trpo.Args(max_kl=1e-6, damping=0.01, cg_steps=200),
    )
    taken = nn.utils.parameters_to_vector(parameters).detach() - before
    assert (
        taken - expected
    ).norm() < 1e-3 * expected.norm()  # what the tolerance of the conjugate gradient leaves


@pytest.mark.parametrize("measured", [(1.0, 0.5), (-1.0, 0.0), (float("nan"), float("nan"))])
def test_a_search_that_finds_nothing_leaves_the_parameters(measured):
    """KL too large, no gain, or not a number, at every length of the step."""
    agent = make_agent(trpo, ACTIONS[0])
    parameters = list(agent.actor.parameters())
    before = [p.detach().clone() for p in parameters]
    outcomes = iter([(0.0, 0.0)] + [measured] * 100)
    gain, kl, backtracks = trpo.line_search(
        lambda: next(outcomes),
        parameters,
        torch.ones(sum(p.numel() for p in parameters)),
        trpo.Args(),
    )
    assert (gain, kl, backtracks) == (0.0, 0.0, 10) and all(
        torch.equal(a, b) for a, b in zip(before, parameters, strict=True)
    )


def test_trpo_without_advantages_stands_still():
    agent = make_agent(trpo, ACTIONS[0])
    batch = batch_for(trpo, agent)
    batch["advantages"] *= 0
    before = [p.detach().clone() for p in agent.actor.parameters()]
    trpo.update(agent, torch.optim.Adam(agent.parameters()), batch, trpo.Args())
    assert all(torch.equal(a, b) for a, b in zip(before, agent.actor.parameters(), strict=True))


# ---------------------------------------------------------------------------------------------- PPO


def test_the_clip_silences_exactly_what_it_says():
    ratios = torch.linspace(0.5, 1.5, 41, dtype=torch.float64)
    args = ppo.Args(clip_low=0.2, clip_high=0.3)
    ratios = ratios[
        (ratios - 0.8).abs().minimum((ratios - 1.3).abs()) > 1e-9
    ]  # at the bound itself either is right
    for advantage in (1.0, -2.0):
        logprobs = ratios.log().requires_grad_()
        objective = ppo.surrogate(
            logprobs, torch.zeros_like(ratios), torch.full_like(ratios, advantage), args
        )
        (gradient,) = torch.autograd.grad(objective.sum(), logprobs)
        silent = ratios > 1.3 if advantage > 0 else ratios < 0.8
        assert torch.equal(gradient == 0, silent) and silent.any()
        assert torch.allclose(gradient[~silent], advantage * ratios[~silent])
        assert torch.allclose(
            objective,
            torch.where(silent, torch.tensor(1.3 if advantage > 0 else 0.8), ratios) * advantage,
        )


def test_the_penalty_is_the_kl_and_pulls_back():
    """Summed over a policy's actions, what is subtracted is β KL(π_old ‖ π), value and gradient."""
    old = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    args = ppo.Args(surrogate="penalty", beta=2.0)
    logits = torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64, requires_grad=True)
    new = logits.log_softmax(-1)
    found = (old * ppo.surrogate(new, old.log(), torch.zeros(3), args)).sum()
    exact = -2.0 * (old * (old.log() - new)).sum()
    assert found.item() == pytest.approx(exact.item()) and exact.item() < -0.1
    assert torch.allclose(
        *(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, exact))
    )


def test_beta_adapts_the_right_way():
    assert ppo.adapt_beta(1.0, 0.016, 0.01) == 2.0 and ppo.adapt_beta(1.0, 0.006, 0.01) == 0.5
    assert ppo.adapt_beta(1.0, 0.0149, 0.01) == ppo.adapt_beta(1.0, 0.0068, 0.01) == 1.0


def spy(monkeypatch):
    """Collects the ratios of every minibatch that reaches the surrogate."""
    ratios, surrogate = [], ppo.surrogate
    monkeypatch.setattr(
        ppo,
        "surrogate",
        lambda new, old, *rest: (
            ratios.append((new - old).exp().detach()) or surrogate(new, old, *rest)
        ),
    )
    return ratios


def test_first_minibatch_has_ratio_1_and_later_ones_not(monkeypatch, tmp_path):
    ratios = spy(monkeypatch)
    ppo.main(
        ppo.Args(total_timesteps=5000, num_minibatches=4, update_epochs=2, output_dir=str(tmp_path))
    )
    assert len(ratios) == 16
    for start in (0, 8):
        assert (ratios[start] - 1).abs().max() < 1e-5
        assert (ratios[start + 7] - 1).abs().max() > 0.01


def test_target_kl_ends_the_passes(monkeypatch):
    for target_kl, passes in ((1e-9, 1), (None, 5), (1e9, 5)):
        agent, ratios = make_agent(ppo, ACTIONS[0]), spy(monkeypatch)
        args = ppo.Args(target_kl=target_kl, update_epochs=5, num_minibatches=2)
        ppo.update(
            agent, torch.optim.Adam(agent.parameters(), lr=0.01), batch_for(ppo, agent), 0.0, args
        )
        monkeypatch.undo()
        assert len(ratios) == 2 * passes


def log_ratios(ratios, advantages):
    """An agent, and a batch of one row for each ratio and advantage."""
    agent = make_agent(ppo, ACTIONS[0])
    batch = batch_for(ppo, agent, B=len(ratios))
    batch["logprobs"] -= torch.tensor(ratios).double().log()
    batch["advantages"] = torch.tensor(advantages).double()
    return agent, batch


def test_clipfrac_is_the_share_whose_gradient_the_clip_takes_away():
    """Outside 1 - 0.2 and 1 + 0.3, but only on the side to which the advantage pushes."""
    ratios = [0.75, 0.75, 0.9, 0.9, 1.25, 1.25, 1.35, 1.35, 1.35, 0.75]
    advantages = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 2.0, 0.0, 0.0]
    expected = [False, True, False, False, False, False, True, True, False, False]
    args = ppo.Args(clip_low=0.2, clip_high=0.3, update_epochs=1, num_minibatches=1)
    found = ppo.is_clipped(torch.tensor(ratios), torch.tensor(advantages), args)
    assert found.tolist() == expected
    agent, batch = log_ratios(ratios, advantages)
    stats = ppo.update(agent, torch.optim.Adam(agent.parameters()), batch, 0.0, args)
    assert float(stats["clipfrac"]) == pytest.approx(0.3)


def test_kl_by_hand():
    """The mean of r - 1 - log r."""
    ratios = [0.5, 0.9, 1.0, 1.1, 1.5]
    agent, batch = log_ratios(ratios, [0.0] * 5)
    r = torch.tensor(ratios).double()
    expected = pytest.approx((r - 1 - r.log()).mean().item())
    assert float(ppo.mean_kl(agent, batch)) == expected
    args = ppo.Args(update_epochs=1, num_minibatches=1)
    stats = ppo.update(agent, torch.optim.Adam(agent.parameters()), batch, 0.0, args)
    assert float(stats["approx_kl"]) == expected


@pytest.mark.parametrize("target_kl", [None, 0.02])
def test_beta_follows_the_kl_of_the_whole_rollout(target_kl, monkeypatch, tmp_path):
    """As the paper has it: measured after the passes, over all steps. The flag stays as given."""
    update, betas, kls, fed = ppo.update, [], [], []

    def watched(agent, optimizer, batch, ent_coef, args):
        stats = update(agent, optimizer, batch, ent_coef, args)
        betas.append(args.beta)
        log_ratio = agent.policy(batch["obs"]).log_prob(batch["actions"]) - batch["logprobs"]
        kls.append((log_ratio.exp() - 1 - log_ratio).mean().item())
        return stats

    def told(beta, kl, target):
        fed.append((beta, float(kl), target))
        return beta * 3

    monkeypatch.setattr(ppo, "update", watched)
    monkeypatch.setattr(ppo, "adapt_beta", told)
    args = ppo.Args(surrogate="penalty", target_kl=target_kl, beta=0.5, total_timesteps=9000)
    args.output_dir = str(tmp_path)
    ppo.main(args)
    assert args.beta == 0.5 and betas == [0.5 * 3**i for i in range(len(betas))]
    assert len(betas) == 4 and min(kls) > 1e-6
    assert [kl for _, kl, _ in fed] == pytest.approx(kls)
    assert [beta for beta, _, _ in fed] == betas
    assert {target for *_, target in fed} == {target_kl or 0.01}


# ----------------------------------------------------------------------------------------- all four


@pytest.mark.parametrize("module", [reinforce, actor_critic, trpo, ppo])
def test_first_standard_deviation_is_the_flags(module):
    envs = module.make_envs("Pendulum-v1", 2)
    policy = module.Agent(envs, 0.37).policy(torch.zeros(5, 3))
    torch.testing.assert_close(policy.stddev, torch.full((5, 1), 0.37))
    assert module.Args().init_std == 1.0


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_one_learning_rate_suits_any_scale_of_reward(name):
    """The same game for ten times the reward: the same gradients at every step of the update."""
    found = []
    for scale in (1.0, 10.0):
        module = script(name)
        torch.manual_seed(0)
        envs = module.make_envs("Guess-v0", 4)
        agent, args = module.Agent(envs), module.Args(num_envs=4)
        rollout, _ = next(module.rollouts(envs, agent, args))
        rollout["rewards"] = rollout["rewards"] * scale
        agent.critic[-1].weight.data *= 0  # a critic that says 0 says so at either scale
        agent.critic[-1].bias.data *= 0
        batch, optimizer = module.prepare(agent, rollout, args), Recorder(agent)
        agent.return_norm.update(batch["returns"])
        agent.return_norm.mean *= 0  # it moves V, which the rollout was judged by
        rest = (0.0,) if hasattr(args, "ent_coef") else ()
        module.update(agent, optimizer, batch, *rest, args)
        found.append((batch, optimizer.seen))
    assert torch.allclose(found[0][0]["advantages"] * 10, found[1][0]["advantages"], atol=1e-3)
    assert torch.allclose(found[0][0]["returns"] * 10, found[1][0]["returns"], atol=1e-3)
    for one, ten in zip(found[0][1], found[1][1], strict=True):
        for a, b in zip(one, ten, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-5))


class Recorder(torch.optim.SGD):
    """Moves nothing, but keeps the gradients of actor and critic as it finds them at each step."""

    def __init__(self, agent):
        super().__init__(agent.parameters(), lr=0.0)
        self.nets, self.seen = (agent.actor, agent.critic), []

    def step(self):
        grads = [
            [p.grad.flatten().clone() for p in net.parameters() if p.grad is not None]
            for net in self.nets
        ]
        self.seen.append([torch.cat(grad) if grad else None for grad in grads])


def update_with(module, agent, optimizer, batch, **flags):
    """The script's update, with all that any of the four reads from a batch: one-step episodes, so
    the returns are rewards."""
    B = len(batch["obs"])
    batch |= {
        "rewards": batch["returns"],
        "terminated": torch.ones(B, dtype=torch.bool),
        "next_obs": batch["obs"] + 100,
    }
    rest = (0.5,) if hasattr(module.Args(), "ent_coef") else ()
    return module.update(agent, optimizer, batch, *rest, module.Args(num_envs=4, **flags))


@pytest.mark.parametrize("scale,most", [(0.01, 1.0), (1000.0, 1.0), (1000.0, 0.3)])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("module", [reinforce, actor_critic, trpo, ppo])
def test_gradients_of_every_optimizer_step_by_hand(module, action, scale, most):
    """Signs of policy, entropy and value loss, their units, actor and critic each clipped by its
    own norm (REINFORCE's actor not at all), none left over."""
    agent = make_agent(module, action)
    agent.return_norm.std.fill_(3.0)
    batch = batch_for(module, agent)
    batch |= {"advantages": batch["advantages"] * scale, "returns": batch["returns"] * scale}
    policy, A = agent.policy(batch["obs"]), batch["advantages"] / 3
    log_prob, entropy = policy.log_prob(batch["actions"]), policy.entropy().mean()
    value_loss = (0.5 * ((agent.value(batch["obs"]) - batch["returns"]) / 3) ** 2).mean()
    policy_loss = -(A * log_prob).sum() / (4 if module is reinforce else 64)

    def clipped(loss, net, most):
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]
        )
        assert scale < 1 or gradient.norm() > 1
        return gradient / (gradient.norm() / most).clamp(min=1)

    actors_most = float("inf") if module is reinforce else most
    actor = clipped(policy_loss - 0.5 * entropy, agent.actor, actors_most)
    critic = clipped(value_loss, agent.critic, most)
    expected = {trpo: [(None, critic)] * 2, ppo: [(actor, critic)] * 2}.get(
        module, [(actor, None)] + [(None, critic)] * 2
    )
    optimizer = Recorder(agent)
    flags = {"update_epochs": 2, "num_minibatches": 1, "max_grad_norm": most}
    stats = update_with(module, agent, optimizer, batch, **flags)
    assert module.Args().max_grad_norm == 1.0
    assert len(optimizer.seen) == len(expected)
    for step, wanted in zip(optimizer.seen, expected, strict=True):
        for found, gradient in zip(step, wanted, strict=True):
            assert found is None if gradient is None else torch.allclose(found, gradient, atol=1e-5)
    logged = -A.mean() if module in (trpo, ppo) else policy_loss  # there the ratio is 1
    for key, value in ("policy_loss", logged), ("value_loss", value_loss), ("entropy", entropy):
        assert stats[key].item() == pytest.approx(value.item(), rel=1e-5)


@pytest.mark.parametrize("module", [reinforce, actor_critic, trpo, ppo])
def test_each_pass_shows_the_critic_every_row_once_in_a_new_order(module):
    """In num_minibatches parts; not the same parts in each pass."""
    agent = make_agent(module, ACTIONS[0])
    batch, value, parts = batch_for(module, agent), agent.value, []
    batch["obs"][:, 0] = torch.arange(64)
    agent.value = lambda obs: parts.append(obs[:, 0].tolist()) or value(obs)
    update_with(module, agent, Recorder(agent), batch, update_epochs=3, num_minibatches=4)
    parts = [part for part in parts if part[0] < 100]  # the others are next_obs
    assert [len(part) for part in parts] == [16] * 12
    passes = [sum(parts[i : i + 4], []) for i in (0, 4, 8)]
    assert (
        all(sorted(rows) == list(range(64)) for rows in passes)
        and passes[0] != passes[1] != passes[2]
    )

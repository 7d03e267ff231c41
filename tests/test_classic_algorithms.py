"""The algorithms against their definitions and gradients by hand."""

from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from conftest import calls_of, script
from oracles import same
from torch import nn
from torch.distributions import kl_divergence

reinforce, actor_critic = script("reinforce"), script("actor_critic")
trpo, ppo = script("trpo"), script("ppo")
SCRIPTS = [reinforce, actor_critic, trpo, ppo]


def make_agent(module):
    """An agent in float64 whose policy is not uniform."""
    torch.manual_seed(0)
    box = gym.spaces.Box(-1, 1, (2,))
    agent = module.Agent(SimpleNamespace(single_observation_space=box, single_action_space=box))
    agent.obs_norm = nn.Identity()  # the norm gives float32
    agent.actor[-1].weight.data *= 100
    agent.actor.log_std.data.uniform_(-1, 0.5)
    return agent.double()


def make_rollout(module, T=8, N=20):
    """Episodes that end at random. What is in rows that are no real steps must count nowhere."""
    torch.manual_seed(1)
    states, mask = torch.randn(T + 1, N, 2).double(), torch.ones(T, N).bool()
    done, one = torch.rand(T, N) < 0.3, module is reinforce  # one episode in each column
    done[-1] |= one
    for t in range(1, T):
        mask[t] = ~done[t - 1] & (mask[t - 1] | (not one))
        done[t] &= mask[t]
    rollout = {"obs": states[:-1], "next_obs": states[1:], "rewards": torch.randn(T, N).double()}
    return rollout | {"terminated": done & (torch.rand(T, N) < 0.5), "done": done, "mask": mask}


def make_batch(agent, B=64):
    """What any of the four updates reads."""
    torch.manual_seed(1)
    obs, advantages, targets = (torch.randn(B, *shape).double() for shape in ((2,), (), ()))
    batch = {"obs": obs, "actions": agent.policy(obs).sample(), "next_obs": obs + 100}
    batch |= {"advantages": 100 * advantages + 3, "targets": 100 * targets + 3}
    return batch | {"rewards": 100 * torch.randn(B).double(), "terminated": torch.rand(B) < 0.5}


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


def advantage(rollout, values, next_values, t, n, gamma, lam):
    """Σ_l (γλ)^l δ_{t+l}, to the end of the episode or of the rollout."""
    total, weight = 0.0, 1.0
    for i in range(t, len(values)):
        rest = 0.0 if rollout["terminated"][i, n] else gamma * next_values[i, n]
        total += weight * (rollout["rewards"][i, n] + rest - values[i, n])
        weight *= gamma * lam
        if rollout["done"][i, n]:
            break
    return total


METHODS = [(reinforce, 1.0, {"psi": psi}) for psi in ("return", "reward-to-go", "baseline")]
METHODS += [(actor_critic, 0.0, {})]
METHODS += [(module, lam, {"gae_lambda": lam}) for module in (trpo, ppo) for lam in (0.8, 1.0)]


@pytest.mark.parametrize("module,lam,flags", METHODS)
def test_advantages_and_targets_are_the_sums_of_their_definition(module, lam, flags):
    """REINFORCE's returns are the sums for λ = 1, and without a baseline V is 0. The whole return
    is the first step's."""
    rollout, agent, psi = make_rollout(module), make_agent(module), flags.get("psi", "baseline")
    critic = float(psi == "baseline")
    V, next_V = (critic * agent.value(rollout[key]).detach() for key in ("obs", "next_obs"))
    steps, columns = rollout["mask"].nonzero(as_tuple=True)
    starts = 0 * steps if psi == "return" else steps
    pairs = zip(starts.tolist(), columns.tolist(), strict=True)
    expected = torch.stack([advantage(rollout, V, next_V, t, n, 0.9, lam) for t, n in pairs])
    batch = module.prepare(agent, rollout, module.Args(gamma=0.9, **flags))
    facts = {"t": steps, "column": columns, "done": batch["done"], "ended": batch["terminated"]}
    same("compute_advantages' first value, Ψ,", batch["advantages"], expected, **facts)
    targets = expected + V[rollout["mask"]]
    same("compute_advantages' second value, the targets,", batch["targets"], targets, **facts)


def test_conjugate_gradients_stop_at_the_solution_or_after_so_many_steps():
    products = []
    for F in (2 * torch.ones(12), torch.arange(1.0, 13)):
        trpo.conjugate_gradient(lambda v, F=F: products.append(v) or F * v, torch.ones(12), steps=3)
    assert len(products) == 1 + 3


def test_trpo_step_is_the_natural_gradient_s():
    """With F the Hessian of the KL and many iterations, (F + damping I) d is parallel to ∇L, and
    ½ dᵀ(F + damping I) d is δ. The step d is so small that F d is the KL's gradient at its end."""
    agent = make_agent(trpo)
    batch, before = make_batch(agent), flat(agent.actor.parameters())
    with torch.no_grad():
        old_policy = agent.policy(batch["obs"])
    batch["advantages"] /= 100
    A = batch["advantages"] - batch["advantages"].mean()
    g = gradient((A * agent.policy(batch["obs"]).log_prob(batch["actions"])).mean(), agent.actor)
    args = trpo.Args(max_kl=1e-9, damping=0.01, cg_steps=200)
    stats = trpo.update(agent, Recorder(agent), batch, 1.0, args)
    d = flat(agent.actor.parameters()) - before
    kl = kl_divergence(old_policy, agent.policy(batch["obs"])).mean()
    image = gradient(kl, agent.actor) + 0.01 * d
    assert (image / image.norm() - g / g.norm()).norm() < 1e-3
    assert d @ image / 2 == pytest.approx(1e-9 / 4 ** stats["backtracks"], rel=1e-3)
    assert stats["kl"] == pytest.approx(kl.item(), rel=1e-6, abs=0)


REFUSED = [(1.0, 0.011), (0.0, 0.0), (float("nan"), float("nan"))]


@pytest.mark.parametrize(
    "measured,moved,outcome",
    [([*REFUSED, (0.1, 0.009)], 0.125, (0.009, 3)), (REFUSED * 4, 0.0, (0.0, 10))],
)
def test_line_search_halves_the_step_until_l_grows_within_the_region(measured, moved, outcome):
    """Refused are a KL that is too large, no gain, and what is not a number."""
    parameters, results = [torch.arange(3.0)], iter(torch.tensor([(0.0, 0.0), *measured]))
    args = trpo.Args(max_kl=0.01)
    result = trpo.line_search(lambda: next(results), parameters, torch.ones(3), args)
    assert result == pytest.approx(outcome)
    assert torch.equal(parameters[0], torch.arange(3.0) + moved)


@pytest.mark.parametrize("advantage,bound", [(1.0, 1.3), (-2.0, 0.7)])
def test_the_clip_silences_exactly_what_it_says(advantage, bound):
    """Flat beyond 1 + ε where A > 0 and below 1 − ε where A < 0, else r A."""
    ratios = torch.linspace(0.505, 1.495, 100).double()
    logprobs, A = ratios.log().requires_grad_(), torch.full_like(ratios, advantage)
    objective, clipped = ppo.surrogate(logprobs, torch.zeros(100), A, ppo.Args(clip_coef=0.3))
    silent = ratios > bound if advantage > 0 else ratios < bound
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
    assert mean.item() == pytest.approx(exact.item())
    assert (objective <= 0).all() and not clipped.any()
    slopes = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (mean, exact)]
    assert torch.allclose(*slopes)


def test_kl_and_clipped_share_that_are_logged(monkeypatch):
    """The KL is measured after the epochs, over all of the rollout's steps; `clipfrac` is the share
    of the last minibatch that is clipped. The advantages lose the rollout's mean."""
    surrogates, agent = calls_of(monkeypatch, ppo, "surrogate"), make_agent(ppo)
    batch = make_batch(agent)
    old_logprobs = agent.policy(batch["obs"]).log_prob(batch["actions"]).detach()
    stats = ppo.update(agent, torch.optim.Adam(agent.parameters(), 0.01), batch, 1.0, ppo.Args())
    log_ratio = agent.policy(batch["obs"]).log_prob(batch["actions"]) - old_logprobs
    assert stats["approx_kl"] == pytest.approx((log_ratio.exp() - 1 - log_ratio).mean().item())
    _, clipped = surrogates[-1][1]
    assert stats["clipfrac"] == clipped.float().mean() > 0 and len(clipped) == 16
    A = torch.cat([inputs[2] for inputs, _ in surrogates[-4:]])  # the last epoch's
    centred = batch["advantages"] - batch["advantages"].mean()
    assert torch.allclose(A.sort()[0], centred.sort()[0])


@pytest.mark.parametrize(
    "module,baseline", [*((module, True) for module in SCRIPTS), (reinforce, False)]
)
def test_gradients_of_every_optimizer_step_by_hand(module, baseline):
    """Signs of policy, entropy and value loss; advantages minus their mean; actor and critic each
    clipped by its own norm (REINFORCE's actor not at all); none left over. Without a baseline there
    is neither a mean nor a critic's step."""
    agent, most = make_agent(module), 0.3
    batch = make_batch(agent)
    A = batch["advantages"] - (batch["advantages"].mean() if baseline else 0)
    policy = agent.policy(batch["obs"])
    log_prob, entropy = policy.log_prob(batch["actions"]), policy.entropy().mean()
    args = module.Args(num_envs=4, update_epochs=2, num_minibatches=1, max_grad_norm=most)
    targets = batch["targets"]
    if module is actor_critic:  # its targets are made anew, from rewards and V
        next_values = agent.value(batch["next_obs"]).detach() * ~batch["terminated"]
        targets = batch["rewards"] + args.gamma * next_values
        batch["targets"] = targets * float("nan")
    value_loss = (0.5 * (agent.value(batch["obs"]) - targets) ** 2).mean()
    policy_loss = -(A * log_prob).mean()

    def clipped(loss, network, most):
        g = gradient(loss, network)
        assert g.norm() > 1
        return g / (g.norm() / most).clamp(min=1)

    most_of_actor = float("inf") if module is reinforce else most
    scale = 64 / 4 if module is reinforce else 1  # steps per episode: a sum over them, not a mean
    actor = clipped(scale * (policy_loss - 0.5 * 0.4 * entropy), agent.actor, most_of_actor)
    critic = clipped(value_loss, agent.critic, most)
    expected = [(actor, None)] + [(None, critic)] * 2 * baseline
    expected = {trpo: [(None, critic)] * 2, ppo: [(actor, critic)] * 2}.get(module, expected)
    args.ent_coef, optimizer = 0.5, Recorder(agent)
    if not baseline:
        args.psi = "return"
    stats = module.update(agent, optimizer, batch, 0.4, args)
    assert len(optimizer.gradients) == len(expected)
    for step, wanted in zip(optimizer.gradients, expected, strict=True):
        for g, exact in zip(step, wanted, strict=True):
            assert g is None if exact is None else torch.allclose(g, exact, atol=1e-5)
    ratio = (agent.policy(batch["obs"]).log_prob(batch["actions"]) - log_prob).exp()
    logged = -(ratio * A).mean() if module in (trpo, ppo) else policy_loss  # after TRPO's step
    losses = {"policy_loss": logged, "value_loss": value_loss, "entropy": entropy}
    for key in losses.keys() & stats.keys():
        assert stats[key] == pytest.approx(losses[key].item(), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("module", SCRIPTS)
def test_each_pass_shows_the_critic_every_row_once_in_a_new_order(module):
    """In num_minibatches parts; not the same parts in each pass."""
    agent, parts = make_agent(module), []
    batch, value = make_batch(agent), agent.value
    batch["obs"][:, 0] = torch.arange(64)
    batch["next_obs"] = batch["obs"] + 100
    agent.value = lambda obs: parts.append(obs[:, 0].tolist()) or value(obs)
    args = module.Args(num_envs=4, update_epochs=3, num_minibatches=4)
    module.update(agent, Recorder(agent), batch, 1.0, args)
    parts = [part for part in parts if part[0] < 100]  # the others are next_obs
    passes = [sum(parts[i : i + 4], []) for i in (0, 4, 8)]
    assert [len(part) for part in parts] == [16] * 12 and passes[0] != passes[1] != passes[2]
    assert all(sorted(rows) == list(range(64)) for rows in passes)

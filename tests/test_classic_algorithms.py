"""The algorithms against their definitions and gradients by hand."""

from types import SimpleNamespace

import classic_envs  # noqa: F401
import gymnasium as gym
import pytest
import torch
from conftest import CLASSIC_SCRIPTS, calls_of, script
from oracles import same
from torch import nn
from torch.distributions import kl_divergence

reinforce, actor_critic = script("reinforce"), script("actor_critic")
trpo, ppo = script("trpo"), script("ppo")


def make_rollout(module, T=8, N=20):
    """Episodes that end at random. What is in rows that are no real steps must count nowhere."""
    torch.manual_seed(1)
    real, done = torch.ones(T, N).bool(), torch.rand(T, N) < 0.3
    one = module is reinforce  # one episode in each column
    done[-1] |= one
    for t in range(1, T):
        real[t] = ~done[t - 1] & (real[t - 1] | (not one))
        done[t] &= real[t]
    rollout = {"rewards": torch.randn(T, N).double(), "done": done, "real": real}
    return rollout | {"terminated": done & (torch.rand(T, N) < 0.5)}


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


METHODS = [(reinforce, 1.0, {"credit": name}) for name in ("return", "reward-to-go", "baseline")]
METHODS += [(actor_critic, 0.0, {})]
METHODS += [(module, lam, {"gae_lambda": lam}) for module in (trpo, ppo) for lam in (0.8, 1.0)]


@pytest.mark.parametrize("module,lam,flags", METHODS)
def test_advantages_and_targets_are_the_sums_of_their_definition(module, lam, flags):
    """REINFORCE's returns are the sums for λ = 1, and without a baseline V is 0. The whole return
    is the first step's."""
    rollout, credit = make_rollout(module), flags.get("credit", "baseline")
    values = torch.randn(len(rollout["rewards"]) + 1, rollout["rewards"].shape[1]).double()
    V, next_V = values[:-1], values[1:]
    args = module.Args(gamma=0.9, **flags)
    advantages, targets = module.compute_advantages(rollout, V, next_V, args)
    if credit != "baseline":
        V = next_V = torch.zeros_like(V)
    real = rollout["real"]
    steps, columns = real.nonzero(as_tuple=True)
    starts = 0 * steps if credit == "return" else steps
    pairs = zip(starts.tolist(), columns.tolist(), strict=True)
    expected = torch.stack([advantage(rollout, V, next_V, t, n, 0.9, lam) for t, n in pairs])
    facts = {"t": steps, "column": columns}
    facts |= {"done": rollout["done"][real], "ended": rollout["terminated"][real]}
    same("compute_advantages' first value, Ψ,", advantages[real], expected, **facts)
    same("compute_advantages' second value, the targets,", targets[real], expected + V[real])


# ---------------------------------------------------------------------------------- TRPO's step
def gradient(value, network):
    grads = torch.autograd.grad(value, list(network.parameters()))
    return nn.utils.parameters_to_vector(grads).detach()


def test_conjugate_gradients_stop_at_the_solution_or_after_so_many_steps():
    products = []
    for F in (2 * torch.ones(12), torch.arange(1.0, 13)):
        trpo.conjugate_gradient(lambda v, F=F: products.append(v) or F * v, torch.ones(12), steps=3)
    assert len(products) == 1 + 3


def test_trpo_step_is_the_natural_gradient_s():
    """With F the Hessian of the KL and many iterations, (F + damping I) d is parallel to ∇L, and
    ½ dᵀ(F + damping I) d is δ. The step d is so small that F d is the KL's gradient at its end.
    What is logged is measured after the step, and the entropy before."""
    torch.manual_seed(0)
    box = gym.spaces.Box(-1, 1, (2,))
    agent = trpo.Agent(SimpleNamespace(single_observation_space=box, single_action_space=box))
    agent.obs_norm, agent = nn.Identity(), agent.double()  # the norm gives float32
    agent.actor[-1].weight.data *= 100  # far from uniform
    obs, A = torch.randn(64, 2).double(), torch.randn(64).double()
    with torch.no_grad():
        old_policy = agent.policy(obs)
    batch = {"obs": obs, "actions": old_policy.sample(), "advantages": A}
    before = nn.utils.parameters_to_vector(agent.actor.parameters())
    g = gradient((A * agent.policy(obs).log_prob(batch["actions"])).mean(), agent.actor)
    args = trpo.Args(max_kl=1e-9, damping=0.01, cg_steps=200)
    loss, entropy, kl, backtracks = trpo.trust_region_step(agent, batch, args)
    d = nn.utils.parameters_to_vector(agent.actor.parameters()) - before
    policy = agent.policy(obs)
    exact_kl = kl_divergence(old_policy, policy).mean()
    image = gradient(exact_kl, agent.actor) + 0.01 * d
    assert (image / image.norm() - g / g.norm()).norm() < 1e-3
    assert (d @ image / 2).item() == pytest.approx(1e-9 / 4**backtracks, rel=1e-3)
    ratio = (policy.log_prob(batch["actions"]) - old_policy.log_prob(batch["actions"])).exp()
    logged = torch.stack([kl, loss, entropy])
    exact = torch.stack([exact_kl, -(ratio * A).mean(), old_policy.entropy().mean()])
    assert torch.allclose(logged, exact, rtol=1e-6, atol=0)


REFUSED = [(1.0, 0.011), (0.0, 0.0), (float("nan"), float("nan"))]


@pytest.mark.parametrize(
    "measured,moved,outcome",
    [([*REFUSED, (0.1, 0.009)], 0.125, (0.1, 0.009, 3)), (REFUSED * 4, 0.0, (0.0, 0.0, 10))],
)
def test_line_search_halves_the_step_until_l_grows_within_the_region(measured, moved, outcome):
    """Refused are a KL that is too large, no gain, and what is not a number."""
    parameters, results = [torch.arange(3.0)], iter(torch.tensor([(0.0, 0.0), *measured]))
    args = trpo.Args(max_kl=0.01)
    result = trpo.line_search(lambda: next(results), parameters, torch.ones(3), args)
    assert result == pytest.approx(outcome)
    assert torch.equal(parameters[0], torch.arange(3.0) + moved)


# ---------------------------------------------------------------------------------- PPO's objective
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
    """Summed over a policy's actions, k3 is KL(π_old ‖ π), value and gradient; for no action is it
    negative, as the log-ratio alone would be."""
    old = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    logits = torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64, requires_grad=True)
    new = logits.log_softmax(-1)
    k3 = ppo.kl_k3(old.log(), new)
    mean, exact = (old * k3).sum(), (old * (old.log() - new)).sum()
    assert mean.item() == pytest.approx(exact.item()) and (k3 >= 0).all()
    slopes = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (mean, exact)]
    assert torch.allclose(*slopes)


# ----------------------------------------------------------------------------------- Whole updates
def recorded(monkeypatch, module, **flags):
    """Run main by plain gradient descent. Returns the agent and args, the rollouts, the orders of
    all epochs, and what each optimizer step found: the agent's state, gradients and rate."""
    found, agents, Agent = [], [], module.Agent

    class Recorder(torch.optim.SGD):
        def __init__(self, parameters, rate, fused):
            super().__init__(parameters, rate)

        def step(self):
            state = {name: value.clone() for name, value in agents[0].state_dict().items()}
            gradients = [None if p.grad is None else p.grad.clone() for p in agents[0].parameters()]
            found.append((state, gradients, self.param_groups[0]["lr"]))
            super().step()

    monkeypatch.setattr(torch.optim, "Adam", Recorder)
    monkeypatch.setattr(module, "Agent", lambda envs: agents.append(Agent(envs)) or agents[-1])
    orders = calls_of(monkeypatch, torch, "randperm")
    calls = calls_of(monkeypatch, module, "compute_advantages")
    args = module.Args(**flags)
    module.main(args)
    rollouts = [inputs[0] for inputs, _ in calls if inputs[0]["rewards"].ndim == 2]
    return agents[0], args, rollouts, [order for _, order in orders], found


def by_hand(module, agent, rollout, lam, args):
    """The real steps of a rollout, with their advantages and targets by plain sums."""
    with torch.no_grad():
        V, next_V = agent.value(rollout["obs"]), agent.value(rollout["next_obs"])
        batch = {"old_logprobs": agent.policy(rollout["obs"]).log_prob(rollout["actions"])}
    A = torch.zeros_like(V)
    for t, n in rollout["real"].nonzero().tolist():
        A[t, n] = advantage(rollout, V, next_V, t, n, args.gamma, lam)
    batch = rollout | batch | {"targets": V + A, "advantages": A}
    batch = {name: column[rollout["real"]] for name, column in batch.items()}
    return batch | {"advantages": batch["advantages"] - batch["advantages"].mean()}


def losses(module, agent, mini, bonus, beta, args):
    """What the policy and what the critic descend on these rows."""
    policy, A = agent.policy(mini["obs"]), mini["advantages"]
    logprobs, targets = policy.log_prob(mini["actions"]), mini["targets"]
    objective = A * logprobs
    if module is ppo:
        r = (logprobs - mini["old_logprobs"]).exp()
        objective = torch.min(r * A, r.clamp(1 - args.clip_coef, 1 + args.clip_coef) * A)
        objective = objective - beta * (r - 1 - r.log())
    if module is actor_critic:  # made anew
        next_values = agent.value(mini["next_obs"]).detach() * ~mini["terminated"]
        targets = mini["rewards"] + args.gamma * next_values
    steps = args.num_envs if module is reinforce else len(A)  # the mean over episodes, or steps
    policy_loss = -(objective + bonus * policy.entropy()).sum() / steps
    return policy_loss, 0.5 * (agent.value(mini["obs"]) - targets).square().mean()


@pytest.mark.parametrize("env_id", ["Diary-v0", "BoxDiary-v0"])
@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_gradients_of_every_optimizer_step_by_hand(name, env_id, tmp_path, monkeypatch):
    """Of whole runs: real steps alone, advantages minus their mean, signs, sums and means, bonus
    and penalty, the clip of one norm (REINFORCE's actor has none), minibatches in new orders, and
    falling rates. The norm of the observations is that of the π that played: it knows the real
    steps of earlier rollouts alone."""
    module, first_alone = script(name), name in ("reinforce", "actor_critic")
    flags = {"num_envs": 8, "num_minibatches": 3, "update_epochs": 2, "learning_rate": 0.3}
    flags |= {"env_id": env_id, "output_dir": str(tmp_path), "max_grad_norm": 0.5}
    flags |= {} if module is reinforce else {"num_steps": 16}
    flags |= {} if module is trpo else {"ent_coef": 0.5}
    flags |= {"beta": 0.5, "kl_target": 1e-12} if module is ppo else {}  # β doubles each time
    agent, args, rollouts, orders, found = recorded(
        monkeypatch, module, total_timesteps=150, **flags
    )
    lam = {reinforce: 1.0, actor_critic: 0.0}.get(module) or getattr(args, "gae_lambda", 0.0)
    assert len(rollouts) > 1 and len(found) == len(rollouts) * (6 + first_alone)
    found, orders, seen, norms = iter(found), iter(orders), [], []
    for i, rollout in enumerate(rollouts):
        played, B = sum(map(len, seen)), int(rollout["real"].sum())
        share, size = 1 - played / 150, -(-B // 3)
        parts = [(torch.arange(B), True, False)] if first_alone else []
        for order in (next(orders), next(orders)):
            rows = [order[start : start + size] for start in (0, size, 2 * size)]
            parts += [(part, module is ppo, True) for part in rows]
        for j, (rows, acts, learns) in enumerate(parts):
            state, gradients, rate = next(found)
            agent.load_state_dict(state)
            if j == 0:
                batch = by_hand(module, agent, rollout, lam, args)
            mini = {key: column[rows] for key, column in batch.items()}
            bonus, beta = getattr(args, "ent_coef", 0.0) * share, 0.5 * 2**i
            policy_loss, value_loss = losses(module, agent, mini, bonus, beta, args)
            loss = acts * policy_loss + learns * value_loss
            networks = [agent.actor] * acts + [agent.critic] * learns
            parameters = [p for network in networks for p in network.parameters()]
            exact = nn.utils.parameters_to_vector(torch.autograd.grad(loss, parameters))
            norms.append(exact.norm().item())
            if not (module is reinforce and acts):
                exact *= min(1, 0.5 / norms[-1])
            ours = torch.cat([g.flatten() for g in gradients if g is not None])
            assert torch.allclose(ours, exact, rtol=1e-4, atol=1e-6)
            assert rate == pytest.approx(0.3 * (1 if first_alone else share))
            rows = torch.cat(seen).double() if seen else torch.zeros(0, 2).double()
            sums = torch.stack([rows**0, rows, rows**2]).sum(1)
            assert torch.allclose(state["obs_norm.sums"], sums)
        seen.append(batch["obs"])
    assert max(norms) > 0.5

"""The algorithms against their definitions and gradients by hand."""

import copy
from types import SimpleNamespace

import classic_envs  # noqa: F401
import gymnasium as gym
import pytest
import torch
from conftest import CLASSIC_SCRIPTS, calls_of, script
from oracles import same
from torch import nn
from torch.distributions import kl_divergence

reinforce, actor_critic, trpo, ppo = map(script, CLASSIC_SCRIPTS)


def advantage(rollout, values, t, n, gamma, lam):
    """Σ_l (γλ)^l δ_{t+l}, to the end of the episode or of the rollout."""
    total, weight = 0.0, 1.0
    for i in range(t, len(rollout["rewards"])):
        rest = 0.0 if rollout["terminated"][i, n] else gamma * values[i + 1, n]
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
    """REINFORCE's are those for λ = 1; V is 0 without a baseline; R(τ) is that of step 0."""
    torch.manual_seed(1)
    T, N, credit = 8, 20, flags.get("credit", "baseline")
    done, values = torch.rand(T, N) < 0.3, torch.randn(T + 1, N).double()
    done[-1] |= module is reinforce  # it plays whole episodes
    rollout = {"rewards": torch.randn(T, N).double(), "done": done}
    rollout["terminated"] = done & (torch.rand(T, N) < 0.5)
    args = module.Args(gamma=0.9, **flags)
    ours = module.compute_advantages(rollout, values[:-1], values[1:], args)
    values = values * (credit == "baseline")
    starts = [0] * T if credit == "return" else range(T)
    sums = [[advantage(rollout, values, t, n, 0.9, lam) for n in range(N)] for t in starts]
    expected, facts = torch.tensor(sums), {"done": done, "ended": rollout["terminated"]}
    same("compute_advantages' first value, Ψ,", ours[0], expected, **facts)
    same("compute_advantages' second value, the targets,", ours[1], expected + values[:-1], **facts)


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
    ½ dᵀ(F + damping I) d is δ. The step d is so small that F d is the KL's gradient at its end."""
    torch.manual_seed(0)
    box = gym.spaces.Box(-1, 1, (2,))
    agent = trpo.Agent(SimpleNamespace(single_observation_space=box, single_action_space=box))
    agent.obs_norm, agent = nn.Identity(), agent.double()  # the norm gives float32
    agent.actor[-1].weight.data *= 100  # far from uniform
    obs, A = torch.randn(64, 2).double(), torch.randn(64).double()
    A -= A.mean()
    with torch.no_grad():
        old_policy = agent.policy(obs)
    batch = {"obs": obs, "actions": old_policy.sample(), "advantages": A}
    before = nn.utils.parameters_to_vector(agent.actor.parameters())
    g = gradient((A * agent.policy(obs).log_prob(batch["actions"])).mean(), agent.actor)
    args = trpo.Args(max_kl=1e-9, damping=0.01, cg_steps=200)
    loss, _, kl, backtracks = trpo.trust_region_step(agent, batch, args)
    d = nn.utils.parameters_to_vector(agent.actor.parameters()) - before
    exact_kl = kl_divergence(old_policy, agent.policy(obs)).mean()
    image = gradient(exact_kl, agent.actor) + 0.01 * d
    assert (image / image.norm() - g / g.norm()).norm() < 1e-3
    assert (d @ image / 2).item() == pytest.approx(1e-9 / 4**backtracks, rel=1e-3)
    assert kl.item() == pytest.approx(exact_kl.item(), rel=1e-6, abs=0)
    assert loss.item() == pytest.approx(-(g @ d).item(), rel=1e-2, abs=0)


def test_line_search_halves_the_step_until_l_grows_within_the_region():
    """Refused are a KL that is too large, no gain, and what is not a number."""
    bad, args = [(1.0, 0.011), (0.0, 0.0), (float("nan"), float("nan"))], trpo.Args(max_kl=0.01)
    cases = [([*bad, (0.1, 0.009)], 0.125, (0.1, 0.009, 3)), (bad * 4, 0.0, (0.0, 0.0, 10))]
    for measured, moved, outcome in cases:
        parameters, results = [torch.arange(3.0)], iter(torch.tensor([(0.0, 0.0), *measured]))
        result = trpo.line_search(lambda: next(results), parameters, torch.ones(3), args)  # noqa: B023
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


# ----------------------------------------------------------------------------------- Whole updates
def recorded(monkeypatch, module, args):
    """Run main by plain gradient descent. Returns the agent, the rollouts, the epochs' orders, and
    of each optimizer step: the agent's state, the gradients, the rate."""
    found, agents, Agent = [], [], module.Agent

    class Recorder(torch.optim.SGD):
        def step(self):
            grads = [p.grad.flatten() for p in agents[0].parameters() if p.grad is not None]
            state = copy.deepcopy(agents[0].state_dict())
            found.append((state, torch.cat(grads), self.param_groups[0]["lr"]))
            super().step()

    monkeypatch.setattr(torch.optim, "Adam", Recorder)
    monkeypatch.setattr(module, "Agent", lambda envs: agents.append(Agent(envs)) or agents[-1])
    orders = calls_of(monkeypatch, torch, "randperm")
    calls = calls_of(monkeypatch, module, "compute_advantages")
    module.main(args)
    rollouts = [inputs[0] for inputs, _ in calls if inputs[0]["rewards"].ndim == 2]
    return agents[0], rollouts, [order for _, order in orders], found


@torch.no_grad()
def by_hand(module, agent, rollout, args):
    """The real steps of a rollout, with their advantages minus the mean."""
    old = {"old_logprobs": agent.policy(rollout["obs"]).log_prob(rollout["actions"])}
    values, next_values = agent.value(rollout["obs"]), agent.value(rollout["next_obs"])
    A, targets = module.compute_advantages(rollout, values, next_values, args)
    old |= {"A": A - A[rollout["real"]].mean(), "targets": targets}
    return {name: column[rollout["real"]] for name, column in (rollout | old).items()}


def losses(module, agent, mini, bonus, beta, args):
    """What the policy and what the critic descend on these rows."""
    policy, A = agent.policy(mini["obs"]), mini["A"]
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
    """Real steps alone; signs, sums and means; bonus, penalty; the clip of one norm (REINFORCE's
    actor has none); minibatches in new orders; falling rates. The norm of the observations has seen
    the real steps of earlier rollouts, as π had when it played."""
    module, flags = script(name), {"env_id": env_id, "num_envs": 8, "total_timesteps": 150}
    flags |= {"num_minibatches": 3, "update_epochs": 2, "learning_rate": 0.3, "max_grad_norm": 0.5}
    flags |= {} if module is reinforce else {"num_steps": 16}
    flags |= {} if module is trpo else {"ent_coef": 0.5}
    flags |= {"beta": 0.5, "kl_target": 1e-12} if module is ppo else {}  # β doubles each time
    args = module.Args(output_dir=str(tmp_path), **flags)
    agent, rollouts, orders, found = recorded(monkeypatch, module, args)
    seen, norms, orders, found = torch.zeros(0, 2).double(), [], iter(orders), iter(found)
    for i, rollout in enumerate(rollouts):
        B, share = int(rollout["real"].sum()), 1 - len(seen) / 150
        parts = [part for _ in range(2) for part in next(orders).split(-(-B // 3))]
        if module in (reinforce, actor_critic):
            parts = [torch.arange(B), *parts]  # a step of the policy, then the critic's
        for j, rows in enumerate(parts):
            state, ours, rate = next(found)
            agent.load_state_dict(state)
            if j == 0:
                batch = by_hand(module, agent, rollout, args)
            mini = {key: column[rows] for key, column in batch.items()}
            bonus = getattr(args, "ent_coef", 0.0) * share
            policy_loss, value_loss = losses(module, agent, mini, bonus, 0.5 * 2**i, args)
            acts = {ppo: True, trpo: False}.get(module, j == 0)
            learns = module is ppo or not acts
            networks = [agent.actor] * acts + [agent.critic] * learns
            exact = gradient(acts * policy_loss + learns * value_loss, nn.ModuleList(networks))
            norms.append(exact.norm().item())
            if not (module is reinforce and acts):
                exact *= min(1, 0.5 / norms[-1])
            assert torch.allclose(ours, exact, rtol=1e-4, atol=1e-6)
            assert rate == pytest.approx(0.3 * (share if module in (trpo, ppo) else 1))
            sums = torch.stack([seen**0, seen, seen**2]).sum(1)
            assert torch.allclose(state["obs_norm.sums"], sums)
        seen = torch.cat([seen, batch["obs"]])
    assert i > 0 and max(norms) > 0.5 and next(found, None) is None

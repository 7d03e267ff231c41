"""Rollouts, returns and advantages, where episodes end, are cut off and begin anew in the middle of
it all."""

from itertools import product
from types import SimpleNamespace

import classic_envs  # noqa: F401
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CLASSIC_SCRIPTS, script

STEPPED = [name for name in CLASSIC_SCRIPTS if name != "reinforce"]


def random_tensors(T=40, N=6, seed=0):
    """Rewards, values, terminated, done and mask with a dummy row after each end, as next-step
    autoreset makes them."""
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(T, N)), rng.normal(size=(T + 1, N))
    terminated = rng.random((T, N)) < 0.12
    truncated = rng.random((T, N)) < 0.12
    mask = np.ones((T, N), bool)
    for t in range(1, T):
        mask[t] = ~(terminated | truncated)[t - 1]
        terminated[t] &= mask[t]
        truncated[t] &= mask[t]
    assert (terminated & ~truncated).any() and (truncated & ~terminated).any() and (~mask).any()
    return [torch.as_tensor(x) for x in (rewards, values, terminated, terminated | truncated, mask)]


def brute_force(rewards, values, terminated, done, t, n, gamma, lam):
    """Σ_l (γλ)^l δ_{t+l} up to the episode's end or the rollout's, by its definition."""
    total, weight = 0.0, 1.0
    for k in range(t, len(rewards)):
        future = 0.0 if terminated[k, n] else values[k + 1, n].item()
        total += weight * (rewards[k, n].item() + gamma * future - values[k, n].item())
        weight *= gamma * lam
        if done[k, n]:
            break
    return total


@pytest.mark.parametrize(
    "name,lam", [("actor_critic", 0.0), *product(("trpo", "ppo"), (0, 0.7, 1))]
)
def test_advantages_by_brute_force(name, lam):
    """The TD error is GAE at λ = 0. The end of an episode ends the sum, and the time limit leaves
    the value behind it in; what the dummy rows hold reaches no real one."""
    rewards, values, terminated, done, mask = random_tensors()
    args = SimpleNamespace(gamma=0.9, gae_lambda=lam)
    found = script(name).compute_advantages(rewards, values, terminated, done, args)
    for t, n in mask.nonzero().tolist():
        assert found[t, n].item() == pytest.approx(
            brute_force(rewards, values, terminated, done, t, n, 0.9, lam), abs=1e-9
        )


def play(name, env_id="Diary-v0", num_envs=3, num_steps=25, rounds=3):
    """The script, an agent, and some rollouts of it with their episodes."""
    module = script(name)
    torch.manual_seed(0)
    envs = module.make_envs(env_id, num_envs)
    agent = module.Agent(envs)
    args = module.Args(
        env_id=env_id,
        num_envs=num_envs,
        **({} if name == "reinforce" else {"num_steps": num_steps}),
    )
    generator = module.rollouts(envs, agent, args)
    return module, agent, args, [next(generator) for _ in range(rounds)]


@pytest.mark.parametrize("name", STEPPED)
def test_rollout_tells_where_each_step_led(name):
    """Diary counts: within an episode steps follow one another, to the last observation; then a
    dummy row; then step 0."""
    *_, rounds = play(name)
    obs = torch.cat([rollout["obs"][:-1] for rollout, _ in rounds] + [rounds[-1][0]["obs"][-1:]])
    mask, done, terminated = (
        torch.cat([rollout[key] for rollout, _ in rounds]) for key in ("mask", "done", "terminated")
    )
    assert mask[0].all() and torch.equal(mask[1:], ~done[:-1])
    assert (done & ~terminated).any() and terminated.any() and not done[~mask].any()
    for t, n in mask.nonzero().tolist():
        assert obs[t + 1, n].tolist() == [obs[t, n, 0], obs[t, n, 1] + 1]
        assert (done & ~terminated)[t, n] == (not terminated[t, n] and obs[t + 1, n, 1] == 6)
    for t, n in (~mask).nonzero().tolist():
        assert obs[t + 1, n].tolist() == [obs[t, n, 0] + 1, 0]


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_episode_returns_are_gymnasium_s(name):
    """Against RecordEpisodeStatistics, fed with the same actions."""
    *_, args, rounds = play(name)
    if name == "reinforce":
        for rollout, returns in rounds:
            assert torch.allclose(
                (rollout["rewards"] * rollout["mask"]).sum(0),
                torch.tensor(returns, dtype=torch.float32),
                atol=1e-5,
            )
        return
    envs = gym.wrappers.vector.RecordEpisodeStatistics(
        gym.make_vec("Diary-v0", num_envs=args.num_envs)
    )
    envs.reset(seed=args.seed)
    for rollout, returns in rounds:
        expected = []
        for actions in rollout["actions"]:
            *_, infos = envs.step(actions.numpy())
            expected += (
                infos["episode"]["r"][infos["_episode"]].tolist() if "episode" in infos else []
            )
        assert returns == pytest.approx(expected, abs=1e-5) and expected


def test_reinforce_plays_one_whole_episode_per_environment():
    *_, rounds = play("reinforce")
    for rollout, returns in rounds:
        obs, mask, done = rollout["obs"], rollout["mask"], rollout["done"]
        assert len(returns) == 3 and len(mask) == mask.sum(0).max()
        for n in range(3):
            length = int(mask[:, n].sum())
            assert (
                mask[:length, n].all() and done[length - 1, n] and not done[: length - 1, n].any()
            )
            assert obs[: length + 1, n, 1].tolist() == list(range(length + 1))


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_batch_holds_the_real_steps_and_nothing_else(name):
    module, agent, args, rounds = play(name)
    for rollout, _ in rounds:
        batch = module.prepare(agent, rollout, args)
        expected = [rollout["obs"][t, n].tolist() for t, n in rollout["mask"].nonzero().tolist()]
        assert batch["obs"].tolist() == expected
        assert all(len(column) == len(expected) for column in batch.values())
        if name == "actor_critic":
            assert torch.equal(batch["next_obs"], batch["obs"] + torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_dummy_rows_enter_no_statistic(name):
    """Rewards, actions and flags of dummy rows are junk; what the update is given does not change
    by a bit."""
    module, agent, args, rounds = play(name)
    rollout = rounds[0][0]
    junk = {
        **rollout,
        "rewards": rollout["rewards"].masked_fill(~rollout["mask"], 1e6),
        "actions": rollout["actions"].masked_fill(~rollout["mask"], 1),
    }
    fresh = {key: value.clone() for key, value in agent.state_dict().items()}
    clean = module.prepare(agent, rollout, args)
    agent.load_state_dict(fresh)
    dirty = module.prepare(agent, junk, args)
    assert (~rollout["mask"]).any() and all(torch.equal(clean[key], dirty[key]) for key in clean)


def test_running_norm_is_mean_and_deviation_of_all_rows():
    torch.manual_seed(0)
    norm = script("ppo").RunningNorm(3)
    rows = [torch.randn(n, 3) * torch.tensor([1.0, 5.0, 0.1]) + 7 for n in (1, 50, 300)]
    for part in rows:
        norm.update(part)
    seen = torch.cat(rows)
    assert torch.allclose(norm.mean, seen.mean(0), atol=1e-4) and torch.allclose(
        norm.std, seen.std(0, unbiased=False), rtol=1e-4
    )
    assert torch.allclose(norm(seen).std(0, unbiased=False), torch.ones(3), atol=1e-2)
    assert norm(torch.full((1, 3), 1e6)).tolist() == [[10.0] * 3]


def test_a_state_first_seen_late_is_not_blown_up():
    """One-hot, a feature may be 0 in all rows so far, and its deviation 0. Its first 1 then counts
    as that of a state seen once in a hundred rows, 10, not as the 10,000 that it is divided to."""
    norm, states = script("ppo").RunningNorm(3), torch.eye(3)
    norm.update(states[[0] * 100 + [1]])
    assert norm(states)[:, 1].tolist() == pytest.approx([-0.1, 10, -0.1], rel=1e-4)
    assert norm(states)[:, 2].tolist() == [0, 0, 10]


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_actions_are_clipped_for_the_environment_alone(name):
    module, agent, args, rounds = play(name, "Mirror-v0")
    rollout = rounds[0][0]
    mask, actions = rollout["mask"], rollout["actions"]
    assert actions.shape[2:] == (3,) and (actions.abs() > 1).any()
    assert torch.allclose(rollout["obs"][1:][mask], actions[mask].clamp(-1, 1))
    batch = module.prepare(agent, rollout, args)
    assert torch.equal(batch["actions"], actions[mask])
    if "logprobs" in batch:
        policy = agent.policy(batch["obs"])
        expected = (
            torch.distributions.Normal(policy.base_dist.loc, policy.base_dist.scale)
            .log_prob(actions[mask])
            .sum(-1)
        )
        assert torch.allclose(batch["logprobs"], expected)


BOX = gym.spaces.Box(-1, 1, (2, 2), np.float32)
FLAT = [
    gym.spaces.Discrete(3, start=2),
    gym.spaces.MultiDiscrete([2, 3]),
    gym.spaces.MultiBinary(4),
    gym.spaces.Tuple([gym.spaces.Discrete(3), BOX]),
    gym.spaces.Dict(a=gym.spaces.Dict(b=BOX, c=gym.spaces.Discrete(2)), d=gym.spaces.Discrete(4)),
]


@pytest.mark.parametrize("space", FLAT, ids=lambda space: type(space).__name__)
def test_every_space_that_gymnasium_flattens(space):
    """Two environments, five steps: what the agent sees is gymnasium's own flattening."""
    module, seen, sample = script("ppo"), [], space.sample
    envs = module.make_envs("Spaces-v0", 2, observation=space)
    agent = module.Agent(envs)

    def watched(*args, **kwargs):
        seen.append(sample(*args, **kwargs))
        return seen[-1]

    for env in envs.unwrapped.envs:
        env.unwrapped.observation_space.sample = watched
    obs, _ = envs.reset()
    for _ in range(5):
        expected = [gym.spaces.flatten(space, each) for each in seen[-2:]]
        assert np.array_equal(obs, np.stack(expected)) and obs.shape[1] > 2
        obs, *_ = envs.step(agent.act(obs))


def test_an_episode_without_a_time_limit_is_cut_off():
    """REINFORCE waits for whole episodes: after 1,000 steps, the critic stands for the rest."""
    module, agent, args, rounds = play("reinforce", "Forever-v0", num_envs=2, rounds=2)
    agent.value = lambda obs: torch.full(obs.shape[:-1], 10.0)
    for rollout, returns in rounds:
        assert rollout["mask"].shape == (1000, 2) and rollout["mask"].all()
        assert rollout["done"].nonzero()[:, 0].tolist() == [999, 999]
        assert not rollout["terminated"].any() and returns == [1000, 1000]
        batch = module.prepare(agent, rollout, args)
        assert batch["returns"][-1].item() == pytest.approx(1 + args.gamma * 10)


def test_reinforce_adds_what_a_time_limit_cut_off():
    """γ^k V(s_T) where the limit ended the episode, nothing where it terminated; by hand."""
    module = script("reinforce")
    rewards = torch.tensor([[1.0, 1.0], [2.0, 2.0], [7.0, 7.0]])
    mask = torch.tensor([[True, True], [True, True], [False, False]])
    done = torch.tensor([[False, False], [True, True], [False, False]])
    terminated = torch.tensor([[False, False], [True, False], [False, False]])
    values = torch.tensor([[3.0, 3.0], [4.0, 4.0], [50.0, 50.0], [9.0, 9.0]])
    agent = SimpleNamespace(value=lambda obs: values)
    rollout = {"obs": torch.zeros(4, 2, 1), "actions": torch.zeros(3, 2), "rewards": rewards}
    rollout |= {"mask": mask, "done": done, "terminated": terminated}
    batch = module.prepare(agent, rollout, SimpleNamespace(gamma=0.5, psi="baseline"))
    # rows: step 0 of both, step 1 of both
    assert batch["returns"].tolist() == [1 + 1, 1 + 0.5 * (2 + 25), 2, 2 + 25]
    assert batch["advantages"].tolist() == [2 - 3, 14.5 - 3, 2 - 4, 27 - 4]


@pytest.mark.parametrize("psi", ["return", "reward-to-go"])
def test_without_a_baseline_the_critic_has_no_say(psi):
    module, agent, args, rounds = play("reinforce")
    agent.critic[-1].bias.data += 100
    args.psi = psi
    rollout, returns = rounds[0]
    batch = module.prepare(agent, rollout, args)
    assert not batch["values"].any()
    zero = torch.zeros(len(rollout["obs"]), 3)
    expected = module.compute_advantages(
        rollout["rewards"], zero, rollout["terminated"], rollout["done"], args
    )[rollout["mask"]]
    assert torch.equal(batch["returns"], expected) and torch.equal(batch["advantages"], expected)


@pytest.mark.parametrize("psi", ["return", "reward-to-go"])
def test_without_a_baseline_the_critic_is_left_alone(psi):
    """Nobody asks it, so nobody trains it; and the policy still moves."""
    module, agent, args, rounds = play("reinforce")
    args.psi = psi
    before = {key: value.clone() for key, value in agent.named_parameters()}
    stats = module.update(
        agent,
        torch.optim.Adam(agent.parameters()),
        module.prepare(agent, rounds[0][0], args),
        0.0,
        args,
    )
    assert "value_loss" not in stats
    moved = {
        key.split(".")[0]
        for key, value in agent.named_parameters()
        if not torch.equal(value, before[key])
    }
    assert moved == {"actor"}


def test_reinforce_starts_every_rollout_elsewhere():
    """A seed given to each reset, not to the first alone, would play the same N starts for ever."""
    *_, rounds = play("reinforce", "CartPole-v1")
    starts = [rollout["obs"][0] for rollout, _ in rounds]
    assert not torch.equal(starts[0], starts[1]) and not torch.equal(starts[1], starts[2])


def test_a_loaded_norm_goes_on_where_it_was():
    """Mean and deviation without the sums behind them would be forgotten at the first update after
    --load."""
    torch.manual_seed(0)
    first = script("ppo").RunningNorm(3)
    loaded = script("ppo").RunningNorm(3)
    rows = torch.randn(60, 3) * 5 + 7
    first.update(rows[:50])
    loaded.load_state_dict(first.state_dict())
    for norm in (first, loaded):
        norm.update(rows[50:])
    assert torch.equal(loaded.mean, first.mean) and torch.equal(loaded.std, first.std)


def test_a_new_scale_leaves_the_critic_what_it_was():
    """Targets made of V that also scale V run away: the first rollouts would multiply it by ten."""
    module, agent, args, rounds = play("actor_critic", "CartPole-v1")
    agent.critic[-1].bias.data += 2
    for rollout, _ in rounds:
        before = agent.value(rollout["obs"])
        module.rescale_returns(agent, module.prepare(agent, rollout, args)["returns"])
        assert torch.allclose(agent.value(rollout["obs"]), before, atol=1e-4)
        agent.critic[-1].bias.data += 1
    assert agent.return_norm.std > 0.1 and abs(agent.return_norm.mean) > 1  # it did change


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_values_and_targets_are_in_units_of_the_reward(name):
    """A critic that says 0 means the mean return, and 1 a deviation more; target less value is the
    advantage."""
    module, agent, args, rounds = play(name)
    agent.return_norm.update(torch.tensor([40.0, 60.0]))
    agent.critic[-1].weight.data *= 0
    for says, value in ((0.0, 50.0), (1.0, 60.0)):
        agent.critic[-1].bias.data.fill_(says)
        assert agent.value(torch.zeros(2, 2)).tolist() == [value] * 2
    batch = module.prepare(agent, rounds[0][0], args)
    assert torch.allclose(batch["values"], torch.tensor(60.0))
    assert torch.allclose(batch["returns"] - 60, batch["advantages"], atol=1e-3)

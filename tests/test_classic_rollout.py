"""Rollouts, observations and actions, where episodes end, are cut off and begin anew in the middle
of a rollout."""

import classic_envs  # noqa: F401
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import equal, script

# Three scripts share one kind of rollouts.
KINDS = pytest.mark.parametrize("name", ["reinforce", "ppo"])


def play(name, env_id="Diary-v0", num_envs=3, num_steps=25, rounds=3):
    """The script, an agent, args, and some rollouts with the returns of their episodes."""
    module = script(name)
    torch.manual_seed(0)
    args = module.Args(env_id=env_id, num_envs=num_envs)
    envs = module.make_envs(env_id, num_envs)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs, stats_key="whole episode")
    agent, args.num_steps = module.Agent(envs), num_steps
    stream = module.rollouts(envs, agent, args)
    return module, agent, args, [next(stream) for _ in range(rounds)]


def joined(rounds):
    """All rollouts as one."""
    return {key: torch.cat([rollout[key] for rollout, _ in rounds]) for key in rounds[0][0]}


def test_rollout_tells_where_each_step_led():
    """Diary counts: within an episode steps follow one another, to the last observation; then a
    dummy row; then step 0."""
    *_, rounds = play("ppo")
    column = joined(rounds)
    obs, next_obs, mask, done = (column[key] for key in ("obs", "next_obs", "mask", "done"))
    truncated = done & ~column["terminated"]
    assert mask[0].all() and torch.equal(mask[1:], ~done[:-1])
    assert truncated.any() and column["terminated"].any() and not done[~mask].any()
    assert all(len(returns) == rollout["done"].sum() for rollout, returns in rounds)
    assert torch.equal(next_obs[:-1], obs[1:])
    assert torch.equal(next_obs[mask], obs[mask] + torch.tensor([0.0, 1.0]))
    assert torch.equal(next_obs[~mask], (obs[~mask] + 1) * torch.tensor([1.0, 0.0]))
    assert torch.equal(truncated[mask], (next_obs[mask][:, 1] == 6) & ~column["terminated"][mask])


@KINDS
def test_earned_is_the_discounted_sum_of_rewards_but_a_terminal_step_s_own(name):
    *_, rounds = play(name)  # reinforce.py resets the environments before each rollout
    for column in [joined([one]) for one in rounds] if name == "reinforce" else [joined(rounds)]:
        earned, rewards = column["earned"], column["rewards"].double()
        past = 0.99 * earned[:-1] * ~column["terminated"][1:]
        assert torch.allclose(earned, rewards + torch.nn.functional.pad(past, (0, 0, 1, 0)))


@KINDS
def test_an_environment_may_write_into_its_own_arrays(name, monkeypatch):
    """It writes each step into the arrays of its first one, and into the actions that it gets. Its
    flags are uint8."""
    module, agent, args, expected = play(name)
    score = module.evaluate(agent, args, episodes=3)
    arrays, step = [], gym.vector.SyncVectorEnv.step

    def reusing(envs, actions):
        obs, rewards, terminated, truncated, infos = step(envs, actions)
        fresh = obs, rewards, terminated.astype(np.uint8), truncated.astype(np.uint8)
        arrays[:] = arrays or fresh
        for kept, new in zip(arrays, fresh, strict=True):
            kept[:] = new
        actions[:] = 1 - actions
        return *arrays, infos

    monkeypatch.setattr(gym.vector.SyncVectorEnv, "step", reusing)
    *_, rounds = play(name)
    for (a, returns), (b, same_returns) in zip(expected, rounds, strict=True):
        assert equal(a, b) and returns == same_returns
    arrays.clear()
    assert module.evaluate(agent, args, episodes=3) == score


def test_reinforce_plays_one_whole_episode_per_environment():
    """Later rollouts differ, because only the first reset has the seed."""
    *_, rounds = play("reinforce", num_envs=8)
    assert not torch.equal(rounds[0][0]["rewards"][0], rounds[1][0]["rewards"][0])
    for rollout, returns in rounds:
        obs, mask, done = rollout["obs"], rollout["mask"], rollout["done"]
        lengths = mask.sum(0).tolist()
        assert len(returns) == 8 and len(mask) == max(lengths) and len(set(lengths)) > 1
        for n, length in enumerate(lengths):
            assert done[:length, n].tolist() == [False] * (length - 1) + [True]
            assert obs[:length, n, 1].tolist() == list(range(length)) and mask[:length, n].all()


def test_an_episode_without_a_time_limit_is_cut_off():
    """REINFORCE waits for whole episodes: after 1,000 steps, V stands in for the rest."""
    *_, rounds = play("reinforce", "Spaces-v0", num_envs=2, rounds=2)
    for rollout, returns in rounds:
        assert rollout["mask"].shape == (1000, 2) and rollout["mask"].all()
        assert rollout["done"].nonzero()[:, 0].tolist() == [999, 999]
        assert not rollout["terminated"].any() and returns == []  # no episode has ended


def test_the_norm_has_mean_and_deviation_of_all_rows():
    """Also far from 0, such as seconds since 1970, in float64: float32 would round them to minutes.
    And of tiny ones. A constant is nearly 0, also if it is 0.3 at times and 0.1 + 0.2 at others."""
    rows = torch.randn(400, 3, generator=torch.Generator().manual_seed(0)).double()
    rows[:, 2] = torch.tensor([0.3, 0.1 + 0.2] * 200, dtype=torch.float64)
    expected = (rows - rows.mean(0)) / rows.std(0, correction=0)
    for scale, offset in ((1, 0), (1, 1.7e9), (1e-25, 0)):
        norm = script("ppo").RunningMeanStd(3)
        for part in rows.split([1, 99, 300]):
            norm.update(scale * part + offset)
        scaled = norm(scale * rows + offset)
        assert scaled.dtype == torch.float32
        assert torch.allclose(scaled[:, :2], expected[:, :2].float(), atol=1e-4)
        assert scaled[:, 2].abs().max() < 1e-3
        assert norm(torch.full((1, 3), 1e12)).tolist() == [[10.0] * 3]


def test_actions_are_scaled_and_clipped_for_the_environment_alone():
    """1 is the upper bound, which is 8, the lower is 5. log π has the action as it was drawn."""
    *_, [(rollout, _), *_] = play("ppo", "Mirror-v0")
    mask, actions = rollout["mask"], rollout["actions"]
    assert actions.shape[2:] == (3,) and (actions.abs() > 1).any()
    assert torch.allclose(rollout["next_obs"][mask], 6.5 + 1.5 * actions[mask].clamp(-1, 1))


def test_each_component_of_an_action_has_bounds_of_its_own():
    """-1 and 1 become its bounds, in the Box's dtype: Mirror refuses any other. Where it has none,
    or beyond a million, the action stays as it is; a locked joint stays where it is."""
    inf = np.inf
    low, high = np.float32([(-20, 0.1), (2, 2), (-inf, inf), (0, inf), (-3.4e38, 3.4e38)]).T
    envs = script("ppo").make_envs("Mirror-v0", 2, low=low, high=high)
    envs.reset()
    actions, *_ = envs.step(np.float32([[-1] * 5, [1] * 5]))
    assert np.allclose(actions, [[-20, 2, -1, 0, -1], [0.1, 2, 1, 1, 1]])
    envs = script("ppo").make_envs("Mirror-v0", 2, low=[-128], high=[127], dtype=np.int8)
    envs.reset()  # the width of these bounds is no int8
    assert envs.step(np.float32([[-1], [1]]))[0].tolist() == [[-128], [127]]


IMAGE, NUMBER = gym.spaces.Box(0, 255, (4, 3), np.uint8), gym.spaces.Discrete(3, start=2)


@pytest.mark.parametrize("space", [IMAGE, NUMBER, gym.spaces.Dict(a=IMAGE, b=NUMBER)])
def test_spaces_that_gymnasium_flattens(space):
    """The agent observes gymnasium's own flattening. Its actions may start at any number."""
    envs = script("ppo").make_envs("Spaces-v0", 2, observation=space, action=NUMBER)
    agent, (obs, _) = script("ppo").Agent(envs), envs.reset(seed=1)
    for _ in range(3):
        observed = [env.unwrapped.observed for env in envs.unwrapped.envs]
        assert np.array_equal(obs, np.stack([gym.spaces.flatten(space, x) for x in observed]))
        obs, *_ = envs.step(agent.act(obs))

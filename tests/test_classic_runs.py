"""Whole runs of the classic scripts: rollouts, spaces, logs, saved agents, learning, bad input."""

import os
import subprocess
import sys
from pathlib import Path

import classic_envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from classic_envs import pay
from conftest import CLASSIC_SCRIPTS, ROOT, calls_of, equal, refused, scalars, script
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

ALL = pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
ppo = script("ppo")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that makes a short run: main's result, the folder, the weights, the rollouts."""

    def run(name, **flags):
        module, short = script(name), {"num_envs": 3, "total_timesteps": 150, "env_id": "Diary-v0"}
        short |= {} if name == "reinforce" else {"num_steps": 25}
        with monkeypatch.context() as patched:
            calls = calls_of(patched, module, "compute_advantages")
            result = module.main(module.Args(output_dir=str(tmp_path), **short | flags))
        result |= {"folder": Path(result["agent"]).parent, "weights": torch.load(result["agent"])}
        return result, [inputs[0] for inputs, _ in calls if inputs[0]["rewards"].ndim == 2]

    return run


# ---------------------------------------------------------------------------------------- Rollouts
@pytest.mark.parametrize("env_id", ["Diary-v0", "BoxDiary-v0"])
@ALL
def test_rollouts_say_what_happened(name, env_id, run):
    """Diary counts, so we know each row. Not real is a step after `done`, and what REINFORCE's
    environments play until the last episode ends. Rewards are divided by the standard deviation of
    the discounted sums so far, which a time limit does not end. Actions stay as they were drawn."""
    alone = name == "reinforce"  # whole episodes, one in each environment
    (result, rollouts), sums, returns = run(name, env_id=env_id, total_timesteps=600), [], []
    for i, rollout in enumerate(rollouts):
        columns = {key: column.numpy() for key, column in rollout.items()}
        if i == 0 or alone:
            (t, earned, total), over, real = np.zeros((3, 3)), np.zeros(3, bool), np.ones(3, bool)
            episode = columns["obs"][0, :, 0]
        for row in range(len(columns["obs"])):
            step = {key: column[row] for key, column in columns.items()}
            assert np.array_equal(step["obs"], np.stack([episode, t], 1))
            episode, t = episode + over, np.where(over, 0, t + 1)
            assert np.array_equal(step["next_obs"], np.stack([episode, t], 1))
            over = step["terminated"] | (t == 6)
            assert np.array_equal(step["real"], real) and np.array_equal(step["done"], over & real)
            paid = pay(step["next_obs"])
            earned, total = paid + 0.99 * earned * ~step["terminated"], paid + total * (t > 1)
            sums, returns = [*sums, *earned[real]], [*returns, *total[over & real]]
            real = real & ~over if alone else ~over
        assert np.allclose(columns["rewards"] * np.std(sums), pay(columns["next_obs"]), atol=1e-4)
        assert not alone or columns["real"][-1].any() and not real.any()
    assert len(returns) > 100 and result["return"] == pytest.approx(np.mean(returns[-100:]))
    assert (rollout["actions"].abs() > 1).any() == (env_id == "BoxDiary-v0")


def test_endless_episodes(run, capsys):
    """REINFORCE cuts them off after 1,000 steps. The others have no return to log."""
    _, (rollout,) = run("reinforce", num_envs=2, env_id="Spaces-v0")
    assert rollout["done"].nonzero()[:, 0].tolist() == [999, 999]
    assert not rollout["terminated"].any()
    result, _ = run("ppo", env_id="Spaces-v0")
    assert "mean return nan (0 episodes)" in capsys.readouterr().out
    with pytest.raises(KeyError):
        scalars(result["folder"], "charts/episodic_return")


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS[1:])
def test_a_rollout_of_nothing_but_resets(name, run):
    """Every second one, as all episodes end after one step."""
    result, rollouts = run(name, env_id="Once-v0", num_steps=1, total_timesteps=21)
    assert len(rollouts) == 7 and result["weights"]["obs_norm.sums"].isfinite().all()


@ALL
def test_an_environment_may_write_into_its_own_arrays(name, run, monkeypatch):
    """Each step into those of its first one, and into the actions. Its flags are uint8."""
    _, expected = run(name)
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
    _, rollouts = run(name)
    assert all(equal(a, b) for a, b in zip(expected, rollouts, strict=True))


def test_the_norm_has_mean_and_deviation_of_all_rows():
    """Also far from 0, in float64. At first it changes nothing, and a constant becomes 0."""
    rows = torch.randn(400, 3).double() * torch.tensor([1, 1, 0])
    expected = (rows - rows.mean(0)) / rows.std(0, correction=0).clamp(min=1e-9)
    assert torch.allclose(ppo.RunningNorm(3)(rows), rows.float())
    for scale, offset in ((1, 0), (1, 1e5), (1e-3, 0)):
        norm = ppo.RunningNorm(3)
        for part in rows.split([1, 99, 300]):
            norm.update(scale * part + offset)
        assert torch.allclose(norm(scale * rows + offset), expected.float(), atol=1e-3)
        assert norm(torch.full((1, 3), 1e12)).tolist() == [[10.0] * 3]


# ------------------------------------------------------------------------------------------ Spaces
INF, IMAGE, NUMBER = np.inf, Box(0, 255, (4, 3), np.uint8), Discrete(3, start=2)
BOUNDS = np.float32([(-20, 0.1), (2, 2), (-INF, INF), (0, INF), (-3.4e38, 3.4e38)]).T
IN_BOUNDS = [[-20, 2, -1, 0, -1], [0.1, 2, 1, 1, 1], [0.1, 2, 9, 9, 9]]
ACTIONS = [(NUMBER, [0, 1, 2], [2, 3, 4]), (Box(*BOUNDS), [[-1] * 5, [1] * 5, [9] * 5], IN_BOUNDS)]
ACTIONS += [(Box(-128, 127, (1,), np.int8), [[-1], [1], [9]], [[-128], [127], [127]])]


@pytest.mark.parametrize("space,drawn,given", ACTIONS)
def test_actions_reach_the_environment_in_its_space(space, drawn, given):
    """-1 and 1 become a component's bounds, which no action leaves. Where it has none, or beyond a
    million, the action stays as it is; a locked joint stays where it is."""
    envs = ppo.make_envs("Spaces-v0", 3, action=space)
    envs.reset(seed=1)
    envs.step(np.array(drawn, np.int64 if space is NUMBER else np.float32))
    assert np.allclose([env.unwrapped.acted for env in envs.unwrapped.envs], given)


SEEN = [IMAGE, NUMBER, Dict(a=IMAGE, b=NUMBER), MultiDiscrete([[2, 3], [4, 2]])]
SEEN += [Box(0, 1, (2,), bool), Box(0, 9, (2,), np.uint16), Box(-1, 1, (2,), np.float64)]


@pytest.mark.parametrize("space", SEEN, ids=str)
def test_observations_are_gymnasium_s_flattening(space):
    envs = ppo.make_envs("Spaces-v0", 2, observation=space)
    obs, _ = envs.reset(seed=1)
    for _ in range(3):
        observed = [env.unwrapped.observed for env in envs.unwrapped.envs]
        assert np.array_equal(obs, [gym.spaces.flatten(space, x) for x in observed])
        assert ppo.Agent(envs).value(obs).shape == (2,)
        obs, *_ = envs.step(np.zeros(2, int))


# -------------------------------------------------------------------------------------------- Runs
@pytest.mark.slow
@ALL
def test_solves_cartpole(name, tmp_path):
    args = script(name).Args(total_timesteps=120_000, output_dir=str(tmp_path))
    assert script(name).main(args)["return"] > 450


@ALL
def test_same_seed_same_run_and_other_seeds_other_environments(name, run, monkeypatch):
    closed = calls_of(monkeypatch, classic_envs.Diary, "close")
    one, same, other = (run(name, seed=seed)[0]["weights"] for seed in (1, 1, 2))
    assert equal(one, same) and not any(torch.equal(one[key], other[key]) for key in one)
    seeds = [env.np_random_seed for (env,), _ in closed]
    assert len(seeds) == 9 and seeds[:3] == seeds[3:6] and len({*seeds}) == 6


@ALL
def test_rewards_of_any_size_train_the_same_agent(name, run, monkeypatch):
    agents = []
    for factor in (1.0, 1e-3, 1e3):
        monkeypatch.setattr(classic_envs, "pay", lambda obs, factor=factor: pay(obs) * factor)
        agents.append(run(name)[0]["weights"])
    for agent in agents[1:]:
        assert all(torch.allclose(agent[key], agents[0][key], atol=1e-3) for key in agent)


@ALL
def test_agent_pt_is_whole_at_any_time_and_has_the_last_update(name, run, monkeypatch):
    """The folder has the environment's name, without its namespace."""
    gym.register("of_a_user/Diary-v0", classic_envs.Diary, max_episode_steps=6)
    saves, Agent, agents = calls_of(monkeypatch, torch, "save"), script(name).Agent, []
    monkeypatch.setattr(
        script(name), "Agent", lambda *envs: agents.append(Agent(*envs)) or agents[0]
    )
    result, _ = run(name, env_id="classic_envs:of_a_user/Diary-v0")
    assert equal(result["weights"], agents[0].state_dict())
    assert {Path(path).name for (_, path), _ in saves} == {"agent.tmp"}
    assert result["folder"].name.split("__")[:3] == ["Diary", name, "1"]


def test_beta_follows_the_kl(run, monkeypatch):
    """It doubles above 1.5 times the target, and halves below the target / 1.5."""
    kls, calls = [0.016, 0.014, 0.0068, 0.0065, 0.0065, 0], calls_of(monkeypatch, torch, "save")
    monkeypatch.setattr(ppo, "kl_k3", lambda old, new: 0 * new + kls[len(calls)])
    result, _ = run("ppo", beta=1.0, kl_target=0.01, total_timesteps=300)
    assert scalars(result["folder"], "losses/beta")[:5] == [2, 2, 2, 1, 0.5]


@ALL
def test_a_run_that_meets_nan_stops_and_keeps_a_finite_agent(name, run, tmp_path, monkeypatch):
    rewards = iter([1.0, 2.0] * 75 + [np.nan] * 1000)
    monkeypatch.setattr(classic_envs, "pay", lambda obs: next(rewards))
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)  # as python -O
    with pytest.raises(RuntimeError, match="non-finite"):
        run(name, total_timesteps=1000)
    (path,) = tmp_path.glob("*/agent.pt")
    assert all(value.isfinite().all() for value in torch.load(path).values())


FLAGS = [("trpo", flag, 0) for flag in ("max_kl", "cg_steps", "num_steps", "total_timesteps")]
FLAGS += [("ppo", flag, 0) for flag in ("clip_coef", "update_epochs", "num_envs", "learning_rate")]
FLAGS += [
    ("ppo", "beta", -1.0),
    ("ppo", "max_grad_norm", -1.0),
    ("reinforce", "gamma", -0.1),
    ("ppo", "gamma", 1.1),
]
FLAGS += [("actor_critic", "learning_rate", np.nan), ("ppo", "kl_target", 0.01)]
FLAGS += [("ppo", "env_id", "CartPoll-v1"), ("actor_critic", "env_id", "nowhere:X-v0")]


@pytest.mark.parametrize("name,flag,value", FLAGS)
def test_a_bad_flag_ends_in_one_line(name, flag, value):
    line = refused(lambda: script(name).main(script(name).Args(**{flag: value})))
    assert line.startswith(f"--{flag.replace('_', '-')}")


@pytest.mark.parametrize("space", [Box(-1, 1, ()), MultiDiscrete([2, 2]), None], ids=str)
def test_an_environment_that_no_agent_fits(space):
    """A Box of one number would get two, in silence. Or it does not reset itself in time."""
    options = {"vector_kwargs": {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}}
    line = refused(lambda: ppo.make_envs("Spaces-v0", 2, **{"action": space} if space else options))
    assert line.startswith("--env-id Spaces-v0: ")


def test_an_environment_in_the_current_folder_and_its_neighbour(tmp_path):
    for name, text in (("mine", "import neighbour"), ("neighbour", "import classic_envs")):
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, ROOT / "ppo.py", "--env-id", "mine:Diary-v0", "--output-dir", "runs"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests/helpers")}
    subprocess.run([*command, "--total-timesteps", "1"], cwd=tmp_path, env=environment, check=True)

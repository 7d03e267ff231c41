"""Whole runs of the classic scripts: learning, repeatability, saved agents and logs."""

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import classic_envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CLASSIC_SCRIPTS, ROOT, EventAccumulator, calls_of, equal, refused, script

CONSTANT_RATE = ("reinforce", "actor_critic")
LOGGED = ["charts/episodic_return", "charts/SPS", "charts/learning_rate"]
LOGGED += [f"losses/{n}" for n in ("policy_loss", "value_loss", "entropy", "explained_variance")]
MORE = {"trpo": ["losses/kl", "losses/backtracks"], "ppo": ["losses/approx_kl", "losses/clipfrac"]}
ALL = pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
ppo = script("ppo")


def run(name, folder, evaluated=False, **flags):
    """The result of main; if it is not evaluated, which takes most of the time, it scores 0."""
    module = script(name)
    evaluate = module.evaluate if evaluated else lambda agent, args: 0.0
    with patch.object(module, "evaluate", evaluate):
        return module.main(module.Args(**{"output_dir": str(folder), "env_id": "Diary-v0"} | flags))


def scalars(result):
    """All that a run has logged: name → pairs of step and value."""
    events = EventAccumulator(str(Path(result["agent"]).parent)).Reload()
    names = events.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def saved(result):
    return torch.load(result["agent"])


@pytest.mark.slow
@ALL
def test_solves_cartpole(name, tmp_path):
    """The defaults. Sign errors end near 10."""
    result = run(name, tmp_path, True, env_id="CartPole-v1", total_timesteps=120_000)
    assert result["eval/return"] > 475 and scalars(result)["charts/episodic_return"][-1][1] > 400


def test_pays_each_action_its_own_reward(tmp_path):
    """The coin is new in each step: a return that is off by one step says nothing about the
    action's own reward (4 of 8)."""
    result = run("ppo", tmp_path, True, env_id="Guess-v0", total_timesteps=25_000)
    assert result["eval/return"] > 7.5


def test_same_seed_same_run(tmp_path):
    """An environment may also draw from the generators of random and numpy."""
    agents, logs = [], []
    for i, seed in enumerate((1, 1, 2)):
        result = run("ppo", tmp_path / str(i), seed=seed, num_envs=4, total_timesteps=1100)
        agents.append(saved(result))
        logs.append((scalars(result) | {"charts/SPS": 0}, random.random(), np.random.random()))
    assert logs[0] == logs[1] and equal(agents[0], agents[1])
    assert all(a != b for a, b in zip(logs[0], logs[2], strict=True))


@pytest.mark.parametrize("name", ["reinforce", "ppo"])  # the others' rollouts are PPO's
def test_neighbouring_seeds_share_no_environment_and_no_episode_of_evaluation(
    name, tmp_path, monkeypatch
):
    """And every environment is closed."""
    seeds, reset = [], classic_envs.Diary.reset
    closed = calls_of(monkeypatch, classic_envs.Diary, "close")

    def watched(env, *, seed=None, options=None):
        seeds.extend([] if seed is None else [seed])
        return reset(env, seed=seed)

    monkeypatch.setattr(classic_envs.Diary, "reset", watched)
    for seed in (1, 2):
        run(name, tmp_path, True, seed=seed, total_timesteps=1)
    assert len(seeds) == len(set(seeds)) == 2 * (script(name).Args().num_envs + 100)
    assert len({id(env) for (env,), _ in closed}) == len(seeds)


def test_one_environment_one_step(tmp_path):
    """Some rollouts contain nothing but the step in which gymnasium resets. Real steps count."""
    flags = {"num_envs": 1, "num_steps": 1, "num_minibatches": 1, "total_timesteps": 30}
    result = run("ppo", tmp_path, **flags)
    assert all(value.isfinite().all() for value in saved(result).values())
    assert saved(result)["obs_norm.count"] == scalars(result)["charts/learning_rate"][-1][0] == 29


def test_the_agent_file_is_what_was_evaluated(tmp_path, monkeypatch):
    """The agent is not the untrained one, and torch's safe default loads it. The folder is named
    after the environment, without its namespace."""
    gym.register("of_a_user/Diary-v0", classic_envs.Diary, max_episode_steps=6)
    flags = {"env_id": "classic_envs:of_a_user/Diary-v0", "output_dir": str(tmp_path)}
    args, scores = ppo.Args(**flags, total_timesteps=5000), calls_of(monkeypatch, ppo, "evaluate")
    saves = calls_of(monkeypatch, torch, "save")
    result = ppo.main(args)
    (((evaluated, _), score),) = scores
    assert score == result["eval/return"] and equal(saved(result), evaluated.state_dict())
    torch.manual_seed(args.seed)
    untrained = ppo.Agent(ppo.make_envs(args.env_id, 1)).state_dict()
    assert not any(torch.equal(saved(result)[key], untrained[key]) for key in untrained)
    assert {Path(path).name for (_, path), _ in saves} == {"agent.tmp"}  # a kill may come here
    assert Path(result["agent"]).parent.name.split("__")[:3] == ["Diary", "ppo", "1"]


def test_rewards_of_any_size_train_the_same_agent(tmp_path, monkeypatch):
    """To the last bit, from the first rollout on, which is trained on. The log and the evaluation
    have what the environment pays. Scaled rewards are divided by the standard deviation of the
    discounted sums, and of 0 once."""
    agents, make_envs = [], ppo.make_envs
    for factor in (1.0, 2.0**-10, 2.0**20):

        def scaled(*args, factor=factor):
            return gym.wrappers.vector.TransformReward(make_envs(*args), lambda r: r * factor)

        with monkeypatch.context() as patched:
            patched.setattr(ppo, "make_envs", scaled)
            batches = calls_of(patched, ppo, "prepare")
            flags = {"env_id": "Points-v0", "num_envs": 5, "total_timesteps": 1000}
            result = run("ppo", tmp_path, True, **flags)
        agents.append(saved(result))
        returns = [value for _, value in scalars(result)["charts/episodic_return"]]
        assert {*returns, result["eval/return"]} == {10 * factor}
        _, rollout, _ = batches[0][0]
        std = np.std([0, *rollout["earned"][rollout["mask"]]])
        assert np.allclose(rollout["rewards"][0], rollout["earned"][0] / std)
    assert equal(agents[0], agents[1]) and equal(agents[0], agents[2])


@ALL
def test_a_run_that_meets_nan_stops_and_keeps_a_finite_agent(name, tmp_path, monkeypatch):
    """In a reward; TRPO would only refuse its steps. `python -O` switches off torch's checks of
    distributions."""
    rewards, step = [], classic_envs.Guess.step

    def broken(env, action):
        obs, reward, *others = step(env, action)
        rewards.append(reward if len(rewards) < 20 else np.nan)
        return obs, rewards[-1], *others

    monkeypatch.setattr(classic_envs.Guess, "step", broken)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    with pytest.raises(RuntimeError, match="non-finite"):
        run(name, tmp_path, env_id="Guess-v0", num_envs=4, total_timesteps=2000)
    (path,) = tmp_path.glob("*/agent.pt")
    assert all(value.isfinite().all() for value in torch.load(path).values())


@ALL
def test_schedules_norms_and_logs_at_every_update(name, tmp_path, monkeypatch, capsys):
    """Rates fall linearly to 0 with the steps taken, except for two learning rates. The norm of
    π_old knows the real steps of earlier rollouts, and no other row. The log has CleanRL's keys."""
    module, seen = script(name), []
    update = module.update

    def watched(agent, optimizer, batch, progress_remaining, args):
        rows = agent.obs_norm.count.item()
        stats = update(agent, optimizer, batch, progress_remaining, args)
        seen.append((batch, progress_remaining, rows, optimizer.param_groups[0]["lr"]))
        return stats

    monkeypatch.setattr(module, "update", watched)
    flags = {"num_envs": 24 if name == "reinforce" else 4, "learning_rate": 0.01}
    result = run(name, tmp_path, **flags, total_timesteps=1500)
    batches, remaining, rows, rates = zip(*seen, strict=True)
    explained = [1 - batch["advantages"].var() / batch["targets"].var() for batch in batches]
    steps = np.cumsum([len(batch["obs"]) for batch in batches])
    assert len(seen) > 2 and remaining == pytest.approx(1 - steps / 1500)
    assert rates == pytest.approx([0.01 * (name in CONSTANT_RATE or share) for share in remaining])
    log = scalars(result)
    assert log.keys() == {*LOGGED, *MORE.get(name, [])}
    assert all(np.isfinite(value) for events in log.values() for _, value in events)
    assert np.allclose(log["charts/learning_rate"], np.stack([steps, rates], 1))
    logged = [value for _, value in log["losses/explained_variance"]]
    assert np.allclose(logged, explained, atol=1e-5)
    assert list(rows) == [0, *steps[:-1]]
    first, *curve, last = capsys.readouterr().out.splitlines()
    folder = str(Path(result["agent"]).parent)
    assert folder in first and folder in last and len(curve) == len(seen) // 10 + 1


def test_evaluation_is_each_environment_s_first_episode():
    """To its termination or time limit; played here one by one. An episode without an end is cut
    off after 10,000 steps, of a point each."""
    args, returns = ppo.Args(env_id="Diary-v0", seed=5), []
    for i in range(20):
        env, done, total = gym.make("Diary-v0"), False, 0.0
        env.reset(seed=55_000 + i)
        while not done:
            _, reward, terminated, truncated, _ = env.step(0)
            done, total = terminated or truncated, total + reward
        returns.append(total)
    agent = ppo.Agent(ppo.make_envs("Diary-v0", 1))
    assert ppo.evaluate(agent, args, episodes=20) == pytest.approx(np.mean(returns))
    agent = SimpleNamespace(act=lambda obs, greedy: np.zeros(1, int))
    assert ppo.evaluate(agent, ppo.Args(env_id="Spaces-v0"), episodes=1) == 10_000


BAD = [(name, "max_grad_norm", 0.0) for name in CLASSIC_SCRIPTS] + [("trpo", "max_kl", -1.0)]
BAD += [("trpo", "gae_lambda", 9.8), ("ppo", "gae_lambda", 9.8), ("ppo", "clip_coef", np.nan)]


@pytest.mark.parametrize("name,flag,bad", BAD)
def test_flags_that_would_learn_nothing_in_silence(name, flag, bad):
    line = refused(lambda: script(name).Args(**{flag: bad}))
    assert line.startswith("error: ") and f"--{flag.replace('_', '-')}" in line


@pytest.mark.parametrize("space", [gym.spaces.Box(-1, 1, ()), gym.spaces.MultiDiscrete([2, 2])])
def test_an_action_that_no_agent_fits(space):
    """A Box of one number would get two, in silence."""
    line = refused(lambda: ppo.make_envs("Spaces-v0", 2, action=space))
    assert line.startswith("error: --env-id Spaces-v0: needs ") and str(space) in line


def test_an_environment_in_the_current_folder_and_its_neighbour(tmp_path):
    """`module:Env-v0`. A namesake of the neighbour among the installed packages stays unused."""
    here, installed = tmp_path / "here", tmp_path / "installed"
    for folder, text in ((here, "import classic_envs\n"), (installed, "1 / 0\n")):
        folder.mkdir()
        (folder / "neighbour.py").write_text(text)
    (here / "users_envs.py").write_text("import neighbour\n")
    path = os.pathsep.join([str(installed), str(ROOT / "tests")])
    command = [sys.executable, ROOT / "ppo.py", "--env-id", "users_envs:Diary-v0"]
    command += ["--total-timesteps", "1", "--output-dir", tmp_path / "runs"]
    subprocess.run(command, cwd=here, env=os.environ | {"PYTHONPATH": path}, check=True)

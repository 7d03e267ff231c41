"""Whole runs of the classic scripts: learning, repeatability, saved agents and logs."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
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
MORE["ppo"] += ["losses/beta"]
KINDS = pytest.mark.parametrize(
    "name", ["reinforce", "ppo"]
)  # of rollouts: three scripts share one
ALL = pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
slow, ppo = partial(pytest.param, marks=pytest.mark.slow), script("ppo")


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


def scaled_rewards(monkeypatch, module, factor):
    make_envs = module.make_envs

    def scaled(*args):
        return gym.wrappers.vector.TransformReward(make_envs(*args), lambda r: r * factor)

    monkeypatch.setattr(module, "make_envs", scaled)


@pytest.mark.slow
@ALL
def test_solves_cartpole(name, tmp_path):
    """The defaults. Sign errors end near 10."""
    result = run(name, tmp_path, True, env_id="CartPole-v1", total_timesteps=120_000)
    assert result["eval/return"] > 475 and scalars(result)["charts/episodic_return"][-1][1] > 400


PAID = [("ppo", "GuessBox-v0", 7.5), ("ppo", "Offset-v0", 100.95)]
PAID += [slow(name, "GuessBox-v0", 7.5) for name in CLASSIC_SCRIPTS[:3]]


@pytest.mark.parametrize("name,env_id,wanted", PAID)
def test_pays_each_action_its_own_reward(name, env_id, wanted, tmp_path):
    """The coin is new in each step: a return that is off by one step says nothing about the
    action's own reward (4 of 8). Episodes of one step, of 100 points or 101, have a deviation that
    is small beside their mean."""
    result = run(name, tmp_path, True, env_id=env_id, total_timesteps=25_000)
    assert result["eval/return"] > wanted


@ALL
def test_same_seed_same_run(name, tmp_path):
    """An environment may also draw from the generators of random and numpy."""
    agents, logs = [], []
    for i, seed in enumerate((1, 1, 2)):
        result = run(name, tmp_path / str(i), seed=seed, num_envs=4, total_timesteps=1100)
        agents.append(saved(result))
        logs.append((scalars(result) | {"charts/SPS": 0}, random.random(), np.random.random()))
    assert logs[0] == logs[1] and equal(agents[0], agents[1])
    assert all(a != b for a, b in zip(logs[0], logs[2], strict=True))


@KINDS
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


@KINDS
def test_one_environment_one_step(name, tmp_path):
    """Some rollouts contain nothing but the step in which gymnasium resets. Real steps count."""
    flags = {} if name == "reinforce" else {"num_steps": 1, "num_minibatches": 1}
    result = run(name, tmp_path, num_envs=1, total_timesteps=30, **flags)
    assert all(value.isfinite().all() for value in saved(result).values())
    rows, last = saved(result)["obs_norm.count"], scalars(result)["charts/learning_rate"][-1]
    assert rows == last[0] and (last[0] == 29 if name == "ppo" else 20 < last[0] < 30)


@ALL
def test_args_are_only_read_and_the_agent_file_is_what_was_evaluated(name, tmp_path, monkeypatch):
    """PPO's β is the run's own. The agent is not the untrained one, and torch's safe default loads
    it. The folder is named after the environment, without its namespace."""
    module = script(name)
    gym.register("of_a_user/Diary-v0", classic_envs.Diary, max_episode_steps=6)
    flags = {"env_id": "classic_envs:of_a_user/Diary-v0", "output_dir": str(tmp_path)}
    flags |= {"beta": 1.0} if name == "ppo" else {}
    args = module.Args(**flags, total_timesteps=5000)
    before, scores = replace(args), calls_of(monkeypatch, module, "evaluate")
    saves = calls_of(monkeypatch, torch, "save")
    result = module.main(args)
    assert args == before
    if name == "ppo":
        assert scalars(result)["losses/beta"][0][1] != 1
    (((evaluated, _), score),) = scores
    assert score == result["eval/return"] and equal(saved(result), evaluated.state_dict())
    torch.manual_seed(args.seed)
    untrained = module.Agent(module.make_envs(args.env_id, 1)).state_dict()
    assert not any(torch.equal(saved(result)[key], untrained[key]) for key in untrained)
    assert {Path(path).name for (_, path), _ in saves} == {"agent.tmp"}  # a kill may come here
    assert not list(tmp_path.rglob("*.tmp"))
    assert Path(result["agent"]).parent.name.split("__")[:3] == ["Diary", name, "1"]


@pytest.mark.parametrize("fps,kth", [(50, 1), (125, 3)])
def test_a_film_shows_every_state_of_an_episode(fps, kth, tmp_path, monkeypatch):
    """Also the last one, of an agent that pushes the cart to one side. Or every k-th state, as
    viewers play frames of less than 20 ms far too slowly."""
    monkeypatch.setitem(type(gym.make("CartPole-v1").unwrapped).metadata, "render_fps", fps)
    Image = pytest.importorskip("PIL.Image")
    agent, gif = ppo.Agent(ppo.make_envs("CartPole-v1", 1)), tmp_path / "film.gif"
    torch.save(agent.state_dict(), tmp_path / "agent.pt")
    script("film").main("ppo.py", str(tmp_path / "agent.pt"), gif=str(gif))
    envs, length, done = ppo.make_envs("CartPole-v1", 1), 0, False
    obs, _ = envs.reset(seed=1)
    while not done:
        obs, _, done, *_ = envs.step(agent.act(obs, greedy=True))
        length += 1
    film, milliseconds = Image.open(gif), 0
    for frame in range(film.n_frames):
        film.seek(frame)
        milliseconds += film.info["duration"]
    assert milliseconds == 20 * (-(-length // kth) + 1) and film.size == (600, 400)


@ALL
def test_rewards_of_any_size_train_the_same_agent(name, tmp_path, monkeypatch):
    """To the last bit, from the first rollout on, which is trained on. The log and the evaluation
    have what the environment pays. Scaled rewards are divided by the standard deviation of the
    discounted sums, of an episode's 10 rewards of 1 and of 0 once."""
    module, agents = script(name), []
    flags = {"env_id": "Endless-v0", "num_envs": 5, "total_timesteps": 1000}
    for factor in (1.0, 2.0**-10, 2.0**20):
        with monkeypatch.context() as patched:
            scaled_rewards(patched, module, factor)
            batches = calls_of(patched, module, "prepare")
            result = run(name, tmp_path, True, **flags)
        agents.append(saved(result))
        returns = [value for _, value in scalars(result)["charts/episodic_return"]]
        assert {*returns, result["eval/return"]} == {10 * factor}
        (agent, rollout, args), batch = batches[0]
        T = 10 if name == "reinforce" else args.num_steps
        earned, sums = 0.0, [0.0]
        for t in range(T):
            earned = 0.99 * earned + (t % 11 < 10)  # in step 11 gymnasium resets
            sums += [earned] * 5 * (t % 11 < 10)
        assert batch["rewards"].unique().numpy() == pytest.approx([1 / np.std(sums)])
    assert equal(agents[0], agents[1]) and equal(agents[0], agents[2])


@pytest.mark.parametrize("place,at", [(0, 15), (0, 20), (1, 20)])
@pytest.mark.parametrize("name", ["reinforce", "trpo"])  # TRPO would only refuse its steps
def test_a_run_that_meets_nan_stops_and_keeps_a_finite_agent(
    name, place, at, tmp_path, monkeypatch
):
    """In an observation, at the end of a rollout or in its middle, or in a reward. `python -O`
    switches off torch's checks of distributions."""
    steps, step = [], classic_envs.Guess.step

    def broken(env, action):
        result = list(step(env, action))
        steps.append(action)
        result[place] = result[place] * (np.nan if len(steps) > at else 1)
        return tuple(result)

    monkeypatch.setattr(classic_envs.Guess, "step", broken)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    flags = {"num_envs": 4, "total_timesteps": 2000} | ({"num_steps": 4} if name == "trpo" else {})
    with pytest.raises(RuntimeError, match="non-finite"):
        run(name, tmp_path, env_id="GuessBox-v0", **flags)
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
    obs, norm = torch.cat([batch["obs"] for batch in batches]), saved(result)
    assert torch.allclose(norm["obs_norm.mean"], obs.double().mean(0))
    assert torch.allclose(norm["obs_norm.std"], obs.double().std(0, correction=0))
    first, *curve, last = capsys.readouterr().out.splitlines()
    folder = str(Path(result["agent"]).parent)
    assert folder in first and folder in last and "mean return 0 in 100 greedy episodes" in last
    every_tenth = [f"step {step:,}: mean return" for step in steps[::10]]
    assert [line[: line.rindex(" ")] for line in curve][: len(every_tenth)] == every_tenth


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
    assert ppo.evaluate(agent, ppo.Args(env_id="Forever-v0"), episodes=1) == 10_000


BAD = [(name, "max_grad_norm", 0.0) for name in CLASSIC_SCRIPTS]
BAD += [("trpo", "max_kl", -1.0), ("trpo", "gae_lambda", 9.8), ("ppo", "gae_lambda", np.nan)]
BAD += [("ppo", "clip_coef", -0.2), ("ppo", "clip_coef", np.nan), ("ppo", "max_grad_norm", -1.0)]


@pytest.mark.parametrize("name,flag,bad", BAD)
def test_flags_that_would_learn_nothing_in_silence(name, flag, bad):
    line = refused(lambda: script(name).Args(**{flag: bad}))
    assert line.startswith("error: ") and f"--{flag.replace('_', '-')}" in line
    ppo.Args(clip_coef=np.inf, gae_lambda=0.0), ppo.Args(gae_lambda=1.0, max_grad_norm=np.inf)


@pytest.mark.parametrize("space", [gym.spaces.Box(-1, 1, ()), gym.spaces.MultiDiscrete([2, 2])])
def test_an_action_that_no_agent_fits(space):
    """A Box of one number would get two, in silence."""
    line = refused(lambda: ppo.make_envs("Spaces-v0", 2, action=space))
    assert line.startswith("error: --env-id Spaces-v0: needs ") and str(space) in line


def test_same_step_autoreset_is_refused():
    """It would pass the next episode's first observation for the last one's end."""
    options = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    with pytest.raises(ValueError, match="autoreset"):
        ppo.make_envs("Spaces-v0", 2, vectorization_mode="sync", vector_kwargs=options)


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

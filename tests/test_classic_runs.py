"""Whole runs of the classic scripts: learning, repeatability, saved agents, logs, and what a user
does wrong."""

import random
import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import classic_envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CLASSIC_SCRIPTS, EventAccumulator, calls_of, equal, script
from torch.distributions import kl_divergence

CONSTANT_RATE = ("reinforce", "actor_critic")
KEYS = ["charts/episodic_return", "charts/SPS", "charts/learning_rate"]
KEYS += [f"losses/{of}" for of in ("policy_loss", "value_loss", "entropy", "explained_variance")]
OWN = {"trpo": ["losses/kl", "losses/backtracks"], "ppo": ["losses/approx_kl", "losses/clipfrac"]}
OWN["ppo"] += ["losses/beta"]
slow, ppo = partial(pytest.param, marks=pytest.mark.slow), script("ppo")


def run(name, folder, evaluated=True, **flags):
    """The result of main; if not evaluated, the scores are 1e-6, which saves most of the time."""
    module = script(name)
    evaluate = module.evaluate if evaluated else lambda *of, **more: 1e-6
    with patch.object(module, "evaluate", evaluate):
        return module.main(module.Args(**{"output_dir": str(folder)} | flags))


def scalars(result):
    """All that a run has logged, as pairs of step and value."""
    events = EventAccumulator(str(Path(result["agent"]).parent)).Reload()
    keys = events.Tags()["scalars"]
    return {key: [(event.step, event.value) for event in events.Scalars(key)] for key in keys}


def saved(result):
    return torch.load(result["agent"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_solves_cartpole(name, tmp_path):
    """The defaults, until the mean return is reached. Sign errors end near 10."""
    result = run(name, tmp_path, target_return=475)
    assert scalars(result)["charts/episodic_return"][-1][0] < 190_000
    assert result["eval/return"] > 450 and result["eval/return_stochastic"] > 400


PAID = [("ppo", "GuessBox-v0", 7.5), ("ppo", "Offset-v0", 100.95)]
PAID += [slow(name, "GuessBox-v0", 7.5) for name in CLASSIC_SCRIPTS[:3]]


@pytest.mark.parametrize("name,env_id,wanted", PAID)
def test_pays_each_action_its_own_reward(name, env_id, wanted, tmp_path):
    """The coin is new in each step: a return that is off by one step holds no word of the action's
    own reward (4 of 8). Episodes of one step, of 100 points or 101, have a deviation that is small
    beside their mean."""
    result = run(name, tmp_path, env_id=env_id, total_timesteps=25_000)
    assert result["eval/return"] > wanted


@pytest.mark.slow
def test_what_the_normalizer_adds_to_trpo_s_step(tmp_path, monkeypatch):
    """The exact KL(π_old ‖ π) once the normalizer of observations has taken in the rollout, too;
    that of the step alone is bounded. trpo.py tells the largest."""
    trpo, found = script("trpo"), []

    def update(agent, optimizer, batch, *rest, own=trpo.update):
        old, stats = agent.policy(batch["obs"]), own(agent, optimizer, batch, *rest)
        moved = deepcopy(agent)
        moved.obs_norm.update(batch["obs"])
        found.append(kl_divergence(old, moved.policy(batch["obs"])).mean().item())
        return stats

    monkeypatch.setattr(trpo, "update", update)
    for seed in (1, 2, 3):
        run("trpo", tmp_path, evaluated=False, seed=seed, total_timesteps=40_000)
    assert max(found) == pytest.approx(0.02, abs=0.005)
    assert f"a KL of {max(found):.2f}" in trpo.__doc__


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_same_seed_same_run(name, tmp_path):
    """An environment may draw from the dice of random and numpy, too."""
    flags = {"evaluated": False, "num_envs": 4, "env_id": "Diary-v0", "total_timesteps": 1100}
    agents, told = [], []
    for i, seed in enumerate((1, 1, 2)):
        result = run(name, tmp_path / str(i), seed=seed, **flags)
        agents.append(saved(result))
        log = scalars(result) | {"charts/SPS": 0}
        told.append((log, random.random(), np.random.random()))
    assert told[0] == told[1]
    assert all(a != b for a, b in zip(told[0], told[2], strict=True))
    assert equal(agents[0], agents[1])


@pytest.mark.parametrize("name", ["reinforce", "ppo"])  # the others have ppo's rollouts
def test_one_environment_one_step(name, tmp_path):
    """Some rollouts hold nothing but the step in which gymnasium resets; real steps are counted."""
    flags = {} if name == "reinforce" else {"num_steps": 1, "num_minibatches": 1}
    flags |= {"env_id": "Diary-v0", "num_envs": 1, "total_timesteps": 30}
    result = run(name, tmp_path, evaluated=False, **flags)
    assert all(value.isfinite().all() for value in saved(result).values())
    rows, last = saved(result)["obs_norm.count"], scalars(result)["charts/learning_rate"][-1]
    assert rows == last[0] and (last[0] == 29 if name == "ppo" else 20 < last[0] < 30)


def test_saved_agent_replays(tmp_path, monkeypatch):
    """Without training; an agent that was updated, not that of the seed. Only the greedy score is
    the same again. The folder names the environment, but no part of a path."""
    monkeypatch.setattr(ppo, "evaluate", partial(ppo.evaluate, episodes=10))
    trained = run("ppo", tmp_path / "a", total_timesteps=600, num_envs=4)
    flags = {"load": trained["agent"], "total_timesteps": 0, "num_envs": 4}
    replayed = run("ppo", tmp_path / "b", **flags)
    untrained = run("ppo", tmp_path / "c", total_timesteps=0, num_envs=4)
    assert replayed["eval/return"] == trained["eval/return"]
    assert len({each["eval/return_stochastic"] for each in (trained, replayed, untrained)}) > 1
    assert equal(saved(trained), saved(replayed))
    assert not equal(saved(trained), saved(untrained))
    assert not list(tmp_path.rglob("*.tmp"))
    gym.register("of_a_user/Diary-v0", classic_envs.Diary, max_episode_steps=6)
    env_id, named = "classic_envs:of_a_user/Diary-v0", ["CartPole"] * 3 + ["Diary"]
    run("ppo", tmp_path / "d", evaluated=False, env_id=env_id, total_timesteps=0)
    names = [path.parent.name for path in sorted(tmp_path.glob("?/*/agent.pt"))]
    assert [name.split("__")[:3] for name in names] == [[of, "ppo", "1"] for of in named]


def test_a_film_shows_every_state_of_an_episode(tmp_path):
    """The last one, too. A greedy episode of an agent that pushes the cart to one side."""
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
    assert milliseconds == 20 * (length + 1) and film.size == (600, 400)


@pytest.mark.parametrize("name", ["reinforce", "ppo"])  # the others have ppo's rollouts
def test_returns_are_told_as_the_environment_pays_them(name, tmp_path, monkeypatch):
    """An episode pays 10. Training sees rewards that are scaled, and bounded at first, where the
    scale is little more than a guess; not so evaluation, the log and --target-return."""
    rollouts = calls_of(monkeypatch, script(name), "prepare")
    flags = {"env_id": "Endless-v0", "num_envs": 5, "target_return": 10.0}
    result = run(name, tmp_path, total_timesteps=10_000, **flags)
    log = scalars(result)
    assert {value for _, value in log["charts/episodic_return"]} == {10.0}
    assert log["charts/episodic_return"][-1][0] < 3_000  # solved once 100 episodes have ended
    assert result["eval/return"] == 10.0
    ((_, rollout, _), _), *_ = rollouts
    assert rollout["rewards"].max() == 10 and rollout["rewards"].min() < 5


def test_diverging_run_stops_with_a_line_and_keeps_a_finite_agent(tmp_path, monkeypatch):
    """Here the third update ruins the weights. Exit status 1."""
    update, calls = ppo.update, []

    def ruinous(agent, *rest):
        calls.append(update(agent, *rest))
        if len(calls) == 3:
            agent.actor[0].weight.data.fill_(np.nan)
            calls[-1]["policy_loss"] = np.nan
        return calls[-1]

    monkeypatch.setattr(ppo, "update", ruinous)
    with pytest.raises(SystemExit) as caught:
        run("ppo", tmp_path, env_id="Diary-v0", num_envs=4)
    (path,) = tmp_path.glob("*/agent.pt")
    assert len(calls) == 3
    assert re.match(r"error: step \d+: loss not finite; lower --learning-rate", caught.value.code)
    assert all(value.isfinite().all() for value in saved({"agent": path}).values())


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 300])
@pytest.mark.parametrize("what,place", [("reset", 0), ("step", 0), ("step", 1)])
def test_not_finite_stops_at_the_door(what, place, at, value, tmp_path, monkeypatch):
    """Observations and rewards, at once or later. An infinite reward is no return that "solves" a
    task, an infinite observation does not reach the saved agent."""
    calls, real = [], getattr(classic_envs.Diary, what)

    def broken(*of, **more):
        found = list(real(*of, **more))
        calls.append(what)
        if len(calls) > at:
            found[place] = found[place] * 0 + value
        return tuple(found)

    monkeypatch.setattr(classic_envs.Diary, what, broken)
    flags = {"env_id": "Diary-v0", "num_envs": 4, "num_steps": 16, "target_return": 99.0}
    with pytest.raises(ValueError, match="must not contain infs or NaNs"):
        run("ppo", tmp_path, evaluated=False, **flags)
    agents = [saved({"agent": path}) for path in tmp_path.glob("*/agent.pt")]
    assert len(agents) == (at > 0)
    assert all(value.isfinite().all() for agent in agents for value in agent.values())


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_schedules_norms_and_logs_at_every_update(name, tmp_path, monkeypatch, capsys):
    """Rates fall linearly to 0 with the steps taken, but for two learning rates. The norm of π_old
    knows earlier rollouts' real steps, and no other row. The logs have CleanRL's keys, or ours."""
    module, seen = script(name), []
    update = module.update

    def watched(agent, optimizer, batch, progress_remaining, args):
        known = agent.obs_norm.count.item()
        stats = update(agent, optimizer, batch, progress_remaining, args)
        seen.append((batch, progress_remaining, known, optimizer.param_groups[0]["lr"]))
        return stats

    monkeypatch.setattr(module, "update", watched)
    flags = {"num_envs": 24 if name == "reinforce" else 4, "learning_rate": 0.01}
    flags |= {"evaluated": False, "env_id": "Diary-v0", "total_timesteps": 1500}
    result = run(name, tmp_path, **flags)
    batches, remaining, known, rates = zip(*seen, strict=True)
    explained = [1 - batch["advantages"].var() / batch["targets"].var() for batch in batches]
    steps = np.cumsum([len(batch["obs"]) for batch in batches])
    assert len(seen) > 2 and remaining == pytest.approx(1 - steps / 1500)
    assert rates == pytest.approx([0.01 * (name in CONSTANT_RATE or share) for share in remaining])
    log = scalars(result)
    assert log.keys() == {*KEYS, *OWN.get(name, [])}
    assert all(np.isfinite(value) for events in log.values() for _, value in events)
    assert np.allclose(log["charts/learning_rate"], np.stack([steps, rates], 1))
    logged = [value for _, value in log["losses/explained_variance"]]
    assert np.allclose(logged, explained, atol=1e-5)
    assert list(known) == [0, *steps[:-1]]
    rows, norm = torch.cat([batch["obs"] for batch in batches]), saved(result)
    assert torch.allclose(norm["obs_norm.mean"], rows.double().mean(0))
    assert torch.allclose(norm["obs_norm.var"], rows.double().var(0, correction=0))
    out, err = capsys.readouterr()
    first, *curve, word, last = out.splitlines()
    assert str(Path(result["agent"]).parent) in first and result["agent"] in last
    assert "mean return 1e-06 greedy, 1e-06 sampled" in last  # not 0.0
    assert word == "evaluating: 100 greedy episodes, then 100 sampled ones" and not err
    every_tenth = [f"step {step:,}: mean return" for step in steps[::10]]
    assert [line[: line.rindex(" ")] for line in curve][: len(every_tenth)] == every_tenth


def test_solved_is_the_mean_of_the_last_100_episodes(tmp_path, monkeypatch):
    """In five rollouts told in advance it is reached in the 4th. What is logged is told as well."""
    told = [[1e3] * 40, [-10.0] * 100, [0.0] * 50, [0.0] * 50, [1e3] * 100]
    envs, args = ppo.make_envs("CartPole-v1", 4), ppo.Args(num_envs=4)
    rollout, _ = next(ppo.rollouts(envs, ppo.Agent(envs), args))
    steps = int(rollout["mask"].sum())
    monkeypatch.setattr(ppo, "rollouts", lambda *of: ((rollout, each) for each in told))
    flags = {"num_envs": 4, "total_timesteps": 6 * steps, "target_return": 0.0}
    flags |= {"evaluated": False}
    log = scalars(run("ppo", tmp_path, **flags))
    means = {steps * k: np.mean(told[k - 1]) for k in range(1, 5)}
    assert dict(log["charts/episodic_return"]) == pytest.approx(means)
    assert [step for step, _ in log["charts/SPS"]] == [steps * k for k in range(1, 4)]


def test_evaluation_is_each_environment_s_first_episode():
    """To its termination or time limit, from seeds that training does not use; played here one by
    one. An episode without an end is cut off after 10,000 steps, of a point each."""
    args, expected = ppo.Args(env_id="Diary-v0", seed=5), []
    for i in range(20):
        env, done, total = gym.make("Diary-v0"), False, 0.0
        env.reset(seed=5 + 10**6 + i)
        while not done:
            _, reward, terminated, truncated, _ = env.step(0)
            done, total = terminated or truncated, total + reward
        expected.append(total)
    agent = ppo.Agent(ppo.make_envs("Diary-v0", 1))
    assert ppo.evaluate(agent, args, True, episodes=20) == pytest.approx(np.mean(expected))
    agent = SimpleNamespace(act=lambda obs, greedy: np.zeros(1, int))
    assert ppo.evaluate(agent, ppo.Args(env_id="Forever-v0"), True, episodes=1) == 10_000


def test_a_kill_while_saving_leaves_a_whole_agent(tmp_path, monkeypatch):
    """The second save is cut off in the middle of its file."""
    save, paths = torch.save, []

    def torn(content, path):
        paths.append(path)
        if len(paths) == 2:
            Path(path).write_bytes(b"half a fi")
            raise KeyboardInterrupt
        save(content, path)

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(KeyboardInterrupt):
        run("ppo", tmp_path, env_id="Diary-v0")
    assert "actor.0.weight" in saved({"agent": next(tmp_path.glob("*/agent.pt"))})


@pytest.mark.parametrize("name", ["reinforce", "ppo"])
def test_a_curve_without_an_end_of_an_episode(name, tmp_path, capsys):
    """REINFORCE cuts such an episode off after 1,000 steps. The run does not look hung."""
    flags = {"env_id": "Forever-v0", "num_envs": 2, "total_timesteps": 100}
    run(name, tmp_path, evaluated=False, **flags)
    assert "mean return unknown, no episode has ended" in capsys.readouterr().out


BAD = [("ppo", "env_id", "Nowhere-v0"), ("ppo", "env_id", "no_such_module:Env-v0")]
BAD += [(name, "num_envs", 0) for name in CLASSIC_SCRIPTS]  # three would wait for ever
BAD += [("actor_critic", "num_steps", 0), ("reinforce", "update_epochs", 0)]
BAD += [("trpo", "max_kl", -1.0), ("trpo", "gae_lambda", 2.0), ("ppo", "gae_lambda", -1.0)]
BAD += [("ppo", "clip_coef", -0.2), ("ppo", "clip_coef", np.nan), ("ppo", "gae_lambda", np.nan)]
BAD += [("ppo", "max_grad_norm", bad) for bad in (0.0, -1.0)]  # nothing is learned; it climbs


@pytest.mark.parametrize("name,flag,bad", BAD)
def test_flags_that_would_learn_nothing_in_silence(name, flag, bad, tmp_path):
    with pytest.raises(SystemExit, match=f"^error: --{flag.replace('_', '-')} "):
        run(name, tmp_path, **{flag: bad})
    assert not list(tmp_path.iterdir())


def test_what_the_flags_may_just_be(tmp_path):
    short_run = {"evaluated": False, "env_id": "Diary-v0", "num_envs": 2, "total_timesteps": 600}
    run("ppo", tmp_path, gae_lambda=0.0, clip_coef=np.inf, gamma=0.0, **short_run)
    run("ppo", tmp_path, gae_lambda=1.0, gamma=1.0, learning_rate=0.0, **short_run)


UNFIT = [{"action": gym.spaces.Box(0, 3, (2,), np.int64)}]
UNFIT += [{"action": gym.spaces.Box(-1, 1, (2, 2))}, {"action": gym.spaces.Discrete(2, start=1)}]
UNFIT += [{"action": gym.spaces.MultiDiscrete([2, 2])}]
SAME_STEP = {"vector_kwargs": {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}}
UNFIT += [{"vectorization_mode": "sync", **SAME_STEP}]


@pytest.mark.parametrize("options", UNFIT)
def test_environments_that_no_agent_fits(options):
    """Same-step autoreset would pass the next episode's first observation for the last's end."""
    with pytest.raises(SystemExit, match="--env-id Spaces-v0: needs") as caught:
        ppo.make_envs("Spaces-v0", 2, **options)
    if "action" in options:  # it says what the environment has
        assert str(options["action"]) in caught.value.code


def test_a_vector_environment_that_does_not_tell_how_it_resets(monkeypatch):
    monkeypatch.delitem(gym.vector.SyncVectorEnv.metadata, "autoreset_mode", raising=False)
    own = gym.make_vec

    def make_vec(*of, **more):
        envs = own(*of, **more)
        envs.metadata = {}
        return envs

    monkeypatch.setattr(gym, "make_vec", make_vec)
    with pytest.raises(SystemExit, match="needs autoreset_mode NEXT_STEP"):
        ppo.make_envs("Spaces-v0", 2)


def test_an_environment_of_the_user_s_own_folder(tmp_path, monkeypatch):
    """`module:Env-v0`, though sys.path has the script's folder alone."""
    (tmp_path / "users_own_envs.py").write_text("import classic_envs")
    monkeypatch.chdir(tmp_path)
    assert ppo.make_envs("users_own_envs:Diary-v0", 2).num_envs == 2

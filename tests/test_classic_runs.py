"""Whole runs of the classic scripts: learning, repeatability, saved agents, logs, and what a user
does wrong."""

import re
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import classic_envs  # noqa: F401
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CLASSIC_SCRIPTS, script
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CONSTANT_RATE = ("reinforce", "actor_critic")
LOSSES = ["policy_loss", "value_loss", "entropy", "explained_variance"]
OWN = {"trpo": ["kl", "surrogate_gain", "backtracks"], "ppo": ["approx_kl", "clipfrac"]}


def run(name, folder, **flags):
    module = script(name)
    return module.main(module.Args(output_dir=str(folder), **flags))


def scalars(agent):
    events = EventAccumulator(str(Path(agent).parent), size_guidance={"scalars": 0})
    events.Reload()
    return {
        key: [(event.step, event.value) for event in events.Scalars(key)]
        for key in events.Tags()["scalars"]
    }


def saved(agent):
    return next(iter(torch.load(agent, weights_only=True).values()))


# ----------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("target", [100, pytest.param(475, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_solves_cartpole(name, target, tmp_path):
    """The defaults, until the mean return is reached. Sign errors end near 10."""
    result = run(name, tmp_path, target_return=float(target))
    assert result["solved_step"] < (200_000 if target == 475 else 100_000)
    assert 0 < result["solved_seconds"] < result["seconds"]
    if target == 475:
        assert result["eval/return"] > 450 and result["eval/return_stochastic"] > 400


@pytest.mark.parametrize(
    "name,env_id",
    [
        ("ppo", "GuessBox-v0"),
        ("trpo", "GuessBox-v0"),
        *(
            pytest.param(name, env_id, marks=pytest.mark.slow)
            for name, env_id in [
                *((name, "Guess-v0") for name in CLASSIC_SCRIPTS),
                ("reinforce", "GuessBox-v0"),
                ("actor_critic", "GuessBox-v0"),
            ]
        ),
    ],
)
def test_pays_each_action_its_own_reward(name, env_id, tmp_path):
    """The coin is new in each step: a return that is off by one step holds no word of the action's
    own reward (4 of 8)."""
    assert run(name, tmp_path, env_id=env_id, total_timesteps=25_000)["eval/return"] > 7.5


@pytest.mark.parametrize(
    "name",
    ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in CLASSIC_SCRIPTS[:3])],
)
def test_crosses_a_frozen_lake(name, tmp_path):
    """Its states are numbers, and become one-hot. A random policy arrives in 1 walk of 70."""
    result = run(name, tmp_path, env_id="DryLake-v0", total_timesteps=80_000, target_return=0.9)
    assert result["solved_step"] < 80_000 and result["eval/return_stochastic"] > 0.75


@pytest.mark.slow
@pytest.mark.parametrize("psi", ["return", "reward-to-go"])
def test_reinforce_learns_without_a_critic(psi, tmp_path):
    assert (
        run("reinforce", tmp_path, psi=psi, env_id="Guess-v0", total_timesteps=60_000)[
            "eval/return"
        ]
        > 7.5
    )


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"surrogate": "penalty"}, {"target_kl": 0.03}])
def test_ppo_variants_learn(flags, tmp_path):
    assert run("ppo", tmp_path, target_return=400.0, **flags)["solved_step"] < 200_000


# --------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_same_seed_same_run(name, tmp_path):
    flags = {"num_envs": 4} if name == "reinforce" else {"num_steps": 64}
    runs = [
        run(name, tmp_path / str(i), seed=seed, total_timesteps=1600, **flags)
        for i, seed in enumerate((1, 1, 2))
    ]
    logs = [
        {key: value for key, value in scalars(result["agent"]).items() if key != "charts/SPS"}
        for result in runs
    ]
    weights = [saved(result["agent"]) for result in runs]
    assert logs[0] == logs[1] and all(
        torch.equal(weights[0][key], weights[1][key]) for key in weights[0]
    )
    assert logs[0] != logs[2]


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_logs_have_cleanrl_s_keys(name, tmp_path, capsys):
    """And keys of our own where CleanRL has none: TRPO's `kl` is exact, not CleanRL's `approx_kl`,
    which is estimated from the ratios."""
    result = run(name, tmp_path, total_timesteps=10_000)
    log = scalars(result["agent"])
    wanted = {"charts/episodic_return", "charts/SPS", "charts/learning_rate"}
    wanted |= {f"losses/{key}" for key in LOSSES + OWN.get(name, [])}
    assert wanted == log.keys()
    assert all(value == value for events in log.values() for _, value in events)
    flags = script(name).Args()
    for step, rate in log["charts/learning_rate"]:
        left = 1 if name in CONSTANT_RATE else 1 - step / 10_000
        assert rate == pytest.approx(flags.learning_rate * left)
    out, err = capsys.readouterr()
    first, last = out.splitlines()
    assert str(Path(result["agent"]).parent) in first and str(result["agent"]) in last
    assert not err  # no progress bar either, as this is no terminal
    if name == "trpo":
        assert all(0 <= kl <= 0.01 for _, kl in log["losses/kl"])


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_one_environment_one_step(name, tmp_path):
    """Some rollouts hold nothing but the step in which gymnasium resets."""
    flags = {} if name == "reinforce" else {"num_steps": 1, "num_minibatches": 1}
    steps = 30 if name == "reinforce" else 15
    result = run(name, tmp_path, env_id="Diary-v0", num_envs=1, total_timesteps=steps, **flags)
    assert all(value.isfinite().all() for value in saved(result["agent"]).values())
    last = scalars(result["agent"])["charts/learning_rate"][-1][0]
    assert last == steps - 1 if name != "reinforce" else last < steps


@pytest.mark.parametrize(
    "env_id,size",
    [
        ("FrozenLake-v1", 16),
        ("DryLake-v0", 16),
        ("CliffWalking-v1", 48),
        ("Blackjack-v1", 32 + 11 + 2),
        pytest.param("Taxi-v4", 500, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_observations_that_are_no_box(name, env_id, size, tmp_path, monkeypatch):
    """Some updates on each. CliffWalking has no time limit, and a random policy seldom arrives:
    REINFORCE cuts episodes off after 1,000 steps."""
    monkeypatch.setattr(script(name), "evaluate", lambda *args: 0.0)
    flags = {"num_envs": 16, "num_steps": 8, "total_timesteps": 400}
    if name == "reinforce":
        del flags["num_steps"]
        if env_id in ("CliffWalking-v1", "Taxi-v4"):
            flags |= {"num_envs": 1, "total_timesteps": 2500}
    result = run(name, tmp_path, env_id=env_id, **flags)
    agent, log = saved(result["agent"]), scalars(result["agent"])
    assert agent["actor.0.weight"].shape[1] == agent["obs_norm.mean"].shape[0] == size
    assert all(value.isfinite().all() for value in agent.values())
    assert len(log["losses/policy_loss"]) >= 2


def test_evaluation_ends_where_the_environment_does_not():
    """After 10,000 steps, of a point each."""
    module = script("ppo")
    agent = SimpleNamespace(act=lambda obs, greedy: np.zeros(1, int))
    assert module.evaluate(agent, module.Args(env_id="Forever-v0"), True, episodes=1) == 10_000


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_saved_agent_replays(name, tmp_path):
    flags = {"num_envs": 4} if name == "reinforce" else {"num_envs": 4, "num_steps": 64}
    trained = run(
        name, tmp_path, total_timesteps=600, **flags
    )  # updated: not the agent of the seed
    before = Path(trained["agent"]).read_bytes()
    replayed = run(name, tmp_path, load=trained["agent"], eval_only=True, record=True)
    assert (
        replayed["eval/return"] == trained["eval/return"] and replayed["agent"] == trained["agent"]
    )
    assert Path(trained["agent"]).read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    film = Image.open(Path(trained["agent"]).with_suffix(".gif"))
    assert film.n_frames > 5 and film.size == (600, 400)
    assert not list(Path(trained["agent"]).parent.glob("*.tmp"))


def test_an_agent_goes_on_from_where_it_was(tmp_path):
    first = run("ppo", tmp_path / "a", total_timesteps=5000)
    second = run(
        "trpo", tmp_path / "b", total_timesteps=1, load=first["agent"]
    )  # they all make the same agent
    assert second["eval/return"] == first["eval/return"]


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_diverging_run_stops_with_a_line_and_keeps_the_last_good_agent(name, tmp_path, monkeypatch):
    """Exit status 1; and the bar is closed first, so that the line stands on a line of its own."""
    module, closed = script(name), []

    class Bar(module.tqdm):
        def close(self):
            closed.append(True)
            super().close()

    monkeypatch.setattr(module, "tqdm", Bar)
    with pytest.raises(SystemExit) as caught:
        run(name, tmp_path, env_id="Broken-v0", num_envs=4)
    assert closed == [True]
    (path,) = tmp_path.glob("*/agent.pt")
    assert re.match(r"error: step \d+: loss not finite", caught.value.code)
    assert str(path) in caught.value.code
    assert all(value.isfinite().all() for value in saved(path).values())


# ------------------------------------------------------------------------------------ the main loop


def watch_updates(name, monkeypatch):
    """What each update is given: learning rate, entropy weight, rows, and how many rows are known
    by then to the norms of observations and of returns."""
    module, seen = script(name), []
    update = module.update

    def watched(agent, optimizer, batch, *rest):
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        known = agent.obs_norm.sums[0, 0].item(), agent.return_norm.sums[0].item()
        seen.append((rate, *rest[:-1], batch["obs"].clone(), known))
        return update(agent, optimizer, batch, *rest)

    monkeypatch.setattr(module, "update", watched)
    return seen


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_schedules_and_norm_at_every_update(name, tmp_path, monkeypatch):
    """Rates fall linearly to 0 with the steps taken, but for REINFORCE's learning rate; the norm of
    π_old knows earlier rollouts' real steps, and no other row; that of the returns this one's,
    too."""
    seen, bonus = watch_updates(name, monkeypatch), hasattr(script(name).Args(), "ent_coef")
    flags = {"num_envs": 24 if name == "reinforce" else 4} | ({"ent_coef": 0.02} if bonus else {})
    result = run(
        name, tmp_path, env_id="Diary-v0", total_timesteps=1500, learning_rate=0.01, **flags
    )
    steps = np.cumsum([len(obs) for *_, obs, _ in seen])
    assert len(seen) > 2
    assert [known for *_, known in seen] == list(zip([0, *steps[:-1]], steps, strict=True))
    left = np.ones(len(steps)) if name in CONSTANT_RATE else 1 - steps / 1500
    assert [rate for rate, *_ in seen] == pytest.approx(0.01 * left)
    if bonus:
        assert [entropy for _, entropy, *_ in seen] == pytest.approx(0.02 * (1 - steps / 1500))
    rows, norm = torch.cat([obs for *_, obs, _ in seen]), saved(result["agent"])
    assert torch.allclose(norm["obs_norm.mean"], rows.mean(0), rtol=1e-4)
    assert torch.allclose(norm["obs_norm.std"], rows.std(0, unbiased=False), rtol=1e-4)


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
@pytest.mark.parametrize("target", [10.0, 0.0, None])
def test_solved_is_the_mean_of_the_last_100_episodes(name, target, tmp_path, monkeypatch):
    """In six rollouts told in advance it is reached in the 4th; what is logged is told as well.
    Each rollout takes a second."""
    module, logs, good = (
        script(name),
        {},
        475.0 if target is None else target,
    )  # CartPole's own, which stops no run
    envs = module.make_envs("CartPole-v1", 4)
    rollout, _ = next(module.rollouts(envs, module.Agent(envs), module.Args(num_envs=4)))
    steps = int(rollout["mask"].sum())
    told = [good + 1e3] * 40, [good - 10] * 100, [good] * 50, [good] * 50, [], [good] * 3
    monkeypatch.setattr(
        module, "rollouts", lambda *args: ((rollout, episodes) for episodes in told)
    )
    monkeypatch.setattr(module, "evaluate", lambda *args: 0.0)
    monkeypatch.setattr(
        module, "time", SimpleNamespace(perf_counter=count().__next__, strftime=time.strftime)
    )
    monkeypatch.setattr(
        module.SummaryWriter,
        "add_scalar",
        lambda self, key, value, step: logs.setdefault(key, {}).update({step: value}),
    )
    result = run(name, tmp_path, num_envs=4, total_timesteps=6 * steps, target_return=target)
    assert (result["solved_step"], result["solved_seconds"]) == (4 * steps, 4)
    updates = 5 if target is None else 3
    assert logs["charts/SPS"] == {steps * k: steps for k in range(1, updates + 1)}
    assert logs["charts/episodic_return"] == {
        steps * k: np.mean(told[k - 1]) for k in range(1, updates + 1) if told[k - 1]
    }


def test_explained_variance_is_1_less_the_unexplained(tmp_path, monkeypatch):
    """1 for a critic that says what came, 0 for one that says nothing."""
    values, prepare = {}, script("ppo").prepare

    def known(agent, rollout, args):
        batch = prepare(agent, rollout, args)
        return batch | {"values": batch["returns"] * (len(values) % 2)}

    monkeypatch.setattr(script("ppo"), "prepare", known)
    monkeypatch.setattr(
        script("ppo").SummaryWriter,
        "add_scalar",
        lambda self, key, value, step: "explained" in key and values.update({step: value}),
    )
    run("ppo", tmp_path, total_timesteps=5000)
    assert list(values.values()) == pytest.approx([0.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_evaluation_is_each_environment_s_first_episode(name):
    """To its termination or time limit, from seeds that training does not use; played here one by
    one."""
    module, args, expected = script(name), script(name).Args(env_id="Diary-v0", seed=5), []
    for i in range(20):
        env, done, total = gym.make("Diary-v0"), False, 0.0
        env.reset(seed=5 + 10**6 + i)
        while not done:
            _, reward, terminated, truncated, _ = env.step(0)
            done, total = terminated or truncated, total + reward
        expected.append(total)
    agent = module.Agent(module.make_envs("Diary-v0", 1))
    assert module.evaluate(agent, args, True, episodes=20) == pytest.approx(np.mean(expected))


@pytest.mark.parametrize("record", [False, True])
def test_scores_and_film_are_of_the_right_policy(record, tmp_path, monkeypatch):
    """Greedy and sampled are not confused; the film is greedy, and there is none unless asked
    for."""
    calls = []
    monkeypatch.setattr(
        script("ppo"),
        "evaluate",
        lambda agent, args, greedy, gif=None: calls.append((greedy, gif)) or float(greedy),
    )
    result = run("ppo", tmp_path, total_timesteps=1, record=record)
    assert (result["eval/return"], result["eval/return_stochastic"]) == (1.0, 0.0)
    assert (
        calls
        == [(True, None), (False, None)]
        + [(True, Path(result["agent"]).with_suffix(".gif"))] * record
    )


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_a_kill_while_saving_leaves_a_whole_agent(name, tmp_path, monkeypatch):
    """The second save is cut off in the middle of its file."""
    save, paths = torch.save, []

    def torn(content, path):
        paths.append(path)
        if len(paths) == 1:
            return save(content, path)
        Path(path).write_bytes(b"half a fi")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(KeyboardInterrupt):
        run(name, tmp_path, env_id="Diary-v0")
    assert "actor.0.weight" in saved(next(tmp_path.glob("*/agent.pt")))


# ---------------------------------------------------------------------------------------- bad input

BAD = [
    ({"env_id": "Nowhere-v0"}, "--env-id Nowhere-v0"),
    ({"env_id": "CartPole-v99"}, "--env-id CartPole-v99"),
    ({"env_id": "no_such_module:Env-v0"}, "--env-id no_such_module:Env-v0"),
    ({"env_id": "SequenceObs-v0"}, "--env-id SequenceObs-v0"),
    ({"env_id": "MultiDiscreteAct-v0"}, "--env-id MultiDiscreteAct-v0"),
    ({"env_id": "FromOne-v0"}, "--env-id FromOne-v0"),
    ({"env_id": "SquareAct-v0"}, "--env-id SquareAct-v0"),
    ({"num_envs": -1}, "--num-envs -1"),
    ({"num_envs": 0}, "--num-envs 0"),
    ({"num_minibatches": 0}, "--num-minibatches 0"),
    ({"total_timesteps": 0}, "--total-timesteps 0"),
    ({"seed": -1}, "--seed -1"),
    ({"gamma": 1.5}, "--gamma 1.5"),
    ({"learning_rate": -1.0}, "--learning-rate -1.0"),
    ({"learning_rate": float("nan")}, "--learning-rate nan"),
    ({"eval_only": True}, "--load"),
    ({"load": "nowhere.pt"}, "--load nowhere.pt"),
]


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
@pytest.mark.parametrize("flags,named", BAD)
def test_bad_input(name, flags, named, refused, tmp_path):
    assert named in refused(lambda: run(name, tmp_path, **flags))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_what_is_at_a_bound_is_accepted(name):
    """γ and λ from 0 to 1, both included, seed and rates of 0, any target; minibatches of unequal
    size."""
    module = script(name)
    for flags in (
        {"gamma": 0.0, "seed": 0, "learning_rate": 0.0},
        {"gamma": 1.0, "target_return": -200.0},
        {"target_return": 0.0},
        {"num_minibatches": 7},
    ):
        module.check_args(module.Args(**flags))
    if hasattr(module.Args(), "gae_lambda"):
        for gae_lambda in (0.0, 1.0):
            module.check_args(module.Args(gae_lambda=gae_lambda))


@pytest.mark.parametrize("content", [b"", b"not an agent", None])
def test_bad_agents(content, refused, tmp_path):
    path = tmp_path / "agent.pt"
    torch.save(
        {"CartPole-v1": {"x": torch.ones(1)}}, path
    ) if content is None else path.write_bytes(content)
    assert f"--load {path}" in refused(lambda: run("ppo", tmp_path / "runs", load=str(path)))


@pytest.mark.parametrize(
    "env_id,other", [("CartPole-v1", "Acrobot-v1"), ("Guess-v0", "Endless-v0")]
)
def test_agent_of_another_environment(env_id, other, refused, tmp_path):
    """Even where the shapes are the same, as in the second pair."""
    agent = run("ppo", tmp_path, env_id=env_id, total_timesteps=1)["agent"]
    assert f"--env-id {other}" in refused(lambda: run("ppo", tmp_path, load=agent, env_id=other))


def test_same_step_autoreset_is_refused(refused, tmp_path, monkeypatch):
    """It would pass the next episode's first observation for the last one's end."""
    make_vec = gym.make_vec
    same_step = {
        "vector_kwargs": {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
        "vectorization_mode": "sync",
    }
    monkeypatch.setattr(
        gym, "make_vec", lambda *args, **options: make_vec(*args, **options, **same_step)
    )
    assert "next-step autoreset" in refused(lambda: run("ppo", tmp_path, env_id="Diary-v0"))

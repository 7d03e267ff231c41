"""Do the classic scripts learn, and how fast? Alone, and beside Stable-Baselines3 and sb3-contrib.

    python tests/benchmarks/classic.py learn           # scores on many seeds; a quarter of an hour
    python tests/benchmarks/classic.py cartpole        # beside SB3: time to 475; ten minutes
    python tests/benchmarks/classic.py --picture       # learning curves on CartPole; two minutes
    python tests/benchmarks/classic.py --only-tables   # no run: the tables once more

Times are for one core. SB3's settings are those that RL Baselines3 Zoo tuned (zoo.json; its `steps`
is the length of run that they were tuned for). All runs use one thread of this process, and their
seconds are of CPU time, so that other work on the machine hardly changes them. Runs share no
environment: our scripts spread their seeds, and here SB3's are spread, because environment i gets
the seed + i. results/classic.jsonl keeps one line for all seeds of a cell.

We left out other environments beside SB3, runs without the normalizer, and steps per second at
equal shapes (`git show dbec442:tests/benchmarks/classic.py`).
"""

import importlib
import json
import operator
import time
from functools import partial
from importlib.util import find_spec
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Literal, NamedTuple

import gymnasium as gym
import torch
import tyro
from bench import RESULTS, Kept, all_flags, run_main, show, table, with_footer
from scripts import CLASSIC_SCRIPTS as OURS
from tyro.conf import Positional

# From hyperparams/*.yml of DLR-RM/rl-baselines3-zoo. "lin 0.001" falls linearly from 0.001 to 0.
ZOO = json.loads(Path(__file__).with_name("zoo.json").read_text())
PEERS = {"actor_critic": "A2C", "trpo": "TRPO", "ppo": "PPO"}
NAMES = {"A2C": "SB3 A2C", "TRPO": "sb3-contrib TRPO", "PPO": "SB3 PPO"}
CARTPOLE = "CartPole-v1"
# A mean return of the last 100 episodes, at which CartPole counts as solved. There a run ends. (The
# other environments cannot pay so much.)
LEVEL = 475
LEARN = [  # environment, what its rewards are multiplied by, scripts and seeds, flags
    (CARTPOLE, 1, dict.fromkeys(OURS, 12), {}),
    (CARTPOLE, 1e-3, dict.fromkeys(OURS, 3), {}),
    (CARTPOLE, 1e3, dict.fromkeys(OURS, 3), {}),
    ("Acrobot-v1", 1, {"reinforce": 8, "trpo": 4, "ppo": 4}, {}),
    ("Acrobot-v1", 1, {"actor_critic": 8}, {"total_timesteps": 100_000}),
    ("Pendulum-v1", 1, {"trpo": 12, "ppo": 6}, {"gamma": 0.95}),
    ("FrozenLake-v1", 1, {"ppo": 3}, {}),
    ("MountainCarContinuous-v0", 1, dict.fromkeys(PEERS, 3), {"total_timesteps": 100_000}),
]


# -------------------------------------------------------------------------------------------- Runs
class Watch:
    """Counts a run's steps and seconds, and notes those at which it reached the level."""

    def start(self):
        self.solved = {"solved_steps": inf, "solved_seconds": inf}
        self.first, self.steps, self.recent = time.process_time(), 0, []

    def note(self, steps, returns):
        """Add steps, and the returns of the episodes that ended; return whether it is solved."""
        self.steps += steps
        self.recent = (self.recent + returns)[-100:]
        solved = len(self.recent) == 100 and mean(self.recent) >= LEVEL
        if solved and self.solved["solved_steps"] == inf:
            seconds = time.process_time() - self.first
            self.solved = {"solved_steps": self.steps, "solved_seconds": seconds}
        return solved


def ours(watch, side, seed, flags, scale=1):
    """Run a script by its main(), until CartPole is solved, and return its greedy return."""
    module = importlib.import_module(side)

    def rollouts(*inputs, original=module.rollouts):
        watch.start()
        for rollout, returns in original(*inputs):
            if watch.note(int(rollout["mask"].sum()), [score / scale for score in returns]):
                return  # without a step on this rollout: what solved it is evaluated
            yield rollout, returns

    def make_envs(*inputs, original=module.make_envs, **options):
        envs = original(*inputs, **options)
        return gym.wrappers.vector.TransformReward(envs, lambda rewards: rewards * scale)

    functions = {"rollouts": rollouts}
    functions |= {"make_envs": make_envs} if scale != 1 else {}
    scores = run_main(module, module.Args(**flags | {"seed": seed}), **functions)
    return scores["eval/return"] / scale


def theirs(watch, side, seed, flags):
    """Run SB3 on CartPole until it is solved, and return its greedy return."""
    import sb3_contrib
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    class Note(BaseCallback):
        def _on_training_start(self):
            watch.start()

        def _on_step(self):
            ended = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            return not watch.note(self.training_env.num_envs, ended)

    settings = dict(flags)
    for name, value in settings.items():
        if isinstance(value, str):
            settings[name] = partial(operator.mul, float(value.removeprefix("lin ")))
    seed, steps = 10_000 * seed, settings.pop("steps")
    envs = make_vec_env(CARTPOLE, n_envs=settings.pop("n_envs"), seed=seed)
    module = sb3_contrib if side == "TRPO" else stable_baselines3
    model = getattr(module, side)("MlpPolicy", envs, seed=seed, device="cpu", **settings)
    model.learn(steps, callback=Note())
    return evaluate_policy(model, make_vec_env(CARTPOLE, n_envs=16, seed=seed + 5_000), 100)[0]


def run(side, **job):
    """A run of a script or a peer."""
    watch = Watch()
    greedy = (ours if side in OURS else theirs)(watch, side, **job)
    return watch.solved | {"greedy": float(greedy)}


# ------------------------------------------------------------------------------------------- Cells
class Cell(NamedTuple):
    """All seeds of a script or a peer in one environment: its row, what to run, how often."""

    row: str
    side: str
    flags: dict
    seeds: range
    changes: dict = {}  # of what `ours` takes

    def key(self):
        return self.flags | {"seeds": list(self.seeds)} | self.changes


def flags_of(script, **flags):
    """All flags but the seed."""
    args = importlib.import_module(script).Args(**flags)
    return {name: value for name, value in all_flags(args).items() if name != "seed"}


def learn():
    for env_id, scale, scripts, flags in LEARN:
        for script, seeds in scripts.items():
            chosen = flags_of(script, env_id=env_id, **flags)
            row = f"learn, {env_id}, {scale:g}, {script}"
            yield Cell(row, script, chosen, range(101, 101 + seeds), {"scale": scale})


def cartpole():
    for script in OURS:
        yield Cell(f"cartpole, {script}", script, flags_of(script, env_id=CARTPOLE), range(1, 6))
        if peer := PEERS.get(script):
            yield Cell(f"cartpole, {peer}", peer, ZOO[peer], range(1, 6))


PARTS = {"learn": learn, "cartpole": cartpole}


def small(cell):
    """The cell at toy size."""
    return cell._replace(flags=cell.flags | {"total_timesteps": 2000}, seeds=range(1))


def summary(values):
    return {"median": round(median(values), 3), "least": round(min(values), 3)}


def measure(cell):
    """{metric: summary over the seeds}, and how many seeds solved CartPole."""
    results = [run(cell.side, seed=s, flags=cell.flags, **cell.changes) for s in cell.seeds]
    solved = sum(result["solved_steps"] < inf for result in results)
    metrics = {name: summary([result[name] for result in results]) for name in results[0]}
    return metrics | {"solved": solved}


# ------------------------------------------------------------------------------------------ Tables
def whole(value):
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rows_of(runs, part):
    """{the rest of the row's name, as a tuple: run}."""
    by_row = {run["row"]: run for run in runs.runs if run["row"].startswith(f"{part}, ")}
    return {tuple(row.split(", ")[1:]): run for row, run in by_row.items()}


def learn_lines(runs):
    """A row for each environment, a column for each script."""
    places, rows = dict.fromkeys(key[:2] for key in runs), []
    for place in places:
        cells = ["{}, rewards × {}".format(*place) if place[1] != "1" else place[0]]
        for script in OURS:
            run = runs.get((*place, script))
            text = "–"
            if run:
                text = f"{whole(run['greedy']['median'])} ({whole(run['greedy']['least'])})"
                seeds = len(run["flags"]["seeds"])
                text += f", {seeds}"
                if place[0] == CARTPOLE:
                    text += f": {run['solved']} at {whole(run['solved_steps']['median'])}"
            cells.append(text)
        rows.append(cells)
    return table(["environment", *OURS], rows)


def cartpole_lines(runs):
    def times(run):
        solved = f"{run['solved']}/{len(run['flags']['seeds'])}"
        return [solved, *(whole(run[key]["median"]) for key in ("solved_steps", "solved_seconds"))]

    rows = []
    for script in OURS:
        run, other = runs.get((script,)), runs.get((PEERS.get(script),))
        cells = [script, *(times(run) if run else [])]
        if run and other:
            ratio = other["solved_seconds"]["median"] / run["solved_seconds"]["median"]
            cells += [NAMES[PEERS[script]], *times(other), f"{ratio:.0f}"]
        rows.append(cells + ["–"] * (9 - len(cells)))
    times_of = ["solved", "steps", "seconds"]
    return table(["script", *times_of, "compared with", *times_of, "times faster"], rows)


LINES = {"learn": learn_lines, "cartpole": cartpole_lines}


def tables(runs):
    by_part = {part: rows_of(runs, part) for part in PARTS}
    return {
        f"classic_{part}": with_footer(LINES[part](rows), list(rows.values()))
        for part, rows in by_part.items()
        if rows
    }


def draw(steps=100_000, seeds=(101, 102, 103)):
    """Learning curves on CartPole at the defaults: the seeds' mean, and a thin line for each."""
    from classic_parts import thousands, train
    from pictures import COLORS, figure, label_lines

    page, (axes,) = figure("Four methods on CartPole, three seeds each", 3.2, 1, 1)
    axes.ends = []
    names = zip(OURS, ("REINFORCE", "actor-critic", "TRPO", "PPO"), strict=True)
    for script, name in names:
        module = importlib.import_module(script)
        runs = [train(module, total_timesteps=steps, seed=seed).curve for seed in seeds]
        average = [mean(part) for part in zip(*runs, strict=True)]
        for curve, width, alpha in [*((run, 0.5, 0.4) for run in runs), (average, 2.2, 1)]:
            axes.plot(thousands(steps), curve, color=COLORS[name], linewidth=width, alpha=alpha)
        axes.ends.append((average[-1], name, COLORS[name]))
    axes.set(xlabel="thousands of steps", ylabel="mean return", ylim=(0, 510))
    label_lines(page)
    page.savefig(RESULTS / "learning.png", dpi=150)


def kept(smoke=False):
    packages = ["gymnasium"] + ["stable-baselines3", "sb3-contrib"] * bool(find_spec("sb3_contrib"))
    return [Kept("classic", *packages, smoke=smoke)]


def main(
    parts: Positional[tuple[Literal["learn", "cartpole"], ...]] = (),
    picture: bool = False,
    only_tables: bool = False,
    smoke: bool = False,
):
    """Make the runs of these parts that are missing. With --smoke each part makes two short runs,
    and nothing is written."""
    torch.set_num_threads(1)  # for theirs, too
    if picture:
        return draw()
    (runs,) = kept(smoke)
    for part in () if only_tables else parts or (PARTS if smoke else ()):
        cells = [cell for cell in PARTS[part]() if not smoke or cell.side in OURS]
        for cell in map(small, cells[:2]) if smoke else cells:
            if not runs.find(cell.row, cell.key()):
                runs.forget(cell.row, [])
                runs.add(cell.row, cell.key(), measure(cell))
    show(tables(runs), smoke)


if __name__ == "__main__":
    tyro.cli(main)

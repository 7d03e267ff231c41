"""Do the classic scripts learn, on many seeds and in several environments?

    python tests/benchmarks/classic.py                 # makes the missing runs: 15 minutes
    python tests/benchmarks/classic.py --only-tables   # no run: the table once more

A run ends when it has solved CartPole. Its score is that of the script's own greedy evaluation.
results/classic.jsonl keeps one line for all seeds of a cell.
"""

import importlib
from math import inf
from statistics import mean, median

import gymnasium as gym
import torch
import tyro
from bench import Kept, run_main, show, table, with_footer
from scripts import CLASSIC_SCRIPTS

CARTPOLE = "CartPole-v1"
# A mean return of the last 100 episodes, at which CartPole counts as solved. There a run ends. (The
# other environments cannot pay so much.)
LEVEL = 475
PLACES = [  # environment, what its rewards are multiplied by, scripts and seeds, flags
    (CARTPOLE, 1, dict.fromkeys(CLASSIC_SCRIPTS, 12), {}),
    (CARTPOLE, 1e-3, dict.fromkeys(CLASSIC_SCRIPTS, 3), {}),
    (CARTPOLE, 1e3, dict.fromkeys(CLASSIC_SCRIPTS, 3), {}),
    ("Acrobot-v1", 1, {"reinforce": 8, "trpo": 4, "ppo": 4}, {}),
    ("Acrobot-v1", 1, {"actor_critic": 8}, {"total_timesteps": 100_000}),
    ("Pendulum-v1", 1, {"trpo": 12, "ppo": 6}, {"gamma": 0.95}),
    ("FrozenLake-v1", 1, {"ppo": 3}, {}),
]


# -------------------------------------------------------------------------------------------- Runs
def until_solved(rollouts, scale, solved):
    """The script's rollouts, with rewards multiplied by scale. Once CartPole is solved they end,
    and the list `solved` gets the steps so far."""

    def rollouts_until_solved(*inputs):
        steps, recent = 0, []
        for rollout, returns in rollouts(*inputs):
            steps += int(rollout["mask"].sum())
            recent = (recent + returns)[-100:]
            if len(recent) == 100 and mean(recent) / scale >= LEVEL:
                solved.append(steps)
                return  # without a step on this rollout: what solved it is evaluated
            yield rollout, returns

    return rollouts_until_solved


def run(name, flags, seed, scale):
    """Run a script. Returns its greedy return, and the steps until it solved CartPole."""
    script, solved = importlib.import_module(name), []

    def make_envs(*inputs, original=script.make_envs, **options):
        envs = original(*inputs, **options)
        return gym.wrappers.vector.TransformReward(envs, lambda rewards: rewards * scale)

    functions = {"rollouts": until_solved(script.rollouts, scale, solved)}
    functions |= {"make_envs": make_envs} if scale != 1 else {}
    scores = run_main(script, script.Args(**flags | {"seed": seed}), **functions)
    return scores["eval/return"] / scale, solved[0] if solved else inf


def measure(name, flags, seeds, scale):
    """What is kept of all seeds of a cell."""
    runs = [run(name, flags, seed, scale) for seed in seeds]
    greedy, steps = zip(*runs, strict=True)
    return {
        "greedy": {"median": round(median(greedy), 3), "least": round(min(greedy), 3)},
        "solved": sum(count < inf for count in steps),
        "solved_steps": {"median": median(steps)},
    }


def row_of(env_id, scale, name):
    return f"learn, {env_id}, {scale:g}, {name}"


def cells():
    """The row, and the arguments of `measure`, of each cell."""
    for env_id, scale, scripts, flags in PLACES:
        for name, seeds in scripts.items():
            seeds = list(range(101, 101 + seeds))
            yield row_of(env_id, scale, name), name, {"env_id": env_id} | flags, seeds, scale


def campaign(runs, smoke):
    """Make the cells that are missing."""
    for row, name, flags, seeds, scale in [*cells()][: 2 if smoke else None]:
        if smoke:
            flags, seeds = flags | {"total_timesteps": 2000}, seeds[:1]
        key = flags | {"seeds": seeds, "scale": scale}
        if not runs.find(row, key):
            runs.add(row, key, measure(name, flags, seeds, scale))


# ------------------------------------------------------------------------------------------ Table
def whole(value):
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def tables(runs):
    """A row for each environment, a column for each script."""
    by_row, rows = {run["row"]: run for run in runs.runs}, []
    for env_id, scale in dict.fromkeys(place[:2] for place in PLACES):
        row = [env_id if scale == 1 else f"{env_id}, rewards × {scale:g}"]
        for name in CLASSIC_SCRIPTS:
            run, text = by_row.get(row_of(env_id, scale, name)), "–"
            if run:
                text = f"{whole(run['greedy']['median'])} ({whole(run['greedy']['least'])})"
                text += f", {len(run['flags']['seeds'])}"
                if env_id == CARTPOLE:
                    text += f": {run['solved']} at {whole(run['solved_steps']['median'])}"
            row.append(text)
        rows.append(row)
    return {"classic": with_footer(table(["environment", *CLASSIC_SCRIPTS], rows), runs.runs)}


def kept(smoke=False):
    return Kept("classic", "gymnasium", smoke=smoke)


def main(only_tables: bool = False, smoke: bool = False):
    """With --smoke two cells are made, of one short run each, and nothing is written."""
    torch.set_num_threads(1)
    runs = kept(smoke)
    if not only_tables:
        campaign(runs, smoke)
    show(tables(runs), smoke)


if __name__ == "__main__":
    tyro.cli(main)

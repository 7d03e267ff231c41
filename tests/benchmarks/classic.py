"""Do the classic scripts learn, on many seeds and in several environments?

    python tests/benchmarks/classic.py    # makes the missing runs, and the table: half an hour

A run's score is the mean return of 100 greedy episodes of its last agent.
"""

from math import inf
from statistics import median

import gymnasium as gym
import numpy as np
import torch
from bench import Kept, load, run_main, show, table, with_footer
from scripts import CLASSIC_SCRIPTS

CARTPOLE = "CartPole-v1"
LEVEL = 475  # a mean return of the last 100 training episodes, at which CartPole counts as solved
PLACES = [  # environment, what its rewards are multiplied by, scripts and seeds, flags
    (CARTPOLE, 1, dict.fromkeys(CLASSIC_SCRIPTS, 12), {}),
    (CARTPOLE, 1e-3, dict.fromkeys(CLASSIC_SCRIPTS, 3), {}),
    (CARTPOLE, 1e3, dict.fromkeys(CLASSIC_SCRIPTS, 3), {}),
    ("Acrobot-v1", 1, {"reinforce": 8, "trpo": 4, "ppo": 4}, {}),
    ("Acrobot-v1", 1, {"actor_critic": 8}, {"total_timesteps": 100_000}),
    ("Pendulum-v1", 1, {"trpo": 12, "ppo": 6}, {"gamma": 0.95}),
    ("FrozenLake-v1", 1, {"ppo": 3}, {}),
]


@torch.no_grad()
def greedy(script, args, weights):
    """The mean return of an agent in 100 environments, an episode in each, without chance."""
    envs = script.make_envs(args.env_id, 100)
    agent = script.Agent(envs)
    agent.load_state_dict(weights)
    returns, playing = np.zeros(100), np.ones(100, bool)
    obs, _ = envs.reset(seed=10_000 * args.seed + 5_000)  # no run trains on these seeds
    while playing.any():
        obs, rewards, terminated, truncated, _ = envs.step(agent.policy(obs).mode.numpy())
        returns += rewards * playing
        playing &= ~np.logical_or(terminated, truncated)
    envs.close()
    return returns.mean()


def run(name, scale, flags):
    """Run a script. Returns its mean return in training and its greedy one, both at the end, and
    the time steps until CartPole was solved."""
    script, solved = load(name), [inf]
    args = script.Args(**flags)

    def make_envs(*inputs, original=script.make_envs, **options):
        envs = original(*inputs, **options)
        return gym.wrappers.vector.TransformReward(envs, lambda rewards: rewards * scale)

    def note(metric, value, step):
        if metric == "charts/episodic_return" and value / scale >= LEVEL:
            solved.append(step)

    result = run_main(script, args, note, make_envs=make_envs)
    return result["return"] / scale, greedy(script, args, result["agent"]), min(solved)


def measure(name, scale, flags, seeds):
    """What is kept of a cell of the table."""
    results = [run(name, scale, flags | {"seed": seed}) for seed in seeds]
    trained, scores, steps = ([round(float(x), 3) for x in xs] for xs in zip(*results, strict=True))
    return {
        "greedy": {"median": median(scores), "least": min(scores)},
        "solved": sum(count < inf for count in steps),
        "solved_steps": {"median": median(steps)},
        "each": {"return": trained, "greedy": scores, "solved_steps": steps},
    }


def cells():
    """Of each cell of the table: row, script, environment, scale, its flags and seeds."""
    for env_id, scale, scripts, flags in PLACES:
        for name, seeds in scripts.items():
            row = f"learn, {env_id}, {scale:g}, {name}"
            yield row, name, env_id, scale, flags, [101 + i for i in range(seeds)]


def whole(value):
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def tables(runs):
    """A row for each environment, a column for each script."""
    rows = {}
    for cell, name, env_id, scale, *_ in cells():
        title = env_id if scale == 1 else f"{env_id}, rewards × {scale:g}"
        row = rows.setdefault(title, dict.fromkeys(CLASSIC_SCRIPTS, "–"))
        for run in runs.of(cell):
            row[name] = f"{whole(run['greedy']['median'])} ({whole(run['greedy']['least'])})"
            row[name] += f", {len(run['flags']['seeds'])}"
            if env_id == CARTPOLE:
                row[name] += f": {run['solved']} at {whole(run['solved_steps']['median'])}"
    rows = [[title, *row.values()] for title, row in rows.items()]
    return {"classic": with_footer(table(["environment", *CLASSIC_SCRIPTS], rows), runs.runs)}


def main():
    runs = Kept("classic", "gymnasium")
    for row, name, env_id, scale, flags, seeds in cells():
        flags = {"env_id": env_id} | flags
        key = flags | {"seeds": seeds, "scale": scale}
        if not runs.find(row, key):
            runs.add(row, key, measure(name, scale, flags, seeds))
    show(tables(runs))


if __name__ == "__main__":
    main()

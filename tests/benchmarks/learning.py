"""Do the classic scripts learn on every seed? Ten minutes on two cores.

    python tests/benchmarks/learning.py             # the table goes into results/learning.md
    python tests/benchmarks/learning.py --picture   # two minutes; the curves, results/learning.png

Each row is a script on an environment with its defaults but for the flags named, on the seeds from
101 on. With --smoke one seed plays a few steps, and nothing is written.
"""

import contextlib
import importlib
import io
import tempfile
from concurrent.futures import ProcessPoolExecutor
from math import inf
from multiprocessing import get_context
from statistics import median
from unittest.mock import patch

import gymnasium as gym
import tyro
from bench import RESULTS, table, write_table

ALL = ("reinforce", "actor_critic", "trpo", "ppo")
ROWS = [  # environment, what its rewards are multiplied by, scripts and seeds, flags
    ("CartPole-v1", 1, dict.fromkeys(ALL, 12), {"target_return": 475.0}),
    ("CartPole-v1", 1e-3, dict.fromkeys(ALL, 3), {"target_return": 0.475}),
    ("CartPole-v1", 1e3, dict.fromkeys(ALL, 3), {"target_return": 475e3}),
    ("Acrobot-v1", 1, {"reinforce": 8, "trpo": 4, "ppo": 4}, {}),
    ("Acrobot-v1", 1, {"actor_critic": 8}, {"total_timesteps": 100_000}),
    ("Pendulum-v1", 1, {"trpo": 12, "ppo": 6}, {"gamma": 0.95}),
    ("FrozenLake-v1", 1, {"ppo": 3}, {}),
]
HEADER = ["environment", "rewards times", "script", "flags", "seeds", "reached", "steps to it"]
HEADER += ["greedy: median (worst)", "sampled: median (worst)"]


def run(job):
    """Greedy and sampled return at the end, and the steps taken."""
    script, env_id, scale, flags, seed = job
    module = importlib.import_module(script)
    own, steps = module.rollouts, []

    def rollouts(*given):
        for rollout, returns in own(*given):
            steps.append(int(rollout["mask"].sum()))
            yield rollout, returns

    def make_envs(*given, own=module.make_envs, **options):
        envs = own(*given, **options)
        return gym.wrappers.vector.TransformReward(envs, lambda rewards: rewards * scale)

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        patch.multiple(module, rollouts=rollouts, make_envs=make_envs),
    ):
        found = module.main(module.Args(env_id=env_id, seed=seed, output_dir=folder, **flags))
    returns = [found[key] / scale for key in ("eval/return", "eval/return_stochastic")]
    return *returns, sum(steps)


def spread(values):
    return f"{median(values):.2f} ({min(values):.2f})"


def draw(steps=100_000, seeds=(101, 102, 103)):
    """Learning curves on CartPole at the defaults: the seeds' mean, and a thin line for each."""
    from classic_parts import thousands, train
    from pictures import COLORS, figure, label_lines

    page, (axes,) = figure("Four methods on CartPole, three seeds each", 3.2, 1, 1)
    axes.ends = []
    names = zip(ALL, ("REINFORCE", "actor-critic", "TRPO", "PPO"), strict=True)
    for script, name in names:
        module = importlib.import_module(script)
        runs = [train(module, total_timesteps=steps, seed=seed).curve for seed in seeds]
        print(script, *([round(each) for each in run] for run in runs), flush=True)
        mean = [sum(part) / len(part) for part in zip(*runs, strict=True)]
        for run, width, alpha in [*((run, 0.5, 0.4) for run in runs), (mean, 2.2, 1)]:
            axes.plot(thousands(steps), run, color=COLORS[name], linewidth=width, alpha=alpha)
        axes.ends.append((mean[-1], name, COLORS[name]))
    axes.set(xlabel="thousands of steps", ylabel="mean return", ylim=(0, 510))
    label_lines(page)
    page.savefig(RESULTS / "learning.png", dpi=150)


def main(smoke: bool = False, picture: bool = False):
    if picture:
        return draw()
    lines = []
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for env_id, scale, scripts, flags in ROWS[::3] if smoke else ROWS:
            for script, number in scripts.items():
                more = {"total_timesteps": 2000} if smoke else {}
                seeds = range(101, 102 if smoke else 101 + number)
                jobs = [(script, env_id, scale, flags | more, seed) for seed in seeds]
                greedy, sampled, steps = zip(*pool.map(run, jobs), strict=True)
                cells = [env_id, f"{scale:g}", script, str(flags or "–").strip("{}"), len(jobs)]
                if "target_return" in flags:
                    reached = [each for each in steps if each < 200_000]
                    cells += [len(reached), f"{median(steps if reached else [inf]):.0f}"]
                else:
                    cells += ["–", "–"]
                lines.append([*cells, spread(greedy), spread(sampled)])
                print(*lines[-1], flush=True)
    note = "200,000 steps or those of the flags"
    write_table("learning", table(HEADER, lines), "gymnasium", note=note, smoke=smoke)


if __name__ == "__main__":
    tyro.cli(main)

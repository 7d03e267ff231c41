"""Does the classic scripts' normalizer of observations earn its lines?

    python tests/benchmarks/observations.py --seeds 8   # the table goes to results/observations.md

Each script plays each environment with its defaults, but for the flags named, once with the
normalizer and once without. results/observations.json keeps the runs, and a run in it is not
repeated: nine seconds of CPU each, as a mean. With --smoke one seed plays a few steps of CartPole,
and nothing is written.
"""

import contextlib
import importlib
import io
import json
import tempfile
from itertools import product
from statistics import mean, median
from unittest.mock import patch

import tyro
from bench import RESULTS, table, write_table
from scripts import CLASSIC_SCRIPTS
from torch import nn

ENVIRONMENTS = {
    "CartPole-v1": {"total_timesteps": 60_000},
    "Acrobot-v1": {"total_timesteps": 100_000},
    "Pendulum-v1": {"total_timesteps": 100_000, "gamma": 0.95},
    "FrozenLake-v1": {"total_timesteps": 100_000},
    "MountainCarContinuous-v0": {"total_timesteps": 100_000},
}
SIDES = ("with", "without")


class Unchanged(nn.Module):
    """In place of RunningMeanStd."""

    def __init__(self, size):
        super().__init__()

    def update(self, x):
        pass

    def forward(self, x):
        return x.float()


def run(script, env_id, side, seed, **flags):
    """Two mean returns: of training's last 100 episodes, and of 20 greedy ones."""
    module, told = importlib.import_module(script), []

    def rollouts(*given, own=module.rollouts):
        for rollout, returns in own(*given):
            told.extend(returns)
            yield rollout, returns

    def evaluate(*given, own=module.evaluate, **options):
        return own(*given, **options, episodes=20)

    changes = {"rollouts": rollouts, "evaluate": evaluate}
    changes |= {"RunningMeanStd": Unchanged} if side == "without" else {}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        patch.multiple(module, **changes),
    ):
        args = module.Args(env_id=env_id, seed=seed, output_dir=folder, **flags)
        found = module.main(args)
    return [round(float(each), 2) for each in (mean(told[-100:] or [0.0]), found["eval/return"])]


def rows(known):
    """Medians over the seeds that both sides have played, the worst in brackets; and on how many
    seeds training ended better with the normalizer, and on how many without it."""
    played = dict.fromkeys(key.split(", ")[0] for key in known)
    for env_id, script in product(played, CLASSIC_SCRIPTS):
        runs = [
            {key.split()[-1]: run for key, run in known.items() if key.startswith(start)}
            for start in (f"{env_id}, {script}, {side}," for side in SIDES)
        ]
        seeds = runs[0].keys() & runs[1].keys()
        ends, greedy = [[[run[s][part] for s in seeds] for run in runs] for part in (0, 1)]
        better = sum(a > b for a, b in zip(*ends, strict=True))
        worse = sum(a < b for a, b in zip(*ends, strict=True))
        cells = [f"{median(each):.4g} ({min(each):.4g})" for each in (*ends, *greedy)]
        yield [env_id, script, len(seeds), *cells, f"{better} : {worse}"]


def main(seeds: int = 8, smoke: bool = False):
    path = RESULTS / "observations.json"
    known = json.loads(path.read_text()) if path.exists() and not smoke else {}
    chosen = range(501, 502 if smoke else 501 + seeds)
    places = ["CartPole-v1"] if smoke else list(ENVIRONMENTS)
    for seed, env_id, script, side in product(chosen, places, CLASSIC_SCRIPTS, SIDES):
        key = f"{env_id}, {script}, {side}, seed {seed}"
        if key not in known:
            flags = ENVIRONMENTS[env_id] | ({"total_timesteps": 2000} if smoke else {})
            known[key] = run(script, env_id, side, seed, **flags)
            print(key, *known[key], flush=True)
        if not smoke:
            path.write_text(json.dumps(known, indent=1) + "\n")
    header = ["environment", "script", "seeds", "last 100 episodes, with", "without"]
    header += ["greedy, with", "without", "better with : without"]
    note = "one thread; medians over the seeds (the worst)"
    lines = table(header, list(rows(known)))
    write_table("observations", lines, "gymnasium", note=note, smoke=smoke)


if __name__ == "__main__":
    tyro.cli(main)

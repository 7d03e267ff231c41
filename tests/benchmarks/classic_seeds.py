"""Does every seed learn? The classic scripts on CartPole-v1 with their defaults, seed after seed.

    python tests/benchmarks/classic_seeds.py                # 50 seeds of each script
    python tests/benchmarks/classic_seeds.py --seeds 5 --only ppo

Whole runs, to the last step, whatever happens in between. Solved: at some step the last 100
training episodes had a mean return of 475. The greedy return is that of 100 fresh episodes at the
end. Two runs go beside each other, one thread each. Writes results/classic_seeds.md, or with --only
the rows of these scripts in it.
"""

import contextlib
import importlib
import io
import multiprocessing
import os
import tempfile
import time
from statistics import median

import tyro
from bench import CLASSIC, RESULTS, row, table, write_table

HEADER = ["CartPole-v1", "solved", "greedy return ≥ 475", "median", "worst"]
HEADER += ["steps to 475, median", "worst", "seconds to 475, median", "worst", "date"]


def run(name: str, seed: int) -> dict:
    """One run, in a worker process."""
    script = importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return script.main(script.Args(seed=seed, output_dir=folder))


def cells(name: str, runs: list[dict]) -> list[str]:
    solved = [each for each in runs if each["solved_step"]]
    returns = sorted(each["eval/return"] for each in runs)
    return [
        name,
        f"{len(solved)} of {len(runs)}",
        f"{sum(value >= 475 for value in returns)} of {len(runs)}",
        f"{median(returns):.0f}",
        f"{returns[0]:.0f}",
        f"{median(each['solved_step'] for each in solved):.0f}",
        f"{max(each['solved_step'] for each in solved)}",
        f"{median(each['solved_seconds'] for each in solved):.1f}",
        f"{max(each['solved_seconds'] for each in solved):.1f}",
        time.strftime("%Y-%m-%d"),
    ]


def main(seeds: int = 50, first: int = 1, only: tuple[str, ...] = tuple(CLASSIC), workers: int = 2):
    os.environ["OMP_NUM_THREADS"] = "1"
    path = RESULTS / "classic_seeds.md"
    rows = {line.split()[1]: line for line in path.read_text().splitlines() if line[:2] == "| "}
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for name in only:
            jobs = [(name, seed) for seed in range(first, first + seeds)]
            runs = pool.starmap(run, jobs, chunksize=1)
            rows[name] = row(cells(name, runs))
            print(rows[name], flush=True)
            for (_, seed), each in zip(jobs, runs, strict=True):
                if each["eval/return"] < 475 or not each["solved_step"]:
                    print(f"    seed {seed}: {each['eval/return']:.0f}, {each['solved_step']}")
    lines = [*table(HEADER, []), *(rows[name] for name in CLASSIC if name in rows)]
    note = f"{workers} runs beside each other, one thread each, "
    note += f"seeds {first} to {first + seeds - 1}"
    if (seeds, first) == (50, 1):
        write_table("classic_seeds", lines, "gymnasium", note=note)


if __name__ == "__main__":
    tyro.cli(main)

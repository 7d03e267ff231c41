"""grpo_llm.py's default step on two CPU cores:
one process with two threads against two processes with one thread each.

    python tests/benchmarks/parallel_speed.py

Rounds alternate. Writes results/parallel_speed.md.
"""

from statistics import median

import tyro
from bench import run_script, table, write_table

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def seconds_per_step(launcher: tuple, threads: int, steps: int) -> float:
    flags = ["--steps", steps, "--eval-problems", 8]
    done = run_script("grpo_llm", *flags, launcher=launcher, OMP_NUM_THREADS=str(threads))
    return median(value for _, value in done["log"]["step_time"])


def main(rounds: int = 5, steps: int = 40):
    pairs = []
    for _ in range(rounds):
        pairs.append((seconds_per_step((), 2, steps), seconds_per_step(TORCHRUN, 1, steps)))
    one, two = (median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    share = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    rows = [
        ["1 process × 2 threads", f"{one:.3f}", "1"],
        ["2 processes × 1 thread", f"{two:.3f}", share],
    ]
    lines = table(["one default step on two cores", "seconds", "speed"], rows)
    write_table("parallel_speed", lines, note=f"median of {rounds} alternating rounds")


if __name__ == "__main__":
    tyro.cli(main)

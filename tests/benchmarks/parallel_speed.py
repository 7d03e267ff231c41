"""grpo_llm.py's default step on two CPU cores:
one process with two threads against two processes with one thread each.

    python tests/benchmarks/parallel_speed.py

Rounds alternate. Writes results/parallel_speed.md.
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def seconds_per_step(prefix: tuple, threads: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            *prefix,
            "grpo_llm.py",
            "--steps",
            str(steps),
            "--eval-problems",
            "8",
            "--output-dir",
            folder,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        events = EventAccumulator(
            next(Path(folder).iterdir()).as_posix(), size_guidance={"scalars": 0}
        )
        events.Reload()
        return median(event.value for event in events.Scalars("step_time"))


def main(rounds: int = 5, steps: int = 40):
    pairs = [
        (seconds_per_step((), 2, steps), seconds_per_step(TORCHRUN, 1, steps))
        for _ in range(rounds)
    ]
    one, two = (median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    lines = [
        "| one default step on two cores | seconds | speed |",
        "|-|-|-|",
        f"| 1 process × 2 threads | {one:.3f} | 1 |",
        f"| 2 processes × 1 thread | {two:.3f} | "
        f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"{time.strftime('%Y-%m-%d')}, median of {rounds} alternating rounds",
    ]
    print("\n".join(lines))
    (Path(__file__).parent / "results" / "parallel_speed.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)

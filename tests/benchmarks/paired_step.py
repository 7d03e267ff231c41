"""Is the default run as fast as it was? One step of this checkout against that of another revision, in turns.

    python tests/benchmarks/paired_step.py 36f1eaf                    # the revision before processes and GPUs
    python tests/benchmarks/paired_step.py 36f1eaf --script rloo_llm

The learning rate is 0, so that both keep to the same policy and lengths of the same distribution. Each run is a process
of its own; the ratio is taken within a round. Prints a table and writes results/paired_step.md.
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]


def step_time(root: Path, script: str, seed: int, steps: int) -> float:
    """Median seconds of a step, evaluation apart."""
    with tempfile.TemporaryDirectory() as out:
        flags = {"learning-rate": 0, "steps": steps, "eval-every": 10**6, "eval-problems": 8, "seed": seed, "output-dir": out}
        command = [sys.executable, f"{script}.py", *(str(part) for key, value in flags.items() for part in (f"--{key}", value))]
        subprocess.run(command, cwd=root, check=True, capture_output=True)
        events = EventAccumulator(str(next(Path(out).iterdir())), size_guidance={"scalars": 0})
        events.Reload()
        return median(event.value for event in events.Scalars("step_time"))


def main(revision: Annotated[str, tyro.conf.Positional], script: str = "grpo_llm", rounds: int = 7, steps: int = 40, write: bool = True):
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        step_time(Path(folder), script, 0, 1), step_time(ROOT, script, 0, 1)  # each makes its tiny model
        pairs = []
        for seed in range(rounds):
            order = (Path(folder), ROOT) if seed % 2 else (ROOT, Path(folder))
            found = {root: step_time(root, script, seed, steps) for root in order}
            pairs.append((found[Path(folder)], found[ROOT]))
            print("{:.4f} s | {:.4f} s".format(*pairs[-1]), flush=True)
    old, new = (median(column) for column in zip(*pairs))
    ratios = sorted(a / b for a, b in pairs)
    lines = [f"| one step of {script}.py | seconds | times as fast, median (range) |", "|-|-|-|", f"| at {revision} | {old:.4f} | 1 |",
             f"| now | {new:.4f} | {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |", "",
             f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {rounds} alternating rounds of {steps} steps"]  # fmt: skip
    print("\n".join(lines))
    if write:
        (Path(__file__).parent / "results" / "paired_step.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)

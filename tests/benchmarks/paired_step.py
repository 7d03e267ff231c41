"""Is the default step as fast as it was?
This working tree against another revision, step by step in turns.

    python tests/benchmarks/paired_step.py 72afeed

Both take the same steps in one process, each by its own train_step, which is given what it asks for
by name. Each draws its sums itself; the dice are the same, so sums and samples are, and the last
column counts the steps whose rewards agree. Which rows make a minibatch may differ, but the
learning rate is 0: neither policy moves. Policy and reference have the same weights on both sides;
the policy is the tiny model after `warm` steps of training: answers of full length.
Writes results/paired_step.md.
"""

import importlib.util
import subprocess
import sys
import tempfile
from math import isclose
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import tyro
from bench import LLM, ROOT, Training, row, table, write_table


def load(folder: Path, script: str, name: str) -> Training:
    """The script of this folder, with a policy and a reference of its own."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{script}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Training(module, module.Args())


def compare(script: str, old_folder: Path, steps: int, warm: int) -> list[str]:
    """A row of the table for one script."""
    old = load(old_folder, script, f"old_{script}")
    new = load(ROOT, script, f"new_{script}")
    for number in range(1, warm + 1):
        new.step(number)
    old.model.load_state_dict(new.model.state_dict())
    if old.reference is not None and new.reference is not None:
        old.reference.load_state_dict(new.reference.state_dict())
    for side in (old, new):  # the same questions from here on, however many were drawn before
        side.problems = side.script.problem_stream(None, warm)
    seconds, rewards = {old: [], new: []}, {old: [], new: []}
    for number in range(warm + 1, warm + 1 + steps):
        for side in (old, new) if number % 2 else (new, old):
            start = perf_counter()
            rewards[side].append(side.step(number, learning_rate=0.0)["reward"])
            seconds[side].append(perf_counter() - start)
    a, b = (seconds[side][5:] for side in (old, new))
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    same = sum(isclose(x, y, abs_tol=1e-6) for x, y in zip(*rewards.values(), strict=True))
    ratio = f"{median(ratios):.3f} ({low:.2f} to {high:.2f})"
    return [f"{script}.py", f"{median(a):.4f}", f"{median(b):.4f}", ratio, f"{same} of {steps}"]


def main(
    revision: Annotated[str, tyro.conf.Positional],
    scripts: tuple[str, ...] = tuple(LLM),
    steps: int = 100,
    warm: int = 60,
    threads: int = 2,
    write: bool = True,
):
    torch.set_num_threads(threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        archive = ["git", "archive", revision]
        files = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=files, check=True)
        for script in scripts:
            rows.append(compare(script, Path(folder), steps, warm))
            print(row(rows[-1]), flush=True)
    header = ["one default step", f"seconds at {revision}", "now"]
    header += ["times as fast, median (80 %)", "steps with the same rewards"]
    if write:
        write_table("paired_step", table(header, rows), note=f"{steps} steps in turns")


if __name__ == "__main__":
    tyro.cli(main)

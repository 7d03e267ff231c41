"""Faults at full count: 50 kills at random instants, a million hostile completions.

    python tests/benchmarks/faults.py

The quick tests do the same a few times. Writes results/faults.md.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro
from bench import ROOT, table, write_table

import grpo_llm

PIECES = ["#", "####", "7", "1,234", "\\boxed{", "}", "$", "٣", "７", "²", "-", ".", "e9"]
PIECES += ["\n", " ", "\x00", "🙂", "9**9**9", "NaN", "inf"]


def hostile(count: int) -> float:
    """Both verifiers on `count` completions made of pieces like these and random bytes;
    the slowest, in seconds per megabyte."""
    rng, slowest = random.Random(0), 0.0
    for i in range(count):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 12)))
        if i % 3 == 0:
            text += rng.randbytes(rng.randint(0, 40)).decode("utf-8", "replace")
        if i % 100_000 == 0:
            text = (text or "#1") * (1_000_000 // max(len(text), 1))
        for verify in (grpo_llm.verify, grpo_llm.verify_flexible):
            start = time.perf_counter()
            found = verify(text, "-31337")
            if len(text) > 100_000:
                slowest = max(slowest, (time.perf_counter() - start) / len(text) * 1e6)
            assert found == 0.0, repr(text)
    return slowest


def kill(count: int, folder: Path):
    """Each time it goes on from a checkpoint that is whole, and no older than the last one known
    before the kill."""
    rng, resume = random.Random(0), []
    command = [sys.executable, "grpo_llm.py", "--steps", "100000", "--prompts-per-step", "4"]
    command += ["--group-size", "4", "--eval-problems", "8", "--output-dir", str(folder)]
    command += ["--eval-every", "1"]  # it saves whenever it evaluates

    def newest():
        return max(folder.glob("*/step-*"), default=None)

    for number in range(count + 1):
        known, end = newest(), time.time() + 120
        with open(os.devnull, "w") as nowhere:
            process = subprocess.Popen(
                [*command, *resume], cwd=ROOT, stdout=nowhere, stderr=nowhere
            )
        while newest() == known:  # until it has gone on from where it was
            assert process.poll() is None and time.time() < end, f"after {known}"
            time.sleep(0.02)
        time.sleep(rng.random() * 2 * (number < count))
        process.kill()
        process.wait()
        assert known is None or newest() > known
        resume = ["--resume", str(newest())]


def main(kills: int = 50, completions: int = 1_000_000):
    start = time.perf_counter()
    slowest = hostile(completions)
    print(f"{completions:,} hostile completions, {slowest:.3f} s a megabyte at most", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        kill(kills, Path(folder))
    found = f"no exception, no reward; at most {slowest:.3f} s per megabyte"
    resumed = "all went on from the last complete checkpoint"
    rows = [
        ["hostile completions", f"{completions:,}", found],
        ["kill -9 at a random instant, then --resume", kills, resumed],
    ]
    seconds = f"{time.perf_counter() - start:.0f} s"
    write_table("faults", table(["fault", "count", "outcome"], rows), note=seconds)


if __name__ == "__main__":
    tyro.cli(main)

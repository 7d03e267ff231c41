"""The fault tests at full count: 50 kills at random instants, a million hostile completions.

    python tests/benchmarks/faults.py

The same tests run in CI with fewer kills. Prints what it found, and writes results/faults.md.
"""

import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from launch import start_server
from test_llm_resume import test_kill_at_any_instant_leaves_a_whole_checkpoint as kill_test

import grpo_llm

PIECES = [
    "#",
    "####",
    "7",
    "1,234",
    "\\boxed{",
    "}",
    "$",
    "٣",
    "７",
    "²",
    "-",
    ".",
    "e9",
    "\n",
    " ",
    "\x00",
    "🙂",
    "9**9**9",
    "NaN",
    "inf",
]


def hostile(count: int) -> float:
    """Verifies `count` completions made of pieces like these and random bytes;
    the slowest, in seconds per megabyte."""
    rng, slowest = random.Random(0), 0.0
    for i in range(count):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 12)))
        if i % 3 == 0:
            text += rng.randbytes(rng.randint(0, 40)).decode("utf-8", "replace")
        if i % 100_000 == 0:
            text = (text or "#1") * (1_000_000 // max(len(text), 1))
        start = time.perf_counter()
        found = grpo_llm.verify(text, "-31337")
        if len(text) > 100_000:
            slowest = max(slowest, (time.perf_counter() - start) / len(text) * 1e6)
        assert found == 0.0, repr(text)
    return slowest


def main(kills: int = 50, completions: int = 1_000_000):
    start = time.perf_counter()
    start_server()
    slowest = hostile(completions)
    print(
        f"{completions:,} hostile completions: no exception, no reward; "
        f"a megabyte took {slowest:.3f} s at most",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        kill_test(
            {"prompts_per_step": 4, "group_size": 4, "eval_problems": 8, "output_dir": folder},
            kills=kills,
        )
    print(f"{kills} of {kills} kills left a whole checkpoint, from which the run went on")
    where = f"{platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}"
    lines = [
        "| fault | count | outcome |",
        "|-|-|-|",
        f"| hostile completions | {completions:,} | no exception, no reward; "
        f"at most {slowest:.3f} s per megabyte |",
        f"| kill -9 at a random instant, then --resume | {kills} | "
        "all went on from the last complete checkpoint |",
        "",
        f"{where}, {time.perf_counter() - start:.0f} s",
    ]
    (Path(__file__).parent / "results" / "faults.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)

"""Writes sums.jsonl, beside this file: sums of two digits, in words, for README's commands."""

import itertools
import json
import random
from pathlib import Path

COUNT = 300


def sums() -> str:
    """The file's text: no two of its sums have the same two numbers, in whatever order."""
    rng = random.Random(0)
    pairs = list(itertools.combinations_with_replacement(range(10, 100), 2))
    lines = []
    for pair in rng.sample(pairs, COUNT):
        a, b = rng.sample(pair, 2)
        problem = {"question": f"What is {a} + {b}?", "answer": str(a + b)}
        lines.append(json.dumps(problem))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("sums.jsonl").write_text(sums())

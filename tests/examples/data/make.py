"""Write sums.jsonl and dates.jsonl into this folder. Commands in the pages use these files."""

import itertools
import json
import random
from pathlib import Path

MONTHS = "January February March April May June July August September October November December"


def jsonl(problems: list[tuple[str, str]]) -> str:
    """One line of JSON for each pair of question and answer."""
    rows = [{"question": question, "answer": answer} for question, answer in problems]
    return "".join(json.dumps(row) + "\n" for row in rows)


def sums(count: int = 300) -> list[tuple[str, str]]:
    """Sums of two numbers with two digits. No two sums have the same pair, in either order."""
    rng, problems = random.Random(0), []
    pairs = list(itertools.combinations_with_replacement(range(10, 100), 2))
    for pair in rng.sample(pairs, count):
        a, b = rng.sample(pair, 2)
        problems.append((f"What is {a} + {b}?", str(a + b)))
    return problems


def dates(count: int = 300) -> list[tuple[str, str]]:
    """Different dates, each with the form to write: ("28 July 2003", "2003-07-28")."""
    rng, problems = random.Random(0), {}
    while len(problems) < count:
        day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1950, 2029)
        name = MONTHS.split()[month - 1]
        problems[f"{day} {name} {year}"] = f"{year}-{month:02}-{day:02}"
    return list(problems.items())


if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "sums.jsonl").write_text(jsonl(sums()))
    (folder / "dates.jsonl").write_text(jsonl(dates()))

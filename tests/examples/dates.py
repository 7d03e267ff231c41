"""Dates to be written as numbers, 28 July 2003 as 2003-07-28. `python dates.py` checks itself."""

import random

MONTHS = "January February March April May June July August September October November December"


def load_problems(split):
    """252 dates to train on and 48 to evaluate on."""
    rng = random.Random(0)
    problems = {}
    while len(problems) < 300:
        day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1950, 2029)
        date = f"{day} {MONTHS.split()[month - 1]} {year}"
        problems[f"Write the date {date} in the form YYYY-MM-DD."] = f"{year}-{month:02}-{day:02}"
    problems = random.Random(0).sample(list(problems.items()), len(problems))
    return problems[48:] if split == "train" else problems[:48]


def verify(completion, answer):
    """The completion must end with the date. A digit or a hyphen before it makes it wrong: without
    this rule a model learned to write chains of dates, 2019-07-26-1957-07-26."""
    end = completion.strip().removesuffix(".").rstrip()
    before = end.removesuffix(answer)
    return float(end.endswith(answer) and not before[-1:].isdigit() and before[-1:] != "-")


if __name__ == "__main__":
    train, test = load_problems("train"), load_problems("test")
    print(f"{len(train)} problems to train on, {len(test)} to evaluate on. The first: {train[0]}")
    assert all(verify(f"It is {answer}.", answer) == 1 for _, answer in train + test)
    assert verify("2003-07-28 or 2003-07-29", "2003-07-28") == 0
    assert verify("2019-07-26-1957-07-26", "1957-07-26") == 0

"""Products such as 7 × 12. The last number of a completion counts, in whatever form it is written.
`python products.py` checks itself."""

import random
import re

# 7, -7, 1,234 and 1,234.50; in 10-7 the hyphen is no sign.
NUMBER = re.compile(r"(?<![0-9])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def load_problems(split):
    """84 products to train on and 40 to evaluate on. The smaller factor comes first, so none is in
    both splits with its factors swapped."""
    pairs = [(a, b) for a in range(2, 10) for b in range(a, 21)]
    pairs = random.Random(0).sample(pairs, len(pairs))
    pairs = pairs[40:] if split == "train" else pairs[:40]
    return [(f"What is {a} × {b}?", a * b) for a, b in pairs]


def verify(completion, answer):
    numbers = NUMBER.findall(completion)
    return float(len(numbers) > 0 and float(numbers[-1].replace(",", "")) == answer)


if __name__ == "__main__":
    train, test = load_problems("train"), load_problems("test")
    print(f"{len(train)} problems to train on, {len(test)} to evaluate on. The first: {train[0]}")
    assert all(verify(f"It is {answer}.", answer) == 1 for _, answer in train + test)
    assert verify("84 or 85", 84) == verify("-84", 84) == verify("no number", 84) == 0

"""GSM8K, word problems whose answer is a number. Fetch its two files into this folder first:
curl -LO "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{train,test}.jsonl"
`python gsm8k.py` checks itself.
"""

import json
from pathlib import Path


def load_problems(split):
    problems = []
    for line in Path(__file__).with_name(f"{split}.jsonl").read_bytes().splitlines():
        row = json.loads(line)
        prompt = row["question"] + "\nReason step by step, then end with #### and the number."
        _, answer = row["answer"].split("#### ")
        problems.append((prompt, answer.replace(",", "")))
    return problems


def verify(completion, answer):
    """After the last #### the right number must stand, and nothing else."""
    _, marker, number = completion.rpartition("####")
    try:
        return float(marker != "" and float(number.replace(",", "")) == float(answer))
    except ValueError:  # it is no number
        return 0.0


if __name__ == "__main__":
    train, test = load_problems("train"), load_problems("test")
    print(f"{len(train)} problems to train on, {len(test)} to evaluate on. The first: {train[0]}")
    assert all(verify(f"So it is\n#### {answer}", answer) == 1 for _, answer in train + test)
    assert verify("18", "18") == verify("#### 18 apples", "18") == verify("#### 19", "18") == 0

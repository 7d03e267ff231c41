"""Python functions, judged by running them: here an answer is a list of tests. Every completion is
run as a program, so use a container for a model that you do not trust. `python functions.py` checks
itself.
"""

import random
import secrets
import subprocess
import sys

SECONDS = 5  # after that a completion's program is stopped


def load_problems(split):
    """48 functions to train on and 12 to evaluate on."""
    problems = []
    for word, sign in ("plus", "+"), ("minus", "-"), ("times", "*"):
        for n in range(2, 22):
            prompt = f"Write a Python function f(x) that returns x {word} {n}. Only write code."
            tests = [f"f({x}) == {x} {sign} {n}" for x in (0, 1, 7)]
            problems.append((prompt, tests))
    random.Random(0).shuffle(problems)
    return problems[12:] if split == "train" else problems[:12]


def verify(completion, answer):
    """Whether the code passes all tests: that of the last block, or the whole completion. An f
    whose result equals everything would pass, too."""
    code = completion.split("```python")[-1].split("```")[0]
    mark = secrets.token_hex()  # printed at the end, so a completion that exits early earns nothing
    lines = [code, *(f"assert {test}" for test in answer), f"print({mark!r})"]
    command = [sys.executable, "-I", "-c", "\n".join(lines)]
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": SECONDS}
    try:
        done = subprocess.run(command, **options)
    except (subprocess.TimeoutExpired, ValueError):
        return 0.0  # it does not end, or is no text that Python can run
    return float(done.stdout.endswith(f"{mark}\n".encode()))


if __name__ == "__main__":
    train, test = load_problems("train"), load_problems("test")
    print(f"{len(train)} problems to train on, {len(test)} to evaluate on. The first: {train[0]}")
    code, tests = "def f(x):\n    return x + 2\n", ["f(1) == 3", "f(7) == 9"]
    assert verify(code, tests) == verify(f"Here it is:\n```python\n{code}```", tests) == 1
    for wrong in ("def f(x): return 3", "no code", "exit()", "while True: pass"):
        assert verify(wrong, tests) == 0

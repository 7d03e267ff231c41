"""Python functions, judged by running them: here an answer is a list of tests. Every completion is
run as a program, so use a container for a model that you do not trust. It needs Linux or macOS.
`python functions.py` checks itself.
"""

import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SECONDS = 5  # then a completion's program is stopped, with all that it has started


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
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # The last line makes a file of a secret name, so whoever exits early earns nothing.
        mark = Path(folder, secrets.token_hex())
        lines = [code, *(f"assert {test}" for test in answer), f"open({str(mark)!r}, 'x')"]
        options = {"stdin": subprocess.PIPE, "cwd": folder, "start_new_session": True}
        options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([sys.executable, "-I", "-"], **options) as program:
            try:
                program.communicate("\n".join(lines).encode(errors="replace"), SECONDS)
            except subprocess.TimeoutExpired:
                return 0.0
            finally:  # also after Ctrl-C
                with suppress(ProcessLookupError):  # nothing of it runs any more
                    os.killpg(program.pid, signal.SIGKILL)
        return float(mark.exists())


if __name__ == "__main__":
    train, test = load_problems("train"), load_problems("test")
    print(f"{len(train)} problems to train on, {len(test)} to evaluate on. The first: {train[0]}")
    code, tests = "def f(x):\n    return x + 2\n", ["f(1) == 3", "f(7) == 9"]
    assert verify(code, tests) == verify(f"Here it is:\n```python\n{code}```", tests) == 1
    for wrong in ("def f(x): return 3", "no code", "exit()", "while True: pass"):
        assert verify(wrong, tests) == 0

"""Exercises, in tests/learn/EXERCISES.md, and their answers, in tests/learn/ANSWERS.md:

python tests/learn/exercise.py rloo_llm compute_advantages   # deletes the function's body
python tests/learn/exercise.py --bug 1                       # plants a bug for you to find

`git checkout rloo_llm.py` brings the script back.
"""

import ast
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import bugs
from scripts import PATHS, ROOT

PAGE = (ROOT / "tests/learn/EXERCISES.md").read_text()
# Of each bug: number, command, the values to look at, what the bug does to them, the test to run
CASES = re.findall(r"^\| (\d+) \| `(.+?)` \| (.+?) \| (.+?) \| `(.+?)` \|$", PAGE, re.M)


def blanked(text: str, function: str) -> str:
    """The script with this function's docstring and nothing else below its head."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            lines = text.splitlines(keepends=True)
            body = "    raise NotImplementedError  # your turn\n"
            return "".join([*lines[: node.body[0].end_lineno], body, *lines[node.end_lineno :]])
    sys.exit(f"error: there is no function {function}")


def plant(number):
    path, text = bugs.planted(int(number))
    path.write_text(text)
    _, command, look, effect, test = CASES[int(number) - 1]
    print(f"{path.name} now has bug {number}. Run\n\n    {command}\n")
    print(f"and look at {look}. What the bug does: {effect}.")
    print(f"Once you have fixed it, this passes: python -m pytest -q {test}")
    print(f"And when you have named the cause, unfold bug {number} in tests/learn/ANSWERS.md")


def load_problems(split):
    """This file is also the task of bug 5's run: the script's own sums …"""
    import grpo_llm

    return grpo_llm.load_problems(split)


def verify(completion, answer):
    """… from which nothing can be learned, as all rewards are equal."""
    return 0.7


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # for terminals without UTF-8
    match sys.argv[1:]:
        case ["--bug", number] if number in [case[0] for case in CASES]:
            plant(number)
        case [script, function] if script.removesuffix(".py") in PATHS:
            path = ROOT / PATHS[script.removesuffix(".py")]
            path.write_text(blanked(path.read_text(), function))
            print(f"{path.name}: the body of {function} is gone; write it from its docstring")
        case _:
            sys.exit(__doc__)

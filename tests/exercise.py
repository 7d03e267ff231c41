"""Deletes a function's body, for an exercise: python tests/exercise.py rloo_llm compute_advantages

What to do then is in tests/EXERCISES.md; `git checkout rloo_llm.py` brings the body back.
"""

import ast
import sys

from lineage import PATHS, ROOT


def blanked(text: str, function: str) -> str:
    """The script with this function's docstring and nothing else below its head."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            lines = text.splitlines(keepends=True)
            body = "    raise NotImplementedError  # your turn\n"
            return "".join([*lines[: node.body[0].end_lineno], body, *lines[node.end_lineno :]])
    sys.exit(f"error: there is no function {function}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1].removesuffix(".py") not in PATHS:
        sys.exit(__doc__)
    path = ROOT / PATHS[sys.argv[1].removesuffix(".py")]
    path.write_text(blanked(path.read_text(), sys.argv[2]))
    print(f"{path.name}: the body of {sys.argv[2]} is gone; write it from its docstring")

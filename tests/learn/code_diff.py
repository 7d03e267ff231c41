"""Shows a diff of code alone, without comments and docstrings, a statement a line:

python tests/learn/code_diff.py grpo_llm gspo_llm
"""

import ast
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).parents[1]))
from lineage import PATHS, source


def code_diff(parent, child):
    """The diff of their statements, one a line, without comments and docstrings."""
    with TemporaryDirectory() as folder:
        for script in (parent, child):
            text = re.sub('""".*?"""', "pass", source(script), flags=re.S)
            lines = ast.unparse(ast.parse(text)).splitlines(keepends=True)
            kept = [line for line in lines if line.strip() not in ("pass", "")]
            Path(folder, script).write_text("".join(kept))
        command = ["diff", "-U1", "-pd", parent, child]
        diff = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
        return diff.partition("@@")[2]  # without the names of the files


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # for terminals without UTF-8
    names = [name.removesuffix(".py") for name in sys.argv[1:]]
    if len(names) != 2 or {*names} - PATHS.keys():
        sys.exit(f"{__doc__}\nThe scripts: {' '.join(PATHS)}")
    print(code_diff(*names))

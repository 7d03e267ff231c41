"""Which scripts there are, which one each descends from, and how they differ.

python tests/scripts.py grpo_llm gspo_llm   # prints their diff without comments and docstrings
python tests/scripts.py                     # writes README's numbers of lines; run it after an edit
"""

import ast
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
MARKER = "# From here on, all scripts of this family are the same, byte for byte.\n"
# Each script and its parent, the script that README compares it with.
CLASSIC = {"reinforce": "", "actor_critic": "reinforce", "trpo": "actor_critic", "ppo": "trpo"}
LLM = {"rloo_llm": "", "grpo_llm": "rloo_llm"}
LLM |= dict.fromkeys(["dapo_llm", "gspo_llm", "cispo_llm"], "grpo_llm")
FAMILY = CLASSIC | LLM
PATHS = {name: f"{name}.py" for name in FAMILY}
CLASSIC_SCRIPTS, LLM_SCRIPTS, SCRIPTS = list(CLASSIC), list(LLM), list(FAMILY)


def source(script):
    return (ROOT / PATHS[script]).read_text()


def parts(text):
    """Name → text, in order: the module's docstring (`__doc__`), `imports`, each field of Args
    (`Args.beta`), each function and class, the `end`. Each begins where the one before ends."""
    lines, ends = text.splitlines(keepends=True), {}
    for node in ast.parse(text).body:
        name = getattr(node, "name", "")
        if isinstance(node, ast.Expr) and not ends:
            ends["__doc__"] = node.end_lineno
        elif name == "Args":
            ends["imports"] = node.lineno
            for field in node.body:
                target = getattr(field, "target", None)
                ends[f"Args.{target.id if target else field.name}"] = field.end_lineno
        elif name:
            ends[name] = node.end_lineno
    ends["end"] = len(lines)
    cuts = zip(ends, [0, *ends.values()], ends.values(), strict=False)
    return {name: "".join(lines[start:end]) for name, start, end in cuts}


def code_diff(parent, child):
    """The diff of their statements, one per line, without comments and docstrings."""
    with TemporaryDirectory() as folder:
        for script in (parent, child):
            text = re.sub('""".*?"""', "pass", source(script), flags=re.S)
            lines = ast.unparse(ast.parse(text)).splitlines(keepends=True)
            code = [line for line in lines if line.strip() not in ("pass", "")]
            Path(folder, script).write_text("".join(code))
        command = ["diff", "-U1", "-d", parent, child]
        diff = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
        lines = Path(folder, child).read_text().splitlines()
    hunks = re.split(r"^@@ .*\+(\d+).*@@\n", diff, flags=re.M)[1:]  # line, text, line, text, …
    named = []
    for start, hunk in zip(hunks[::2], hunks[1::2], strict=True):
        unchanged = re.match("(?: .*\n)*", hunk)[0].count("\n")
        above = lines[: int(start) + unchanged]
        names = re.findall(r"^(?:def|class) (\w+)", "\n".join(above), re.M)
        named.append(f"@@ {names[-1] if names else 'imports'}\n{hunk}")
    return "".join(named)


def changed(child):
    """The number of lines in the diff to the parent, and in brackets those of code."""
    parent = FAMILY[child]
    if not parent:
        return "–"
    command = ["diff", PATHS[parent], PATHS[child]]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    of_code = len(re.findall("^[+-]", code_diff(parent, child), re.M))
    return f"{len(re.findall('^[<>]', diff, re.M))} ({of_code})"


def with_counts(page):
    """README with the numbers of lines that each file of the table changes now."""
    row = re.compile(r"^(\| \[(\w+)\.py\].*? \| .*? \|) .*? \|", re.M)
    return row.sub(lambda match: f"{match[1]} {changed(match[2])} |", page)


if __name__ == "__main__":
    names = [name.removesuffix(".py") for name in sys.argv[1:]]
    if len(names) == 2 and PATHS.keys() >= {*names}:
        print(code_diff(*names))
    elif names:
        sys.exit(f"{__doc__}\nThe scripts: {' '.join(PATHS)}")
    else:
        readme = ROOT / "README.md"
        readme.write_text(with_counts(readme.read_text()))

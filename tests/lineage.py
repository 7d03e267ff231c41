"""The scripts, their families, and the parts of a script's text."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKER = "# From here on, all scripts of this family are the same, byte for byte.\n"
FAMILY = {  # each script's parent, with which README compares it by `diff`
    "reinforce": "",
    "actor_critic": "reinforce",
    "trpo": "actor_critic",
    "ppo": "trpo",
    "rloo_llm": "",
    "grpo_llm": "rloo_llm",
    "dapo_llm": "grpo_llm",
    "gspo_llm": "grpo_llm",
    "cispo_llm": "grpo_llm",
    "ppo_llm": "grpo_llm",  # an example, which has a critic below the marker, too
}
PATHS = {name: f"{name}.py" for name in FAMILY} | {"ppo_llm": "tests/examples/ppo_llm.py"}
SCRIPTS = list(FAMILY)
LLM_SCRIPTS = [name for name in SCRIPTS if name.endswith("_llm")]
CLASSIC_SCRIPTS = [name for name in SCRIPTS if not name.endswith("_llm")]


def source(script):
    return (ROOT / PATHS[script]).read_text()


def changed(child):
    """The number of lines in the diff to the parent."""
    command = ["diff", PATHS[FAMILY[child]], PATHS[child]]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return len(re.findall("^[<>]", diff, re.M))


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

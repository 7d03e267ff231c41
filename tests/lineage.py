"""The scripts, their families, and the parts of a script's text."""

import ast
from pathlib import Path

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

"""Who descends from whom, how large each script may be, and which of its parts are its own.

All else is the same text in parent and child. test_lineage.py checks it, and carry.py carries an
edit from one script to its sisters. A new script needs a row in FAMILY and one in OWN.
"""

import ast
import difflib
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Row(NamedTuple):
    parent: str
    changed: int  # lines that the diff to the parent may have
    lines: int  # lines that it may have
    tokens: int  # code tokens that it may have


FAMILY = {
    "reinforce": Row("", 0, 420, 3000),
    "actor_critic": Row("reinforce", 160, 420, 3000),
    "trpo": Row("actor_critic", 200, 480, 3300),
    "ppo": Row("trpo", 215, 450, 3300),
    "rloo_llm": Row("", 0, 800, 5850),
    "grpo_llm": Row("rloo_llm", 90, 800, 5850),
    "dapo_llm": Row("grpo_llm", 95, 840, 6150),
    "gspo_llm": Row("grpo_llm", 48, 800, 5850),
    "cispo_llm": Row("grpo_llm", 60, 800, 5850),
    "ppo_llm": Row("grpo_llm", 200, 900, 6900),
}
# What differs from the parent, or which one of the two lacks: functions, classes, fields of Args,
# and `imports`, which stands for all lines that are in none of these.
OWN = {
    "actor_critic": "Args.psi Args.num_envs Args.num_steps Args.learning_rate Args.max_grad_norm "
    "compute_advantages rescale_returns update fit_critic rollouts imports",
    "trpo": "Args.ent_coef Args.num_steps Args.learning_rate Args.max_grad_norm Args.max_kl "
    "Args.cg_steps Args.damping Args.gae_lambda compute_advantages rescale_returns flat_gradient "
    "conjugate_gradient line_search update fit_critic imports",
    "ppo": "Args.max_kl Args.cg_steps Args.damping Args.update_epochs Args.learning_rate "
    "Args.max_grad_norm Args.surrogate Args.clip_coef Args.beta Args.target_kl Args.ent_coef "
    "flat_gradient conjugate_gradient line_search update fit_critic mean_kl surrogate imports",
    "grpo_llm": "Args.baseline Args.clip_low Args.clip_high Args.beta Args.scale_rewards "
    "Args.length_norm Args.minibatches Args.learning_rate Args.__post_init__ compute_advantages "
    "token_weights surrogate train_step",
    "dapo_llm": "Args.clip_high Args.overlong_cache Args.max_resample Args.beta Args.length_norm "
    "Args.__post_init__ token_weights overlong_penalty dynamic_rollout train_step",
    "gspo_llm": "Args.clip_low Args.clip_high Args.beta Args.length_norm token_weights surrogate",
    "cispo_llm": "Args.clip_low Args.clip_high Args.beta Args.length_norm token_weights surrogate",
    "ppo_llm": "Args.beta Args.scale_rewards Args.length_norm compute_advantages token_weights "
    "surrogate train_minibatch train_step main token_logprobs evaluate check_args "
    "imports Args.gamma Args.gae_lambda Args.vf_coef Args.ent_coef "
    "at_last_token mean_and_variance whiten completion_logits of_tokens token_values "
    "batch_values add_critic",
}

# Where each script is, from ROOT. PPO for language models is there for the experiments alone.
PATHS = {path.stem: path.name for path in ROOT.glob("*.py")}
PATHS["ppo_llm"] = "tests/examples/ppo_llm.py"
SCRIPTS = sorted(PATHS, key=lambda name: [*FAMILY, name].index(name))
LLM_SCRIPTS = [name for name in SCRIPTS if name.endswith("_llm")]
CLASSIC_SCRIPTS = [name for name in SCRIPTS if not name.endswith("_llm")]
FAMILIES = {"llm": LLM_SCRIPTS, "classic": CLASSIC_SCRIPTS}


def family_of(script):
    return "llm" if script.endswith("_llm") else "classic"


def texts(family):
    """Script → its text, of all scripts of the family."""
    return {script: (ROOT / PATHS[script]).read_text() for script in FAMILIES[family]}


def changed(child):
    """Lines of the diff to the parent."""
    a, b = (PATHS[name] for name in (FAMILY[child].parent, child))
    diff = subprocess.run(["diff", a, b], cwd=ROOT, capture_output=True, text=True).stdout
    return len(re.findall("^[<>]", diff, re.M))


def parts(text):
    """Name → text of the module's docstring (`__doc__`), of each function and class, and of each
    field of Args (`Args.beta`), in order; with the comments right above."""
    lines, found = text.splitlines(), {}

    def add(name, node):
        first = min(each.lineno for each in [node, *getattr(node, "decorator_list", [])])
        while lines[first - 2].lstrip().startswith("#"):
            first -= 1
        found[name] = "\n".join(lines[first - 1 : node.end_lineno])

    for node in ast.parse(text).body:
        if isinstance(node, ast.Expr):
            found["__doc__"] = "\n".join(lines[: node.end_lineno])
        elif getattr(node, "name", "") == "Args":
            for field in node.body:
                add(f"Args.{field.target.id if hasattr(field, 'target') else field.name}", field)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            add(node.name, node)
    return found


def imports(text):
    """The lines that are in no part: imports, constants, section rules, dependencies."""
    for part in parts(text).values():
        text = text.replace(part, "", 1)
    return "\n".join(line for line in text.splitlines() if line)


def is_own(name, script):
    """Whether this script has something else of this name than its parent."""
    return name == "__doc__" or name in OWN.get(script, "").split()


def shared(name, a, b):
    """Whether the part must be the same in both scripts: no one between them has its own."""

    def line(script):
        return {script, *line(FAMILY[script].parent)} if script else set()

    return not any(is_own(name, script) for script in line(a) ^ line(b))


def conflicts(sources):
    """Where git has marked a conflict."""
    return [
        f"{script}.py:{number}: conflict"
        for script, text in sources.items()
        for number, line in enumerate(text.splitlines(), 1)
        if line.startswith("<<<<<<< ")
    ]


def complaints(sources):
    """What is wrong with these texts of scripts, a paragraph each."""
    missing = [name for name in sources if name not in FAMILY]
    missing = [f"{name}.py: give it a row in FAMILY of tests/lineage.py" for name in missing]
    if missing or conflicts(sources):
        return missing + conflicts(sources)
    named, found = {}, []
    for script, text in sources.items():
        named[script] = parts(text) | {"imports": imports(text)}
    for child in sources:
        parent = FAMILY[child].parent
        if not parent:
            continue
        a, b = named[parent], named[child]
        for name in dict.fromkeys([*a, *b, *OWN.get(child, "").split()]):
            old, new = a.get(name, ""), b.get(name, "")
            if old == new and is_own(name, child):
                found.append(f"`{name}` of {child}.py is {parent}.py's, but OWN names it")
            if old != new and not is_own(name, child):
                old, new = old.splitlines(), new.splitlines()
                found.append(
                    f"`{name}` differs between {parent}.py and {child}.py. If that is the "
                    f"algorithm, name it in OWN of tests/lineage.py, under {child}; if not, carry "
                    "the change over from the script that you edited, by one of\n"
                    f"    python tests/carry.py {parent}.py\n    python tests/carry.py {child}.py\n"
                    + "\n".join(difflib.unified_diff(old, new, parent, child, lineterm=""))
                )
        if [name for name in a if name in b] != [name for name in b if name in a]:
            found.append(f"{child}.py and {parent}.py order what they share differently")
    return found

"""The two families of scripts: who descends from whom, how large each may be, and what may differ.

All else is the same text in all scripts of a family. test_lineage.py checks it, and carry.py
carries an edit from one script to its sisters. A new script needs a line in LIMITS, and its own
parts in MAY_DIFFER and ONLY_IN.
"""

import ast
import difflib
from itertools import combinations, pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Script: its parent, the lines that their diff may have, and its code tokens. All are about a tenth
# above what is there, so that a bug can be mended: they are to be raised or lowered at will.
LIMITS = {
    "reinforce": (None, 0, 2600),
    "actor_critic": ("reinforce", 130, 2600),
    "trpo": ("actor_critic", 172, 2900),
    "ppo": ("trpo", 190, 2900),
    "rloo_llm": (None, 0, 7600),
    "grpo_llm": ("rloo_llm", 129, 7750),
    "gspo_llm": ("grpo_llm", 66, 7770),
    "cispo_llm": ("grpo_llm", 72, 7700),
    "dapo_llm": ("grpo_llm", 126, 8100),
    "ppo_llm": ("grpo_llm", 220, 8300),
}
# Where each script is, from ROOT. PPO for language models is there for the experiments alone.
PATHS = {path.stem: path.name for path in ROOT.glob("*.py")}
PATHS["ppo_llm"] = "tests/examples/ppo_llm.py"
# All scripts there are, those of LIMITS first and in its order.
SCRIPTS = sorted(PATHS)
SCRIPTS.sort(key=lambda name: [*LIMITS, name].index(name))
LLM_SCRIPTS = [name for name in SCRIPTS if name.endswith("_llm")]
CLASSIC_SCRIPTS = [name for name in SCRIPTS if not name.endswith("_llm")]
FAMILIES = {"llm": LLM_SCRIPTS, "classic": CLASSIC_SCRIPTS}
BUDGETS = [(parent, name, lines) for name, (parent, lines, _) in LIMITS.items() if parent]

# What an algorithm may change: groups of scripts that share a text of their own. The scripts that
# are not named share one more text, two of them at least. A field of Args is written `Args.beta`.
MAY_DIFFER = {
    "llm": {
        "Args.clip_low": ["gspo_llm"],
        "Args.clip_high": ["grpo_llm ppo_llm", "dapo_llm", "gspo_llm", "cispo_llm"],
        "Args.beta": ["rloo_llm ppo_llm", "grpo_llm"],
        "Args.minibatches": ["rloo_llm"],
        "Args.__post_init__": ["dapo_llm"],
        "compute_advantages": ["rloo_llm", "ppo_llm"],
        "token_weights": ["rloo_llm dapo_llm cispo_llm ppo_llm", "grpo_llm", "gspo_llm"],
        "importance_ratio": ["gspo_llm"],
        "surrogate": ["rloo_llm", "cispo_llm", "ppo_llm"],
        "is_clipped": ["cispo_llm", "ppo_llm"],
        "train_step": ["rloo_llm", "dapo_llm", "ppo_llm"],
        "train_minibatch": ["rloo_llm", "ppo_llm"],
        "token_logprobs": ["ppo_llm"],
        "check_args": ["dapo_llm", "ppo_llm"],
    },
    "classic": {
        "Args.update_epochs": ["ppo"],
        "Args.ent_coef": ["ppo"],
        "Args.num_steps": ["actor_critic"],
        "Args.num_envs": ["reinforce"],
        "Args.learning_rate": ["reinforce", "actor_critic", "trpo", "ppo"],
        "Args.total_timesteps": ["reinforce"],
        "Args.max_grad_norm": ["reinforce trpo"],
        "compute_advantages": ["reinforce", "actor_critic"],
        "update": ["reinforce", "actor_critic", "trpo", "ppo"],
        "fit_critic": ["actor_critic"],
        "rollouts": ["reinforce"],
    },
}
# Who has what not all of the family have.
ONLY_IN = {
    "llm": {
        "Args.baseline": "rloo_llm",
        "Args.clip_low": "grpo_llm dapo_llm gspo_llm ppo_llm",
        "Args.clip_high": "grpo_llm dapo_llm gspo_llm cispo_llm ppo_llm",
        "Args.gamma": "ppo_llm",
        "Args.gae_lambda": "ppo_llm",
        "Args.vf_coef": "ppo_llm",
        "Args.ent_coef": "ppo_llm",
        "Args.scale_rewards": "grpo_llm dapo_llm gspo_llm cispo_llm",
        "Args.length_norm": "grpo_llm",
        "Args.max_resample": "dapo_llm",
        "Args.overlong_cache": "dapo_llm",
        "at_last_token": "ppo_llm",
        "whiten": "ppo_llm",
        "importance_ratio": "grpo_llm dapo_llm gspo_llm cispo_llm ppo_llm",
        "is_clipped": "grpo_llm dapo_llm gspo_llm cispo_llm ppo_llm",
        "completion_logits": "ppo_llm",
        "of_tokens": "ppo_llm",
        "token_values": "ppo_llm",
        "batch_values": "ppo_llm",
        "add_critic": "ppo_llm",
        "overlong_penalty": "dapo_llm",
        "informative": "dapo_llm",
        "dynamic_rollout": "dapo_llm",
    },
    "classic": {
        "Args.psi": "reinforce",
        "Args.ent_coef": "reinforce actor_critic ppo",
        "Args.num_steps": "actor_critic trpo ppo",
        "Args.gae_lambda": "trpo ppo",
        "Args.max_kl": "trpo",
        "Args.cg_steps": "trpo",
        "Args.damping": "trpo",
        "Args.surrogate": "ppo",
        "Args.clip_coef": "ppo",
        "Args.beta": "ppo",
        "Args.target_kl": "ppo",
        "flat_gradient": "trpo",
        "conjugate_gradient": "trpo",
        "line_search": "trpo",
        "mean_kl": "ppo",
        "surrogate": "ppo",
        "rescale_returns": "actor_critic",
        "fit_critic": "reinforce actor_critic trpo",
    },
}
# Where a script departs by some words from what it shares: these, and what all others have there.
DEPARTURES = {
    "ppo_llm": {
        "rollout_metrics": ("rewards.std(correction=0)", "rewards.std(1).mean()"),
        "describe_group": ("rewards.std(1, correction=0)", "rewards.std(1)"),
        "save_checkpoint": ('    state |= {"critic": model.critic.state_dict()}\n', ""),
        "main": ("    add_critic(model, state, args)\n", ""),
    }
}
# What a script imports otherwise than the model of its family: both forms.
MODEL = {"llm": "grpo_llm", "classic": "ppo"}
LITERAL = {"from typing import Literal"}
NAMES = "from torch.distributions import Categorical, Distribution, Independent, Normal"
IMPORTS_MAY_DIFFER = {
    "ppo_llm": {"import copy"},
    "actor_critic": LITERAL,
    "trpo": LITERAL | {NAMES, f"{NAMES}, kl_divergence"},
}


def family_of(script):
    return "llm" if script.endswith("_llm") else "classic"


def texts(family):
    """Script → its text, of all scripts of the family."""
    return {script: (ROOT / PATHS[script]).read_text() for script in FAMILIES[family]}


def shared(name, a, b):
    """Whether the part of this name must be the same in both scripts. A docstring never is."""
    family = family_of(a)
    groups = [group.split() for group in MAY_DIFFER[family].get(name, [])]
    owners = ONLY_IN[family].get(name, f"{a} {b}").split()
    together = all((a in group) == (b in group) for group in groups)
    return together and {a, b} <= {*owners} and name != "__doc__"


def parts(text):
    """Name → lines of the module's docstring (`__doc__`), of each function and class, and of each
    field of Args with a docstring under it (`Args.beta`), in order; with comments right above."""
    lines, found = text.splitlines(), {}

    def add(name, node, last=None):
        first = min(each.lineno for each in [node, *getattr(node, "decorator_list", [])])
        while first > 1 and lines[first - 2].lstrip().startswith("#"):
            first -= 1
        found[name] = "\n".join(lines[first - 1 : (last or node).end_lineno])

    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for field, below in pairwise([*node.body, None]):
                if isinstance(field, ast.FunctionDef):
                    add(f"Args.{field.name}", field)
                if isinstance(field, ast.AnnAssign):
                    add(f"Args.{field.target.id}", field, isinstance(below, ast.Expr) and below)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            add(node.name, node)
        elif isinstance(node, ast.Expr):
            add("__doc__", node)
    return found


def unnamed(text):
    """The lines that are in no part: imports, section rules, constants."""
    for part in parts(text).values():
        text = text.replace(part, "", 1)
    return {line for line in text.splitlines() if line}


def conflicts(sources):
    """Where git has marked a conflict."""
    marks = [
        f"{script}.py:{number}: conflict"
        for script, text in sources.items()
        for number, line in enumerate(text.splitlines(), 1)
        if line.startswith("<<<<<<< ")
    ]
    return marks


def complaints(family, sources=None):
    """What is wrong with the texts of a family's scripts, a paragraph each."""
    sources = sources or texts(family)
    if conflicts(sources):
        return conflicts(sources)
    named = {script: parts(text) for script, text in sources.items()}
    found = check_presence(family, named) + check_order(named) + check_departures(named)
    found += compare(family, {script: taken_back(script, named[script]) for script in named})
    for script, text in sources.items():
        different = unnamed(text) ^ unnamed(sources[MODEL[family]])
        if different != IMPORTS_MAY_DIFFER.get(script, set()):
            found.append(
                f"{script}.py and {MODEL[family]}.py differ in an import, a constant or a section "
                f"rule: carry it over, or declare it in IMPORTS_MAY_DIFFER: {sorted(different)}"
            )
    return found


def taken_back(script, named):
    """The script's parts without its departures."""
    edits = DEPARTURES.get(script, {})
    return {name: text.replace(*edits.get(name, ("", "")), 1) for name, text in named.items()}


def check_departures(named):
    found = []
    for script in named.keys() & DEPARTURES:
        for name, (own, _) in DEPARTURES[script].items():
            if own not in named[script].get(name, ""):
                found.append(f"`{name}` of {script}.py has no {own!r}, as DEPARTURES says")
    return found


def compare(family, named):
    """Scripts of one group must have the same text, of two groups different ones."""
    parents = [{script, parent} for script, (parent, *_) in LIMITS.items()]
    pairs = sorted(combinations(named, 2), key=lambda pair: {*pair} not in parents)
    found = {}  # one for each name, of parent and child if it can be
    for a, b in pairs:
        for name in named[a].keys() & named[b].keys():
            same_text = named[a][name] == named[b][name]
            declared = {a, b} <= {*ONLY_IN[family].get(name, f"{a} {b}").split()}  # else said above
            if same_text and declared and not shared(name, a, b):
                found.setdefault(
                    name,
                    f"`{name}` is the same in {a}.py and {b}.py, but MAY_DIFFER has them in "
                    "different groups: put both into one string, or drop the entry",
                )
            if shared(name, a, b) and not same_text:
                old, new = named[a][name].splitlines(), named[b][name].splitlines()
                found.setdefault(
                    name,
                    f"`{name}` differs between {a}.py and {b}.py. If that is the algorithm, name "
                    f"the newer of them under `{name}` in MAY_DIFFER of tests/lineage.py; if not, "
                    "carry the change over from the script that you edited:\n"
                    f"    python tests/carry.py {a}.py        or        "
                    f"python tests/carry.py {b}.py\n"
                    + "\n".join(difflib.unified_diff(old, new, a, b, lineterm="")),
                )
    for name, groups in MAY_DIFFER[family].items():
        others = {script for script in named if name in named[script]}
        others -= {*" ".join(groups).split()}
        if len(others) == 1:
            found.setdefault(name, f"`{name}`: name {others.pop()} in MAY_DIFFER, too")
    return [found[name] for name in sorted(found)]


def check_presence(family, named):
    found = []
    for name in sorted({name for each in named.values() for name in each}):
        owners = {script for script in named if name in named[script]}
        wanted = {*ONLY_IN[family].get(name, " ".join(named)).split()}
        if owners != wanted:
            found.append(
                f"`{name}` is in {sorted(owners)}, and should be in {sorted(wanted)}: "
                "carry it over, or declare it in ONLY_IN of tests/lineage.py"
            )
    return found


def check_order(named):
    found = []
    for a, b in combinations(named, 2):
        both = [name for name in named[a] if name in named[b]]
        if both != [name for name in named[b] if name in named[a]]:
            found.append(f"{a}.py and {b}.py order what they share differently")
    return found

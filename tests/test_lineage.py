"""The scripts may differ in nothing but the algorithm: same text, same order, small diffs."""

import ast
import difflib
import re
import subprocess
from itertools import combinations, pairwise

import pytest
from conftest import CLASSIC_SCRIPTS, LLM_SCRIPTS, ROOT

# What an algorithm may change: groups of scripts that share a text of their own. The scripts that
# are not named share one more text, two of them at least, and what is not listed here is the same
# in every script that has it, byte for byte.
LLM_MAY_DIFFER = {
    "compute_advantages": ["rloo_llm"],
    "token_weights": ["rloo_llm dapo_llm cispo_llm", "grpo_llm", "gspo_llm"],
    "surrogate": ["rloo_llm", "gspo_llm", "cispo_llm"],
    "train_step": ["rloo_llm", "dapo_llm"],
    "train_minibatch": ["rloo_llm", "dapo_llm", "cispo_llm"],
    "main": ["dapo_llm"],
    "check_args": ["dapo_llm"],
}
LLM_ARGS_MAY_DIFFER = {
    "clip_low": ["gspo_llm"],
    "clip_high": ["grpo_llm", "dapo_llm", "gspo_llm", "cispo_llm"],
    "beta": ["rloo_llm", "grpo_llm", "gspo_llm cispo_llm"],
    "minibatches": ["rloo_llm"],
    "__post_init__": ["dapo_llm"],
}
LLM_ONLY_IN = {
    "overlong_penalty": {"dapo_llm"},
    "informative": {"dapo_llm"},
    "dynamic_rollout": {"dapo_llm"},
}
LLM_ARGS_ONLY_IN = {
    "baseline": {"rloo_llm"},
    "clip_low": {"grpo_llm", "dapo_llm", "gspo_llm"},
    "clip_high": set(LLM_SCRIPTS) - {"rloo_llm"},
    "beta": set(LLM_SCRIPTS) - {"dapo_llm"},
    "scale_rewards": set(LLM_SCRIPTS) - {"rloo_llm"},
    "length_norm": {"grpo_llm"},
    "max_resample": {"dapo_llm"},
    "overlong_cache": {"dapo_llm"},
}
CLASSIC_MAY_DIFFER = {
    "compute_advantages": ["reinforce", "actor_critic"],
    "surrogate": ["trpo", "ppo"],
    "prepare": ["reinforce", "actor_critic"],
    "update": ["reinforce", "actor_critic", "trpo", "ppo"],
    "fit_critic": ["actor_critic"],
    "rollouts": ["reinforce"],
    "check_args": ["reinforce actor_critic", "trpo", "ppo"],
    "train": ["reinforce actor_critic", "trpo", "ppo"],
}
CLASSIC_ARGS_MAY_DIFFER = {
    "update_epochs": ["ppo"],
    "ent_coef": ["ppo"],
    "num_steps": ["actor_critic"],
    "num_envs": ["reinforce"],
    "learning_rate": ["reinforce", "actor_critic", "trpo", "ppo"],
    "total_timesteps": ["reinforce"],
    "max_grad_norm": ["reinforce trpo"],
}
CLASSIC_ONLY_IN = {
    **dict.fromkeys(
        ("flat_gradient", "fisher_vector_product", "conjugate_gradient", "line_search"), {"trpo"}
    ),
    **dict.fromkeys(("is_clipped", "adapt_beta", "critic_loss", "mean_kl"), {"ppo"}),
    "surrogate": {"trpo", "ppo"},
    "rescale_returns": {"actor_critic"},
    "fit_critic": set(CLASSIC_SCRIPTS) - {"ppo"},
}
CLASSIC_ARGS_ONLY_IN = {
    "psi": {"reinforce"},
    "ent_coef": set(CLASSIC_SCRIPTS) - {"trpo"},
    "num_steps": set(CLASSIC_SCRIPTS) - {"reinforce"},
    "gae_lambda": {"trpo", "ppo"},
    **dict.fromkeys(("max_kl", "cg_steps", "damping"), {"trpo"}),
    **dict.fromkeys(
        ("surrogate", "clip_low", "clip_high", "beta", "target_kl", "clip_values"), {"ppo"}
    ),
}
# What a script imports otherwise than the model of its family, ppo.py or grpo_llm.py: both forms.
LITERAL = {"from typing import Literal"}
COPIES = {"from dataclasses import dataclass", "from dataclasses import dataclass, replace"}
NAMES = "from torch.distributions import Categorical, Distribution, Independent, Normal"
IMPORTS_MAY_DIFFER = {
    "reinforce": COPIES,
    "actor_critic": LITERAL | COPIES,
    "trpo": LITERAL | COPIES | {NAMES, f"{NAMES}, kl_divergence"},
}
# Each script but the first of its family with its parent, and how long their diff may be.
BUDGETS = [
    ("reinforce", "actor_critic", 150),
    ("actor_critic", "trpo", 230),
    ("trpo", "ppo", 240),
    ("rloo_llm", "grpo_llm", 85),
    ("grpo_llm", "gspo_llm", 60),
    ("grpo_llm", "cispo_llm", 65),
    ("grpo_llm", "dapo_llm", 150),
]


def definitions(name):
    """Name → source of every top-level function and class but Args, with decorators, in order."""
    source = (ROOT / f"{name}.py").read_text()
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "Args":
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def fields(name):
    """Name → source of every field of Args with the docstring under it, and of its methods."""
    source = (ROOT / f"{name}.py").read_text()
    body = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Args"
    ).body
    found = {}
    for field, doc in pairwise([*body, None]):
        if isinstance(field, ast.FunctionDef):
            found[field.name] = ast.get_source_segment(source, field)
        if isinstance(field, ast.AnnAssign):
            assert isinstance(doc, ast.Expr) and isinstance(doc.value.value, str), (
                f"{name}.py: {field.target.id} has no docstring"
            )
            found[field.target.id] = (
                ast.get_source_segment(source, field) + "\n" + ast.get_source_segment(source, doc)
            )
    return found


def compare(parts, table):
    """Scripts of one group must have the same text, of two groups different ones: what is wrong."""
    parents = [{a, b} for a, b, _ in BUDGETS]
    pairs = sorted(combinations(parts, 2), key=lambda pair: set(pair) not in parents)
    complaints = {}  # one for each name, of parent and child if it can be
    for a, b in pairs:
        for name in parts[a].keys() & parts[b].keys():
            groups = [group.split() for group in globals()[table].get(name, [])]
            same_group = all((a in group) == (b in group) for group in groups)
            same_text = parts[a][name] == parts[b][name]
            if same_text and not same_group:
                complaints.setdefault(
                    name,
                    f"`{name}` is the same in {a}.py and {b}.py, but {table} has them in different "
                    "groups: put both into one string, or drop the entry",
                )
            if same_group and not same_text:
                old, new = parts[a][name].splitlines(), parts[b][name].splitlines()
                complaints.setdefault(
                    name,
                    f"`{name}` differs between {a}.py and {b}.py. If that is the algorithm, name "
                    f"the newer of them under `{name}` in {table}; if not, carry the change over:\n"
                    + "\n".join(difflib.unified_diff(old, new, a, b, lineterm="")),
                )
    for name, groups in globals()[table].items():
        unnamed = {script for script in parts if name in parts[script]}
        unnamed -= set(" ".join(groups).split())
        if len(unnamed) == 1:
            complaints.setdefault(name, f"`{name}`: name {unnamed.pop()} in {table}, too")
    return [complaints[name] for name in sorted(complaints)]


def check_presence(parts, table):
    complaints = []
    for name in sorted({name for part in parts.values() for name in part}):
        found = {script for script in parts if name in parts[script]}
        wanted = globals()[table].get(name, set(parts))
        if name not in globals()[table] and found != wanted:
            complaints.append(f"`{name}`: only in {sorted(found)}: declare that in {table}")
        elif found != wanted:
            complaints.append(f"`{name}`: in {sorted(found)}, but {table} says {sorted(wanted)}")
    return complaints


def check_order(parts):
    complaints = []
    for a, b in combinations(parts, 2):
        shared = [name for name in parts[a] if name in parts[b]]
        if shared != [name for name in parts[b] if name in parts[a]]:
            complaints.append(f"{a}.py and {b}.py order what they share differently")
    return complaints


@pytest.mark.parametrize(
    "scripts,read,tables",
    [
        (LLM_SCRIPTS, definitions, "LLM"),
        (LLM_SCRIPTS, fields, "LLM_ARGS"),
        (CLASSIC_SCRIPTS, definitions, "CLASSIC"),
        (CLASSIC_SCRIPTS, fields, "CLASSIC_ARGS"),
    ],
)
def test_scripts_share_their_text(scripts, read, tables):
    parts = {name: read(name) for name in scripts}
    complaints = compare(parts, f"{tables}_MAY_DIFFER")
    complaints += check_presence(parts, f"{tables}_ONLY_IN") + check_order(parts)
    assert not complaints, "\n\n".join(complaints)


def test_the_check_sees_a_changed_byte():
    for name in ("verify", "token_weights"):
        parts = {script: definitions(script) for script in LLM_SCRIPTS}
        parts["cispo_llm"][name] += " "
        (complaint,) = compare(parts, "LLM_MAY_DIFFER")
        assert complaint.startswith(f"`{name}` differs between")


def test_the_check_sees_a_new_script():
    """A copy of the parent with an `update` of its own, a text kept, a function gone and a new one:
    one complaint for each, which names the table."""
    parts = {script: definitions(script) for script in CLASSIC_SCRIPTS}
    parts["vpg"] = dict(parts["actor_critic"])
    parts["vpg"]["update"] += " "
    parts["vpg"]["helper"] = parts["vpg"].pop("rescale_returns")
    changed = compare(parts, "CLASSIC_MAY_DIFFER")
    assert "`update`: name vpg in CLASSIC_MAY_DIFFER, too" in changed
    assert any(
        text.startswith("`prepare` is the same in actor_critic.py and vpg.py") for text in changed
    )
    presence = check_presence(parts, "CLASSIC_ONLY_IN")
    assert "`helper`: only in ['vpg']: declare that in CLASSIC_ONLY_IN" in presence


def test_every_script_is_checked():
    known = {*LLM_SCRIPTS, *CLASSIC_SCRIPTS}
    on_disk = {path.stem for path in ROOT.glob("*.py")}
    assert on_disk == known, "name a classic script in CLASSIC_SCRIPTS of tests/conftest.py"
    with_parent = {script for _, script, _ in BUDGETS}
    first = {"reinforce", "rloo_llm"}
    assert on_disk - first == with_parent, "give it a parent and a budget in BUDGETS"


def test_what_is_not_a_definition_is_shared_too():
    """Imports, section rules and constants."""

    def rest(name):
        source = (ROOT / f"{name}.py").read_text()
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(
                node, (ast.FunctionDef, ast.ClassDef, ast.Expr)
            ):  # Expr: the module's docstring
                lines[node.lineno - 1 : node.end_lineno] = [""] * (
                    node.end_lineno - node.lineno + 1
                )
        return [line for line in lines if line and not line.startswith("@")]

    for scripts, model in ((LLM_SCRIPTS, "grpo_llm"), (CLASSIC_SCRIPTS, "ppo")):
        for name in scripts:
            different = set(rest(name)) ^ set(rest(model))
            assert different == IMPORTS_MAY_DIFFER.get(name, set()), (
                f"{name}.py and {model}.py: declare it in IMPORTS_MAY_DIFFER"
            )


@pytest.mark.parametrize("a,b,budget", BUDGETS)
def test_diff_budgets(a, b, budget):
    diff = subprocess.run(
        ["diff", f"{a}.py", f"{b}.py"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    changed = len(re.findall(r"^[<>]", diff, re.M))
    assert changed <= budget, (
        f"diff {a}.py {b}.py has {changed} changed lines; the budget is {budget}"
    )


@pytest.mark.parametrize("name", LLM_SCRIPTS + CLASSIC_SCRIPTS)
def test_self_contained(name):
    text = (ROOT / f"{name}.py").read_text()
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert not imported & {path.stem for path in ROOT.glob("*.py")}
    called = {
        node.func.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "trust_remote_code" not in text and not called & {"eval", "exec"}

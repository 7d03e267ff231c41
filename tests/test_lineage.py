"""The scripts may differ in nothing but the algorithm: same text, same order, small diffs."""

import ast
import difflib
import re
import subprocess
from itertools import combinations, pairwise

import pytest
from conftest import CLASSIC_SCRIPTS, LLM_SCRIPTS, ROOT

# What an algorithm may change: groups of scripts that share a text of their own. All the scripts
# that are not named share one more text, and what is not listed here is the same in every script
# that has it, byte for byte.
LLM_MAY_DIFFER = {
    "compute_advantages": ["rloo_llm"],
    "token_weights": ["rloo_llm dapo_llm cispo_llm", "gspo_llm"],
    "surrogate": ["rloo_llm", "gspo_llm", "cispo_llm"],
    "train_step": ["rloo_llm", "dapo_llm"],
    "train_minibatch": ["rloo_llm", "dapo_llm", "cispo_llm"],
    "main": ["dapo_llm"],
    "check_args": ["dapo_llm"],
}
LLM_ARGS_MAY_DIFFER = {
    "clip_low": ["gspo_llm"],
    "clip_high": ["dapo_llm", "gspo_llm", "cispo_llm"],
    "beta": ["rloo_llm", "gspo_llm cispo_llm"],
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
    "learning_rate": ["reinforce", "actor_critic", "trpo"],
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


def compare(parts, may_differ):
    """Scripts of one group must have the same text, of two groups different ones; else the diff."""
    for a, b in combinations(parts, 2):
        for name in parts[a].keys() & parts[b].keys():
            groups = [group.split() for group in may_differ.get(name, [])]
            same_group = all((a in group) == (b in group) for group in groups)
            if not same_group:
                assert parts[a][name] != parts[b][name], (
                    f"`{name}` is declared to differ between {a}.py and {b}.py: stale"
                )
            elif parts[a][name] != parts[b][name]:
                diff = difflib.unified_diff(
                    parts[a][name].splitlines(), parts[b][name].splitlines(), a, b, lineterm=""
                )
                pytest.fail(
                    f"`{name}` differs between {a}.py and {b}.py; carry the change over:\n"
                    + "\n".join(diff)
                )


def check_presence(parts, only_in):
    for name in {name for part in parts.values() for name in part}:
        wanted = only_in.get(name, set(parts))
        assert {script for script in parts if name in parts[script]} == wanted, (
            f"`{name}` is declared for {sorted(wanted)}"
        )


def check_order(parts):
    for a, b in combinations(parts, 2):
        shared = [name for name in parts[a] if name in parts[b]]
        assert shared == [name for name in parts[b] if name in parts[a]], (
            f"{a}.py and {b}.py order these differently"
        )


@pytest.mark.parametrize(
    "scripts,read,may_differ,only_in",
    [
        (LLM_SCRIPTS, definitions, LLM_MAY_DIFFER, LLM_ONLY_IN),
        (LLM_SCRIPTS, fields, LLM_ARGS_MAY_DIFFER, LLM_ARGS_ONLY_IN),
        (CLASSIC_SCRIPTS, definitions, CLASSIC_MAY_DIFFER, CLASSIC_ONLY_IN),
        (CLASSIC_SCRIPTS, fields, CLASSIC_ARGS_MAY_DIFFER, CLASSIC_ARGS_ONLY_IN),
    ],
)
def test_scripts_share_their_text(scripts, read, may_differ, only_in):
    parts = {name: read(name) for name in scripts}
    compare(parts, may_differ)
    check_presence(parts, only_in)
    check_order(parts)


def test_the_check_sees_a_changed_byte():
    parts = {name: definitions(name) for name in LLM_SCRIPTS}
    for name in ("verify", "token_weights"):
        changed = {script: dict(part) for script, part in parts.items()}
        changed["cispo_llm"][name] += " "
        with pytest.raises(pytest.fail.Exception, match=f"`{name}` differs"):
            compare(changed, LLM_MAY_DIFFER)


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

    # What a script imports otherwise than the first of its family, and the first instead.
    words = "from typing import Literal"
    copies = {"from dataclasses import dataclass", "from dataclasses import dataclass, replace"}
    names = "Categorical, Distribution, Independent, Normal"
    kl = {
        f"from torch.distributions import {names}",
        f"from torch.distributions import {names}, kl_divergence",
    }
    own = {
        "reinforce": copies,
        "actor_critic": {words} | copies,
        "trpo": {words} | copies | kl,
    }
    for scripts, model in ((LLM_SCRIPTS, "grpo_llm"), (CLASSIC_SCRIPTS, "ppo")):
        for name in scripts:
            assert set(rest(name)) ^ set(rest(model)) == own.get(name, set()), f"{name}.py"


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

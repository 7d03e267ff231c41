"""How the scripts are written: what is the same in all scripts of a family, short functions, help
texts, dependencies; and README's numbers of lines."""

import ast
import re
import tomllib

import pytest
from scripts import (
    CLASSIC_SCRIPTS,
    LLM_SCRIPTS,
    MARKER,
    PATHS,
    ROOT,
    SCRIPTS,
    parts,
    source,
    with_counts,
)


@pytest.mark.parametrize("scripts", [CLASSIC_SCRIPTS, set(LLM_SCRIPTS) - {"ppo_llm"}])
def test_below_the_marker_all_scripts_are_the_same(scripts):
    assert len({source(name).split(MARKER)[1] for name in scripts}) == 1


GRPO = ["grpo_llm", "gspo_llm", "cispo_llm"]
SAME = [("main", ["rloo_llm", "dapo_llm", *GRPO]), ("train_step", GRPO)]
SAME += [("train_minibatch", ["dapo_llm", *GRPO]), ("kl_k3", ["dapo_llm", *GRPO])]
SAME += [("prepare", CLASSIC_SCRIPTS), ("rollouts", CLASSIC_SCRIPTS[1:])]
SAME += [("compute_advantages", CLASSIC_SCRIPTS[2:])]


@pytest.mark.parametrize("part,scripts", SAME)
def test_what_tests_read_in_one_script_is_the_same_in_these(part, scripts):
    assert len({parts(source(name))[part] for name in scripts}) == 1
    found = {path.stem for path in ROOT.glob("*.py") if not path.stem.startswith("after_")}
    assert found == PATHS.keys() - {"ppo_llm"}


def test_ppo_llm_differs_from_grpo_llm_by_its_critic():
    """Below the marker; above it, and for what only one of the two has, `diff` is the judge."""
    marked = "\n# From here on.*\n"  # ppo_llm.py has words of its own here
    own, shared = (parts(re.split(marked, source(name))[1]) for name in ("ppo_llm", "grpo_llm"))
    differing = {name for name in shared if own[name] != shared[name]}
    expected = {"token_logprobs", "restore", "save_checkpoint"}
    assert differing == expected and len(shared) > 20


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_fit_on_a_screen_and_flags_have_their_help(name):
    """A flag's help is a comment of four words or more, above the flag or behind it."""
    functions = [n for n in ast.walk(ast.parse(source(name))) if isinstance(n, ast.FunctionDef)]
    lines = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert max(lines.values()) <= 45, max(lines, key=lines.get)
    for field, text in parts(source(name)).items():
        if field.startswith("Args.") and field != "Args.__post_init__":
            assert len(" ".join(re.findall("# (.+)", text)).split()) >= 4, field


def test_a_copied_script_brings_what_it_needs():
    """It imports no other script, and `uv run grpo_llm.py` installs what requirements.txt would."""
    pins, found = set((ROOT / "requirements.txt").read_text().split()), set()
    for name in SCRIPTS:
        assert not set(re.findall(r"^ *(?:from|import) (\w+)", source(name), re.M)) & PATHS.keys()
        block = source(name).split("\n# /// script\n")[1].removesuffix("# ///\n")  # see PEP 723
        metadata = tomllib.loads(re.sub("^# ?", "", block, flags=re.M))
        own = {pin.partition("==")[0] for pin in metadata["dependencies"]}
        family = {"transformers", "tqdm"} if name in LLM_SCRIPTS else {"gymnasium[classic-control]"}
        assert own == {"torch", "tyro", "tensorboard"} | family
        found |= set(metadata["dependencies"])
    assert found == {pin for pin in pins if not pin.startswith("pytest")}


def test_readme_has_the_numbers_of_lines():
    """If this fails: python tests/scripts.py"""
    page = (ROOT / "README.md").read_text()
    assert with_counts(page) == page

"""How the scripts are written: short functions, help texts, dependencies."""

import ast
import re
import tomllib

import pytest
from lineage import LLM_SCRIPTS, PATHS, ROOT, SCRIPTS, parts, source


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_fit_on_a_screen_and_flags_have_their_help(name):
    """A flag's help is a comment of four words or more, above the flag or behind it."""
    functions = [n for n in ast.walk(ast.parse(source(name))) if isinstance(n, ast.FunctionDef)]
    lines = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert max(lines.values()) <= 55, max(lines, key=lines.get)
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
        assert own >= {"torch", "tyro", "tensorboard", "tqdm"}
        assert ("transformers" if name in LLM_SCRIPTS else "gymnasium[classic-control]") in own
        found |= set(metadata["dependencies"])
    assert found == {pin for pin in pins if not pin.startswith("pytest")}

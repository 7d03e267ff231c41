"""How the scripts are written: what is the same in all scripts of a family, short functions, help
texts, dependencies; and README's numbers of lines."""

import ast
import re
import tomllib

import pytest
from scripts import (
    CLASSIC_SCRIPTS,
    FAMILY,
    LLM_SCRIPTS,
    MARKER,
    PATHS,
    ROOT,
    SCRIPTS,
    parts,
    source,
    with_counts,
)


@pytest.mark.parametrize("scripts", [CLASSIC_SCRIPTS, LLM_SCRIPTS])
def test_below_the_marker_all_scripts_are_the_same(scripts):
    texts = {name: source(name).split(MARKER)[1] for name in scripts}
    differing = [name for name, text in texts.items() if text != texts[scripts[0]]]
    assert not differing, f"below the marker not as {scripts[0]}.py: {', '.join(differing)}"


GRPO = [name for name in FAMILY if "grpo_llm" in (name, FAMILY[name]) and name != "dapo_llm"]
SAME = [("main", GRPO), ("token_weights", ["rloo_llm", "dapo_llm", "cispo_llm"])]
SAME += [(part, ["dapo_llm", *GRPO]) for part in ("compute_advantages", "kl_k3", "train_minibatch")]
SAME += [("compute_advantages", CLASSIC_SCRIPTS[2:])]


@pytest.mark.parametrize("part,scripts", SAME)
def test_what_tests_read_in_one_script_is_the_same_in_these(part, scripts):
    texts = {name: parts(source(name))[part] for name in scripts}
    differing = [name for name, text in texts.items() if text != texts[scripts[0]]]
    assert not differing, f"`{part}` is not as in {scripts[0]}.py in: {', '.join(differing)}"


def test_runs_of_language_models_begin_and_end_alike():
    """All that main does before it draws, and after it has trained."""
    mains = [parts(source(name))["main"].partition("def main")[2] for name in LLM_SCRIPTS]
    begin, end = (
        "        # Draw a group of completions",
        "        if RANK == 0:\n            for name",
    )
    assert len({main.split(begin)[0] for main in mains}) == 1
    assert len({main.split(end)[1] for main in mains}) == 1


def test_every_script_at_the_top_is_known():
    at_the_top = {path.stem for path in ROOT.glob("*.py") if path.stem[:8] != "variant_"}
    assert at_the_top == PATHS.keys(), "tests/scripts.py lists other scripts"
    assert not [*ROOT.glob("*.rej")], "carry these hunks by hand, then delete them"


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_fit_on_a_screen_and_flags_have_their_help(name):
    """main, the lesson, may have 100 lines. A flag's help is a comment above it or behind it."""
    functions = [n for n in ast.walk(ast.parse(source(name))) if isinstance(n, ast.FunctionDef)]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    for function, length in lengths.items():
        limit = 100 if function == "main" else 45  # main is the lesson
        assert length <= limit, f"`{function}` has {length} lines; at most {limit}"
    for field, text in parts(source(name)).items():
        if field.startswith("Args.") and field != "Args.__post_init__":
            assert re.search(r"# \w", text), f"`{field}` has no comment, which is its help"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_docstring_says_what_changes_and_where(name):
    """In at most 32 lines, with a table whose right side names functions, sections and flags."""
    known, doc = parts(source(name)), ast.get_docstring(ast.parse(source(name)), clean=False)
    assert len(doc.splitlines()) <= 32
    for head, rows in re.findall(r"^(What changes.*)Where\n((?:    .*\n)+)", doc, re.M):
        for where in [where for row in rows.splitlines() for where in row[len(head) :].split(", ")]:
            word, _, section = where.partition(" (")
            field = "Args." + word.split()[0][2:].replace("-", "_")
            assert word in known or field in known, f"no {word} in {name}.py"
            assert not section or f"- {section[:-1]}\n" in source(name), f"no section {section}"


def test_a_copied_script_brings_what_it_needs():
    """It imports no other script, and `uv run grpo_llm.py` installs what requirements.txt would."""
    pins, dependencies = set((ROOT / "requirements.txt").read_text().split()), set()
    for name in SCRIPTS:
        assert not set(re.findall(r"^ *(?:from|import) (\w+)", source(name), re.M)) & PATHS.keys()
        block = source(name).split("\n# /// script\n")[1].removesuffix("# ///\n")  # see PEP 723
        metadata = tomllib.loads(re.sub("^# ?", "", block, flags=re.M))
        packages = {pin.partition("==")[0] for pin in metadata["dependencies"]}
        family = {"transformers"} if name in LLM_SCRIPTS else {"gymnasium[classic-control]"}
        assert packages == {"torch", "tyro", "tensorboard"} | family
        dependencies |= set(metadata["dependencies"])
    assert dependencies == {pin for pin in pins if not pin.startswith("pytest")}


def test_readme_has_the_numbers_of_lines():
    page = (ROOT / "README.md").read_text()
    rows = {*re.findall(r"^\| \[(\w+)\.py\]", page, re.M)}
    assert rows == {*SCRIPTS}, "README's table lists other scripts"
    assert with_counts(page) == page, "to write them: python tests/scripts.py"

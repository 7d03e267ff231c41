"""All scripts of a family are the same below the marker, and carry.py carries an edit to them."""

import re
import shutil
import subprocess
import sys

import pytest
from lineage import CLASSIC_SCRIPTS, LLM_SCRIPTS, MARKER, PATHS, ROOT, parts, source


@pytest.mark.parametrize("scripts", [CLASSIC_SCRIPTS, set(LLM_SCRIPTS) - {"ppo_llm"}])
def test_below_the_marker_all_scripts_are_the_same(scripts):
    assert len({source(name).split(MARKER)[1] for name in scripts}) == 1
    assert {path.stem for path in ROOT.glob("*.py")} == PATHS.keys() - {"ppo_llm"}


def test_ppo_llm_differs_from_grpo_llm_by_its_critic():
    """Below the marker; above it, and for what only one of the two has, `diff` is the judge."""
    marked = "\n# From here on.*\n"  # ppo_llm.py has words of its own here
    own, shared = (parts(re.split(marked, source(name))[1]) for name in ("ppo_llm", "grpo_llm"))
    differing = {name for name in shared if own[name] != shared[name]}
    assert differing == {"token_logprobs", "evaluate", "check_args", "restore"} and len(shared) > 20


@pytest.fixture
def carry(tmp_path):
    """Copies all scripts into a repository of its own. Call it with a script and (old, new) pairs:
    it edits the script, runs carry.py and returns what this printed, and all texts."""
    for path in [*PATHS.values(), "README.md", "tests/lineage.py", "tests/carry.py"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for words in ("init -q", "add .", "-c user.name=me -c user.email=me@example.com commit -qm 1"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)

    def run(script, *edits):
        for old, new in edits:
            file = tmp_path / PATHS[script]
            assert old in file.read_text()
            file.write_text(file.read_text().replace(old, new, 1))
        command = [sys.executable, "tests/carry.py", f"{script}.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        texts = {name: (tmp_path / path).read_text() for name, path in PATHS.items()}
        return done.stdout + done.stderr, texts, (tmp_path / "README.md").read_text()

    return run


@pytest.mark.parametrize("script", ["grpo_llm", "dapo_llm", "ppo_llm", "ppo"])
def test_a_shared_edit_reaches_all_sisters(script, carry):
    """A flag, a new flag, an import and a function below the marker."""
    flag, new = "    seed: int = 1  #", "    new: int = 0  # a new flag\n"
    edits = [(flag, f"{new}{flag} mended:"), ("import sys\n", "import this\n")]
    edits += [("\ndef evaluate(", "\n# mended\ndef evaluate(")]
    printed, texts, page = carry(script, *edits)
    for name in LLM_SCRIPTS if script in LLM_SCRIPTS else CLASSIC_SCRIPTS:
        text = source(name)
        for old, new in edits:
            text = text.replace(old, new, 1)
        assert texts[name] == text and printed == ""
        lines = text.count("\n")
        assert re.search(rf"\| \[{name}.py\].* \| {lines} \| (\d+ \(\d+\)|–) \|", page)


def test_what_is_the_algorithms_own_stays(carry):
    """The docstring stays, and a part that the sister has otherwise; a line names this part."""
    edits = [('"""DAPO', '"""Our DAPO'), ("0.0 * lengths", "0 * lengths")]
    printed, texts, _ = carry("dapo_llm", *edits, ("return mask / sum", "return mask + sum"))
    assert "grpo_llm.py: `token_weights` is its own and stays" in printed
    assert "cispo_llm.py" not in printed and "overlong_penalty" not in printed
    assert "return mask + sum" in texts["cispo_llm"] and texts["grpo_llm"] == source("grpo_llm")


def test_an_unknown_script_ends_in_one_line(carry):
    assert re.fullmatch("grop_llm.py is not in .*\n", carry("grop_llm")[0])

"""All scripts of a family are the same below the marker, and carry.py carries an edit to them."""

import re
import shutil
import subprocess
import sys
from itertools import product

import pytest
from lineage import CLASSIC_SCRIPTS, LLM_SCRIPTS, MARKER, PATHS, ROOT, parts, source


@pytest.mark.parametrize("scripts", [CLASSIC_SCRIPTS, set(LLM_SCRIPTS) - {"ppo_llm"}])
def test_below_the_marker_all_scripts_are_the_same(scripts):
    assert len({source(name).split(MARKER)[1] for name in scripts}) == 1
    assert {path.stem for path in ROOT.glob("*.py")} == PATHS.keys() - {"ppo_llm"}


@pytest.mark.parametrize("part,first", [("prepare", 0), ("rollouts", 1), ("compute_advantages", 2)])
def test_these_parts_above_the_marker_are_the_same_from_a_script_on(part, first):
    """Tests of these parts run with one of these scripts alone."""
    assert len({parts(source(name))[part] for name in CLASSIC_SCRIPTS[first:]}) == 1


def test_ppo_llm_differs_from_grpo_llm_by_its_critic():
    """Below the marker; above it, and for what only one of the two has, `diff` is the judge."""
    marked = "\n# From here on.*\n"  # ppo_llm.py has words of its own here
    own, shared = (parts(re.split(marked, source(name))[1]) for name in ("ppo_llm", "grpo_llm"))
    differing = {name for name in shared if own[name] != shared[name]}
    assert differing == {"token_logprobs", "evaluate", "check_args", "restore"} and len(shared) > 20


EDITS = [  # in order: a new flag, another flag, an import, and a function below the marker
    ("    seed: int = 1  #", "    new: int = 0  # a new flag\n    seed: int = 1  # mended:"),
    ("import sys\n", "import this\n"),
    ("\ndef evaluate(", "\n# mended\ndef evaluate("),
    (
        "return mask / num_tokens",
        "return mask + num_tokens",
    ),  # ppo_llm has this line, and grpo_llm another
]


@pytest.mark.parametrize("script", ["ppo_llm", "ppo"])
def test_an_edit_reaches_all_sisters(script, tmp_path):
    """Each sister's docstring stays. So does a part whose merge conflicts, and a line names it."""
    for path in [*PATHS.values(), "README.md", "tests/lineage.py", "tests/carry.py"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for words in ("init -q", "add .", "-c user.name=me -c user.email=me@example.com commit -qm 1"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)

    texts = {name: source(name) for name in PATHS}
    for name, (old, new) in product(texts, EDITS):
        texts[name] = texts[name].replace(old, new, 1)
    texts[script] = texts[script].replace('"""', '"""Our ', 1)
    (tmp_path / PATHS[script]).write_text(texts[script])
    command = [sys.executable, "tests/carry.py", f"{script}.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    named = re.findall(r"(\w+)\.py: `token_weights` is its own and stays", done.stdout)
    assert ("grpo_llm" in named) == (script == "ppo_llm") and done.stderr == ""
    for name in LLM_SCRIPTS if script in LLM_SCRIPTS else CLASSIC_SCRIPTS:
        assert (tmp_path / PATHS[name]).read_text() == texts[name]
        row = rf"\| \[{name}.py\].* \| {len(texts[name].splitlines())} \| (\d+ \(\d+\)|–) \|"
        assert re.search(row, (tmp_path / "README.md").read_text())

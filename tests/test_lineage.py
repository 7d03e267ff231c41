"""The scripts may differ in nothing but the algorithm: same text, same order, small diffs; and
carry.py carries an edit to all of them."""

import ast
import re
import shutil
import subprocess
import sys

import pytest
from conftest import CLASSIC_SCRIPTS, LLM_SCRIPTS, ROOT
from lineage import BUDGETS, FAMILIES, LIMITS, PATHS, complaints, family_of, parts, texts


@pytest.mark.parametrize("family", FAMILIES)
def test_scripts_share_their_text(family):
    found = complaints(family)
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("a,b,most", BUDGETS)
def test_diff_budgets(a, b, most):
    command = ["diff", PATHS[a], PATHS[b]]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    changed = len(re.findall(r"^[<>]", diff, re.M))
    assert changed <= most, f"{' '.join(command)} has {changed} lines; LIMITS allows {most}"


@pytest.mark.parametrize("name", LLM_SCRIPTS + CLASSIC_SCRIPTS)
def test_self_contained(name):
    text = (ROOT / PATHS[name]).read_text()
    imported, called = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    assert not imported & PATHS.keys()
    assert "trust_remote_code" not in text and not called & {"eval", "exec"}


# ------------------------------------------------------------------------------ what the check sees


@pytest.mark.parametrize(
    "script,name", [("cispo_llm", "verify"), ("dapo_llm", "token_weights"), ("ppo", "Args.gamma")]
)
def test_the_check_sees_a_changed_byte(script, name):
    """It says which part differs, and the command that carries the change."""
    sources = texts(family_of(script))
    part = parts(sources[script])[name]
    sources[script] = sources[script].replace(part, f"#\n{part}")
    (found,) = complaints(family_of(script), sources)
    assert found.startswith(f"`{name}` differs between")
    assert f"python tests/carry.py {script}.py" in found


def test_the_check_sees_imports_order_and_names():
    sources = texts("llm")
    text = sources["rloo_llm"]
    (found,) = complaints(
        "llm", sources | {"rloo_llm": text.replace("import os\n", "import sys\n")}
    )
    assert found.startswith("rloo_llm.py and grpo_llm.py differ in an import")
    found = complaints("llm", sources | {"rloo_llm": text.replace("def evaluate(", "def measure(")})
    assert any(each.startswith("`measure` is in ['rloo_llm'], and should be in") for each in found)
    body = parts(text)
    swapped = text.replace(body["verify"], "HERE").replace(body["main"], body["verify"])
    found = complaints("llm", sources | {"rloo_llm": swapped.replace("HERE", body["main"])})
    assert len(found) == len(sources) - 1 and all(
        "order what they share differently" in each for each in found
    )


# ----------------------------------------------------------------------------------------- carry.py


@pytest.fixture
def copy(tmp_path):
    """A copy of the scripts in a repository of its own."""
    for path in [*(PATHS[name] for name in LIMITS), "tests/lineage.py", "tests/carry.py"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "base")
    return tmp_path


def git(folder, *words):
    author = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.com"]
    subprocess.run(["git", *author, *words], cwd=folder, check=True)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def carry(folder, script, *flags):
    """Exit status and output of carry.py."""
    command = [sys.executable, "tests/carry.py", f"{script}.py", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout


MENDED = {  # what all scripts of the family have, and what to put in its place
    "llm": ("def verify(", "# mended\ndef verify("),
    "classic": ("def evaluate(", "# mended\ndef evaluate("),
}


@pytest.mark.parametrize("script", ["grpo_llm", "dapo_llm", "ppo_llm", "ppo"])
def test_a_shared_line_reaches_all_sisters(script, copy):
    family = family_of(script)
    edit(copy / PATHS[script], *MENDED[family])
    assert carry(copy, script) == (0, "the lineage test finds nothing\n")
    command = ["git", "diff", "--numstat"]
    changed = subprocess.run(command, cwd=copy, capture_output=True, text=True).stdout
    assert changed.splitlines() == [
        f"1\t0\t{path}" for path in sorted(PATHS[name] for name in texts(family))
    ]


def test_what_is_the_algorithms_own_stays(copy):
    """dapo_llm.py shares token_weights with three sisters and not with the others; overlong_penalty
    and the module's docstring are its own alone."""
    edit(copy / "dapo_llm.py", '"""DAPO', '"""Our DAPO')
    edit(copy / "dapo_llm.py", "def overlong_penalty(", "# mended\ndef overlong_penalty(")
    edit(copy / "dapo_llm.py", "def token_weights(", "# mended\ndef token_weights(")
    before = {name: (copy / PATHS[name]).read_bytes() for name in texts("llm")}
    status, said = carry(copy, "dapo_llm")
    changed = {name for name in before if (copy / PATHS[name]).read_bytes() != before[name]}
    assert status == 0 and changed == {"rloo_llm", "cispo_llm", "ppo_llm"}
    assert "grpo_llm.py: `token_weights` is its own" in said
    carry(copy, "dapo_llm", "--own")
    assert "# mended\ndef token_weights(" in (copy / "grpo_llm.py").read_text()
    assert "Our DAPO" not in (copy / "grpo_llm.py").read_text()


def test_a_conflict_is_marked_and_listed(copy):
    edit(copy / "grpo_llm.py", *MENDED["llm"])
    edit(copy / "rloo_llm.py", "def verify(", "# otherwise\ndef verify(")
    status, said = carry(copy, "grpo_llm")
    assert status == 1 and re.fullmatch(r"rloo_llm\.py:\d+: conflict\n", said)
    assert "# mended\ndef verify(" in (copy / "gspo_llm.py").read_text()
    marked = "<<<<<<< rloo_llm.py\n# otherwise\n=======\n# mended\n>>>>>>> grpo_llm.py\n"
    assert marked in (copy / "rloo_llm.py").read_text()
    assert carry(copy, "grpo_llm") == (1, said), "it waits until the conflict is mended"

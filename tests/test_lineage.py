"""The scripts may differ in nothing but the algorithm: same text, same order, small diffs; and
carry.py carries an edit to all of them."""

import ast
import re
import shutil
import subprocess
import sys

import pytest
from lineage import FAMILIES, FAMILY, OWN, PATHS, ROOT, changed, complaints, family_of, parts, texts


@pytest.mark.parametrize("family", FAMILIES)
def test_scripts_share_their_text(family):
    found = complaints(texts(family))
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("child", [name for name in FAMILY if FAMILY[name].parent])
def test_diffs_are_small(child):
    assert changed(child) <= FAMILY[child].changed, "more lines than FAMILY allows"


def test_main_and_the_second_half_are_nobodys_own():
    """From the comment line on not a byte may differ. PPO for texts has a critic in both."""
    alike = {"main", "train", "evaluate", "check_args", "prepare"}
    alike |= {"make_envs", "Agent", "RunningMeanStd"}
    sources = texts("llm")
    for name in OWN.keys() - {"ppo_llm"}:
        assert not alike & set(OWN[name].split())
    ends = {sources[name].partition("# From here on")[2] for name in sources if name != "ppo_llm"}
    assert len(ends) == 1 and "" not in ends


@pytest.mark.parametrize("name", FAMILY)
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


# ----------------------------------------------------------------------------- what the check sees


def test_the_check_sees_a_changed_part():
    """It says which, and the command that carries the change; what is own may change."""
    for script, name in [("gspo_llm", "Args.seed"), ("ppo_llm", "verify"), ("ppo", "Args.gamma")]:
        sources = texts(family_of(script))
        part = parts(sources[script])[name]
        sources[script] = sources[script].replace(part, f"#\n{part}")
        found = complaints(sources)
        assert found[0].startswith(f"`{name}` differs between")
        assert f"python tests/carry.py {script}.py" in found[0]
    sources = texts("llm")
    own = "def overlong_penalty("
    sources["dapo_llm"] = sources["dapo_llm"].replace(own, f"#\n{own}")
    assert not complaints(sources)


def test_the_check_sees_imports_order_and_names():
    sources = texts("llm")
    text, body = sources["gspo_llm"], parts(sources["gspo_llm"])
    swapped = text.replace(body["verify"], "HERE").replace(body["main"], body["verify"])
    for edited, expected in [
        (text.replace("import os\n", "import sys\n"), "`imports` differs between"),
        (text.replace("def evaluate(", "def measure("), "`measure` differs between"),
        (swapped.replace("HERE", body["main"]), "order what they share differently"),
        (text.replace(body["surrogate"], parts(sources["grpo_llm"])["surrogate"]), "OWN names it"),
    ]:
        found = complaints(sources | {"gspo_llm": edited})
        assert any(expected in each for each in found), expected


# ----------------------------------------------------------------------------------------- carry.py


@pytest.fixture
def copy(tmp_path):
    """A copy of the scripts in a repository of its own."""
    for path in [*PATHS.values(), "tests/lineage.py", "tests/carry.py"]:
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
    edit(copy / PATHS[script], "    seed: int = 1  #", "    seed: int = 1  # mended")
    assert carry(copy, script) == (0, "the lineage test finds nothing\n")
    command = ["git", "diff", "--numstat"]
    changed = subprocess.run(command, cwd=copy, capture_output=True, text=True).stdout
    assert changed.splitlines() == [
        f"2\t1\t{path}" for path in sorted(PATHS[name] for name in texts(family))
    ]


def test_what_is_the_algorithms_own_stays(copy):
    edit(copy / "dapo_llm.py", '"""DAPO', '"""Our DAPO')
    edit(copy / "dapo_llm.py", "def overlong_penalty(", "# mended\ndef overlong_penalty(")
    edit(copy / "dapo_llm.py", "def token_weights(", "# mended\ndef token_weights(")
    before = {name: (copy / PATHS[name]).read_bytes() for name in texts("llm")}
    status, said = carry(copy, "dapo_llm")
    assert status == 0 and "grpo_llm.py: `token_weights` is its own" in said
    assert before == {name: (copy / PATHS[name]).read_bytes() for name in before}
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

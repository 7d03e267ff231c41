"""The README's commands, flags, files and quoted lines; benchmarks/quotes.py has its numbers."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from conftest import ROOT, script
from launch import Launched
from lineage import PATHS
from test_lineage import BUDGETS

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M)
QUOTES = re.findall(r"^(`\w(?:.+\n)+?)```python\n((?:.+\n)+?)```$", README, re.M)


def test_readme_stays_short():
    """What is more belongs on a page of tests/benchmarks, or in CONTRIBUTING."""
    assert len(README.splitlines()) <= 190 and len(README.split()) <= 2300


@pytest.mark.parametrize("command,quote", QUOTES, ids=[quote[0][1:40] for quote in QUOTES])
def test_lines_quoted_are_those_that_the_diff_adds(command, quote):
    """Word for word, in a row, at most five of them, and none in the script before."""
    *before, name = re.findall(r"\w+\.py", command.partition(":")[0])
    lines = quote.splitlines()
    assert 1 <= len(lines) <= 5 and quote in (ROOT / name).read_text()
    for path in before:
        known = (ROOT / path).read_text().splitlines()
        assert not set(lines) & set(known)


def test_every_pair_of_neighbours_is_quoted():
    pairs = {tuple(re.findall(r"\w+\.py", command.partition(":")[0])) for command, _ in QUOTES}
    of_top_level = {(PATHS[a], PATHS[b]) for a, b, _ in BUDGETS if "/" not in PATHS[b]}
    missing = of_top_level - pairs
    assert not missing, (
        f"{missing}: README needs a section for it, with a line `diff PARENT CHILD`: …, and below "
        "it a python block of 1 to 5 successive lines of the child that its parent has not"
    )
    assert pairs - of_top_level == {("rloo_llm.py",)}


def test_flags_named_exist():
    """Each is in the --help of a script, or of a benchmark named with a flag."""
    others = {"nproc-per-node", "logdir", "slow", "help", "extra-index-url"}  # torchrun's, …
    paths = set(PATHS.values())
    paths |= set(re.findall(r"(tests/benchmarks/\w+\.py) --", README))
    asked = [Launched(path, "--help") for path in sorted(paths)]
    assert [process.wait() for process in asked] == [0] * len(asked)
    flag = r"--(?:no-)?([a-z][a-z-]+)"
    taken = set(re.findall(flag, "".join(process.stdout for process in asked)))
    assert set(re.findall(flag, README)) - others <= taken


def test_files_named_exist():
    for path in re.findall(r"\]\(([\w./]+)\)|(tests/[\w/]+\.\w+)|(\w+\.py)\b", README):
        assert (ROOT / next(filter(None, path))).exists() or (
            ROOT / "tests/benchmarks" / next(filter(None, path))
        ).exists(), path


SHELL = [text.replace("\\\n", "") for kind, text in BLOCKS if not kind]  # a command, a line
COMMANDS = [line for text in SHELL for line in text.splitlines() if line[:1] != "#"]


@pytest.mark.parametrize("command", [line for line in COMMANDS if ".py" in line])
def test_every_command_has_flags_that_the_script_takes(command):
    """As the script reads them; test_every_command_runs (slow) runs them all."""
    words = shlex.split(command.rpartition("&& ")[2])
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    module = script(words[at].removesuffix(".py"))
    tyro.cli(module.Args, args=words[at + 1 :])


def test_the_verifier_shown_is_the_file_named():
    code = (ROOT / "tests/benchmarks/verifiers/exact_text.py").read_text().split('"""\n\n\n')[1]
    assert ("python", code) in BLOCKS


LLM_SMOKE = "--steps 2 --prompts-per-step 8 --group-size 4 --eval-problems 4"
LLM_SMOKE += " --max-new-tokens 6 --eval-every 1"
SMOKE = {"grpo_llm.py": LLM_SMOKE, "ppo.py": "--total-timesteps 4096"}


@pytest.mark.slow
def test_every_command_runs(pretrained, gsm_file, tmp_path):
    """The blocks of the README from top to bottom, at smoke size:
    a stand-in for the hub's model, a file for GSM8K's. Slow: each starts as a user starts it."""
    first, second, *rest = COMMANDS
    assert (
        first.endswith("&& pip install -r requirements.txt && python grpo_llm.py")
        and second == "python -m pytest -q -n 2 tests"
    )
    test_file = tmp_path / "test.jsonl"
    test_file.write_text('{"question": "What is 2 + 2?", "answer": "2 + 2 = 4\\n#### 4"}\n')
    for command in ["python grpo_llm.py", *rest]:
        stand_ins = {
            "train.jsonl": gsm_file,
            "test.jsonl": str(test_file),
            "--nproc-per-node 8": "--standalone --nproc-per-node 2",
            "--steps 25": "--steps 2",
        }
        models = re.findall(r"(?:Qwen|HuggingFaceTB)/\S+", command)
        stand_ins |= dict.fromkeys(models, pretrained)
        for pattern, made in (
            ("runs/…/step-000050", "grpo_llm__*/step-000001"),
            ("runs/…/agent.pt", "ppo__*/agent.pt"),
        ):
            if pattern in command:  # by a command before this one; the last one was torchrun's
                stand_ins[pattern] = str(sorted(tmp_path.glob(made), key=os.path.getmtime)[-2:][0])
        for known, stand_in in stand_ins.items():
            command = command.replace(known, stand_in)
        file = next(word for word in command.split() if word.endswith(".py"))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            command.replace(file, f"{file} {SMOKE[file]} --output-dir {tmp_path}"),
            shell=True,
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, command + done.stderr[-9000:]  # torchrun adds much

"""The README's commands, flags, files, quoted lines and numbers."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from conftest import CLASSIC_SCRIPTS, LLM_SCRIPTS, ROOT, script
from launch import Launched
from lineage import FAMILY, PATHS, changed

pytestmark = pytest.mark.usefixtures("tiny_model")
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M)
QUOTES = re.findall(r"^(`\w(?:.+\n)+?)```python\n((?:.+\n)+?)```$", README, re.M)


# -------------------------------------------------------------------------------------- Numbers

SCRIPTS = {name: path for name, path in PATHS.items() if "/" not in path}
LINES = {name: len((ROOT / path).read_text().splitlines()) for name, path in SCRIPTS.items()}
PARENTS = {name: FAMILY[name].parent for name in SCRIPTS if FAMILY[name].parent}
RESULTS = ROOT / "tests/benchmarks/results"
UNTRAINED = "untrained, 128 tokens"


def cells(name: str) -> dict[str, dict[str, str]]:
    """{first cell of the row: {column: cell}} of a table in results/."""
    lines = (RESULTS / f"{name}.md").read_text().splitlines()
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines if line[:1] == "|"]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_headline_numbers_are_those_measured():
    """All twenty of the first screen. Where one has moved, read its sentence again."""
    llm = sorted(LINES[name] for name in LLM_SCRIPTS if name in LINES)
    classic = sorted(LINES[name] for name in CLASSIC_SCRIPTS)
    diffs = sorted(map(changed, PARENTS))
    seeds, cartpole = cells("classic_seeds"), cells("classic_cartpole")
    (solved,) = {row["solved"] for row in seeds.values()}
    seconds = sorted(float(row["seconds to 475, median"]) for row in seeds.values())
    faster = sorted(float(cartpole[name]["times faster"]) for name in list(cartpole)[1:])
    sums = cells("llm_compare")["grpo_llm"]
    start, end = float(sums["pass@1 before"]), float(sums["after"])
    trained, untrained = map(cells("real_model").get, ("largest, GRPO", f"largest, {UNTRAINED}"))
    before, after = float(untrained["greedy"]), float(trained["greedy"].split()[-1])
    rates = [row["ratio"] for name, row in cells("trl_speed").items() if "per second" in name]
    said = [
        f"{classic[0]} to {classic[-1]} lines per classic script",
        f"{llm[0]:,} to {llm[-1]:,} per language-model script",
        f"diffs of {diffs[0]} to {diffs[-1]} lines",
        f"on {solved} seeds by all four, in {seconds[0]:.0f} to {seconds[-1]:.0f} s",
        f"{start:.0%} → {end:.0%} in {sums['seconds']} s",
        f"on {before:.0%} of unseen questions",
        f"on {after:.0%} after {float(trained['minutes on one core']):.0f} minutes",
        f"in a {faster[0]:.0f}th to a {faster[-1]:.0f}th of Stable-Baselines3's time",
        f"{rates[0]} (GRPO) and {rates[1]} (RLOO) times TRL's",
    ]
    text = " ".join(README.replace(" %", "%").split())
    assert [each for each in said if each not in text] == []


def test_the_map_says_sizes_and_verdicts_of_all_scripts():
    page = (ROOT / "tests/experiments/EXPERIMENTS.md").read_text()
    verdicts = dict(re.findall(r"\]\(#(\w+)\) \| (.+) \|", page))
    row = r"^\| \[(\w+)\.py\]\(\1\.py\), .+ \| (\d+) \| (\d+|–) \| .+ \| \[(.+)\]\(.+#(\w+)\) \|$"
    rows = re.findall(row, README, re.M)
    assert sorted(name for name, *_ in rows) == sorted(SCRIPTS)
    for name, lines, diff, verdict, experiment in rows:
        expected = (str(LINES[name]), str(changed(name)) if name in PARENTS else "–")
        assert (lines, diff, verdict) == (*expected, verdicts[experiment]), name


def test_tables_are_those_measured():
    """README's of the pretrained model, cell by cell; RESULTS.md's, each with its footer."""
    found, expected = cells("real_model"), []
    for task in ("products", "largest", "sums", "dates"):
        trained, untrained = found[f"{task}, GRPO"], found[f"{task}, {UNTRAINED}"]
        scores = ("held out, sampled: before → after (worst)", "greedy", "pass@8")
        row = [f"{untrained[name]} → {trained[name].split(' → ')[1]}" for name in scores]
        expected.append(" | ".join([trained["seeds"], *row, trained["minutes on one core"]]))
    assert re.findall(r"^\| \*.+ rollouts \| (.+) \|$", README, re.M) == expected
    page = (RESULTS.parent / "RESULTS.md").read_text()
    for name in ("classic_cartpole", "classic_speed", "classic_beyond", "llm_compare"):
        assert (RESULTS / f"{name}.md").read_text() in page, name


# ------------------------------------------------------------------------ Lines, flags, commands


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
    """A section each, with a line `diff PARENT CHILD`: … and a block of what the child adds."""
    pairs = {tuple(re.findall(r"\w+\.py", command.partition(":")[0])) for command, _ in QUOTES}
    of_top_level = {(PATHS[parent], PATHS[child]) for child, parent in PARENTS.items()}
    assert pairs == of_top_level | {("rloo_llm.py",)}


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
        assert (ROOT / next(filter(None, path))).exists(), path


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
    code = (ROOT / "tests/examples/verifiers/exact_text.py").read_text().split('"""\n\n\n')[1]
    assert ("python", code) in BLOCKS


LLM_SMOKE = "--steps 2 --prompts-per-step 8 --group-size 4 --eval-problems 4"
LLM_SMOKE += " --max-new-tokens 6 --eval-every 1"
SMOKE = {"grpo_llm.py": LLM_SMOKE, "ppo.py": "--total-timesteps 4096"}
EARLIER = {"runs/…/step-000050": "grpo_llm__*/step-000001", "runs/…/agent.pt": "ppo__*/agent.pt"}


@pytest.mark.slow
def test_every_command_runs(pretrained, gsm_file, tmp_path):
    """The blocks of the README from top to bottom, at smoke size:
    a stand-in for the hub's model, a file for GSM8K's. Slow: each starts as a user starts it."""
    first, second, *rest = COMMANDS
    assert first.endswith("&& pip install -r requirements.txt && python grpo_llm.py")
    assert second == "python -m pytest -q -n 2 tests"
    test_file = tmp_path / "test.jsonl"
    test_file.write_text('{"question": "What is 2 + 2?", "answer": "2 + 2 = 4\\n#### 4"}\n')
    stand_ins = {
        "train.jsonl": gsm_file,
        "test.jsonl": str(test_file),
        "--nproc-per-node 8": "--standalone --nproc-per-node 2",
        "--steps 25": "--steps 2",
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    for command in ["python grpo_llm.py", *rest]:
        command = re.sub(r"(?:Qwen|HuggingFaceTB)/\S+", pretrained, command)
        for known, stand_in in stand_ins.items():
            command = command.replace(known, stand_in)
        for known, made in EARLIER.items():
            if known in command:  # made by a command before this one; the last one was torchrun's
                found = sorted(tmp_path.glob(made), key=os.path.getmtime)
                command = command.replace(known, str(found[-2:][0]))
        file = next(word for word in command.split() if word.endswith(".py"))
        command = command.replace(file, f"{file} {SMOKE[file]} --output-dir {tmp_path}")
        options = {"shell": True, "cwd": ROOT, "capture_output": True, "text": True}
        done = subprocess.run(command, env=environment, **options)
        assert done.returncode == 0, command + done.stderr[-9000:]  # torchrun adds much

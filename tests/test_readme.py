"""Every command and every number of the README."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from conftest import ROOT, script
from cures_findings import FINDINGS, fill, summary
from launch import Launched, run
from test_lineage import BUDGETS

README = (ROOT / "README.md").read_text()
FOLDER = ROOT / "tests/benchmarks/results"
RESULTS = (FOLDER / "llm_compare.md").read_text()
SEEDS = (FOLDER / "classic_seeds.md").read_text()
QUOTED = ["llm_compare", "classic_cartpole"]
# one table of them all
BEYOND = ["classic_acrobot", "classic_pendulum", "classic_lunarlander", "classic_halfcheetah"]


@pytest.mark.parametrize("name", QUOTED)
def test_results_are_the_committed_ones(name):
    assert (FOLDER / f"{name}.md").read_text().strip() in README


@pytest.mark.parametrize("name", BEYOND)
def test_rows_are_the_committed_ones(name):
    rows = [
        line for line in (FOLDER / f"{name}.md").read_text().splitlines() if line.startswith("|")
    ]
    assert len(rows) == 4 and all(row in README for row in rows)


def test_headline_numbers_are_in_the_results():
    cells = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]]
        for row in RESULTS.splitlines()
        if "|" in row
    }
    header, grpo = cells["run"], cells["grpo_llm"]
    numbers = (float(cell.replace("–", "nan")) for cell in grpo)
    value = dict(zip(header, numbers, strict=True))
    before, after, short, long = re.search(
        r"goes from ([\d.]+) to ([\d.]+) and the answers grow from (\d+) tokens to (\d+)",
        " ".join(README.split()),
    ).groups()
    assert (before, after) == (f"{value['pass@1 before']:.2f}", f"{value['after']:.2f}")
    assert (short, long) == (f"{value['length before']:.0f}", f"{value['length after']:.0f}")


def test_numbers_of_trl_are_in_the_results():
    """Seconds to 0.90, ours and theirs, and how many times as many completions a second."""
    text = " ".join(README.partition("\nAgainst TRL")[2].partition("\n\n")[0].split())
    speed, time = ((FOLDER / f"trl_{name}.md").read_text() for name in ("speed", "time"))
    ratios = re.findall(r"completions per second.*\| ([\d.]+) \| [\d.]+ to", speed)
    seconds = re.findall(r"^\| .*?\| ([\d.]+) \(", time, re.M)
    assert seconds == re.findall(r"([\d.]+) s\b", text)
    assert ratios == re.findall(r"([\d.]+) times", text) != []


def test_fifty_seeds_are_in_the_results():
    """README says how many of the runs were solved, and ended at 475 or more."""
    rows = re.findall(r"^\| (\w+) \| (\d+) of 50 \| (\d+) of 50 \|", SEEDS, re.M)
    told = re.findall(r"`(\w+)` (?:in )?(\d+) of 50", README)
    assert [(name, share, share) for name, share in told] == rows and len(rows) == 4


def cures():
    """{name of an experiment: what README says of it beside its picture}."""
    found = re.findall(r"results/cures_(\w+)\.png\)\n((?:  .+\n)+)", README)
    return {name: " ".join(text.split()) for name, text in found}


def test_every_cure_is_shown():
    results = {path.stem.removeprefix("cures_") for path in FOLDER.glob("cures_*.json")}
    assert results == cures().keys() == FINDINGS.keys() and len(results) == 15
    assert all((FOLDER / f"cures_{name}.png").exists() for name in results)


@pytest.mark.parametrize("name", FINDINGS)
def test_what_a_cure_shows_is_what_was_measured(name):
    """Every number is filled in from the row and column that cures_findings.py names."""
    found = json.loads((FOLDER / f"cures_{name}.json").read_text())
    text = fill(FINDINGS[name], summary(found))
    assert cures()[name] == text
    assert f"Found: {text}\n" in (FOLDER / "cures.md").read_text()


def test_findings_are_filled_in_from_the_place_named():
    rows = {"clip, on": {"seeds": 3, "a / b": (1, 2.25, 4)}, "": {"share": (0, 0.5, 1)}}
    text = "{clip, on / a / b :.1f} of {clip, on / a / b / low :.0f}, {/ share / high :.0%}"
    assert fill(text, rows) == "2.2 of 1, 100 %"
    with pytest.raises(KeyError):
        fill("{clip, off / a / b :.1f}", rows)


BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M)
QUOTES = re.findall(r"^(`\w(?:.+\n)+?)```python\n((?:.+\n)+?)```$", README, re.M)


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
    assert pairs == {(f"{a}.py", f"{b}.py") for a, b, _ in BUDGETS} | {("rloo_llm.py",)}


@pytest.mark.slow
def test_cures_at_smoke_size():
    """All of them; the figures too, where matplotlib is installed."""
    done = run("tests/benchmarks/cures.py", "--smoke")
    assert set(cures()) <= set(done.stdout.split())


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`(diff \w+\.py \w+\.py)`", README))))
def test_diff_commands_show_something(command):
    assert subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True).returncode == 1


def test_flags_named_exist():
    """In one of these scripts; the benchmarks' own flags are read from their text."""
    started = [
        Launched(f"{name}.py", "--help")
        for name in ("grpo_llm", "rloo_llm", "dapo_llm", "reinforce", "ppo", "trpo")
    ]
    assert [process.wait() for process in started] == [0] * 6
    shown = "".join(process.stdout for process in started)
    for path, flag in re.findall(r"(tests/benchmarks/\w+\.py) --(\w+)", README):
        assert f"{flag}: bool" in (ROOT / path).read_text(), flag
    for flag in set(
        re.findall(
            r"--(?!logdir|help|nproc-per-node|nnodes|shutdown-timeout|slow|only)[a-z][a-z-]+",
            re.sub(r"tests/benchmarks/\w+\.py --\w+", "", README),
        )
    ):
        assert flag in shown, flag


def test_files_named_exist():
    for path in re.findall(r"\]\(([\w./]+)\)|(tests/[\w/]+\.\w+)|(\w+\.py)\b", README):
        assert (ROOT / next(filter(None, path))).exists() or (
            ROOT / "tests/benchmarks" / next(filter(None, path))
        ).exists(), path


COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines()]


@pytest.mark.parametrize("command", [line for line in COMMANDS if ".py" in line])
def test_every_command_has_flags_that_the_script_takes(command):
    """As the script reads them; test_every_command_runs (slow) runs them all."""
    words = shlex.split(command.rpartition("&& ")[2])
    (at,) = (i for i, word in enumerate(words) if word.endswith(".py"))
    module = script(words[at].removesuffix(".py"))
    tyro.cli(module.Args, args=words[at + 1 :])


LLM_SMOKE = "--steps 2 --prompts-per-step 4 --group-size 4 --eval-problems 4"
LLM_SMOKE += " --max-new-tokens 6 --save-every 1"
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
        }
        stand_ins |= dict.fromkeys(re.findall(r"Qwen/\S+", command), pretrained)
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
            f"{command} {SMOKE[file]} --output-dir {tmp_path}",
            shell=True,
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, command + done.stderr[-2000:]


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"python (tests/benchmarks/\w+\.py)", README)))
)
def test_benchmarks_compile(path):
    compile((ROOT / path).read_text(), path, "exec")


def test_gpu_benchmark_at_smoke_size():
    assert (
        "| a |" in run("tests/benchmarks/gpu.py", "--smoke", "--parts", "a", "b", "c", "d").stdout
    )


@pytest.mark.slow
def test_gpu_benchmark_at_smoke_size_with_a_run_that_learns_torchrun_and_trl():
    assert "held-out chains" in run("tests/benchmarks/gpu.py", "--smoke").stdout

"""Every command and every number of the README."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from conftest import ROOT, script
from launch import Launched, run

README = (ROOT / "README.md").read_text()
FOLDER = ROOT / "tests/benchmarks/results"
RESULTS = (FOLDER / "llm_compare.md").read_text()
QUOTED = [
    "llm_compare",
    "trl_speed",
    "trl_time",
    "parallel_speed",
    "classic_cartpole",
]
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
        r"goes from ([\d.]+) to ([\d.]+) and the answers\ngrow from (\d+) tokens to (\d+)", README
    ).groups()
    assert (before, after) == (f"{value['pass@1 before']:.2f}", f"{value['after']:.2f}")
    assert (short, long) == (f"{value['length before']:.0f}", f"{value['length after']:.0f}")


def cures():
    """{name of an experiment: what README says of it below its picture}."""
    section = README.partition("## Every cure shown")[2].partition("\n## ")[0]
    return dict(re.findall(r"results/cures_(\w+)\.png\)\n((?:.+\n)+)", section))


def test_every_cure_is_shown():
    results = {path.stem.removeprefix("cures_") for path in FOLDER.glob("cures_*.json")}
    assert results == cures().keys() and len(results) == 15
    assert all((FOLDER / f"cures_{name}.png").exists() for name in results)


@pytest.mark.parametrize("name", cures())
def test_numbers_of_a_cure_are_the_measured_ones(name):
    """Each is a median, an end of a range, or a setting, rounded; or a hundred times that, in %."""
    table = (FOLDER / "cures.md").read_text().partition(f"## {name}\n")[2].partition("\n## ")[0]
    table = "\n".join(line for line in table.splitlines() if line.startswith("|"))
    measured = [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[-+]\d+)?", table)]
    text = cures()[name].replace(",", "").replace("`", "").replace("\n", " ")
    for number, percent in re.findall(r"(\d+(?:\.\d+)?)( %)?", text):
        digits = len(number.partition(".")[2])
        scale = 100 if percent else 1
        found = {f"{scale * each:.{digits}f}" for each in measured}
        assert number in found, f"{name}: {number}{percent} was not measured"


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


COMMANDS = [line for b in re.findall(r"```\n(.*?)```", README, re.S) for line in b.splitlines()]


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
        and second == "python -m pytest -q tests"
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

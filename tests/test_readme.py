"""Every command and every number of the README."""

import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
FOLDER = ROOT / "tests/benchmarks/results"
RESULTS = (FOLDER / "llm_compare.md").read_text()
QUOTED = ["llm_compare", "trl_speed", "trl_time", "parallel_speed", "classic_cartpole", "classic_variance"]
BEYOND = ["classic_acrobot", "classic_pendulum", "classic_lunarlander", "classic_halfcheetah"]  # one table of them all


@pytest.mark.parametrize("name", QUOTED)
def test_results_are_the_committed_ones(name):
    assert (FOLDER / f"{name}.md").read_text().strip() in README


@pytest.mark.parametrize("name", BEYOND)
def test_rows_are_the_committed_ones(name):
    rows = [line for line in (FOLDER / f"{name}.md").read_text().splitlines() if line.startswith("|")]
    assert len(rows) == 4 and all(row in README for row in rows)


def test_headline_numbers_are_in_the_results():
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in RESULTS.splitlines() if "|" in row}
    header, grpo = cells["run"], cells["grpo_llm"]
    value = dict(zip(header, map(float, (cell if cell != "–" else "nan" for cell in grpo))))
    before, after, short, long = re.search(r"goes from ([\d.]+) to ([\d.]+) and the answers\ngrow from (\d+) tokens to (\d+)", README).groups()
    assert (before, after) == (f"{value['pass@1 before']:.2f}", f"{value['after']:.2f}")
    assert (short, long) == (f"{value['length before']:.0f}", f"{value['length after']:.0f}")


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`(diff \w+\.py \w+\.py)`", README))))
def test_diff_commands_show_something(command):
    assert subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True).returncode == 1


def test_flags_named_exist():
    """In one of these scripts; the benchmarks' own flags are read from their text."""
    shown = ""
    for name in ("grpo_llm", "reinforce", "ppo", "trpo"):
        shown += subprocess.run([sys.executable, f"{name}.py", "--help"], cwd=ROOT, capture_output=True, text=True).stdout
    for path, flag in re.findall(r"(tests/benchmarks/\w+\.py) --(\w+)", README):
        assert f"{flag}: bool" in (ROOT / path).read_text(), flag
    for flag in set(re.findall(r"--(?!logdir|help|nproc-per-node)[a-z][a-z-]+", re.sub(r"tests/benchmarks/\w+\.py --\w+", "", README))):
        assert flag in shown, flag


def test_files_named_exist():
    for path in re.findall(r"\]\(([\w./]+)\)|(tests/[\w/]+\.\w+)|(\w+\.py)\b", README):
        assert (ROOT / next(filter(None, path))).exists() or (ROOT / "tests/benchmarks" / next(filter(None, path))).exists(), path

"""Every command and every number of the README."""

import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "tests/benchmarks/results/llm_compare.md").read_text()


def test_results_are_the_committed_ones():
    assert RESULTS.strip() in README
    assert (ROOT / "tests/benchmarks/results/trl_speed.md").read_text().strip() in README


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
    shown = subprocess.run([sys.executable, "grpo_llm.py", "--help"], cwd=ROOT, capture_output=True, text=True).stdout
    for flag in set(re.findall(r"--(?!logdir|help)[a-z][a-z-]+", README)):
        assert flag in shown, flag


def test_files_named_exist():
    for path in re.findall(r"\]\(([\w./]+)\)|(tests/[\w/]+\.\w+)|(\w+\.py)\b", README):
        assert (ROOT / next(filter(None, path))).exists() or (ROOT / "tests/benchmarks" / next(filter(None, path))).exists(), path

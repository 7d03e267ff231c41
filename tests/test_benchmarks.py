"""The benchmarks: their tables, which runs they keep, their arithmetic; and (slow) each of them and
each experiment at toy size."""

import json
import re
import runpy
from datetime import datetime
from math import prod

import bench
import beside_trl
import classic
import gpu
import methods
import parity
import pytest
import real_model
from conftest import ROOT
from launch import Launched
from test_experiments import NAMES

TESTS = ROOT / "tests"
PAGE = (TESTS / "benchmarks/RESULTS.md").read_text()

# Name, command after `python tests/`, and parts that the output must hold, with … between them.
SMOKE = [
    ("classic", "--smoke", "| reinforce | 0/1 | … | CartPole-v1 | "),
    ("methods", "--smoke --arms grpo sapo", "| GRPO | 1 | … | sapo | 1 | … | pass@k credit | 1 |"),
    ("parity", "--smoke", "| rloo_llm --beta 0.1 | … | tis --beta 0.0 |"),
    ("beside_trl", "--smoke", "| tiny, rloo_llm.py | … | real, grpo_llm.py |"),
    ("real_model", "--smoke --model PRETRAINED", "| products, GRPO | 1 | … right answer"),
    ("gpu", "--smoke", '"gradient_error" … "ranks", "name": "cispo_llm" … "computed"'),
]
SMOKE = [(name, f"benchmarks/{name}.py {flags}", expected) for name, flags, expected in SMOKE]
SMOKE += [(name, f"experiments/{name}.py --smoke", name) for name in NAMES]
SMOKE += [("weights", "learn/weights.py /dev/null", "")]


@pytest.mark.slow
@pytest.mark.parametrize("name,command,expected", SMOKE, ids=[row[0] for row in SMOKE])
def test_it_runs_at_smoke_size(name, command, expected, pretrained, tmp_path, monkeypatch):
    """If TRL or Stable-Baselines3 is not installed, our side runs alone."""
    monkeypatch.setenv("OUT", str(tmp_path))  # where gpu.py writes
    words = f"tests/{command}".replace("PRETRAINED", pretrained).split()
    process = Launched(*words)
    assert process.wait(600) == 0, process.stderr[-3000:]
    assert all(part in process.stdout for part in expected.split(" … ")), process.stdout


@pytest.mark.parametrize("module", [methods, real_model, classic, parity, beside_trl, gpu])
def test_the_tables_are_those_of_the_runs_kept(module):
    for name, lines in module.tables(*module.kept()).items():
        text = "\n".join(lines)
        assert f"<!-- {name} -->\n{text}\n<!-- end -->" in PAGE, name


def test_a_changed_default_reuses_no_run(tmp_path, monkeypatch):
    """Of methods.py's runs in a file, none is found after a change of a default that its command
    does not name; and the runs from before the change are not mixed with new ones."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    made = []

    def in_processes(function, jobs, at_once):
        made.extend(jobs)
        return [(job, {"pass@1": [job["rate"]]}) for job in jobs]

    monkeypatch.setattr(methods, "in_processes", in_processes)

    def runs_made():
        made.clear()
        runs = bench.Kept("methods")
        methods.campaign(runs, ["grpo"], [1, 2], 1, {})
        return len(made), len(runs.runs)

    assert runs_made() == (6, 6)  # two rates on two seeds, then two seeds
    runs = bench.Kept("methods")
    flags = runs.runs[0]["flags"]
    assert runs.find("grpo", flags) and not runs.find("grpo", flags | {"max_grad_norm": 0.5})
    assert runs_made() == (0, 6)
    script, arguments = bench.load("grpo_llm"), methods.arguments

    def changed(*inputs):
        _, args = arguments(*inputs)
        args.max_grad_norm = 0.5
        return script, args

    monkeypatch.setattr(methods, "arguments", changed)
    assert runs_made() == (6, 6)


def test_the_file_and_not_its_folder_is_a_flag():
    args = bench.load("grpo_llm").Args(output_dir="/a/b", model="/a/SmolLM2")
    flags = bench.all_flags(args)
    assert flags["model"] == "SmolLM2" and "output_dir" not in flags and flags["seed"] == args.seed


def test_only_rows_that_can_pass_count():
    """Six rows of ten seeds and twelve of five: 0.05 / 6, and 0.3 of six by chance."""
    text = " ".join(methods.how_to_read([[1.0] * 10] * 6 + [[1.0] * 5] * 12 + [[]]))
    assert "Of the 18 rows" in text and "only 6 have" in text
    assert "below 0.0083" in text and "0.3 of them" in text
    assert "only 0 have" in " ".join(methods.how_to_read([[1.0] * 5] * 3))


def test_pass_at_k_is_that_of_all_draws():
    """Of 4 completions 1 is right: it is among 2 of them in 3 of 6 draws."""
    assert methods.pass_at(2, {"flags": {"draws": 4}, "right": [1, 4, 0]}) == (0.5 + 1 + 0) / 3


def test_watch_counts_both_sides_alike():
    """Solved is a mean of 475 over the last 100 episodes; what comes later changes nothing."""
    watch = classic.Watch()
    watch.start(0.0)
    assert not watch.note(100, [500.0] * 99)
    assert watch.note(10, [500.0]) and watch.found["solved_steps"] == 110
    assert not watch.note(10, [0.0] * 6) and watch.found["solved_steps"] == 110
    assert watch.found["steps"] == 120 and watch.found["last"] == 470


def test_the_middle_of_five_seeds_is_the_mean_of_three():
    assert classic.summary([0.0, 9.0, 1.0, 2.0, 3.0])["iqm"] == 2


def test_make_py_makes_the_data_files():
    """The answers are right. No two sums have the same two numbers, because one of the two could be
    held out and the other trained on."""
    made = runpy.run_path(str(TESTS / "examples/data/make.py"))
    sums, dates = made["sums"](), made["dates"]()
    for name, problems in {"sums": sums, "dates": dates}.items():
        file = TESTS / f"examples/data/{name}.jsonl"
        assert made["jsonl"](problems) == file.read_text()
    numbers = [tuple(sorted(map(int, re.findall(r"\d+", question)))) for question, _ in sums]
    assert [str(a + b) for a, b in numbers] == [answer for _, answer in sums]
    assert len(set(numbers)) == len(sums)
    for question, answer in dates:
        assert datetime.strptime(question, "%d %B %Y").date().isoformat() == answer
    assert len(dict(dates)) == len(dates)


def test_real_model_trains_on_no_held_out_product(tmp_path, monkeypatch):
    """The factors do not occur in the other order either. The answers are right."""
    monkeypatch.setattr(real_model, "CACHE", tmp_path)
    sides = []
    for path in real_model.task_files("products"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        numbers = [[int(word) for word in re.findall(r"\d+", row["question"])] for row in rows]
        assert [str(prod(each)) for each in numbers] == [row["answer"] for row in rows]
        sides.append({tuple(sorted(each)) for each in numbers})
    train, held_out = sides
    assert len(held_out) == 40 and len(train) > 40 and not train & held_out

"""The benchmarks: their tables, their arithmetic; and (slow) each of them at toy size."""

import re

import bench
import classic
import gpu
import methods
import numpy as np
import parity
import pytest
import real_model
import stats
import torch
from conftest import ROOT, calls_of
from launch import Launched

MODULES = [methods, real_model, classic, parity, gpu]
TOY = {"prompts_per_step": 4, "group_size": 4, "eval_problems": 4, "max_new_tokens": 4}


@pytest.mark.parametrize("module", MODULES)
def test_the_tables_are_those_of_the_runs_kept(module):
    page = bench.PAGE.read_text()
    for name, lines in module.tables(bench.Kept(module.__name__)).items():
        text = "\n".join(lines)
        assert f"<!-- {name} -->\n{text}\n<!-- end -->" in page, name


def test_scores_are_of_sums_that_no_run_trains_on_and_no_rate_is_chosen_by():
    script = bench.load("grpo_llm")
    args = script.Args(eval_problems=10_000)
    _, train, tuning = methods.load_task(methods.TUNING_SUMS, script, args)
    _, _, scored = methods.load_task(methods.SUMS, script, args)
    assert min(len(tuning), len(scored)) >= 256 and len(set(scored)) == len(scored)
    assert not {*train} & {*tuning} and not {*train} & {*scored} and not {*tuning} & {*scored}


@pytest.fixture
def page(monkeypatch, tmp_path):
    """A copy of the page, to be written, without any run that is kept; and runs in this process."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "PAGE", tmp_path / "RESULTS.md")
    bench.PAGE.write_text((ROOT / "tests/benchmarks/RESULTS.md").read_text())

    def in_processes(function, jobs, at_once=1):
        return [(job, function(**job)) for job in jobs]

    monkeypatch.setattr(bench, "in_processes", in_processes)
    for module in (methods, real_model):
        monkeypatch.setattr(module, "draw", lambda runs: None)
    return bench.PAGE


def test_the_rate_is_that_of_the_tuning_seeds(page):
    """The rate that is best on other seeds is not taken."""
    runs = bench.Kept("methods", "transformers")
    for seed, scores in {101: (0.2, 0.3), 102: (0.6, 0.4), 1: (0.5, 0.9), 2: (0.5, 0.9)}.items():
        for rate, score in zip((1e-3, 2e-3), scores, strict=True):
            flags = methods.flags_of("GRPO", rate, seed)
            runs.add("GRPO", flags, {"eval/pass@1": [0.0, score]})
    assert methods.rate_of(runs, "GRPO") == 1e-3


def test_interval_is_student_s():
    """Of 16 numbers: t = 2.1314, from a table, times the standard error."""
    spread = np.tile([-1.0, 1.0], 8)
    low, high = stats.interval(3 + spread)
    error = spread.std(ddof=1) / 4
    assert [low, high] == pytest.approx([3 - 2.1314 * error, 3 + 2.1314 * error], abs=1e-3)


@pytest.mark.slow
def test_methods(page, monkeypatch):
    method = methods.Method("grpo_llm", TOY | {"steps": 4}, methods.IMITATION)
    monkeypatch.setattr(methods, "METHODS", {"imitation": method})
    monkeypatch.setattr(methods, "RATES", (3e-4, 5e-4))
    monkeypatch.setattr(methods, "SEEDS", (1, 2))
    runs = calls_of(monkeypatch, methods, "run")
    for _ in range(2):  # the second finds all runs
        methods.main()
        assert len(runs) == 6
    assert re.search(r"\| imitation \| 0.000\d .* \| 64 \|", page.read_text())


@pytest.mark.slow
def test_real_model(page, monkeypatch, pretrained):
    small = {"prompts_per_step": 2, "eval_problems": 2, "max_new_tokens": 3}
    monkeypatch.setattr(real_model, "FLAGS", real_model.FLAGS | small)
    scripts = "rloo_llm", "dapo_llm"
    real_model.main("dates", scripts, seeds=(1,), steps=5, model=pretrained, bf16=True)
    assert "| dates, RLOO, bf16 | 5 | 1 |" in page.read_text()
    assert re.search(r"\| dates, DAPO, bf16 \| 2 \| 1 \| .* \| 128 \|", page.read_text())


@pytest.mark.slow
def test_classic(page, monkeypatch):
    flags = {"total_timesteps": 2000, "num_envs": 4}
    places = [("CartPole-v1", 2, {"actor_critic": 1, "ppo": 1}, flags)]
    monkeypatch.setattr(classic, "PLACES", places)
    monkeypatch.setattr(classic, "LEVEL", 15)
    classic.main()
    row = r"\| CartPole-v1, rewards × 2 \| – \| (\d+).*: 1 at [\d,]+ \| – \| .* 1: 1 at [\d,]+ \|"
    assert int(re.search(row, page.read_text())[1]) < 500


@pytest.mark.slow
@pytest.mark.parametrize("command", parity.CASES)
def test_our_side_of_parity(command, tmp_path):
    """TRL may not be installed. The clip acts on some tokens."""
    torch.set_default_dtype(torch.float64)
    try:
        parity.make_model(tmp_path)
        *_, steps = parity.ours(command, str(tmp_path))
    finally:
        torch.set_default_dtype(torch.float32)
    rloo = command.startswith("rloo")
    assert len(steps) == (1 if rloo else 4) and (sum(step[-1] for step in steps) > 0) != rloo


@pytest.mark.slow
def test_gpu(monkeypatch):
    """On a CPU nothing differs from it, except in bf16."""
    small = {"vocab_size": 600, "hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2}
    monkeypatch.setattr(gpu, "SHAPE", gpu.SHAPE | small)
    for name, size in {"GROUPS": 8, "SAMPLES": 2, "LONGEST": 20, "NEW": 16}.items():
        monkeypatch.setattr(gpu, name, size)
    for row, compare in gpu.right():
        assert (compare()["gradient_error"] > 0) == row.endswith("bf16")
    for _, measure in gpu.step():
        spent = measure()
        assert 0 < spent["rollout_s"] + spent["train_minibatch_s"] < spent["s"]


@pytest.mark.slow
def test_pictures_of_learn(tmp_path):
    process = Launched("tests/learn/ratio_pictures.py", str(tmp_path))
    assert process.wait(600) == 0, process.stderr[-3000:]
    assert len([*tmp_path.glob("*.png")]) == 2

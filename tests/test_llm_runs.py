"""Whole runs: learning, repeatability, what is scored, shown and kept, and what a kill leaves."""

import importlib
import json
import os
import time
import zlib
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from conftest import calls_of, equal, scalars, script, set_task, weights
from launch import Launched

grpo = script("grpo_llm")


def by_text(completion, answer):
    """Different completions have different rewards."""
    return zlib.crc32(completion.encode()) / -(2**32)


def test_a_run_learns(tmp_path):
    """With a turned sign pass@1 falls instead of rising."""
    result = grpo.main(grpo.Args(steps=16, eval_problems=96, output_dir=str(tmp_path)))
    assert result["eval/pass@1_initial"] < 0.25
    assert result["eval/pass@1"] > result["eval/pass@1_initial"] + 0.1


@pytest.mark.slow
def test_make_py_teaches_the_form_of_an_answer(tmp_path, monkeypatch):
    """A tenth of its steps are enough for that. The files beside the weights are the shipped ones;
    the weights cannot be, as another CPU rounds otherwise."""
    tiny = Path(grpo.__file__).parent / "tests/tiny_model"
    monkeypatch.syspath_prepend(tiny)
    make = importlib.import_module("make")
    monkeypatch.setattr(make, "STEPS", 45)
    model, tokenizer = make.untrained(0)
    make.train(model, tokenizer, 0)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / name).read_text() == (tiny / name).read_text()
    scores = grpo.main(grpo.Args(model=str(tmp_path), steps=0, output_dir=str(tmp_path)))
    assert scores["eval/clipped_ratio"] < 0.1 and scores["eval/pass@1"] > 0


def test_same_seed_same_run(short_run, monkeypatch):
    """Another seed is another run, with the same evaluation. Each step asks questions of its own,
    none twice. Each step of each process has random numbers of its own, or a question would get the
    same completions again."""
    set_task(monkeypatch, grpo, by_text)
    seeded = calls_of(monkeypatch, torch, "manual_seed")
    rollouts = calls_of(monkeypatch, grpo, "rollout")
    args = grpo.Args(**short_run, num_minibatches=1)
    first, again, other = grpo.main(args), grpo.main(args), grpo.main(replace(args, seed=2))
    a, b, c = (weights(run["folder"]) for run in (first, again, other))
    assert equal(a, b) and not equal(a, c)
    assert first["eval/pass@1_initial"] == other["eval/pass@1_initial"]
    asked = [tuple(inputs[3]) for inputs, _ in rollouts if inputs[4] == args.group_size]
    assert asked[:2] == asked[2:4] and len({*asked}) == 4 and len({*asked[0]}) == 4
    monkeypatch.setattr(grpo, "RANK", 1)
    monkeypatch.setattr(grpo, "evaluate", lambda *_: {"eval/pass@1": 0.0})
    grpo.main(args)
    seeds = {seed for (seed,), _ in seeded if abs(seed) > 2**20}  # evaluations and tasks have 0
    assert len(seeds) == 3 * 2, "of two steps, with two seeds, and in the second process"


def test_scores_are_means_and_all_completions_are_kept(short_run, monkeypatch, tmp_path, capsys):
    """pass@1 is of all samples, pass@8 of each problem's best; the best and the worst are shown.
    Not more completions are drawn at once than in training. --steps 0 saves nothing. The shell
    leaves the ~ of --output-dir=~/runs as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    set_task(monkeypatch, grpo, by_text)
    rollouts = calls_of(monkeypatch, grpo, "rollout")
    result = grpo.main(grpo.Args(**short_run | {"steps": 0, "output_dir": "~/runs"}))
    folder = Path(result["folder"])
    assert folder.parent == tmp_path / "runs" and not list(folder.glob("step-*"))
    assert [(len(inputs[3]), inputs[4]) for inputs, _ in rollouts] == [(2, 8)] * 4
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    rewards = [by_text(row["completion"], "") for row in rows]
    assert [(row["step"], row["reward"]) for row in rows] == [(0, reward) for reward in rewards]
    assert len({*rewards}) > 5 and str(eval(rows[-1]["prompt"][:-1])) == rows[-1]["answer"]
    means = {"eval/pass@1": sum(rewards) / 64}
    means["eval/pass@8"] = sum(max(rewards[i : i + 8]) for i in range(0, 64, 8)) / 8
    for name, mean in means.items():
        assert result[name] == pytest.approx(mean) == pytest.approx(scalars(folder, name)[0])
    lines = capsys.readouterr().out.splitlines()
    for line, shown in zip(lines[-3:], (max(rewards), min(rewards), folder), strict=True):
        assert line.endswith(str(shown))


def test_a_checkpoint_is_a_model_and_scores_what_it_scored(short_run, monkeypatch, tmp_path):
    """Neither the initial model nor the reference is saved. What is cut off while its last file is
    written leaves the checkpoint before it whole."""
    set_task(monkeypatch, grpo, by_text)
    args = grpo.Args(**short_run | {"eval_every": 1}, learning_rate=5e-3, warmup_steps=1, beta=0.1)
    result = grpo.main(args)
    assert result["eval/pass@1"] != result["eval/pass@1_initial"]
    again = grpo.main(replace(args, model=f"{result['folder']}/step-000002", steps=0))
    assert again["eval/pass@1"] == result["eval/pass@1"]
    save = Mock(side_effect=[None, KeyboardInterrupt])
    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", save)
    with pytest.raises(KeyboardInterrupt):
        grpo.main(replace(args, output_dir=str(tmp_path / "cut off")))
    assert [path.name for path in tmp_path.glob("cut off/*/step-*")] == ["step-000001"]


def test_a_killed_run_has_written_what_it_had_to_say(tmp_path):
    """Its output goes into files, and it is killed without warning: all lines printed until then
    are there, and each step is in the log. A notebook or a cluster may have set RANK, which counts
    only beside WORLD_SIZE."""
    command = ["grpo_llm.py", "--eval-every", 3, "--eval-problems", 8, "--output-dir", tmp_path]
    run, deadline = Launched(*command, environment=os.environ | {"RANK": "3"}), time.time() + 120
    while not list(tmp_path.glob("*/step-*")) or len(scalars(*tmp_path.iterdir(), "reward")) < 5:
        assert run.process.is_alive() and time.time() < deadline, run.stderr
        time.sleep(0.05)
    run.kill()
    assert run.wait() == -9
    first, second, third, *lines = run.stdout.splitlines()
    assert first.startswith("Args(") and second.startswith("10000 questions") and "<eos>" in third
    assert any(line.startswith("step 3: eval/pass@1") for line in lines)

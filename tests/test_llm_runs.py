"""Whole runs: learning, repeatability, what is scored, shown and kept, and what a kill leaves."""

import importlib
import json
import os
import re
import time
import zlib
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from conftest import calls_of, equal, scalars, script, set_task, weights
from launch import Launched, flags, run

grpo = script("grpo_llm")


def by_text(completion, answer):
    """Different completions have different rewards."""
    return zlib.crc32(completion.encode()) / 2**32


def test_a_run_learns(tmp_path):
    """With a turned sign pass@1 falls instead of rising."""
    result = grpo.main(grpo.Args(steps=16, eval_problems=128, output_dir=str(tmp_path)))
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
    flags = {"model": str(tmp_path), "steps": 0, "micro_batch_size": 256}
    scores = grpo.main(grpo.Args(**flags, output_dir=str(tmp_path)))
    assert scores["eval/clipped_ratio"] < 0.1 and scores["eval/pass@1"] > 0


def test_same_seed_same_run(short_run, monkeypatch):
    """Another seed is another run. Each step asks questions of its own, none of them twice, with
    random numbers of its own, or a question would get the same completions at every step."""
    set_task(monkeypatch, grpo, by_text)
    seeded = calls_of(monkeypatch, transformers, "set_seed")
    rollouts = calls_of(monkeypatch, grpo, "rollout")
    args = grpo.Args(**short_run)
    first, again, other = grpo.main(args), grpo.main(args), grpo.main(replace(args, seed=2))
    a, b, c = (weights(run["folder"]) for run in (first, again, other))
    assert equal(a, b) and not equal(a, c)
    assert first["eval/pass@1_initial"] == other["eval/pass@1_initial"]
    asked = [tuple(inputs[3]) for inputs, _ in rollouts if inputs[4] == 4]
    assert asked[:2] == asked[2:4] and len(set(asked)) == 4 and len(set(asked[0])) == 4
    seeds = {seed for (seed,), _ in seeded} - {0}
    assert len(seeds) == 2 * 2, "each seed's steps; 0 is for problems and evaluations"
    seeded.clear()
    monkeypatch.setattr(grpo, "RANK", 1)  # so another process answers a question otherwise
    monkeypatch.setattr(grpo, "evaluate", lambda *_: {"eval/pass@1": 0.0})
    grpo.main(replace(args, num_minibatches=1))
    assert len({seed for (seed,), _ in seeded} - seeds - {0}) == 2


def test_scores_are_means_of_any_reward(short_run, monkeypatch, tmp_path):
    """pass@1 is of all samples, pass@8 of each problem's best. --steps 0 logs every score, and
    saves nothing. No more problems are asked at once than in training. The shell leaves the ~ of
    --output-dir=~/runs as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    set_task(monkeypatch, grpo, lambda *inputs: -7 * by_text(*inputs))
    rollouts = calls_of(monkeypatch, grpo, "rollout")
    result = grpo.main(grpo.Args(**short_run | {"steps": 0, "output_dir": "~/runs"}))
    assert Path(result["folder"]).parent == tmp_path / "runs"
    assert [(len(inputs[3]), inputs[4]) for inputs, _ in rollouts] == [(4, 8)] * 2
    rewards = torch.cat([rewards for _, (_, rewards, _) in rollouts])
    assert len(rewards.unique()) > 5
    assert result["eval/pass@1"] == pytest.approx(rewards.mean().item())
    assert result["eval/pass@8"] == pytest.approx(rewards.amax(1).mean().item())
    for name in ("eval/pass@1", "eval/pass@8", "eval/clipped_ratio"):
        assert scalars(result["folder"], name) == [pytest.approx(result[name])]
    assert not list(Path(result["folder"]).glob("step-*"))


def test_a_checkpoint_is_a_model_and_scores_what_it_scored(short_run, monkeypatch, tmp_path):
    """Neither the initial model nor the reference is saved. What is cut off while its last file is
    written leaves the checkpoint before it whole."""
    set_task(monkeypatch, grpo, by_text)
    args = grpo.Args(**short_run | {"eval_every": 1}, learning_rate=5e-3, warmup_steps=1, beta=0.1)
    result = grpo.main(args)
    assert result["eval/pass@1"] != result["eval/pass@1_initial"]
    checkpoint = f"{result['folder']}/step-000002"
    again = grpo.main(replace(args, model=checkpoint, steps=0))
    assert again["eval/pass@1"] == result["eval/pass@1"]

    save = Mock(side_effect=[None, KeyboardInterrupt])
    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", save)
    with pytest.raises(KeyboardInterrupt):
        grpo.main(replace(args, output_dir=str(tmp_path / "cut off")))
    assert [path.name for path in tmp_path.glob("cut off/*/step-*")] == ["step-000001"]


def test_a_killed_run_has_written_what_it_had_to_say(short_run):
    """Its output goes into files, and it is killed without warning: all lines printed until then
    are there, and each step is in the log."""
    run = Launched("grpo_llm.py", *flags(short_run | {"steps": 1000, "eval_every": 10}))
    runs, deadline = Path(short_run["output_dir"]), time.monotonic() + 120
    while not list(runs.glob("*/step-*")) or len(scalars(next(runs.iterdir()), "reward")) < 12:
        assert run.process.is_alive() and time.monotonic() < deadline, run.stderr
        time.sleep(0.05)
    run.kill()
    assert run.wait() == -9
    assert run.stdout.startswith("Args(") and "step 10: eval/pass@1" in run.stdout


def test_what_a_run_says_and_keeps(short_run):
    """It prints its flags, how many problems there are, what ends a completion, each evaluation
    with its best and worst completion, the result and its folder; it keeps its flags, and every
    completion of its evaluations. This terminal knows ASCII alone. A notebook or a cluster may have
    set RANK, which counts only beside WORLD_SIZE."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "RANK": "3"}
    process = run("grpo_llm.py", *flags(short_run), environment=environment)
    first, second, third, *lines, last = process.stdout.splitlines()
    assert first == str(grpo.Args(**short_run)) and second.startswith("10000 questions to train on")
    assert "8 to evaluate" in second and "ends at <eos>" in third
    (folder,) = Path(short_run["output_dir"]).iterdir()
    result = re.fullmatch(r"pass@1 (\S+) \? (\S+); \d+ s; model and logs in (.*)", last)
    logged = scalars(folder, "eval/pass@1")
    assert result.groups() == (*(f"{score:.3f}" for score in logged), str(folder))
    kept = [json.loads(line) for line in (folder / "completions.jsonl").open()]
    assert [row["step"] for row in kept] == [0] * 64 + [2] * 64
    for i, part in enumerate((kept[:64], kept[64:])):
        rewards = [row["reward"] for row in part]
        assert sum(rewards) / 64 == pytest.approx(logged[i])
        assert all(grpo.verify(row["completion"], row["answer"]) == row["reward"] for row in part)
        assert {str(eval(row["prompt"][:-1])) for row in part} == {row["answer"] for row in part}
        shown = [line for line in lines if line.startswith("    prompt")][2 * i :]
        for line, choose in zip(shown, (max, min), strict=False):
            assert line.endswith(f"reward {choose(rewards)}")
    (log,) = folder.glob("events*")
    assert first.encode() in log.read_bytes()


def test_a_reward_that_float32_cannot_hold_ends_the_run_and_keeps_the_model(short_run, monkeypatch):
    """64 rewards of an evaluation, 16 of a step, 64 of an evaluation and some of the next step."""
    rewards = chain((i % 3 for i in range(150)), repeat(1e39))
    set_task(monkeypatch, grpo, lambda *_: next(rewards))
    with pytest.raises(RuntimeError, match="non-finite"):
        grpo.main(grpo.Args(**short_run | {"steps": 4, "eval_every": 1}))
    (folder,) = Path(short_run["output_dir"]).iterdir()
    assert [path.name for path in folder.glob("step-*")] == ["step-000001"]
    assert all(tensor.isfinite().all() for tensor in weights(folder).values())

"""Whole runs: learning, repeatability, what is logged, and a user's errors."""

import importlib
from dataclasses import replace
from itertools import chain, cycle, islice, repeat
from pathlib import Path

import pytest
import torch
from conftest import calls_of, equal, reward_by, scalars, script, weights

grpo = script("grpo_llm")


def test_a_run_learns_and_its_log_is_complete(tmp_path):
    """With a turned sign pass@1 falls instead of rising. The clip is live."""
    args = grpo.Args(steps=16, eval_problems=128, output_dir=str(tmp_path))
    result = grpo.main(args)
    assert result["eval/pass@1_initial"] < 0.25
    assert result["eval/pass@1"] > result["eval/pass@1_initial"] + 0.1
    assert result["eval/pass@8"] >= result["eval/pass@1"]
    names = "reward reward_std frac_reward_zero_std completions/mean_length clipfrac approx_kl"
    names += " completions/clipped_ratio learning_rate kl entropy grad_norm"
    names += " loss eval/pass@1 eval/pass@8"
    logged = {name: scalars(result["folder"], name) for name in names.split()}
    for name, values in logged.items():
        assert len(values) == (2 if name.startswith("eval") else 16), name
    assert 0 < sum(logged["clipfrac"]) / 16 < 0.5
    assert abs(logged["kl"][0]) < 1e-8 < 1e-3 < logged["kl"][-1]  # it begins as the reference
    assert logged["approx_kl"][-1] > 0 and logged["learning_rate"][9] == pytest.approx(5e-4)


@pytest.mark.slow
def test_make_py_teaches_the_form_of_an_answer(tmp_path, monkeypatch):
    """A tenth of its steps are enough for that. The files beside the weights are the shipped ones;
    the weights cannot be, as another CPU rounds otherwise."""
    monkeypatch.syspath_prepend(grpo.TINY_MODEL)
    make = importlib.import_module("make")
    monkeypatch.setattr(make, "STEPS", 45)
    model, tokenizer = make.untrained(0)
    make.train(model, tokenizer, 0)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / name).read_text() == (grpo.TINY_MODEL / name).read_text()
    flags = {"model": str(tmp_path), "steps": 0, "micro_batch_size": 256}
    scores = grpo.main(grpo.Args(**flags, output_dir=str(tmp_path)))
    assert scores["eval/clipped_ratio"] < 0.1 and scores["eval/pass@1"] > 0


def test_same_seed_same_run(short_run, monkeypatch):
    """Also where `args` has been used before. The third run has another seed. Each step has
    randomness of its own, or the same question would get the same completions at every step."""
    reward_by(monkeypatch, grpo, lambda text, _: sum(map(ord, text)) % 7)
    seeded = calls_of(monkeypatch, torch, "manual_seed")
    args = grpo.Args(**short_run, max_new_tokens=6)
    first, again, other = grpo.main(args), grpo.main(args), grpo.main(replace(args, seed=2))
    a, b, c = (weights(run["folder"]) for run in (first, again, other))
    assert equal(a, b) and not equal(a, c)
    assert first["eval/pass@1_initial"] == other["eval/pass@1_initial"]
    seeds = {seed for (seed,), _ in seeded} - {0}
    assert len(seeds) == 2 * 2, "each seed's steps; 0 is for problems and evaluations"
    seeded.clear()
    monkeypatch.setattr(grpo, "RANK", 1)  # so another process answers a question otherwise
    grpo.main(args)
    assert len({seed for (seed,), _ in seeded} - seeds - {0}) == 1 + 2


def test_what_is_not_finite_ends_the_run_and_keeps_the_model(short_run, monkeypatch):
    """A verifier may give NaN, or a number that float32 cannot hold."""
    # 64 rewards of an evaluation, 16 of a step, 64 and 16 more; those of the second step overflow.
    rewards = chain(islice(cycle([0, 1, 2]), 150), repeat(1e39))
    reward_by(monkeypatch, grpo, lambda *_: next(rewards))
    with pytest.raises(RuntimeError, match="non-finite"):
        grpo.main(grpo.Args(**short_run | {"steps": 4, "eval_every": 1}))
    (folder,) = Path(short_run["output_dir"]).iterdir()
    assert [path.name for path in folder.glob("step-*")] == ["step-000001"]
    assert all(tensor.isfinite().all() for tensor in weights(folder).values())

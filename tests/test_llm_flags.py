"""What the flags of the LLM scripts do: defaults that follow, learning rates, --eval-only, --resume
alone, --help."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import LLM_SCRIPTS, equal, last_checkpoint, scalars, script, weights
from launch import ROOT, flags, run

grpo = script("grpo_llm")

# ----------------------------------------------------------------------- defaults that follow


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_defaults_follow_from_model_and_data_unless_given(name):
    Args = script(name).Args

    def chosen(**flags):
        args = Args(**flags)
        return args.learning_rate, args.max_new_tokens, args.micro_batch_size, "####" in args.prompt

    assert chosen() == (4e-4, 24, 128, False)
    assert chosen(model="some/model") == (1e-6, 24, 8, False)
    assert chosen(dataset="train.jsonl") == (4e-4, 256, 128, True)
    assert chosen(model="some/model", dataset="train.jsonl") == (1e-6, 256, 8, True)
    own = {
        "learning_rate": 3e-5,
        "max_new_tokens": 9,
        "micro_batch_size": 5,
        "prompt": "{question}",
    }
    assert chosen(model="some/model", dataset="train.jsonl", **own) == (3e-5, 9, 5, False)


def test_what_was_chosen_is_printed_and_logged(quick, capsys):
    result = grpo.main(grpo.Args(**quick | {"steps": 1}))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("run in")]
    assert result["folder"] in line and "learning_rate=0.0004" in line
    assert "max_new_tokens=24" in line and "prompt='{question}'" in line
    assert scalars(result["folder"], "learning_rate") == [pytest.approx(4e-4)]


def test_the_tiny_model_takes_two_threads_at_most(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    grpo.start_device(grpo.Args(device="cpu"))
    grpo.start_device(grpo.Args(device="cpu", model="some/model"))
    assert asked == [2]


def test_a_device_that_is_not_there(refused):
    assert "--device cuda" in refused(grpo.start_device, grpo.Args(device="cuda"))
    assert grpo.start_device(grpo.Args(device="auto")).type == "cpu"


# ---------------------------------------------------------------------------- learning rate


@pytest.mark.parametrize(
    "steps,warmup,rates",
    [
        (1, 10, [1]),
        (5, 10, [0.2, 0.4, 0.6, 0.8, 1]),
        (5, 2, [0.5, 1, 0.75, 0.5, 0.25]),
        (4, 0, [1, 0.75, 0.5, 0.25]),
    ],
)
def test_rates_by_hand(steps, warmup, rates):
    args = grpo.Args(steps=steps, warmup_steps=warmup, learning_rate=2.0)
    found = [grpo.learning_rate_at(step, args) / 2 for step in range(1, steps + 1)]
    assert found == pytest.approx(rates)


@pytest.mark.parametrize("steps", [1, 5, 20, 200])
def test_the_peak_is_reached_in_any_run(steps):
    args = grpo.Args(steps=steps)
    found = [grpo.learning_rate_at(step, args) for step in range(1, steps + 1)]
    assert max(found) == args.learning_rate and min(found) > 0


# ------------------------------------------------------------------ --eval-only, and the console


def test_eval_only_scores_and_shows_and_leaves_nothing(quick, tmp_path, capsys):
    trained = grpo.main(grpo.Args(**quick))
    model = str(last_checkpoint(trained["folder"]))
    capsys.readouterr()
    before = weights(trained["folder"])
    args = grpo.Args(**quick | {"model": model, "output_dir": str(tmp_path / "new")})
    args.eval_only = True
    found = grpo.main(args)
    out = capsys.readouterr().out
    assert found["eval/pass@1"] == found["eval/pass@1_initial"] == trained["eval/pass@1"]
    assert out.count("(right: ") == 4 and "pass@1" in out  # a last chunk of four
    assert not (tmp_path / "new").exists() and equal(before, weights(trained["folder"]))


def test_console_has_a_line_per_evaluation_and_no_bar_in_a_log_file(quick):
    done = run("grpo_llm.py", *flags(quick | {"steps": 2, "eval_every": 1}))
    assert done.stdout.count("held-out pass@1") == 3 and done.stdout.count("(right: ") == 3
    assert "it/s" not in done.stderr and "%|" not in done.stderr


def test_a_checkpoint_of_the_tiny_model_is_a_model(quick, tmp_path):
    trained = grpo.main(grpo.Args(**quick))
    again = quick | {"model": str(last_checkpoint(trained["folder"])), "steps": 1}
    result = grpo.main(grpo.Args(**again | {"output_dir": str(tmp_path / "again")}))
    assert result["eval/pass@1_initial"] == trained["eval/pass@1"]


# ----------------------------------------------------------------------------- --resume alone


@pytest.fixture
def begun(quick):
    """A run of four steps with flags of its own, and its checkpoint after two."""
    own = {"steps": 4, "save_every": 2, "learning_rate": 1e-2, "seed": 7, "clip_high": 0.3}
    result = grpo.main(grpo.Args(**quick | own))
    return result, str(Path(result["folder"]) / "step-000002")


def test_resume_alone_takes_the_checkpoints_flags(begun):
    straight, path = begun
    expected = weights(straight["folder"])
    resumed = grpo.main(grpo.Args(resume=path))
    assert equal(expected, weights(resumed["folder"]))
    assert {k: v for k, v in straight.items() if "eval" in k} == {
        k: v for k, v in resumed.items() if "eval" in k
    }


def test_what_does_not_shape_the_result_may_be_given_anew(begun, monkeypatch):
    _, path = begun
    args, state = grpo.load_checkpoint(grpo.Args(resume=path, steps=6, save_every=1, eval_every=9))
    assert (args.steps, args.save_every, args.eval_every) == (6, 1, 9)
    assert (args.seed, args.clip_high, state["step"]) == (7, 0.3, 2)
    # A value that is the default counts as given if it stands on the command line, in any spelling.
    for words in (["--steps", "200"], ["--steps=200"]):
        monkeypatch.setattr(sys, "argv", ["grpo_llm.py", *words])
        assert grpo.load_checkpoint(grpo.Args(resume=path))[0].steps == 200
    monkeypatch.setattr(sys, "argv", ["grpo_llm.py", "--save_every=50"])
    assert grpo.load_checkpoint(grpo.Args(resume=path))[0].save_every == 50


@pytest.mark.parametrize("given", [{"seed": 8}, {"clip_high": 0.2001}, {"beta": 0.5}])
def test_a_contradiction_is_one_line(begun, given, refused):
    (name,) = given
    line = refused(grpo.load_checkpoint, grpo.Args(resume=begun[1], **given))
    assert f"--{name.replace('_', '-')} {given[name]}" in line and "begun with" in line


def test_flags_that_follow_from_repeated_ones_are_not_taken_as_given(pretrained, quick):
    """--resume PATH --model M: the learning rate that M would have by default was not asked for."""
    own = quick | {"model": pretrained, "learning_rate": 5e-3, "micro_batch_size": 2}
    result = grpo.main(grpo.Args(**own | {"max_new_tokens": 4, "steps": 1}))
    resumed = grpo.Args(resume=str(last_checkpoint(result["folder"])), model=pretrained)
    args, _ = grpo.load_checkpoint(resumed)
    assert (args.learning_rate, args.micro_batch_size, args.max_new_tokens) == (5e-3, 2, 4)


# ------------------------------------------------------------------------ held-out


def test_nothing_is_wasted_of_a_data_set(tmp_path):
    rows = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(7473)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train, held_out = grpo.load_data(grpo.Args(dataset=str(tmp_path / "d.jsonl")))
    assert len(held_out) == 256 and len(train) == 7473 - 256
    args = grpo.Args(dataset=str(tmp_path / "d.jsonl"), eval_problems=10)
    assert grpo.load_data(args) == (train, held_out[:10]), "the split does not hang on the flag"


@pytest.mark.slow
def test_help_into_a_closed_pipe_blames_no_folder():
    """As in `python grpo_llm.py --help | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "grpo_llm.py", "--help"]
    ended = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert "BrokenPipeError" in ended.stderr and "--output-dir" not in ended.stderr

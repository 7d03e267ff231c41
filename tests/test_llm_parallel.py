"""Two processes and one: the same optimizer step, one warm start, one log, one saved model."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import LLM_SCRIPTS, ROOT, last_checkpoint, scalars, weights
from launch import flags, run, side_by_side, wait_for

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def torchrun(*command, **options):
    """The real command, in a process group of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*TORCHRUN, *command],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **options,
    )


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    out = tmp_path_factory.mktemp("parallel") / "step"
    run("tests/parallel_step.py", out)
    both = side_by_side("tests/parallel_step.py", out, "parallel")
    assert [process.wait() for process in both] == [0, 0], both[0].stderr + both[1].stderr
    return [
        torch.load(f"{out}-{name}.pt", weights_only=True) for name in ("0-of-1", "0-of-2", "1-of-2")
    ]


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_two_processes_take_the_step_of_one(steps, name):
    """Three minibatches of ragged lengths in a row. Each process normalising by its own tokens, a
    gradient averaged instead of summed, or shares that are gathered in the wrong order fail it."""
    one, *both = (step[name] for step in steps)
    assert one["lengths"].unique().numel() > 3 and one["rewards"].unique().numel() == 2
    for two in both:
        assert two["texts"] == one["texts"] and torch.equal(two["lengths"], one["lengths"])
        assert (two["weights"] - one["weights"]).abs().max() < 1e-6
        for a, b in zip(one["stats"], two["stats"], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    assert torch.equal(both[0]["weights"], both[1]["weights"]), "the copies have drifted apart"


def check_run(output: str, errors: str, runs: Path):
    """One result, one bar, one folder, one log of two steps, one model."""
    assert (
        output.count("step 0: held-out") == output.count("logs in") == 1
        and errors.count(" 0/1000") <= 1
    )
    (folder,) = runs.iterdir()
    assert len(list(folder.glob("events*"))) == 1 and weights(folder)
    assert len(scalars(folder, "reward")) == 2 and scalars(folder, "num_tokens")[-1] > 0


@pytest.mark.parametrize("name", ["grpo_llm", "dapo_llm"])
def test_two_processes_make_one_run(name, tmp_path, quick):
    """dapo_llm: the processes agree on when to stop drawing, or one of them would wait for ever."""
    both = side_by_side(f"{name}.py", *flags(quick))
    assert [process.wait() for process in both] == [0, 0], both[0].stderr + both[1].stderr
    output, errors = "".join(p.stdout for p in both), "".join(p.stderr for p in both)
    check_run(output, errors, tmp_path / "runs")


@pytest.mark.slow
def test_torchrun(tmp_path, quick):
    """The same by the real command, which takes seconds to start."""
    process = torchrun("grpo_llm.py", *flags(quick))
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-3000:]
    check_run(output, errors, tmp_path / "runs")


def test_processes_draw_different_samples(tmp_path):
    """The same question to both processes: with the same dice, the answers would be the same."""
    (tmp_path / "dice.py").write_text(f"""
import grpo_llm as grpo
seen, real = [], grpo.rollout
grpo.rollout = lambda *args: seen.append(real(*args)) or seen[-1]
encode = grpo.encode_prompt
grpo.encode_prompt = lambda question, *rest: encode("3+8+5=", *rest)
grpo.evaluate = lambda *args: {{"eval/pass@1": 0.0, "eval/mean_length": 0.0}}
grpo.main(grpo.Args(steps=1, prompts_per_step=2, group_size=32, output_dir={str(tmp_path)!r}))
completions = seen[0][1]
assert len(completions) == 64 and completions[:32] != completions[32:], completions
""")
    both = side_by_side(tmp_path / "dice.py")
    assert [process.wait() for process in both] == [0, 0], both[0].stderr + both[1].stderr


def check_end(errors: str, runs: Path):
    """It ended after a step that is saved, and says so once."""
    (folder,) = runs.iterdir()
    assert len(scalars(folder, "reward")) == int(last_checkpoint(folder).name[5:])
    assert errors.count("stopped; go on with --resume") == 1
    assert str(last_checkpoint(folder)) in errors


def test_ctrl_c_ends_both_processes_after_the_same_step(quick):
    """A terminal sends it to torchrun and to each process, and torchrun sends it on: every process
    gets it twice, and not at the same time. Were each to end by itself, the others would wait for
    it for ever."""
    both = side_by_side("grpo_llm.py", *flags(quick | {"steps": 100_000, "save_every": 2}))
    runs = Path(quick["output_dir"])
    wait_for(lambda: list(runs.glob("*/step-000002")))
    for process in both * 2:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert [process.wait(60) for process in both] == [1, 0]
    check_end(both[0].stderr + both[1].stderr, runs)


@pytest.mark.slow
def test_ctrl_c_to_torchrun(quick):
    """The real command, which takes seconds to start and has signals of its own."""
    process = torchrun("grpo_llm.py", *flags(quick | {"steps": 100_000, "save_every": 2}))
    runs = Path(quick["output_dir"])
    wait_for(lambda: list(runs.glob("*/step-000002")))
    os.killpg(process.pid, signal.SIGINT)
    check_end(process.communicate(timeout=60)[1], runs)


@pytest.mark.slow
def test_no_process_leaves_while_the_first_one_saves(tmp_path, quick):
    """A scheduler interrupts the processes, not torchrun, which kills all as soon as one has
    failed."""
    (tmp_path / "slow.py").write_text(f"""
import os, signal, sys, time
import grpo_llm as grpo
save, advantages = grpo.save_model, grpo.compute_advantages
grpo.save_model = lambda *args: time.sleep(3) or save(*args)
def interrupted(*args):
    if grpo.RANK == 1:
        signal.raise_signal(signal.SIGINT)
    return advantages(*args)
grpo.compute_advantages = interrupted
grpo.main(grpo.Args(**{quick!r}))
""")
    _, errors = torchrun(str(tmp_path / "slow.py")).communicate(timeout=120)
    (folder,) = Path(quick["output_dir"]).iterdir()
    assert f"go on with --resume {folder}/step-000001" in errors and weights(folder)

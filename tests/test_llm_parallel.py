"""Two processes and one: the same optimizer step, one warm start, one log, one saved model."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import LLM_SCRIPTS, ROOT, last_checkpoint
from test_llm_resume import wait_for
from test_llm_runs import scalars, weights

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def run(command):
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    out = tmp_path_factory.mktemp("parallel") / "step"
    run([sys.executable, "tests/parallel_step.py", str(out)])
    run([*TORCHRUN, "tests/parallel_step.py", str(out), "parallel"])
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


@pytest.mark.parametrize("name", ["grpo_llm", "dapo_llm"])
def test_torchrun(name, tmp_path, quick):
    """dapo_llm: the processes agree on when to stop drawing, or one of them would wait for ever."""
    flags = [
        part for key, value in quick.items() for part in (f"--{key.replace('_', '-')}", str(value))
    ]
    done = run([*TORCHRUN, f"{name}.py", *flags])
    assert done.stdout.count("held-out") == 1 and done.stderr.count(" 0/1000") <= 1
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(list(folder.glob("events*"))) == 1 and weights(folder)
    assert len(scalars(folder, "reward")) == 2 and scalars(folder, "num_tokens")[-1] > 0


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
    run([*TORCHRUN, str(tmp_path / "dice.py")])


def test_ctrl_c_ends_all_processes_after_the_same_step(tmp_path, quick):
    """A terminal sends it to torchrun and to each process, and torchrun sends it on: every process
    gets it twice, and not at the same time. Were each to end by itself, the others would wait for
    it for ever."""
    flags = [
        part
        for key, value in (quick | {"steps": 100_000}).items()
        for part in (f"--{key.replace('_', '-')}", str(value))
    ]
    command = [*TORCHRUN, "grpo_llm.py", *flags, "--save-every", "2"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        text=True,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    runs = Path(quick["output_dir"])
    wait_for(lambda: list(runs.glob("*/step-000002")))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    (folder,) = runs.iterdir()
    assert len(scalars(folder, "reward")) == int(last_checkpoint(folder).name[5:])
    assert (
        errors.count("stopped; go on with --resume") == 1 and str(last_checkpoint(folder)) in errors
    )


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
    done = subprocess.run(
        [*TORCHRUN, str(tmp_path / "slow.py")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    (folder,) = Path(quick["output_dir"]).iterdir()
    assert f"go on with --resume {folder}/step-000001" in done.stderr and weights(folder)

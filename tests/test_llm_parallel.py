"""Two processes and one: the same step and scores, one warm start, one log, one saved model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import LLM_SCRIPTS, ROOT, scalars, script, weights
from launch import flags, run, side_by_side
from lineage import PATHS

pytestmark = pytest.mark.usefixtures("tiny_model")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    out = tmp_path_factory.mktemp("parallel") / "step"
    run("tests/parallel_step.py", out)
    both = side_by_side("tests/parallel_step.py", out, "parallel")
    assert [process.wait() for process in both] == [0, 0], both[0].stderr + both[1].stderr
    assert both[0].stdout.count(": held-out ") == len(LLM_SCRIPTS) and both[1].stdout == ""
    return [
        torch.load(f"{out}-{name}.pt", weights_only=True) for name in ("0-of-1", "0-of-2", "1-of-2")
    ]


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_two_processes_take_the_step_of_one(steps, name):
    """Three minibatches of ragged lengths in a row, and a step of two passes. Each process
    normalising by its own tokens, a gradient averaged instead of summed, or shares that are
    gathered in the wrong order fail it."""
    one, *both = (step[name] for step in steps)
    assert one["lengths"].unique().numel() > 3 and one["rewards"].unique().numel() == 2
    assert {"loss", "grad_norm", "approx_kl", "reward", "kl"} <= one["stats"][-1].keys()
    for two in both:
        assert two["texts"] == one["texts"] and torch.equal(two["lengths"], one["lengths"])
        assert (two["weights"] - one["weights"]).abs().max() < 1e-6
        assert two["scores"] == pytest.approx(one["scores"], abs=1e-6)
        for a, b in zip(one["stats"], two["stats"], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    assert torch.equal(both[0]["weights"], both[1]["weights"]), "the copies have drifted apart"


@pytest.mark.parametrize("name", LLM_SCRIPTS)
@pytest.mark.parametrize("size,sizes", [(1, [1] * 8), (4, [4, 4]), (6, [4, 4]), (9, [8])])
def test_groups_are_not_torn_needlessly(name, size, sizes, monkeypatch):
    """Four groups of four rows on two processes: two groups each, and of these as many whole ones
    at a time as fit."""
    module, shares = script(name), []
    args = module.Args(group_size=4, micro_batch_size=size)
    monkeypatch.setattr(module, "WORLD", 2)
    for rank in (0, 1):
        monkeypatch.setattr(module, "RANK", rank)
        shares.append(module.micro_batches(torch.arange(16), args))
    assert [[len(part) for part in share] for share in shares] == [sizes, sizes]
    assert torch.cat([*shares[0], *shares[1]]).tolist() == [*range(16)]


def test_minibatches_are_for_all_processes(refused, monkeypatch):
    """Each minibatch has as many groups for each process."""
    monkeypatch.setattr(script("grpo_llm"), "WORLD", 2)
    grpo = script("grpo_llm")
    grpo.check_args(grpo.Args(prompts_per_step=8, minibatches=4))
    line = refused(grpo.check_args, grpo.Args(prompts_per_step=4, minibatches=4))
    assert "--minibatches" in line and "--prompts-per-step" in line


def check_run(output: str, errors: str, runs: Path):
    """One result, one bar, one folder, one log of two steps, one model."""
    for said in ("run in ", "step 0: held-out", "  a group of this step", "logs in"):
        assert output.count(said) == 1
    assert errors.count(" 0/1000") <= 1
    (folder,) = runs.iterdir()
    assert len(list(folder.glob("events*"))) == 1 and weights(folder)
    assert len(scalars(folder, "reward")) == 2 and scalars(folder, "num_tokens")[-1] > 0


@pytest.mark.parametrize("name", ["grpo_llm", "dapo_llm", "ppo_llm"])
def test_two_processes_make_one_run(name, tmp_path, quick):
    """dapo_llm: the processes agree on when to stop drawing, or one of them would wait for ever.
    The second has no problem to evaluate, and says nothing."""
    own = {"minibatches": 2, "update_epochs": 2, "eval_problems": 1}
    both = side_by_side(PATHS[name], *flags(quick | own))
    assert [process.wait() for process in both] == [0, 0], both[0].stderr + both[1].stderr
    assert both[1].stdout == ""
    check_run(both[0].stdout, both[0].stderr + both[1].stderr, tmp_path / "runs")


def test_two_processes_go_on(tmp_path, quick):
    """Resumed to the last bit, as one is; and one process does not go on for two."""
    own = {"minibatches": 2, "steps": 4, "eval_every": 2}
    both = side_by_side("grpo_llm.py", *flags(quick | own))
    assert [process.wait() for process in both] == [0, 0], both[0].stderr + both[1].stderr
    (folder,) = (tmp_path / "runs").iterdir()
    straight, rewards = weights(folder), scalars(folder, "reward")
    both = side_by_side("grpo_llm.py", "--resume", folder / "step-000002")
    assert [process.wait() for process in both] == [0, 0], both[0].stderr + both[1].stderr
    resumed = weights(folder)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert scalars(folder, "reward") == rewards and len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
def test_torchrun(tmp_path, quick):
    """The same by the real command, which takes seconds to start."""
    done = subprocess.run(
        [*TORCHRUN, "grpo_llm.py", *flags(quick | {"minibatches": 2})],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check_run(done.stdout, done.stderr, tmp_path / "runs")


def test_processes_draw_different_samples(tmp_path):
    """The same question to both processes: with the same dice, the answers would be the same.
    And no thread of the process group is left: at the interpreter's end it may abort."""
    (tmp_path / "dice.py").write_text(f"""
import pathlib
import grpo_llm as grpo
seen, real = [], grpo.rollout
grpo.rollout = lambda *args: seen.append(real(*args)) or seen[-1]
encode = grpo.encode_prompt
grpo.encode_prompt = lambda question, *rest: encode("3+8+5", *rest)
grpo.evaluate = lambda *args: {{"eval/pass@1": 0.0}}
grpo.show = lambda *args: None
own = {{"steps": 1, "prompts_per_step": 2, "minibatches": 1, "group_size": 32}}
grpo.main(grpo.Args(**own, output_dir={str(tmp_path)!r}))
completions = seen[0][1]
assert len(completions) == 64 and completions[:32] != completions[32:], completions
threads = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in thread for thread in threads), threads
""")
    both = side_by_side(tmp_path / "dice.py")
    assert [process.wait() for process in both] == [0, 0], both[0].stderr + both[1].stderr


def test_processes_agree_on_rewards(tmp_path):
    """Of a verifier that does not say the same twice: two policies must not drift apart."""
    (tmp_path / "own.py").write_text("""
import os, random
dice = random.Random(os.environ["RANK"])
def verify(completion, answer):
    return dice.random()
""")
    (tmp_path / "agree.py").write_text(f"""
import grpo_llm as grpo, torch
own = {{"steps": 2, "prompts_per_step": 4, "minibatches": 2, "group_size": 4, "eval_problems": 3}}
own |= {{"verifier": {str(tmp_path / "own.py")!r}, "output_dir": {str(tmp_path / "runs")!r}}}
save = grpo.save_checkpoint
def save_checkpoint(model, *rest):
    torch.save(model.state_dict(), f"{tmp_path}/{{grpo.RANK}}.pt")
    save(model, *rest)
grpo.save_checkpoint = save_checkpoint
print(grpo.main(grpo.Args(**own))["eval/pass@1"])
""")
    both = side_by_side(tmp_path / "agree.py")
    assert [process.wait() for process in both] == [0, 0], both[0].stderr + both[1].stderr
    a, b = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert both[0].stdout.splitlines()[-1] == both[1].stdout.splitlines()[-1]

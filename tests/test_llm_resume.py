"""A run that is cut: resumed to the last bit, interrupted cleanly, killed without loss;
and what is no checkpoint."""

import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import LLM_SCRIPTS, equal, last_checkpoint, scalars, script, weights
from launch import Launched, flags, wait_for

grpo = script("grpo_llm")


def trainer(folder):
    return torch.load(last_checkpoint(folder) / "trainer.pt", weights_only=True)


def same(a, b):
    """Nested containers of tensors and numbers, equal to the last bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_resumed_is_straight(name, quick, tmp_path):
    """4 steps, and 2 + resume + 2: dice, data, optimizer, learning rate, scores;
    each one lost shows in some number."""
    module = script(name)
    own = {"steps": 4, "save_every": 2, "eval_every": 3, "learning_rate": 1e-2}
    args = module.Args(**quick | own)
    straight = module.main(args)
    shutil.copytree(Path(straight["folder"]) / "step-000002", tmp_path / "again/step-000002")
    (tmp_path / "again/saving-123.tmp").mkdir()  # what a kill may leave
    resumed = module.main(replace(args, resume=str(tmp_path / "again/step-000002")))
    assert Path(resumed["folder"]) == tmp_path / "again"
    assert not (tmp_path / "again/saving-123.tmp").exists()
    assert equal(weights(straight["folder"]), weights(resumed["folder"]))
    states = [trainer(run["folder"]) for run in (straight, resumed)]
    for state in states:
        assert state.pop("args") | {"resume": ""} == vars(args)
        (group,) = state["optimizer"]["param_groups"]
        assert group["lr"] == module.learning_rate_at(4, args), "logged is not yet set"
    assert same(*states)
    for key in ("reward", "loss", "grad_norm", "num_tokens", "entropy"):
        assert scalars(straight["folder"], key)[2:] == scalars(resumed["folder"], key)
    assert {k: v for k, v in straight.items() if "eval" in k} == {
        k: v for k, v in resumed.items() if "eval" in k
    }


def test_data_set_goes_on_where_it_was(quick, tmp_path, monkeypatch):
    """Passes over a data set: the second half of a pass must not be the first half again."""
    monkeypatch.setattr(
        grpo,
        "load_data",
        lambda args: ([(f"{i}+1=", str(i + 1)) for i in range(10)], [("1+1=", "2")]),
    )
    asked, real = [], grpo.rollout
    monkeypatch.setattr(
        grpo,
        "rollout",
        lambda m, t, problems, *rest: asked.append(problems) or real(m, t, problems, *rest),
    )
    args = grpo.Args(**quick | {"steps": 4, "save_every": 2, "eval_every": 100})
    straight = grpo.main(args)
    training = [problems for problems in asked if len(problems) == 4]
    shutil.copytree(Path(straight["folder"]) / "step-000002", tmp_path / "again/step-000002")
    asked.clear()
    grpo.main(replace(args, resume=str(tmp_path / "again/step-000002")))
    assert [problems for problems in asked if len(problems) == 4] == training[2:]


def test_the_last_two_are_kept_and_nothing_else(quick):
    run = grpo.main(grpo.Args(**quick | {"steps": 5, "save_every": 1}))
    names = sorted(path.name for path in Path(run["folder"]).iterdir() if path.is_dir())
    assert names == ["step-000004", "step-000005"]


def test_what_is_no_checkpoint(quick, tmp_path, refused, monkeypatch):
    run = grpo.main(grpo.Args(**quick))
    good = last_checkpoint(run["folder"])
    args = grpo.Args(**quick | {"resume": str(good)})
    assert "--learning-rate" in refused(grpo.main, replace(args, learning_rate=1e-5))
    assert "--resume" in refused(grpo.main, replace(args, resume=str(tmp_path / "nowhere")))
    for name in ("dapo_llm", "gspo_llm"):
        other = script(name)
        line = refused(other.main, other.Args(**quick | {"resume": str(good)}))
        assert "--resume" in line and "this script" in line
    monkeypatch.setattr(grpo, "WORLD", 2)
    monkeypatch.setattr(grpo.dist, "init_process_group", lambda *_: None)
    assert "processes: 1" in refused(grpo.main, args)
    monkeypatch.undo()
    for file in ("trainer.pt", "model.safetensors"):
        torn = tmp_path / f"torn-{file}" / "step-000002"
        shutil.copytree(good, torn)
        (torn / file).write_bytes((good / file).read_bytes()[:-100])
        before = {path: path.read_bytes() for path in torn.iterdir()}
        assert f"--resume {torn}" in refused(grpo.main, replace(args, resume=str(torn)))
        assert {path: path.read_bytes() for path in torn.iterdir()} == before


def test_resume_with_less_memory(quick):
    """What changes memory alone may change in the middle of a run:
    the numbers stay the same but for rounding."""
    own = quick | {"steps": 4, "save_every": 2}
    run = grpo.main(grpo.Args(**own))
    args = grpo.Args(**own | {"resume": f"{run['folder']}/step-000002"})
    expected = scalars(run["folder"], "grad_norm")[2:]
    again = grpo.main(replace(args, micro_batch_size=3, gradient_checkpointing=True))
    assert scalars(again["folder"], "grad_norm")[2:] == pytest.approx(expected, rel=1e-3)


def test_what_lies_beside_a_checkpoint_is_left_alone(quick, tmp_path):
    own, home = quick | {"steps": 4, "save_every": 1}, tmp_path / "home"
    run = grpo.main(grpo.Args(**own))
    shutil.copytree(Path(run["folder"]) / "step-000003", home / "step-000003")
    others = [home / n for n in ("precious.tmp", "step-by-step-notes", "step-zero", "step-1")]
    for other in others:
        other.mkdir()
    grpo.main(grpo.Args(**own | {"resume": str(home / "step-000003")}))
    steps = sorted(path.name for path in home.glob("step-0*"))
    assert all(other.exists() for other in others) and steps == ["step-000003", "step-000004"]


def test_the_line_after_an_earlier_checkpoint(quick, monkeypatch):
    """Resumed from the older of two and interrupted, a run goes on from where it was, not from the
    newer one."""
    own, real = quick | {"steps": 4, "save_every": 2}, grpo.compute_advantages
    run = grpo.main(grpo.Args(**own))
    monkeypatch.setattr(
        grpo, "compute_advantages", lambda *args: signal.raise_signal(signal.SIGINT) or real(*args)
    )
    with pytest.raises(SystemExit, match="--resume .*step-000003$"):
        grpo.main(grpo.Args(**own | {"resume": f"{run['folder']}/step-000002"}))


def start(quick, *more):
    return Launched("grpo_llm.py", *flags(quick), *more)


def test_interrupted_run_says_how_to_go_on(quick):
    quick |= {"steps": 100_000}
    process = start(quick, "--save-every", "3")
    runs = Path(quick["output_dir"])
    wait_for(lambda: list(runs.glob("*/step-000003")))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 1 and "Traceback" not in process.stderr
    path = process.stderr.strip().splitlines()[-1].rpartition("--resume ")[2]
    (folder,) = runs.iterdir()
    assert Path(path) == last_checkpoint(folder)
    step = trainer(folder)["step"]
    assert len(scalars(folder, "reward")) == step, (
        "the log is closed, and the checkpoint is that of the last step"
    )
    again = start(quick, "--save-every", "3", "--resume", path)
    wait_for(lambda: last_checkpoint(folder).name > f"step-{step:06d}")
    again.kill()
    again.wait()


def test_interrupt_before_the_first_step_is_no_traceback(quick, tmp_path):
    """In the warm start, that is, which is where a newcomer's first run spends its time."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    process = Launched("grpo_llm.py", *flags(quick), environment=environment)
    wait_for(lambda: "warm start" in process.stdout)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT and "Traceback" not in process.stderr
    assert not list(tmp_path.glob("torch/hub/*"))


def test_kill_at_any_instant_leaves_a_whole_checkpoint(quick, kills=3):
    """Each time it goes on from a checkpoint that is whole, and no older than the last that was
    complete at the kill."""
    quick |= {"steps": 100_000, "save_every": 1}
    runs, rng, resume = Path(quick["output_dir"]), random.Random(0), []

    def newest():
        return max(runs.glob("*/step-*"), default=None)

    for kill in range(kills + 1):
        process, known = start(quick, *resume), newest()
        wait_for(lambda before=known: newest() != before)  # it went on from where it was
        time.sleep(rng.random() * 2 * (kill < kills))
        process.kill()
        process.wait()
        assert known is None or newest() > known
        resume = ["--resume", str(newest())]


# ------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_folder_that_cannot_be_written(name, tmp_path, quick):
    (tmp_path / "file").touch()
    done = Launched(f"{name}.py", *flags(quick | {"output_dir": tmp_path / "file/runs"}))
    assert done.wait() == 2 and "Traceback" not in done.stderr
    assert "--output-dir" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("size", [1_000, 100_000, 400_000])
def test_full_disk(size, quick):
    """No file may grow beyond `size` bytes: at first the log cannot be written, then the weights
    (340 kB), then the optimizer's state (680 kB). The error differs with the writer; the line that
    the user sees does not."""
    done = Launched("grpo_llm.py", *flags(quick), largest_file=size)
    assert done.wait() == 2
    # but for that of TensorBoard's thread
    assert "Traceback" not in done.stderr.partition("Exception in thread")[0]
    assert "--output-dir" in done.stderr.splitlines()[-1]
    assert not list(Path(quick["output_dir"]).glob("*/step-*")), (
        "a checkpoint that is not whole has no name"
    )


def test_prompt_longer_than_the_context(quick, refused):
    assert "--max-new-tokens" in refused(grpo.main, grpo.Args(**quick | {"max_new_tokens": 125}))
    grpo.main(grpo.Args(**quick | {"steps": 1, "max_new_tokens": 120}))  # 128 with the longest sum


def test_one_long_question_stops_the_run_before_its_first_step(quick, tmp_path, refused):
    questions = [f"{i}+{i}=" for i in range(10)] * 3 + ["7+" * 60 + "7="]
    (tmp_path / "sums.jsonl").write_text(
        "\n".join(json.dumps({"question": q, "answer": "#### 1"}) for q in questions)
    )
    flags = {"dataset": str(tmp_path / "sums.jsonl"), "prompt": "{question}", "max_new_tokens": 24}
    line = refused(grpo.main, grpo.Args(**quick | flags))
    assert "--max-new-tokens" in line and "7+7+7" in line and not Path(quick["output_dir"]).exists()


@pytest.mark.parametrize("steps", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_memory_stays_flat(quick, steps, monkeypatch):
    """Resident memory after the first steps may move by a tenth at most; slow: over 300 steps."""
    pages, real = [], grpo.compute_advantages

    def watched(*args):
        pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
        return real(*args)

    monkeypatch.setattr(grpo, "compute_advantages", watched)
    grpo.main(grpo.Args(**quick | {"steps": steps, "eval_every": 100, "save_every": 20}))
    assert max(pages[steps // 6 :]) < pages[steps // 6] * 1.1

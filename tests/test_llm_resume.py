"""A run that is cut: resumed to the last bit, killed without loss."""

import random
import shutil
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import equal, last_checkpoint, reward_by, scalars, script, weights
from launch import Launched, flags

grpo = script("grpo_llm")


def trainer(folder):
    return torch.load(last_checkpoint(folder) / "trainer.pt", weights_only=True)


def files(folder):
    """Path → content, of all files below."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def by_text(completion, answer):
    """Different completions have different rewards, and a verifier may draw."""
    return zlib.crc32(completion.encode()) / 2**32 + 0.1 * random.random()


def test_resumed_is_straight(short_run, monkeypatch):
    """Four steps of two epochs, and two, a resume and two more, end in the same bits. The resumed
    run has a folder of its own, and leaves the other as it was. All checkpoints stay."""
    dapo = script("dapo_llm")  # it draws most
    reward_by(monkeypatch, dapo, by_text)
    epochs = {"steps": 4, "eval_every": 1, "num_minibatches": 2, "update_epochs": 2, "beta": 0.1}
    args = dapo.Args(**short_run | epochs, learning_rate=1e-3, seed=7)
    straight = dapo.main(args)
    before = files(straight["folder"])
    resumed = dapo.main(replace(args, resume=f"{straight['folder']}/step-000002"))
    assert files(straight["folder"]) == before and resumed["folder"] != straight["folder"]
    for run, first in ((straight, 1), (resumed, 3)):
        checkpoints = sorted(path.name for path in Path(run["folder"]).glob("s*"))
        assert checkpoints == [f"step-00000{step}" for step in range(first, 5)]
    for key in straight.keys() - {"eval/pass@1_initial", "folder"}:
        assert resumed[key] == straight[key]
    assert equal(weights(straight["folder"]), weights(resumed["folder"]))
    states = [trainer(run["folder"])["optimizer"]["state"] for run in (straight, resumed)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    for key in ("reward", "kl", "loss", "grad_norm", "learning_rate"):
        assert scalars(straight["folder"], key)[2:] == scalars(resumed["folder"], key)
    logged = [scalars(run["folder"], "eval/pass@1") for run in (straight, resumed)]
    assert logged[0][2:] == logged[1]


def test_a_model_may_be_written_otherwise_or_be_moved(short_run, tmp_path):
    """`--model m/` is `--model m`. The checkpoint keeps the weights, so a run goes on."""
    shutil.copytree(grpo.TINY_MODEL, tmp_path / "other")
    args = grpo.Args(**short_run, model=str(tmp_path / "other"), max_new_tokens=4)
    path = f"{grpo.main(replace(args, eval_every=1))['folder']}/step-000001"
    for model in ("other/", "moved"):
        if model == "moved":
            (tmp_path / "other").rename(tmp_path / "moved")
        result = grpo.main(replace(args, resume=path, model=str(tmp_path) + f"/{model}"))
        assert last_checkpoint(result["folder"]).name == "step-000002"


def test_a_run_that_goes_no_further_says_nothing_about_a_model(short_run, capsys):
    """With --resume at the last step nothing is trained, and no model is in the new folder."""
    path = last_checkpoint(grpo.main(grpo.Args(**short_run))["folder"])
    capsys.readouterr()
    grpo.main(grpo.Args(**short_run, resume=str(path)))
    assert "model and logs in" not in capsys.readouterr().out


@pytest.mark.parametrize("owner,name,kept", [(torch, "save", 1), (grpo, "evaluate", 2)])
def test_what_is_cut_off_leaves_the_newest_checkpoint_whole(
    owner, name, kept, short_run, monkeypatch
):
    """While its last file is saved; and in the evaluation behind it, which may fail in the user's
    own verifier."""
    calls, real = [], getattr(owner, name)

    def cut_off(*args):
        calls.append(args)
        if len(calls) == (2 if name == "save" else 3):
            if name == "save":
                Path(args[1]).write_bytes(b"half a fi")
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(owner, name, cut_off)
    with pytest.raises(KeyboardInterrupt):
        grpo.main(grpo.Args(**short_run | {"eval_every": 1}))
    (folder,) = Path(short_run["output_dir"]).iterdir()
    assert trainer(folder)["step"] == len(list(folder.glob("step-*"))) == kept


def test_a_killed_run_has_written_what_it_had_to_say(short_run):
    """Its output goes into files, and it is killed without warning: all lines printed until then
    are there, each step is in the log, and the newest checkpoint is whole."""
    run = Launched("grpo_llm.py", *flags(short_run | {"steps": 1000, "eval_every": 10}))
    runs, deadline = Path(short_run["output_dir"]), time.monotonic() + 120
    while not list(runs.glob("*/step-*")) or len(scalars(next(runs.iterdir()), "reward")) < 12:
        assert run.process.is_alive() and time.monotonic() < deadline, run.stderr
        time.sleep(0.05)
    run.kill()
    assert run.wait() == -9
    (folder,) = runs.iterdir()
    assert run.stdout.startswith("Args(") and "step 10: eval/pass@1" in run.stdout
    assert trainer(folder)["step"] % 10 == 0 and weights(folder)

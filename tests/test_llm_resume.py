"""A run that is cut: resumed to the last bit, killed without loss."""

import random
import time
import zlib
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import equal, last_checkpoint, reward_by, scalars, script, weights
from launch import Launched, flags

grpo = script("grpo_llm")


def optimizer_of(folder):
    return torch.load(last_checkpoint(folder) / "trainer.pt", weights_only=True)["optimizer"]


def by_text(completion, answer):
    """Different completions have different rewards, and a verifier may draw."""
    return zlib.crc32(completion.encode()) / 2**32 + 0.1 * random.random()


def test_resumed_is_straight(short_run, monkeypatch):
    """Four steps of two epochs, and two, a resume and two more, end in the same bits. The resumed
    run has a folder of its own. All checkpoints stay."""
    dapo = script("dapo_llm")  # it draws most
    reward_by(monkeypatch, dapo, by_text)
    epochs = {"steps": 4, "eval_every": 1, "num_minibatches": 2, "update_epochs": 2, "beta": 0.1}
    args = dapo.Args(**short_run | epochs, learning_rate=1e-3, seed=7)
    straight = dapo.main(args)
    resumed = dapo.main(replace(args, resume=f"{straight['folder']}/step-000002"))
    for run, first in ((straight, 1), (resumed, 3)):
        checkpoints = sorted(path.name for path in Path(run["folder"]).glob("s*"))
        assert checkpoints == [f"step-00000{step}" for step in range(first, 5)]
    assert equal(weights(straight["folder"]), weights(resumed["folder"]))
    states = [optimizer_of(run["folder"])["state"] for run in (straight, resumed)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    for key in ("reward", "kl", "loss", "grad_norm", "learning_rate", "eval/pass@1"):
        values = scalars(straight["folder"], key)
        assert values[2:] == scalars(resumed["folder"], key)


SCORES = {"eval/pass@1": 0.0}
SAVING = torch, "save", [None, KeyboardInterrupt], 1
EVALUATING = grpo, "evaluate", [SCORES, SCORES, KeyboardInterrupt], 2


@pytest.mark.parametrize("owner,name,results,kept", [SAVING, EVALUATING])
def test_what_is_cut_off_leaves_the_newest_checkpoint_whole(
    owner, name, results, kept, short_run, monkeypatch
):
    """While its last file is saved; and in the evaluation behind it, which may fail in the user's
    own verifier."""
    monkeypatch.setattr(owner, name, Mock(side_effect=results))
    with pytest.raises(KeyboardInterrupt):
        grpo.main(grpo.Args(**short_run | {"eval_every": 1}))
    assert len(list(Path(short_run["output_dir"]).glob("*/step-*"))) == kept


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

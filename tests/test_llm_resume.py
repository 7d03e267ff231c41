"""A run that is cut: resumed to the last bit, killed without loss."""

import random
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import equal, last_checkpoint, scalars, script, weights

grpo = script("grpo_llm")


def trainer(folder):
    return torch.load(last_checkpoint(folder) / "trainer.pt", weights_only=True)


def files(folder):
    """Path → content, of all files below."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def by_text(completion, answer):
    """Different completions have different rewards, and a verifier may draw."""
    return zlib.crc32(completion.encode()) / 2**32 + 0.1 * random.random()


@pytest.mark.parametrize("name", ["dapo_llm", "ppo_llm"])
def test_resumed_is_straight(name, short_run, monkeypatch):
    """Four steps of two epochs, and two, a resume and two more, end in the same bits. The resumed
    run has a folder of its own, and leaves the other as it was. All checkpoints stay."""
    module = script(name)
    monkeypatch.setattr(module, "load_verifier", lambda _: by_text)
    own = {"steps": 4, "eval_every": 1, "minibatches": 2, "update_epochs": 2, "beta": 0.1}
    args = module.Args(**short_run | own, learning_rate=1e-3, seed=7)
    straight = module.main(args)
    before = files(straight["folder"])
    resumed = module.main(replace(args, resume=f"{straight['folder']}/step-000002"))
    assert files(straight["folder"]) == before and resumed["folder"] != straight["folder"]
    for run, first in ((straight, 1), (resumed, 3)):
        found = sorted(path.name for path in Path(run["folder"]).glob("s*"))
        assert found == [f"step-00000{step}" for step in range(first, 5)]
    for key in straight.keys() - {"eval/pass@1_initial", "folder"}:
        assert resumed[key] == straight[key]
    assert equal(weights(straight["folder"]), weights(resumed["folder"]))
    states = [trainer(run["folder"]) for run in (straight, resumed)]
    for state in states:
        assert state.pop("model") == "tiny"
        state["optimizer"] = state["optimizer"]["state"]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    for key in ("reward", "kl", "loss", "grad_norm", "learning_rate"):
        assert scalars(straight["folder"], key)[2:] == scalars(resumed["folder"], key)
    logged = [scalars(run["folder"], "eval/pass@1") for run in (straight, resumed)]
    assert logged[0][2:] == logged[1]


def test_a_checkpoint_of_another_model_is_refused(short_run, tmp_path, refused):
    """Also where all shapes are alike: rate, tokenizer and reference would be another model's."""
    other = str(tmp_path / "other")
    shutil.copytree(grpo.TINY_MODEL, other)
    for model, wrong in (("tiny", other), (other, "tiny")):
        args = grpo.Args(**short_run | {"steps": 1}, model=model)
        path = str(last_checkpoint(grpo.main(args)["folder"]))
        line = refused(grpo.main, replace(args, resume=path, model=wrong))
        assert line == f"--resume {path}: give its own --model, too: {model}"


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

"""A run that is cut: resumed to the last bit, killed without loss; and what is no checkpoint."""

import random
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

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
    run has a folder of its own, and leaves the other as it was."""
    module = script(name)
    monkeypatch.setattr(module, "load_verifier", lambda _: by_text)
    own = {"steps": 4, "eval_every": 2, "minibatches": 2, "update_epochs": 2, "beta": 0.1}
    args = module.Args(**short_run | own, learning_rate=1e-3, seed=7)
    straight = module.main(args)
    before = files(straight["folder"])
    resumed = module.main(replace(args, resume=f"{straight['folder']}/step-000002"))
    assert files(straight["folder"]) == before and resumed["folder"] != straight["folder"]
    assert [path.name for path in Path(resumed["folder"]).glob("step-*")] == ["step-000004"]
    for key in straight.keys() - {"eval/pass@1_initial", "folder"}:
        assert resumed[key] == straight[key]
    assert equal(weights(straight["folder"]), weights(resumed["folder"]))
    states = [trainer(run["folder"]) for run in (straight, resumed)]
    for state in states:
        state["optimizer"] = state["optimizer"]["state"]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    for key in ("reward", "loss", "grad_norm", "num_tokens", "learning_rate"):
        assert scalars(straight["folder"], key)[2:] == scalars(resumed["folder"], key)
    logged = [scalars(run["folder"], "eval/pass@1") for run in (straight, resumed)]
    assert logged[0][1:] == logged[1]


def test_a_run_deletes_nothing_but_its_own_checkpoints(short_run, monkeypatch):
    """A copy, an archive and a link that the user puts into the run's folder stay."""
    real, kept = grpo.save_checkpoint, ["step-000001-best", "step-000001.tar.gz", "step-latest"]

    def save_checkpoint(model, tokenizer, optimizer, folder, step):
        real(model, tokenizer, optimizer, folder, step)
        if step == 1:
            copy, archive, link = (folder / name for name in kept)
            shutil.copytree(folder / "step-000001", copy)
            archive.write_text("an archive")
            link.symlink_to(folder / "step-000001")

    monkeypatch.setattr(grpo, "save_checkpoint", save_checkpoint)
    result = grpo.main(grpo.Args(**short_run | {"steps": 5, "eval_every": 1}))
    found = sorted(path.name for path in Path(result["folder"]).glob("step-*"))
    assert found == sorted([*kept, "step-000004", "step-000005"])
    assert (Path(result["folder"]) / kept[0] / "model.safetensors").exists()


def test_what_is_no_checkpoint(short_run, tmp_path, refused):
    """A torn file, one that lacks something, none."""
    args = grpo.Args(**short_run)
    path = last_checkpoint(grpo.main(args)["folder"])
    torn = ["trainer.pt", "model.safetensors", "config.json"]
    for name in (*torn, "lacks"):
        file = Path(shutil.copytree(path, tmp_path / name), name)
        if name in torn:
            file.write_bytes(file.read_bytes()[:-100])
    torch.save({"step": 2}, tmp_path / "lacks/trainer.pt")
    for name in (*torn, "lacks", "nowhere"):
        line = refused(grpo.main, replace(args, resume=str(tmp_path / name)))
        assert line.startswith(f"error: --resume {tmp_path / name}: ") and len(line) < 420


def test_a_kill_while_saving_leaves_the_checkpoint_before(short_run, monkeypatch):
    """The second one is cut off in the middle of its last file."""
    save = torch.save

    def torn(content, path):
        if content["step"] == 2:
            Path(path).write_bytes(b"half a fi")
            raise KeyboardInterrupt
        save(content, path)

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(KeyboardInterrupt):
        grpo.main(grpo.Args(**short_run | {"eval_every": 1}))
    (folder,) = Path(short_run["output_dir"]).iterdir()
    assert trainer(folder)["step"] == 1


def test_what_an_evaluation_breaks_off_is_saved(short_run, monkeypatch):
    """The checkpoint comes before the evaluation, which may fail in the user's own verifier."""
    evaluate = Mock(side_effect=[{"eval/pass@1": 0.0}, KeyboardInterrupt])
    monkeypatch.setattr(grpo, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        grpo.main(grpo.Args(**short_run))
    (folder,) = Path(short_run["output_dir"]).iterdir()
    assert trainer(folder)["step"] == 2

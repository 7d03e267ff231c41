"""A run that is cut: resumed to the last bit, killed without loss; and what is no checkpoint."""

import json
import random
import shutil
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from conftest import LLM_SCRIPTS, equal, last_checkpoint, scalars, script, weights
from launch import Launched, flags, run, wait_for
from lineage import PATHS

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


def scores(result):
    return {key: value for key, value in result.items() if key.startswith("eval")}


def files(folder):
    """Path → content, of all files below."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def newest_run(args):
    """The folder of the last run begun under --output-dir."""
    return max(Path(args.output_dir).iterdir())


@pytest.fixture
def begun(quick, tmp_path):
    """Call it for a run of four steps with flags of its own: its args, what main returned, and the
    path of a copy of its checkpoint after two steps, in a folder of its own."""

    def begin(name="grpo_llm", **more):
        own = {"steps": 4, "eval_every": 2, "minibatches": 2, "learning_rate": 1e-2, "seed": 7}
        module = script(name)
        args = module.Args(**quick | own | more)
        straight = module.main(args)
        copy = tmp_path / "again/step-000002"
        shutil.copytree(Path(straight["folder"]) / "step-000002", copy)
        return args, straight, str(copy)

    return begin


# ------------------------------------------------------------------------------- to the last bit


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_resumed_is_straight(name, begun):
    """4 steps of two epochs each, and 2 + resume + 2: randomness, orders of groups, data,
    optimizer, learning rate, scores; each one lost shows in some number. By main with the same
    flags, and by the command line with the path alone."""
    module = script(name)
    args, straight, path = begun(name, update_epochs=2)
    resumed = module.main(replace(args, resume=path))
    assert scores(resumed) | {"eval/pass@1_initial": 0} == scores(straight) | {
        "eval/pass@1_initial": 0
    }
    run(PATHS[name], "--resume", path)
    for folder in (resumed["folder"], newest_run(args)):
        assert equal(weights(straight["folder"]), weights(folder))
        states = [trainer(straight["folder"]), trainer(folder)]
        for state in states:
            assert state.pop("args") | {"resume": ""} == vars(args)
        assert same(*states)
        for key in ("reward", "loss", "grad_norm", "num_tokens", "learning_rate"):
            assert scalars(straight["folder"], key)[2:] == scalars(folder, key)
        assert scalars(straight["folder"], "eval/pass@1")[1:] == scalars(folder, "eval/pass@1")


def test_resumed_is_straight_where_the_model_file_is_bf16(begun, pretrained, tmp_path):
    """The checkpoint is float32. Both files must give tensors that begin alike in memory: where
    they do not, the CPU's sums may be rounded differently."""
    folder = str(tmp_path / "bf16")
    shutil.copytree(pretrained, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    args, straight, path = begun(model=folder, max_new_tokens=8)
    resumed = grpo.main(replace(args, resume=path))
    assert equal(weights(straight["folder"]), weights(resumed["folder"]))
    assert same(trainer(straight["folder"])["optimizer"], trainer(resumed["folder"])["optimizer"])
    for source in (folder, pretrained, str(last_checkpoint(straight["folder"]))):
        model, _ = grpo.load_policy(replace(args, model=source), torch.device("cpu"))
        assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())


# ---------------------------------------------------------------------------- flags given again


def test_flags_given_again_win(begun, pretrained):
    """A value that is the default counts as given, too; what is not given is as it was: with the
    model given once more, also what would follow from it by default."""
    own = {"micro_batch_size": 2, "max_new_tokens": 4}
    args, _, path = begun(model=pretrained, clip_high=0.3, clip_low=0.1, **own)
    words = ["--steps", "5", "--clip-high=0.2", "--eval_every", "1", "--model", pretrained]
    said = run("grpo_llm.py", "--resume", path, *words).stdout
    again = replace(args, steps=5, clip_high=0.2, eval_every=1, resume=path)
    assert said.startswith(f"{again}\nrun in ") and "\nstep 2: eval/pass@1 " in said
    state = trainer(newest_run(args))
    assert state["args"] == vars(again) and state["step"] == 5


def test_what_would_be_another_run_is_one_line(begun, refused, gsm_file, pretrained):
    args, _, path = begun(dataset=gsm_file, max_new_tokens=8)
    before = files(args.output_dir)
    given = {"model": pretrained, "seed": 8, "group_size": 8}
    given |= {"dataset": "arithmetic", "eval_dataset": gsm_file}
    for name, value in given.items():
        line = refused(grpo.main, replace(args, resume=path, **{name: value}))
        assert f"--resume {path}: begun as" in line and str(value) in line.partition("is not")[2]
    done = Launched("grpo_llm.py", "--resume", path, "--seed", "8")
    assert done.wait() == 2 and done.stderr.splitlines()[-1].startswith(f"error: --resume {path}")
    assert files(args.output_dir) == before


def test_a_complete_run_is_resumed_only_with_more_steps(begun, refused, tmp_path):
    """Or with --steps 0, which evaluates it."""
    args, straight, _ = begun()
    path = str(last_checkpoint(straight["folder"]))
    args = replace(args, resume=path, output_dir=str(tmp_path / "new"))
    for steps in (4, 3):
        line = refused(grpo.main, replace(args, steps=steps))
        assert line == f"error: --resume {path}: step 4 is done: raise --steps {steps}"
    assert not (tmp_path / "new").exists()
    assert scores(grpo.main(replace(args, steps=0)))["eval/pass@1"] == straight["eval/pass@1"]
    assert trainer(grpo.main(replace(args, steps=5))["folder"])["step"] == 5


def test_the_state_of_a_resumed_run_is_in_memory_once(begun, monkeypatch):
    """What was read from the file is gone when the run begins: the optimizer has its own copy."""
    args, _, path = begun()
    load, evaluate, read, found = grpo.load_checkpoint, grpo.evaluate, [], []

    def watched(path):
        mark = torch.zeros(1)
        read.append(weakref.ref(mark))
        return load(path) | {"mark": mark}

    monkeypatch.setattr(grpo, "load_checkpoint", watched)
    monkeypatch.setattr(grpo, "evaluate", lambda *a: found.append(read[0]()) or evaluate(*a))
    grpo.main(replace(args, resume=path))
    assert found == [None, None]


# ------------------------------------------------------------------------ what a run may delete


def test_two_resumes_of_one_checkpoint_have_folders_of_their_own(begun, tmp_path):
    """Neither touches the run that it continues, nor the newer checkpoint in there."""
    args, straight, _ = begun(steps=3, eval_every=1)
    before = files(straight["folder"])
    older = f"{straight['folder']}/step-000002"
    args = replace(args, resume=older, output_dir=str(tmp_path / "new"))
    folders = [grpo.main(args)["folder"] for _ in range(2)]
    assert len({straight["folder"], *folders}) == 3 and files(straight["folder"]) == before
    for folder in folders:
        assert Path(folder).parent == tmp_path / "new"
        assert [path.name for path in Path(folder).glob("step-*")] == ["step-000003"]


def test_a_run_deletes_nothing_but_its_own_checkpoints(quick, monkeypatch):
    """A copy, an archive and a link that the user puts into the run's folder stay."""
    real, kept = grpo.save, ["step-000001-best", "step-000001.tar.gz", "step-latest"]

    def save(model, tokenizer, folder, state):
        real(model, tokenizer, folder, state)
        if state["step"] == 1:
            copy, archive, link = (folder.with_name(name) for name in kept)
            shutil.copytree(folder, copy)
            archive.write_text("an archive")
            link.symlink_to(folder)

    monkeypatch.setattr(grpo, "save", save)
    result = grpo.main(grpo.Args(**quick | {"steps": 5, "eval_every": 1}))
    found = sorted(path.name for path in Path(result["folder"]).glob("step-*"))
    assert found == sorted([*kept, "step-000004", "step-000005"])
    assert (Path(result["folder"]) / kept[0] / "model.safetensors").exists()


# ------------------------------------------------------------------------- what is no checkpoint


def test_what_is_no_checkpoint(begun, tmp_path, refused):
    args, _, path = begun()
    state = torch.load(f"{path}/trainer.pt", weights_only=True)
    others = {"processes": state | {"run": [state["run"][0], 2, *state["run"][2:]]}}
    others["a flag that is no more"] = state | {"args": state["args"] | {"save_every": 50}}
    for name, other in others.items():
        shutil.copytree(path, tmp_path / name)
        torch.save(other, tmp_path / name / "trainer.pt")
    torn = ["trainer.pt", "model.safetensors", "config.json"]
    for name in torn:
        shutil.copytree(path, tmp_path / name)
        file = tmp_path / name / name
        file.write_bytes(file.read_bytes()[:-100])
    for name in (*others, *torn, "nowhere"):
        line = refused(grpo.main, replace(args, resume=str(tmp_path / name)))
        assert "--resume" in line and str(tmp_path / name) in line


@pytest.mark.parametrize("name,other", [("cispo_llm", "grpo_llm"), ("grpo_llm", "cispo_llm")])
def test_checkpoint_of_another_script(name, other, begun, refused):
    """By main, and by the command line, whether or not the other has the flags that it was begun
    with: GRPO has all that CISPO has."""
    args, _, path = begun(name, steps=2)
    Args = script(other).Args
    shared = {key: value for key, value in vars(args).items() if hasattr(Args, key)}
    line = refused(script(other).main, Args(**shared | {"resume": path}))
    done = Launched(PATHS[other], "--resume", path)
    assert done.wait() == 2
    for said in (line, done.stderr.splitlines()[-1]):
        assert said.startswith(f"error: --resume {path}: ") and len(said) < 420


# --------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_kill_at_any_instant_leaves_a_whole_checkpoint(kills, quick):
    """Each time it goes on from a checkpoint that is whole, and newer than the last. The run that
    ends leaves its last two checkpoints and logs, nothing half-made."""
    quick |= {"steps": 100_000, "eval_every": 1}
    runs, rng, resume = Path(quick["output_dir"]), random.Random(0), []

    def newest():
        return max(runs.glob("*/step-*"), default=None, key=lambda path: path.name)

    for _ in range(kills):
        process, known = Launched("grpo_llm.py", *flags(quick), *resume), newest()
        wait_for(lambda before=known: newest() != before)  # it went on from where it was
        time.sleep(rng.random() * 2)
        process.kill()
        process.wait()
        assert known is None or newest().name > known.name
        resume = ["--resume", str(newest())]
    last = trainer(newest().parent)["step"] + 3
    run("grpo_llm.py", *resume, "--steps", str(last))
    kept = sorted(path.name for path in max(runs.iterdir()).iterdir())
    assert kept[1:] == [f"step-{last - 1:06d}", f"step-{last:06d}"] and len(kept) == 3


@pytest.mark.parametrize("stage", ["model", "tokenizer", "trainer.pt", "rename"])
def test_an_error_while_saving_leaves_whole_checkpoints(stage, quick, monkeypatch, refused):
    """A full disk, for example: one line says so, what was saved before is whole, and nothing is
    left of the save that failed."""
    real, calls = grpo.save, []

    def fail(*_):
        raise OSError("no space left on device")

    def save(model, tokenizer, folder, state):
        calls.append(folder)
        if len(calls) == 2:
            target = {"model": model, "tokenizer": tokenizer, "trainer.pt": torch, "rename": Path}
            name = {"trainer.pt": "save", "rename": "rename"}.get(stage, "save_pretrained")
            monkeypatch.setattr(target[stage], name, fail)
        real(model, tokenizer, folder, state)

    monkeypatch.setattr(grpo, "save", save)
    line = refused(grpo.main, grpo.Args(**quick | {"steps": 4, "eval_every": 1}))
    monkeypatch.undo()
    (folder,) = Path(quick["output_dir"]).iterdir()
    failed = f"{folder / 'step-000002'} cannot be saved, is the disk full?"
    assert line == f"error: {failed}: no space left on device"
    assert sorted(path.name for path in folder.iterdir())[1:] == ["step-000001"]
    grpo.main(grpo.Args(**quick | {"resume": str(folder / "step-000001")}))


# ------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_folder_that_cannot_be_written(name, tmp_path, quick):
    (tmp_path / "file").touch()
    folder = tmp_path / "file/runs"
    done = Launched(PATHS[name], *flags(quick | {"output_dir": folder}))
    assert done.wait() == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: --output-dir {folder}: ")


def test_a_prompt_that_leaves_no_room_stops_the_run_before_its_first_step(
    quick, tmp_path, refused, monkeypatch
):
    """The longest of all, though it is one to train on."""
    questions = [f"{i}+{i}" for i in range(20)] + ["7+" * 9 + "7"]
    rows = [json.dumps({"question": question, "answer": "1"}) for question in questions]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    own = {"dataset": str(tmp_path / "sums.jsonl"), "prompt": "{question}=", "max_new_tokens": 10}
    args, load = grpo.Args(**quick | own), grpo.load_policy
    assert questions[-1] in dict(grpo.load_data(args)[0])

    def limited(*given):
        model, tokenizer = load(*given)
        tokenizer.model_max_length = 30
        return model, tokenizer

    monkeypatch.setattr(grpo, "load_policy", limited)
    line = refused(grpo.main, replace(args, max_new_tokens=11))
    assert line == "error: --max-new-tokens 11: the longest prompt leaves room for 10"
    assert not Path(quick["output_dir"]).exists()
    grpo.main(args)


@pytest.mark.parametrize("steps", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_memory_stays_flat(quick, steps, monkeypatch):
    """Resident memory after the first steps may move by a tenth at most; slow: over 300 steps."""
    pages, real = [], grpo.compute_advantages

    def watched(*args):
        pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
        return real(*args)

    monkeypatch.setattr(grpo, "compute_advantages", watched)
    grpo.main(grpo.Args(**quick | {"steps": steps, "eval_every": 20}))
    assert max(pages[steps // 6 :]) < pages[steps // 6] * 1.1

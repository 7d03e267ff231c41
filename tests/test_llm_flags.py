"""What the flags of the LLM scripts do: defaults that follow, learning rates, the reader's own
verifier, bfloat16, --help."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import LLM_SCRIPTS, equal, last_checkpoint, scalars, script, weights
from launch import ROOT, Launched, flags, run

grpo = script("grpo_llm")

# ----------------------------------------------------------------------- defaults that follow


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_defaults_follow_from_model_and_data_unless_given(name):
    Args = script(name).Args

    def chosen(**flags):
        args = Args(**flags)
        return args.learning_rate, args.max_new_tokens, args.micro_batch_size

    assert chosen() == (4e-4, 24, 256)
    assert chosen(model="some/model") == (1e-6, 24, 8)
    assert chosen(dataset="train.jsonl") == (4e-4, 256, 256)
    assert chosen(model="some/model", dataset="train.jsonl") == (1e-6, 256, 8)
    own = {"learning_rate": 3e-5, "max_new_tokens": 9, "micro_batch_size": 5}
    assert chosen(model="some/model", dataset="train.jsonl", **own) == (3e-5, 9, 5)


def test_what_was_chosen_is_printed_and_logged(quick, capsys):
    result = grpo.main(grpo.Args(**quick | {"steps": 1}))
    lines = capsys.readouterr().out.splitlines()
    assert f"run in {result['folder']}" in lines
    assert "    learning_rate: 0.0004" in lines and "    max_new_tokens: 24" in lines
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


# ------------------------------------------------------------------------------- --update-epochs


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_each_pass_has_all_groups_in_an_order_of_its_own(name, quick, monkeypatch):
    module, seen = script(name), []
    monkeypatch.setattr(
        module, "train_minibatch", lambda model, optimizer, batch, args: seen.append(batch) or {}
    )
    if name == "dapo_llm":
        quick |= {"max_resample": 1}
        monkeypatch.setattr(module, "informative", lambda rewards: (rewards == rewards).any(1))
    own = {"steps": 1, "update_epochs": 3, "minibatches": 4, "prompts_per_step": 8}
    module.main(module.Args(**quick | own))
    assert len(seen) == 12
    passes = []
    for part in range(0, 12, 4):
        groups = torch.cat([batch["completion_ids"] for batch in seen[part : part + 4]])
        passes.append([tuple(group.flatten().tolist()) for group in groups.split(4)])
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
    for batch in seen:  # whole groups: a prompt each
        prompts = batch["prompt_ids"].view(2, 4, -1)
        assert len(batch["mask"]) == 8 and (prompts == prompts[:, :1]).all()


def test_re_use_brings_the_clip_to_life(quick):
    """The ratio is 1 in the first pass of one minibatch, and moves in the next."""
    own = {"steps": 1, "minibatches": 1, "learning_rate": 1e-2, "warmup_steps": 0}
    once, often = (grpo.main(grpo.Args(**quick | own, update_epochs=n)) for n in (1, 4))
    assert scalars(once["folder"], "clip_ratio") == [0]
    assert abs(scalars(once["folder"], "approx_kl")[0]) < 1e-8
    assert scalars(often["folder"], "clip_ratio")[0] > 0
    assert scalars(often["folder"], "approx_kl")[0] > 1e-4


# ------------------------------------------------------------------------------------ --verifier

OWN = '''
"""A verifier with a helper, a constant and an import of its own."""
import json

FREE = {"yes", "no"}


def score(completion):
    return len(completion) / 10


def verify(completion, answer):
    assert isinstance(completion, str)
    if isinstance(answer, str):
        assert answer in FREE
        return score(completion)
    assert answer == 5 and isinstance(answer, int), repr(answer)
    return json.loads("-0.5")
'''


@pytest.fixture
def own_task(tmp_path):
    """Flags for a verifier in a file, and for questions whose answers are texts and numbers."""
    rows = [{"question": f"{i}+1=", "answer": ["yes", "no", 5][i % 3]} for i in range(30)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "own.py").write_text(OWN)
    names = {"dataset": "own.jsonl", "eval_dataset": "own.jsonl", "verifier": "own.py"}
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows[:6])))
    names["eval_dataset"] = "held_out.jsonl"
    return {flag: str(tmp_path / name) for flag, name in names.items()} | {"max_new_tokens": 8}


def test_verifier_and_answers_of_the_reader_s_own(own_task, quick):
    """Answers reach it as they stand; any float is a reward."""
    done = run("grpo_llm.py", *flags(quick | own_task))
    (folder,) = Path(quick["output_dir"]).iterdir()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("step 2: held-out")]
    assert "lenient" not in line
    assert ", right answer 'yes'\n" in done.stdout or ", right answer 'no'\n" in done.stdout
    assert -0.5 < scalars(folder, "eval/pass@1")[0] < 1.0
    assert scalars(folder, "reward_std")[0] > 0 and weights(folder)


def test_an_exception_of_the_verifier_is_its_author_s_to_see(own_task, quick):
    path = Path(own_task["verifier"])
    path.write_text("def verify(completion, answer):\n    return completion / answer\n")
    done = Launched("grpo_llm.py", *flags(quick | own_task))
    assert done.wait() == 1 and "return completion / answer" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("TypeError")
    path.write_text("import no_such_module\n")
    done = Launched("grpo_llm.py", *flags(quick | own_task))
    assert done.wait() == 1 and "no_such_module" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("text", [None, "def score(completion, answer):\n    return 1.0\n"])
def test_no_verifier_is_one_line(text, quick, refused, tmp_path):
    """No such file, or no `verify` in it."""
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    line = refused(grpo.main, grpo.Args(**quick | {"verifier": str(path)}))
    assert f"--verifier {path}: " in line and not Path(quick["output_dir"]).exists()


def test_text_answers_need_a_verifier_of_their_own(own_task, quick, refused):
    for verifier in ("strict", "flexible"):
        line = refused(grpo.main, grpo.Args(**quick | own_task | {"verifier": verifier}))
        assert f"--dataset {own_task['dataset']}: line 1 " in line


def test_flexible_rewards_the_last_number_anywhere(quick, monkeypatch):
    asked = []
    monkeypatch.setattr(grpo, "verify", None)
    monkeypatch.setattr(grpo, "verify_flexible", lambda *pair: float(asked.append(pair) or 1))
    result = grpo.main(grpo.Args(**quick | {"verifier": "flexible", "steps": 1}))
    assert asked and scalars(result["folder"], "reward") == [1.0]


# --------------------------------------------------------------------------------------- --dtype


def test_bfloat16_by_a_whole_run(pretrained, gsm_file, quick, tmp_path):
    """On the CPU: products in bf16, weights in float32, which move; the gap between sampler and
    training pass is logged, and only here."""
    own = tmp_path / "parity.py"
    own.write_text("def verify(completion, answer):\n    return float(len(completion) % 2)\n")
    quick |= {"model": pretrained, "dataset": gsm_file, "verifier": str(own), "steps": 3}
    quick |= {"max_new_tokens": 6, "learning_rate": 1e-3, "eval_every": 3}
    before = grpo.load_policy(grpo.Args(model=pretrained), torch.device("cpu"))[0].state_dict()
    folders = {}
    for dtype in ("bfloat16", "float32", "auto"):
        done = run("grpo_llm.py", *flags(quick | {"dtype": dtype, "output_dir": tmp_path / dtype}))
        assert f"    dtype: {dtype}\n" in done.stdout
        (folders[dtype],) = (tmp_path / dtype).iterdir()
    after = {dtype: weights(folder) for dtype, folder in folders.items()}
    assert equal(after["auto"], after["float32"]) and not equal(after["auto"], after["bfloat16"])
    for name, value in after["bfloat16"].items():
        moved = value - before[name]
        assert value.dtype == torch.float32 and 0 < moved.abs().max() < 0.1
    gap = "sampling/sampling_logp_difference"
    mean, largest = (scalars(folders["bfloat16"], f"{gap}/{of}") for of in ("mean", "max"))
    assert len(mean) == 3 and all(0 < m < x < 0.5 for m, x in zip(mean, largest, strict=True))
    for dtype in ("float32", "auto"):
        with pytest.raises(KeyError):
            scalars(folders[dtype], f"{gap}/mean")
    assert scalars(folders["bfloat16"], "kl")[0] == 0, "at first, it is its own reference"


def test_bfloat16_learns(tmp_path):
    result = grpo.main(
        grpo.Args(dtype="bfloat16", steps=12, eval_problems=128, output_dir=str(tmp_path))
    )
    assert result["eval/pass@1_initial"] < 0.3 and result["eval/pass@1"] > 0.25
    assert result["eval/pass@1"] > result["eval/pass@1_initial"] + 0.05


# ------------------------------------------------------------------------- models and held-out


def test_a_checkpoint_of_the_tiny_model_is_a_model(quick, tmp_path):
    trained = grpo.main(grpo.Args(**quick))
    again = quick | {"model": str(last_checkpoint(trained["folder"])), "steps": 1}
    result = grpo.main(grpo.Args(**again | {"output_dir": str(tmp_path / "again")}))
    assert result["eval/pass@1_initial"] == trained["eval/pass@1"]


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

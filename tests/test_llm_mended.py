"""Bugs that a review found, B1 to B16, each with a test that fails without its mend. Elsewhere: B6,
what a failed save leaves, in test_llm_resume.py; B11, DAPO's cap, in test_dapo.py; B15, threads, in
test_llm_flags.py.
"""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import tokenizers
import torch
import transformers
from conftest import Characters, last_checkpoint, random_model, script
from launch import ROOT, flags

grpo, dapo = script("grpo_llm"), script("dapo_llm")
PROBLEMS = [("1+2", "3"), ("2+5", "7")]


def write(path, text):
    path.write_text(text)
    return str(path)


def jsonl(path, rows):
    return write(path, "\n".join(map(json.dumps, rows)))


def rollout(verifier):
    args = grpo.Args(verifier=verifier)
    return grpo.rollout(random_model(), Characters(), PROBLEMS, 2, 1.0, args)[2]


def digest(folder):
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return [(path, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]


# ------------------------------------------------------------------------- runs and their folders


@pytest.fixture
def begun(quick):
    return grpo.main(grpo.Args(**quick | {"eval_every": 1, "steps": 3}))["folder"]


def test_two_resumes_of_one_checkpoint_have_folders_of_their_own(begun, quick, tmp_path):
    """B1, B2: also of the older checkpoint; the newer one of the old run stays as it is."""
    before = digest(begun)
    older = f"{begun}/step-000002"
    anew = quick | {"steps": 3, "eval_every": 1, "output_dir": str(tmp_path / "new")}
    folders = [grpo.main(grpo.Args(**anew | {"resume": older}))["folder"] for _ in range(2)]
    assert len({begun, *folders}) == 3 and digest(begun) == before
    for folder in folders:
        assert Path(folder).parent == tmp_path / "new"
        assert last_checkpoint(folder).name == "step-000003"
        assert len(list(Path(folder).glob("step-*"))) == 1


def test_adams_state_of_a_resumed_run_is_there_once(begun, quick, monkeypatch):
    """B5: the state that was read is not kept beside the optimizer's own."""
    states, load, step = [], grpo.load_checkpoint, grpo.train_step
    monkeypatch.setattr(
        grpo, "load_checkpoint", lambda path: states.append(load(path)) or states[-1]
    )

    def train_step(*args):
        assert "optimizer" not in states[0]
        return step(*args)

    monkeypatch.setattr(grpo, "train_step", train_step)
    grpo.main(grpo.Args(**quick | {"steps": 3, "resume": f"{begun}/step-000002"}))
    assert len(states) == 1


def test_two_first_starts_leave_one_model_and_nothing_else(tmp_path, monkeypatch):
    """B12: the second finds the first's, made while it was busy itself."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    save = grpo.save
    inside = []

    def slow(model, tokenizer, folder):
        if not inside:
            inside.append(folder)
            shutil.copytree(tmp_path / "other", folder)
        save(model, tokenizer, folder)

    save(random_model(), SimpleNamespace(save_pretrained=lambda folder: None), tmp_path / "other")
    monkeypatch.setattr(grpo, "save", slow)
    folder = grpo.tiny_model_folder(1)
    assert inside == [folder] and list((tmp_path / "hub").iterdir()) == [folder]
    assert {path.name for path in folder.iterdir()} == {
        path.name for path in (tmp_path / "other").iterdir()
    }


def test_the_suites_cache_is_its_own(tmp_path, monkeypatch):
    """B16: also where the user has set TORCH_HOME."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    cleanups = []
    config = SimpleNamespace(option=SimpleNamespace(dist="no"), add_cleanup=cleanups.append)
    config.addinivalue_line = lambda *_: None
    conftest.pytest_configure(config)
    assert not Path(torch.hub.get_dir()).is_relative_to(tmp_path)
    for cleanup in cleanups:
        cleanup()


@pytest.mark.parametrize("torn", ["config.json", "model.safetensors", "trainer.pt"])
def test_a_torn_checkpoint_is_one_line(torn, begun, quick, refused):
    file = last_checkpoint(begun) / torn
    file.write_bytes(file.read_bytes()[:100])
    line = refused(grpo.main, grpo.Args(**quick | {"resume": str(file.parent)}))
    assert "--resume" in line and str(file.parent) in line


def test_advantages_that_are_not_a_number_stop_the_run(quick, monkeypatch):
    """They must not pass for "no signal"."""
    monkeypatch.setattr(grpo, "compute_advantages", lambda rewards, args: rewards * torch.nan)
    with pytest.raises(SystemExit, match="error: step 1: not finite.*--learning-rate"):
        grpo.main(grpo.Args(**quick))


# ---------------------------------------------------------------------------------- the verifier


def test_a_verifier_may_import_a_file_beside_it_and_use_processes(tmp_path):
    """B3. Processes that are started find its functions by the name of its file."""
    write(tmp_path / "beside_the_verifier.py", "HALF = 0.5\n")
    source = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from beside_the_verifier import HALF

def score(text):
    return HALF

def verify(completion, answer):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(score, completion).result()
"""
    verify = grpo.load_verifier(write(tmp_path / "verifier_with_a_pool.py", source))
    assert verify("#3", "3") == 0.5


def test_a_verifier_named_as_a_loaded_module_is_one_line(tmp_path, refused):
    path = write(tmp_path / "json.py", "def verify(completion, answer):\n    return 1.0\n")
    line = refused(grpo.load_verifier, path)
    assert f"--verifier {path}" in line and len(line) < 400
    assert sys.modules["json"] is json


def test_loading_a_verifier_again_changes_nothing(tmp_path):
    """It is loaded at each rollout."""
    path = write(tmp_path / "often_loaded.py", "def verify(completion, answer):\n    return 1.0\n")
    grpo.load_verifier(path)
    before = list(sys.path)
    grpo.load_verifier(path)
    assert sys.path == before


def test_a_reward_beyond_floats_is_one_line(tmp_path, refused):
    """B14."""
    source = "def verify(completion, answer):\n    return 10**400\n"
    path = write(tmp_path / "beyond_floats.py", source)
    assert f"--verifier {path}" in refused(rollout, path)


# --------------------------------------------------------------------------------------- the data


ROWS = [{"question": f"{i}+1", "answer": i + 1} for i in range(3)]


def test_few_questions_and_one_file_for_both_sides(quick, tmp_path):
    """B7: two questions are one to train on and one to evaluate on."""
    two = jsonl(tmp_path / "two.jsonl", ROWS[:2])
    flags = {"model": "tiny", "prompt": "{question}=", "max_new_tokens": 24}
    train, held_out = grpo.load_data(grpo.Args(dataset=two))
    assert len(train) == len(held_out) == 1
    one = jsonl(tmp_path / "one.jsonl", ROWS[:1])
    for data in ({"dataset": two}, {"dataset": one, "eval_dataset": one}):
        scores = grpo.main(grpo.Args(**quick | flags | data | {"steps": 1}))
        assert 0 <= scores["eval/pass@1"] <= 1


def test_sums_are_not_evaluated_on_a_file(refused):
    assert "--eval-dataset" in refused(grpo.check_args, grpo.Args(eval_dataset="test.jsonl"))


def test_blank_lines_and_numbers_as_answers(tmp_path):
    """B9."""
    text = "\n" + "\n\n  \n".join(map(json.dumps, ROWS)) + "\n\n"
    path = write(tmp_path / "d.jsonl", text)
    found = grpo.load_jsonl("--dataset", path, grpo.Args())
    assert found == [("0+1", "1"), ("1+1", "2"), ("2+1", "3")]


@pytest.mark.parametrize("kind", ["Latin-1", "gz"])
def test_what_is_not_utf8_is_one_short_line(kind, tmp_path, refused):
    """B9: with the number of the line that is meant."""
    path, lines = tmp_path / "d.jsonl", [json.dumps({"question": "x" * 5000, "answer": 1})] * 9
    lines[6] = '{"question": "' + "é" * 5000 + '", "answer": 1}'
    data = "\n".join(lines).encode("latin-1")
    path.write_bytes(data if kind == "Latin-1" else gzip.compress(data))
    line = refused(grpo.load_jsonl, "--dataset", str(path), grpo.Args())
    assert f"line {7 if kind == 'Latin-1' else 1}: " in line and len(line) < 400


# ------------------------------------------------------------------------ tokenizers and models


def test_a_tokenizer_that_ends_every_text(pretrained):
    """B8: without a chat template, the end would stand before the answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.chat_template = None
    plain = grpo.encode_prompts(PROBLEMS, tokenizer, grpo.Args())
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    assert tokenizer("1")["input_ids"][-1] == tokenizer.eos_token_id
    assert grpo.encode_prompts(PROBLEMS, tokenizer, grpo.Args()) == plain


def test_prompts_are_tokenized_in_one_call(monkeypatch):
    """B13."""
    calls, real = [], Characters.__call__
    monkeypatch.setattr(Characters, "__call__", lambda *a, **k: calls.append(1) or real(*a, **k))
    grpo.encode_prompts(PROBLEMS * 50, Characters(), grpo.Args())
    assert len(calls) == 1


def test_a_chat_template_that_raises_is_one_line(pretrained, refused):
    """B14: with an error that begins with a newline, too."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.chat_template = "{{ raise_exception('\n\nsystem first') }}"
    line = refused(grpo.encode_prompts, PROBLEMS, tokenizer, grpo.Args())
    assert "--model" in line and "system first" in line


def test_a_pad_id_outside_the_embedding_is_no_matter(pretrained, tmp_path):
    """B14: as in tokenizers whose pad token was added without a row for it."""
    folder = tmp_path / "model"
    shutil.copytree(pretrained, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<|added|>"})
    tokenizer.save_pretrained(folder)
    args = grpo.Args(model=str(folder), max_new_tokens=4)
    model, tokenizer = grpo.load_policy(args, torch.device("cpu"))
    assert tokenizer.pad_token_id >= model.get_input_embeddings().num_embeddings
    problems = [("1", "1"), ("1 + 2 + 3 + 4", "10")]  # of two lengths
    batch, _, _ = grpo.rollout(model, tokenizer, problems, 2, 1.0, args)
    assert grpo.token_logprobs(model, batch, 1.0).isfinite().all()


@pytest.mark.parametrize("has_bf16", [True, False])
def test_bfloat16_on_cards_that_have_it(has_bf16, pretrained, monkeypatch):
    """B4: others emulate it, slowly."""
    asked = []

    def is_bf16_supported(including_emulation=True):
        asked.append(including_emulation)
        return has_bf16 or including_emulation

    class Model(transformers.Qwen2ForCausalLM):
        to = lambda self, device: self  # noqa: E731

    model = Model.from_pretrained(pretrained)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(grpo.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    policy, _ = grpo.load_policy(grpo.Args(model=pretrained), torch.device("cuda"))
    assert policy.in_bf16 == has_bf16 and asked == [False]


def test_parameters_that_are_never_used_get_no_gradient():
    """B14: nor do they take Adam's memory."""
    model = random_model()
    model.unused = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = grpo.generate(model, [[3, 4], [5, 6]], 4, 6, 1.0)
    batch["advantages"] = torch.linspace(-1, 1, 8)
    assert grpo.train_minibatch(model, optimizer, batch, grpo.Args())
    assert model.unused.weight.grad is None and model.unused.weight not in optimizer.state
    assert model.get_input_embeddings().weight in optimizer.state


# ------------------------------------------------------------------------------------ what is said


def test_an_error_that_begins_with_a_newline_is_shown(capsys):
    """B14."""
    with pytest.raises(SystemExit), grpo.blame("--model x"):
        raise ValueError("\n\nwhat is wrong\nand more")
    assert capsys.readouterr().err == "error: --model x: what is wrong and more\n"


def test_a_terminal_that_knows_ascii_alone(quick):
    """B14: the last line has an arrow. A fork keeps the encoding, so this is a real command."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "grpo_llm.py", *flags(quick | {"steps": 1})]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0 and b"; model and logs in " in done.stdout, done.stderr[-2000:]


def test_dapos_penalty_follows_the_limit():
    """B10: the cache is a share of --max-new-tokens, also of a resumed run's new one."""
    for limit in (100, 200):
        args = dapo.Args(max_new_tokens=limit)
        lengths = torch.tensor([0.8, 0.9, 1.0]) * limit
        ended = torch.ones(3, dtype=torch.bool)
        penalty = dapo.overlong_penalty(lengths, ended, args)
        assert penalty.tolist() == pytest.approx([0, -0.25, -0.5])

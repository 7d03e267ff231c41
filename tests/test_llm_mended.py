"""Bugs that a review found, B1 to B16, each with a test that fails without its mend. Elsewhere: B4,
bf16 that is emulated, in test_llm_bf16.py; B6, what a failed save leaves, in test_llm_resume.py;
B7 and B9, data files, in test_llm_task.py; B10 and B11, DAPO's penalty and cap, in test_dapo.py;
B15, threads, in test_llm_flags.py.
"""

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
from conftest import Characters, last_checkpoint, random_model, script, spy
from launch import ROOT, flags
from test_llm_resume import files

grpo = script("grpo_llm")
PROBLEMS = [("1+2", "3"), ("2+5", "7")]


def write(path, text):
    path.write_text(text)
    return str(path)


# ------------------------------------------------------------------------- runs and their folders


@pytest.fixture
def begun(quick):
    return grpo.main(grpo.Args(**quick | {"eval_every": 1, "steps": 3}))["folder"]


def test_two_resumes_of_one_checkpoint_have_folders_of_their_own(begun, quick, tmp_path):
    """B1, B2: also of the older checkpoint; the newer one of the old run stays as it is."""
    before = files(begun)
    older = f"{begun}/step-000002"
    anew = quick | {"steps": 3, "eval_every": 1, "output_dir": str(tmp_path / "new")}
    folders = [grpo.main(grpo.Args(**anew | {"resume": older}))["folder"] for _ in range(2)]
    assert len({begun, *folders}) == 3 and files(begun) == before
    for folder in folders:
        assert Path(folder).parent == tmp_path / "new"
        assert last_checkpoint(folder).name == "step-000003"
        assert len(list(Path(folder).glob("step-*"))) == 1


def test_adams_state_of_a_resumed_run_is_there_once(begun, quick, monkeypatch):
    """B5: the state that was read is not kept beside the optimizer's own."""
    path = f"{begun}/step-000002"
    state = grpo.load_checkpoint(path)
    monkeypatch.setattr(grpo, "load_checkpoint", lambda path: state)
    grpo.main(grpo.Args(**quick | {"steps": 3, "resume": path}))
    assert "optimizer" not in state


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


# --------------------------------------------------------------------------------------- the data


ROWS = [{"question": f"{i}+1", "answer": i + 1} for i in range(3)]


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
    calls = spy(monkeypatch, Characters, "__call__")
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


def test_a_terminal_that_knows_ascii_alone(quick):
    """B14: the last line has an arrow. A fork keeps the encoding, so this is a real command."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "grpo_llm.py", *flags(quick | {"steps": 1})]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0 and b"; model and logs in " in done.stdout, done.stderr[-2000:]

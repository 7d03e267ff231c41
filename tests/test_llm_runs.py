"""Whole runs: learning, repeatability, the cache, real models and data, and a user's errors."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers
from conftest import (
    Characters,
    equal,
    last_checkpoint,
    quick_for,
    random_model,
    scalars,
    script,
    spy,
    weights,
)
from launch import run

grpo = script("grpo_llm")
pytestmark = pytest.mark.usefixtures("tiny_model")


@pytest.fixture(scope="session")
def learned(tmp_path_factory, tiny_model):
    """The default warm start and a run of 16 steps."""
    folder = str(tmp_path_factory.mktemp("runs"))
    return grpo.main(grpo.Args(steps=16, eval_every=8, eval_problems=128, output_dir=folder))


def test_learns(learned):
    """With a turned sign pass@1 falls instead of rising."""
    assert learned["eval/pass@1_initial"] < 0.35
    assert learned["eval/pass@1"] > 0.8 and learned["eval/pass@1_greedy"] > 0.9
    assert min(learned["eval/pass@8"], learned["eval/pass@1_flexible"]) >= learned["eval/pass@1"]


@pytest.mark.parametrize("name", quick_for())
def test_each_script_learns(name, tmp_path):
    module = script(name)
    result = module.main(module.Args(steps=30, eval_problems=128, output_dir=str(tmp_path)))
    assert result["eval/pass@1_initial"] == pytest.approx(0.27, abs=0.06)
    assert result["eval/pass@1"] > 0.8


def test_clip_is_live_and_logs_are_complete(learned):
    names = "reward reward_std frac_reward_zero_std completions/mean_length clip_ratio approx_kl"
    names += " completions/clipped_ratio learning_rate kl entropy grad_norm step_time num_tokens"
    names += " tokens_per_second loss eval/pass@1 eval/pass@1_flexible eval/pass@8"
    logged = {name: scalars(learned["folder"], name) for name in names.split()}
    for name, values in logged.items():
        assert len(values) == (3 if name.startswith("eval") else 16), name
    assert 0 < sum(logged["clip_ratio"]) / 16 < 0.5
    assert abs(logged["kl"][0]) < 1e-8 < 1e-3 < logged["kl"][-1]  # it begins as the reference
    assert logged["approx_kl"][-1] > 0 and logged["learning_rate"][9] == pytest.approx(4e-4)
    assert min(logged["num_tokens"]) > 0 and max(logged["num_tokens"]) < 256 * 24, "of one step"


@pytest.fixture
def untrained(monkeypatch, tmp_path):
    """A cache of its own for a tiny model without its warm start: returns the cache."""
    real = grpo.tiny_model_folder
    monkeypatch.setattr(grpo, "tiny_model_folder", lambda: real(0))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/hub"


def test_same_seed_same_run_with_and_without_cache(quick, untrained, monkeypatch):
    """The second run takes the warm start from the cache; the third has another seed."""
    monkeypatch.setattr(grpo, "load_verifier", lambda _: lambda completion, _: len(completion) % 3)
    own = quick | {"max_new_tokens": 6}
    runs = [grpo.main(grpo.Args(**own, seed=seed)) for seed in (1, 1, 2)]
    first, second, other = runs
    a, b, c = (weights(run["folder"]) for run in runs)
    assert equal(a, b) and not equal(a, c)
    for name in ("loss", "reward", "clip_ratio", "kl", "eval/pass@1"):
        assert scalars(first["folder"], name) == scalars(second["folder"], name)
    assert first["eval/pass@1_initial"] == other["eval/pass@1_initial"]


def test_each_step_and_each_seed_has_randomness_of_its_own(quick, monkeypatch):
    """Otherwise the same question would get the same completions at every step."""
    seen = []

    def train_step(*_):
        seen.append(torch.initial_seed())
        return {"num_tokens": 1.0}

    monkeypatch.setattr(grpo, "train_step", train_step)
    for seed in (1, 2):
        grpo.main(grpo.Args(**quick | {"steps": 4, "eval_every": 100, "seed": seed, "beta": 0.0}))
    assert len(set(seen)) == 8


def test_corrupt_cache_is_named(untrained, refused):
    def load():
        return grpo.load_policy(grpo.Args(), torch.device("cpu"))

    load()
    (folder,) = untrained.iterdir()  # and nothing half-made beside it
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert str(folder) in refused(load)
    shutil.rmtree(folder)
    load()


def test_a_folder_that_cannot_be_written_is_named(untrained, quick, tmp_path, monkeypatch, refused):
    """The output folder, or else the cache of the tiny model."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file/runs"
    line = refused(grpo.main, grpo.Args(**quick | {"output_dir": str(folder)}))
    assert line.startswith(f"error: --output-dir {folder}: ")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "file"))
    line = refused(grpo.main, grpo.Args(**quick))
    assert str(tmp_path / "file") in line and "output-dir" not in line
    assert not Path(quick["output_dir"]).exists()


def test_cache_key_holds_what_shapes_the_weights(monkeypatch):
    """The source of both functions, and the versions of torch and transformers."""
    monkeypatch.setattr(grpo, "save", lambda *args: None)
    folder_of = grpo.tiny_model_folder
    folders = [folder_of(0), folder_of(0)]
    parts = [(torch, "__version__"), (transformers, "__version__")]
    for module, name in [*parts, (grpo, "tiny_model_folder"), (grpo, "make_sum")]:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda: ("another",))
            folders.append(folder_of(0))
    assert folders[0] == folders[1] and len(set(folders)) == 5


def test_two_first_starts_leave_one_model_and_nothing_else(tmp_path):
    """The second finds the model that the first has made in the meantime."""
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    for _ in range(2):
        grpo.save(random_model(), tokenizer, tmp_path / "model")
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


def test_reference_stays_and_is_not_loaded_without_kl(quick, monkeypatch):
    seen, real = [], grpo.batch_logprobs
    loaded = spy(monkeypatch, grpo, "load_policy")

    def look(reference, batch, args):
        seen.append({name: tensor.clone() for name, tensor in reference.state_dict().items()})
        return real(reference, batch, args)

    monkeypatch.setattr(grpo, "batch_logprobs", look)
    run = grpo.main(grpo.Args(**quick | {"steps": 3}))
    assert len(seen) == 3 and equal(seen[0], seen[2]) and len(loaded) == 2
    assert not equal(seen[0], weights(run["folder"]))
    grpo.main(grpo.Args(**quick | {"beta": 0.0, "output_dir": quick["output_dir"] + "2"}))
    assert len(seen) == 3 and len(loaded) == 3


@pytest.fixture
def copied(pretrained, tmp_path):
    """A copy of the model's folder, to be changed, and its tokenizer."""
    folder = str(tmp_path / "model")
    shutil.copytree(pretrained, folder)
    return folder, transformers.AutoTokenizer.from_pretrained(folder)


def test_stop_ids_and_dropout(pretrained):
    args = grpo.Args(model=pretrained)
    model, tokenizer = grpo.load_policy(args, torch.device("cpu"))
    assert model.generation_config.eos_token_id == [0, 2]
    prompts = grpo.encode_prompts([("1+1", "2")], tokenizer, args)
    batch = grpo.generate(model, prompts, 2, 4, 1.0)
    a, b = (grpo.token_logprobs(model, batch, 1.0) for _ in range(2))
    assert torch.equal(a, b), "dropout is on"


def test_default_prompts(pretrained):
    """`3+8=` for sums; of a file the question, and for the strict verifier its instruction."""
    _, tokenizer = grpo.load_policy(grpo.Args(model=pretrained), torch.device("cpu"))

    def asked(**flags):
        (ids,) = grpo.encode_prompts([("3+8", "11")], tokenizer, grpo.Args(**flags))
        text = tokenizer.decode(ids)
        question = text.removeprefix("<|im_start|>user\n")
        question = question.removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        assert (question != text) == bool(tokenizer.chat_template)
        return question

    reasons = "3+8\nReason step by step, then end with #### and the number."
    for template in (tokenizer.chat_template, None):
        tokenizer.chat_template = template
        assert asked() == asked(verifier="flexible") == "3+8="
        assert asked(dataset="d.jsonl") == reasons
        for verifier in ("flexible", "own.py"):
            assert asked(dataset="d.jsonl", verifier=verifier) == "3+8"
        assert asked(prompt="Q: {question} {A}:") == "Q: 3+8 {A}:"


def test_bos_comes_once_and_no_end(pretrained):
    """A tokenizer may begin and end every text; the end may not stand before the completion."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    special = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<s>", "<|im_end|>")}
    post = tokenizers.processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=list(special.items())
    )
    tokenizer.backend_tokenizer.post_processor = post
    assert tokenizer("1")["input_ids"][-1] == tokenizer.eos_token_id
    for template in ("{{ bos_token }}" + tokenizer.chat_template, None):
        tokenizer.chat_template = template
        (ids,) = grpo.encode_prompts([("1 + 1", "2")], tokenizer, grpo.Args())
        assert ids.count(special["<s>"]) == 1 and ids[-1] != tokenizer.eos_token_id


def test_a_model_without_an_end_token_leaves_a_checkpoint_that_generates(copied, quick):
    folder, tokenizer = copied
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    own = {"model": folder, "steps": 1, "max_new_tokens": 4}
    result = grpo.main(grpo.Args(**quick | own))
    assert result["eval/clipped_ratio"] == 1
    saved = transformers.AutoModelForCausalLM.from_pretrained(last_checkpoint(result["folder"]))
    assert saved.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)


TEMPLATES = [(None, "resize_token_embeddings")]  # and a token added to the tokenizer alone
TEMPLATES += [("{{ messages[0]['content'][0]['text'] }}", "without tokens")]  # it wants parts
ALL_BUT_ONE = "{% if '🙂' not in messages[0]['content'] %}x{% endif %}"
TEMPLATES += [(ALL_BUT_ONE, "without tokens")]
TEMPLATES += [("{{ raise_exception('\n\nsystem first') }}", "fails: system first")]


@pytest.mark.parametrize("template,reason", TEMPLATES)
def test_a_prompt_that_cannot_be_read_is_one_line(
    template, reason, copied, quick, tmp_path, refused
):
    """The run stops before its first step, though only a question to train on has the 🙂."""
    folder, tokenizer = copied
    if template is None:
        tokenizer.add_tokens(["🙂"])
    else:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    questions = ["What is 1 + 🙂?", *(f"What is {i} + 1?" for i in range(20))]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"question": q, "answer": 1}) for q in questions))
    own = {"model": folder, "dataset": str(data), "max_new_tokens": 8, "prompt": "{question}"}
    args = grpo.Args(**quick | own)
    assert questions[0] in dict(grpo.load_data(args)[0])
    line = refused(grpo.main, args)
    assert line.startswith("error: --model") and reason in line
    assert not Path(quick["output_dir"]).exists()


LIMITS = [("gpt2", {}, math.inf, 58), ("qwen2", {"max_position_embeddings": 32}, 1e30, 26)]
LIMITS += [("llama", {}, 10, 4), ("llama", {}, 6, 0), ("llama", {}, 3, 0)]


@pytest.mark.parametrize("kind,shape,limit,room", LIMITS)
def test_a_prompt_that_leaves_no_room_is_one_line(kind, shape, limit, room, monkeypatch, refused):
    """Tokenizer or model may set the limit; the longest prompt has 6 tokens."""
    monkeypatch.setattr(Characters, "model_max_length", limit)
    problems = [("1+2", "3"), ("7+7+7", "21"), ("3+4", "7")]
    given, args = (random_model(kind, **shape), Characters()), grpo.Args(max_new_tokens=room + 1)
    line = refused(grpo.check_prompts, problems, *given, args)
    reason = f"the longest prompt leaves room for {room}"
    assert line == f"error: --max-new-tokens {room + 1}: {reason}"
    grpo.check_prompts(problems, *given, replace(args, max_new_tokens=room))


BAD = {"group_size": 1, "minibatches": 7, "seed": -1, "prompt": "{q}", "verifier": "exact"}
BAD |= {"dataset": "x.jsonl", "eval_dataset": "x.jsonl", "model": "/nowhere/at/all"}


@pytest.mark.parametrize("name,value", BAD.items())
def test_bad_flags(quick, refused, name, value):
    line = refused(grpo.main, grpo.Args(**quick | {name: value}))
    assert f"--{name.replace('_', '-')}" in line


def test_non_finite_loss_stops_with_the_step_and_keeps_the_model(quick, monkeypatch, capsys):
    real, calls = grpo.compute_advantages, []  # called by each evaluation, too

    def poisoned(rewards, args):
        calls.append(1)
        return real(rewards, args) + (float("nan") if len(calls) == 4 else 0.0)

    monkeypatch.setattr(grpo, "compute_advantages", poisoned)
    with pytest.raises(SystemExit, match="step 2: not finite.*--learning-rate"):
        grpo.main(grpo.Args(**quick | {"steps": 4, "eval_every": 1}))
    (folder,) = Path(quick["output_dir"]).iterdir()
    assert last_checkpoint(folder).name == "step-000001"
    assert all(tensor.isfinite().all() for tensor in weights(folder).values())


@pytest.mark.parametrize("name", quick_for("dapo_llm", "ppo_llm"))
def test_every_tensor_is_on_the_model_s_device(name):
    """On an emulated device, what CUDA would refuse raises as well."""
    done = run("tests/emulated_gpu.py", name)
    assert f"{name}: the same numbers on both devices" in done.stdout

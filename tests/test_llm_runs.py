"""Whole runs: learning, repeatability, the cache, real models and data, and a user's errors."""

import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from conftest import (
    LLM_SCRIPTS,
    ROOT,
    equal,
    last_checkpoint,
    scalars,
    script,
    spy,
    weights,
)
from launch import run

grpo = script("grpo_llm")
pytestmark = pytest.mark.usefixtures("tiny_model")


# ----------------------------------------------------------------------------------------- learning


@pytest.fixture(scope="session")
def learned(tmp_path_factory, tiny_model):
    """The default warm start and 30 of the default's 200 steps."""
    folder = str(tmp_path_factory.mktemp("runs"))
    return grpo.main(grpo.Args(steps=30, eval_every=15, eval_problems=128, output_dir=folder))


def test_learns(learned):
    """With the sign of the loss, of the advantage or of the ratio turned round, it falls from 0.2
    instead of rising."""
    assert learned["eval/pass@1_initial"] < 0.35
    assert learned["eval/pass@1"] > 0.8 and learned["eval/pass@1_greedy"] > 0.9
    assert min(learned["eval/pass@8"], learned["eval/pass@1_lenient"]) >= learned["eval/pass@1"]


@pytest.mark.parametrize(
    "name,steps,at_least",
    [
        *((name, 12, 0.25) for name in LLM_SCRIPTS if name != "grpo_llm"),
        *(pytest.param(name, 30, 0.45, marks=pytest.mark.slow) for name in LLM_SCRIPTS),
    ],
)
def test_each_script_learns(name, steps, at_least, tmp_path):
    """12 of the default's 200 steps (slow: 30), from the same cached model;
    a turned sign falls from 0.2 instead of rising. grpo_llm's quick test is test_learns."""
    module = script(name)
    result = module.main(module.Args(steps=steps, eval_problems=128, output_dir=str(tmp_path)))
    assert result["eval/pass@1_initial"] == pytest.approx(0.2, abs=0.06)
    assert result["eval/pass@1"] > at_least


def test_clip_is_live_and_logs_are_complete(learned):
    names = "reward reward_std frac_reward_zero_std completions/mean_length clip_ratio approx_kl"
    names += " completions/clipped_ratio learning_rate kl entropy grad_norm step_time num_tokens"
    names += " tokens_per_second loss eval/pass@1 eval/pass@1_greedy eval/pass@1_lenient"
    names += " eval/pass@8"
    logged = {name: scalars(learned["folder"], name) for name in names.split()}
    for name, values in logged.items():
        assert len(values) == (3 if name.startswith("eval") else 30), name
    assert 0 < sum(logged["clip_ratio"]) / 30 < 0.5
    assert (
        abs(logged["kl"][0]) < 1e-8 < 1e-3 < logged["kl"][-1]
    )  # at first, it is its own reference
    assert logged["approx_kl"][-1] > 0 and logged["learning_rate"][9] == pytest.approx(4e-4)
    assert min(logged["num_tokens"]) > 0 and max(logged["num_tokens"]) < 256 * 24, "of one step"


def test_saved_model_loads_and_solves(learned):
    model = transformers.AutoModelForCausalLM.from_pretrained(last_checkpoint(learned["folder"]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(last_checkpoint(learned["folder"]))
    inputs = tokenizer("3+8+5=", return_tensors="pt")
    output = model.generate(input_ids=inputs["input_ids"], do_sample=False, max_new_tokens=20)
    assert tokenizer.decode(output[0], skip_special_tokens=True) == "3+8+5=11,16#16"


# -------------------------------------------------------------------------- repeatability and cache


def test_same_seed_same_run_with_and_without_cache(quick, small_tiny):
    """Second run: the warm start comes from the cache. Third: another seed."""
    runs = [grpo.main(grpo.Args(**quick, seed=seed)) for seed in (1, 1, 2)]
    first, second, other = runs
    a, b, c = (weights(run["folder"]) for run in runs)
    assert equal(a, b) and not equal(a, c)
    for name in ("loss", "reward", "clip_ratio", "kl", "eval/pass@1"):
        assert scalars(first["folder"], name) == scalars(second["folder"], name)
    assert first["eval/pass@1_initial"] == other["eval/pass@1_initial"]


def test_each_step_and_each_seed_has_dice_of_its_own(quick, monkeypatch):
    """The same question at every step: with the same dice, the answers would be the same, too."""
    seen, real = [], grpo.rollout
    monkeypatch.setattr(grpo, "rollout", lambda *a: seen.append(torch.initial_seed()) or real(*a))
    for seed in (1, 2):
        grpo.main(grpo.Args(**quick | {"steps": 4, "eval_every": 100, "seed": seed}))
    training = [dice for dice in seen if dice]  # an evaluation's dice are those of seed 0
    assert len(training) == len(set(training)) == 8


@pytest.fixture
def small_tiny(monkeypatch, tmp_path):
    """A warm start of seconds, and a cache of its own for it: returns the cache."""
    real = grpo.tiny_model_folder

    def tiny_model_folder():
        return real(30)

    monkeypatch.setattr(grpo, "tiny_model_folder", tiny_model_folder)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/hub"


def test_corrupt_cache_is_named(small_tiny, refused):
    def load():
        return grpo.load_policy(grpo.Args(), torch.device("cpu"))

    load()
    (folder,) = small_tiny.iterdir()  # and nothing half-made beside it
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert str(folder) in refused(load)
    shutil.rmtree(folder)
    load()


def test_a_cache_that_cannot_be_written_is_not_the_output_folder(
    small_tiny, quick, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "file"))
    with pytest.raises((OSError, SystemExit)) as caught:
        grpo.main(grpo.Args(**quick))
    said = f"{caught.value} {capsys.readouterr().err}"
    assert str(tmp_path / "file") in said and "output-dir" not in said
    assert not Path(quick["output_dir"]).exists()


@pytest.mark.parametrize("part", ["tiny_model_folder", "make_sum", "versions"])
def test_cache_key_holds_what_shapes_the_weights(part, monkeypatch):
    """The source of both functions, and the versions of torch and transformers."""
    folder_of = grpo.tiny_model_folder
    monkeypatch.setattr(grpo, "save", lambda *args: None)
    before = folder_of(0)
    assert folder_of(0) == before
    parts = [(torch, "__version__"), (transformers, "__version__")]
    for module, name in parts if part == "versions" else [(grpo, part)]:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda: ("another",))
            assert folder_of(0) != before


# ---------------------------------------------------------------------------- reference and dropout


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


# ----------------------------------------------------------------------------- real models and data


def test_stop_ids_and_dropout(pretrained):
    args = grpo.Args(model=pretrained)
    model, tokenizer = grpo.load_policy(args, torch.device("cpu"))
    assert model.generation_config.eos_token_id == [0, 2]
    prompts = grpo.encode_prompts([("1+1", "2")], tokenizer, args)
    batch = grpo.generate(model, prompts, 2, 4, 1.0)
    a, b = (grpo.token_logprobs(model, batch, 1.0) for _ in range(2))
    assert torch.equal(a, b), "dropout is on"


def test_default_prompts(pretrained):
    """`3+8=` for sums; of a file the question, and with the strict verifier what it wants; in the
    chat template where there is one."""
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


def test_bos_comes_once(pretrained):
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    post = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.backend_tokenizer.post_processor = post
    for template in (None, "{{ bos_token }}" + tokenizer.chat_template):
        tokenizer.chat_template = template
        (ids,) = grpo.encode_prompts([("1 + 1", "2")], tokenizer, grpo.Args())
        assert ids.count(bos) == 1


# ---------------------------------------------------------------------------------------- bad input


BAD = {"group_size": [1], "minibatches": [7, 8], "update_epochs": [0], "steps": [-1]}
BAD |= {"learning_rate": [float("nan")], "temperature": [0.0], "clip_low": [-0.1], "seed": [-1]}
BAD |= {"beta": [float("inf")], "max_new_tokens": [-5], "dataset": ["x.jsonl"], "prompt": ["{q}"]}
BAD |= {"eval_dataset": ["x.jsonl"], "model": ["/nowhere/at/all"], "verifier": ["lenient"]}


@pytest.mark.parametrize("name", BAD)
def test_bad_flags(quick, refused, name):
    for value in BAD[name]:
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


def test_a_run_leaves_nothing_outside_its_folder(quick, tmp_path, monkeypatch):
    """With the default --output-dir: one folder of the run, in runs, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    before = {*ROOT.iterdir(), ROOT / "__pycache__"}
    grpo.main(grpo.Args(**quick | {"output_dir": "runs"}))
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert len([*tmp_path.glob("runs/*")]) == 1 and {*ROOT.iterdir()} <= before


def test_every_tensor_is_on_the_model_s_device():
    """On a second device, emulated: what CUDA would refuse ends here as well."""
    done = run("tests/emulated_gpu.py")
    for name in LLM_SCRIPTS:
        assert f"{name}: the same numbers on both devices" in done.stdout

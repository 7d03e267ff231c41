"""Whole runs: learning, repeatability, the cache, real models and data, and a user's errors."""

import shutil
from dataclasses import replace
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
    random_model,
    scalars,
    script,
    weights,
)
from launch import Launched, run

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
    assert logged["kl"][-1] > 1e-3 and abs(logged["kl"][0]) < 1e-8, (
        "at first, it is its own reference"
    )
    assert logged["approx_kl"][-1] > 0 and logged["learning_rate"][9] == pytest.approx(4e-4)
    assert logged["num_tokens"] == sorted(logged["num_tokens"])


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


def test_evaluation_takes_no_dice_from_training(quick):
    quick |= {"steps": 3}
    rare, often = (grpo.main(grpo.Args(**quick, eval_every=every)) for every in (3, 1))
    assert equal(weights(rare["folder"]), weights(often["folder"]))


@pytest.fixture
def small_tiny(monkeypatch, tmp_path):
    """A warm start of seconds, and a cache of its own for it: returns the cache."""
    real = grpo.make_tiny_model

    def make_tiny_model():
        return real(30)

    monkeypatch.setattr(grpo, "make_tiny_model", make_tiny_model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/torch/hub"


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises((OSError, SystemExit)) as caught:
        grpo.main(grpo.Args(**quick))
    said = f"{caught.value} {capsys.readouterr().err}"
    assert str(tmp_path / "file") in said and "output-dir" not in said
    assert not Path(quick["output_dir"]).exists()


def test_one_process_of_each_machine_makes_the_tiny_model(small_tiny, monkeypatch):
    """Whatever its rank among those of all machines."""
    saved = []
    monkeypatch.setattr(grpo, "save_model", lambda *args: saved.append(args[2]))
    monkeypatch.setattr(grpo, "RANK", 2)
    for local_rank, times in (("1", 0), ("0", 1)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert saved == [grpo.tiny_model_folder()] * times


@pytest.mark.parametrize("part", ["make_tiny_model", "demonstration", "make_sum", "versions"])
def test_cache_key_holds_what_shapes_the_weights(part, monkeypatch):
    """The source of each of the three functions, and the versions of torch and transformers."""
    monkeypatch.setattr(grpo, "save_model", lambda *args: None)
    monkeypatch.setattr(grpo, "make_tiny_model", lambda: ())
    before = grpo.tiny_model_folder()
    assert grpo.tiny_model_folder() == before
    parts = [(torch, "__version__"), (transformers, "__version__")]
    for module, name in parts if part == "versions" else [(grpo, part)]:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda: ("another",))
            assert grpo.tiny_model_folder() != before


# ---------------------------------------------------------------------------- reference and dropout


def test_reference_stays_and_is_not_loaded_without_kl(quick, monkeypatch):
    seen, loaded, real, load = [], [], grpo.batch_logprobs, grpo.load_policy

    def spy(reference, batch, args):
        seen.append({name: tensor.clone() for name, tensor in reference.state_dict().items()})
        return real(reference, batch, args)

    monkeypatch.setattr(grpo, "batch_logprobs", spy)
    monkeypatch.setattr(grpo, "load_policy", lambda *a: loaded.append(1) or load(*a))
    run = grpo.main(grpo.Args(**quick | {"steps": 3}))
    assert len(seen) == 3 and equal(seen[0], seen[2]) and len(loaded) == 2
    assert not equal(seen[0], weights(run["folder"]))
    grpo.main(grpo.Args(**quick | {"beta": 0.0, "output_dir": quick["output_dir"] + "2"}))
    assert len(seen) == 3 and len(loaded) == 3


# ----------------------------------------------------------------------------- real models and data


def test_tokenizer_of_another_model(pretrained, gsm_file, tmp_path, quick, refused):
    """Ids that the model has no embedding for:
    an index error within, or on CUDA a device-side assertion."""
    transformers.AutoTokenizer.from_pretrained(pretrained).save_pretrained(tmp_path / "mixed")
    random_model("llama", vocab=50).save_pretrained(tmp_path / "mixed")
    flags = {"model": str(tmp_path / "mixed"), "dataset": gsm_file}
    assert "--model" in refused(grpo.main, grpo.Args(**quick | flags))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_three_architectures(kind, pretrained, gsm_file, tmp_path, quick, monkeypatch):
    """A base model: no chat template, no pad token; GPT-2's positions are learned, its embeddings
    tied. Some models come with a generation config that loads, but that save_pretrained refuses."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.chat_template, tokenizer.pad_token = None, None
    tokenizer.save_pretrained(tmp_path)
    model = random_model(kind, vocab=len(tokenizer), stops=(tokenizer.eos_token_id,))
    model.save_pretrained(tmp_path)
    own = '{"do_sample": false, "temperature": 0.6, "top_p": 0.9}'
    (tmp_path / "generation_config.json").write_text(own)
    monkeypatch.setattr(grpo, "verify", lambda completion, answer: float(len(completion) % 2))
    quick |= {"model": str(tmp_path), "dataset": gsm_file, "prompt": "{question}"}
    args = grpo.Args(**quick | {"max_new_tokens": 6, "learning_rate": 1e-3})
    after, before = weights(grpo.main(args)["folder"]), model.state_dict()
    moved = [name for name in before if not torch.equal(after[name], before[name])]
    assert len(moved) > len(before) / 2


def test_stop_ids_and_dropout(pretrained):
    args = grpo.Args(model=pretrained)
    model, tokenizer = grpo.load_policy(args, torch.device("cpu"))
    assert (
        model.generation_config.eos_token_id == [0, 2] and model.generation_config.pad_token_id == 0
    )
    ids = grpo.encode_prompt("1+1", tokenizer, args)
    batch = grpo.generate(model, [ids], 2, 4, 1.0)
    a, b = (grpo.token_logprobs(model, batch, 1.0) for _ in range(2))
    assert torch.equal(a, b), "dropout is on"


def test_default_prompts(pretrained):
    """Words where there is a chat template, `3+8=` for sums where there is none; `####` is asked
    for with the strict verifier alone."""
    _, tokenizer = grpo.load_policy(grpo.Args(model=pretrained), torch.device("cpu"))

    def asked(**flags):
        ids = grpo.encode_prompt("3+8", tokenizer, grpo.Args(model=pretrained, **flags))
        text = tokenizer.decode(ids)
        question = text.removeprefix("<|im_start|>user\n")
        question = question.removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        assert (question != text) == bool(tokenizer.chat_template)
        return question

    assert asked().startswith("What is 3+8?") and asked().endswith("#### and the number.")
    reasons = asked(dataset="d.jsonl")
    assert reasons == "3+8\nReason step by step, then end with #### and the number."
    for verifier in ("flexible", "own.py"):
        assert asked(verifier=verifier) == "What is 3+8?"
        assert asked(verifier=verifier, dataset="d.jsonl") == "3+8"
    assert asked(prompt="Q: {question} {A}:") == "Q: 3+8 {A}:"
    assert asked(prompt="{question}") == "3+8"
    tokenizer.chat_template = None
    assert asked() == asked(verifier="flexible") == "3+8="
    assert asked(dataset="d.jsonl") == reasons
    assert asked(dataset="d.jsonl", verifier="flexible") == asked(prompt="{question}") == "3+8"


def test_bos_comes_once_and_missing_pad_is_mended(pretrained, tmp_path):
    shutil.copytree(pretrained, tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    post = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.backend_tokenizer.post_processor = post
    tokenizer.pad_token = None
    template, tokenizer.chat_template = tokenizer.chat_template, None
    args = grpo.Args(model="m")
    assert grpo.encode_prompt("1 + 1", tokenizer, args).count(tokenizer.bos_token_id) == 1
    tokenizer.chat_template = "{{ bos_token }}" + template
    assert grpo.encode_prompt("1 + 1", tokenizer, args).count(tokenizer.bos_token_id) == 1
    tokenizer.save_pretrained(tmp_path / "m")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "m")
    model, tokenizer = grpo.load_policy(
        replace(args, model=str(tmp_path / "m")), torch.device("cpu")
    )
    assert (
        tokenizer.pad_token_id is None
        and model.generation_config.pad_token_id in model.generation_config.eos_token_id
    )


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


def test_tokenizer_that_cannot_read_the_prompt(quick, refused, learned, gsm_file):
    for model in (str(last_checkpoint(learned["folder"])), "tiny"):
        line = refused(grpo.main, grpo.Args(**quick | {"model": model, "dataset": gsm_file}))
        assert f"--model {model} cannot read 'What is 990 + 1?" in line


def test_non_finite_loss_stops_with_the_step_and_keeps_the_model(quick, monkeypatch, capsys):
    real, calls = grpo.compute_advantages, []

    def poisoned(rewards, args):
        calls.append(1)
        return real(rewards, args) + (float("nan") if len(calls) == 2 else 0.0)

    monkeypatch.setattr(grpo, "compute_advantages", poisoned)
    with pytest.raises(SystemExit, match="step 2"):
        grpo.main(grpo.Args(**quick | {"steps": 4, "eval_every": 1}))
    (folder,) = Path(quick["output_dir"]).iterdir()
    assert last_checkpoint(folder).name == "step-000001"
    assert all(tensor.isfinite().all() for tensor in weights(folder).values())


def test_a_reward_that_is_not_finite_is_one_line(quick, tmp_path, refused):
    (tmp_path / "v.py").write_text("def verify(completion, answer):\n    return float('nan')\n")
    args = grpo.Args(**quick | {"steps": 0, "verifier": str(tmp_path / "v.py")})
    assert "--verifier" in refused(grpo.main, args)


@pytest.mark.parametrize("same_as", ["bos_token", "eos_token"])
def test_an_unknown_token_that_is_also_another(pretrained, same_as):
    """As OPT's and Granite's: in a prompt it is no sign of what cannot be read."""
    args = grpo.Args(model="m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.unk_token = "<|im_start|>"
    with pytest.raises(SystemExit):
        grpo.encode_prompt("1+1", tokenizer, args)
    setattr(tokenizer, same_as, "<|im_start|>")
    assert tokenizer.unk_token_id in grpo.encode_prompt("1+1", tokenizer, args)


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
    done = run("tests/second_device.py")
    for name in LLM_SCRIPTS:
        assert f"{name}: the same numbers on both devices" in done.stdout


def test_the_emulated_device_refuses_a_tensor_of_the_host():
    done = Launched("tests/second_device.py", "--mix")
    assert done.wait() == 1 and "tensors on two devices" in done.stderr

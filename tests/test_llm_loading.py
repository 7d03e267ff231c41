"""A model and its tokenizer, as the hub would give them: what is loaded, what a prompt becomes, and
what is refused in one line."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import tokenizers
import torch
import transformers
from conftest import Characters, batch_of, last_checkpoint, random_model, scalars, script

grpo = script("grpo_llm")
CPU = torch.device("cpu")


@pytest.fixture
def copied(pretrained, tmp_path):
    """A copy of the model's folder, to be changed, and its tokenizer."""
    folder = str(tmp_path / "model")
    shutil.copytree(pretrained, folder)
    return folder, transformers.AutoTokenizer.from_pretrained(folder)


def change_json(path, **change):
    path = Path(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


# ------------------------------------------------------------------------------------- The model


def test_stop_ids_dropout_and_what_a_verifier_sees(pretrained, monkeypatch):
    """Dropout is off. No verifier sees special tokens, such as the one that ends a completion."""
    args = grpo.Args(model=pretrained)
    model, tokenizer = grpo.load_policy(args, CPU)
    assert model.generation_config.eos_token_id == [0, 2]

    def generate(model, prompts, *_):
        return batch_of(model, prompts, [3, 1, 2, 4])

    monkeypatch.setattr(grpo, "generate", generate)
    batch, completions, _ = grpo.rollout(model, tokenizer, [("1+2", "3")], 4, 1.0, args)
    a, b = (grpo.token_logprobs(model, batch, 1.0) for _ in range(2))
    assert torch.equal(a, b)
    assert "<|" in tokenizer.decode(batch["completion_ids"][0])
    assert completions[1] == "" and not any("<|" in text for text in completions)


# What stands behind an assistant's text, and the tokens there that end a completion.
TURNS = {
    "ChatML": ("<|im_end|>\n", "<|im_end|>"),
    "Gemma's line break is an added token": ("<end_of_turn>\n", "<end_of_turn>"),
    "Phi's chat ends with eos": ("<|end|>\n<|endoftext|>", "<|end|>"),
    "blanks that are an added token": ("\n  <|im_end|>", "<|im_end|>"),
    "nothing": ("", None),
    "text alone": (" Next:", None),
}


@pytest.mark.parametrize("end,expected", TURNS.values(), ids=TURNS)
def test_the_token_that_ends_a_turn_stops_a_base_model_too(end, expected, copied):
    """A base model's files name <|endoftext|> alone; its chat template ends a turn otherwise. The
    system prompt of the template has such tokens, too."""
    folder, tokenizer = copied
    tokenizer.add_tokens(["\n", "  ", "<end_of_turn>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.eos_token = "<|endoftext|>"
    turn = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + END }}".replace("END", repr(end))
    system = "<|im_start|>system\nYou help!<end_of_turn>\n"
    tokenizer.chat_template = system + "{% for m in messages %}" + turn + "{% endfor %}"
    tokenizer.save_pretrained(folder)
    change_json(f"{folder}/generation_config.json", eos_token_id=0)
    model, _ = grpo.load_policy(grpo.Args(model=folder), CPU)
    ends = {0} if expected is None else {0, tokenizer.convert_tokens_to_ids(expected)}
    assert model.generation_config.eos_token_id == sorted(ends)


def checkpoint(model, short_run):
    """The folder that a step on this model leaves."""
    result = grpo.main(grpo.Args(**short_run | {"model": model, "steps": 1, "max_new_tokens": 4}))
    return last_checkpoint(result["folder"])


def test_a_checkpoint_stops_in_transformers_where_it_stopped_here(copied, short_run):
    """Each of its two stop ids ends a completion of transformers' generate. A hub's settings of
    sampling are gone: training never used them, and transformers refuses to save some."""
    folder, _ = copied
    settings = {"temperature": 0.0, "top_p": 0.9, "early_stopping": True, "do_sample": False}
    change_json(f"{folder}/generation_config.json", **settings, pad_token_id=3)
    path = checkpoint(folder, short_run)
    kept = json.loads((path / "generation_config.json").read_text())
    assert kept["eos_token_id"] == [0, 2] and kept["pad_token_id"] == 3
    assert not kept.keys() & settings.keys()
    saved = transformers.AutoModelForCausalLM.from_pretrained(path)
    for stop in ([0], [2]):
        options = {"max_new_tokens": 5, "prefix_allowed_tokens_fn": lambda *_, stop=stop: stop}
        assert saved.generate(torch.tensor([[5, 6]]), **options).tolist() == [[5, 6, *stop]]


def test_a_model_without_an_end_token_leaves_a_checkpoint_that_generates(copied, short_run):
    folder, tokenizer = copied
    tokenizer.eos_token = tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    Path(folder, "chat_template.jinja").unlink(missing_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    model.save_pretrained(folder)
    path = checkpoint(folder, short_run)
    assert scalars(path.parent, "eval/clipped_ratio") == [1, 1]
    saved = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert saved.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)


def test_missing_weights_are_refused(copied, refused):
    """transformers would draw at random what a file lacks."""
    folder, _ = copied
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weights = model.state_dict()
    del weights["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(folder, state_dict=weights)
    line = refused(grpo.load_policy, grpo.Args(model=folder), CPU)
    assert f"--model {folder}" in line and "model.layers.1.mlp.up_proj.weight" in line
    assert "--model /nowhere" in refused(grpo.load_policy, grpo.Args(model="/nowhere"), CPU)


def test_tensors_of_any_file_begin_alike_in_memory(copied, monkeypatch):
    """If not, the CPU rounds sums differently, and a run resumed from another file is not exact.
    And with mistral_common installed, its tokenizer is not taken, which has no chat template."""
    tokenizer = Mock(wraps=transformers.AutoTokenizer.from_pretrained)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", tokenizer)
    for model in (copied[0], "tiny"):
        model, _ = grpo.load_policy(grpo.Args(model=model), CPU)
        assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
        assert tokenizer.call_args.kwargs == {"mistral_format": False}


@pytest.mark.parametrize("tied", [True, False])
def test_in_bf16_weights_are_spread_inside_their_cells(copied, tied):
    """bf16 sees the model of the file; yet a step of a quarter of the gap to the next number moves
    what bf16 sees by a quarter on average. What no matrix product rounds stays, and so do zeros.
    Twice the same, as in the reference and in other processes."""
    folder, tokenizer = copied
    model = random_model("qwen2", len(tokenizer), tie_word_embeddings=tied)
    for parameter in model.parameters():
        parameter.data = (parameter.data + 0.01).bfloat16().float()
    matrix = model.model.layers[0].mlp.up_proj.weight
    matrix.data[0] = 0.0
    model.save_pretrained(folder)
    bf16 = grpo.Args(model=folder, dtype="bfloat16")
    args = bf16, bf16, replace(bf16, dtype="float32"), replace(bf16, resume=folder)
    models = [grpo.load_policy(each, CPU)[0] for each in args]
    spread, again, *same = (dict(each.named_parameters()) for each in models)
    for name, weight in model.named_parameters():
        assert torch.equal(spread[name].bfloat16(), weight.bfloat16()), name
        assert torch.equal(spread[name], again[name])
        assert all(torch.equal(each[name], weight) for each in same)
        rounded = "proj.weight" in name or name == "lm_head.weight"
        assert torch.equal(spread[name], weight) != rounded
    own = spread["model.layers.0.mlp.up_proj.weight"].detach()
    assert not own[0].any()
    gap = (matrix[1:].frexp()[1] - 8).float().exp2()
    step = gap.copysign(own[1:]) / 4  # away from 0: so a spread to one side alone is seen, too
    seen = (own[1:] + step).bfloat16().float() - matrix[1:]
    assert (seen / step).mean().item() == pytest.approx(1, abs=0.2)


# ------------------------------------------------------------------------------------ The prompts


def test_prompts(pretrained):
    """`3+8=` for sums; of a file the question, and for the built-in verifier its instruction."""
    assert grpo.Args().prompt == grpo.Args(verifier="own.py").prompt == "{question}="
    assert grpo.Args(dataset="d.jsonl", verifier="own.py").prompt == "{question}"
    reasons = "{question}\nReason step by step, then end with #### and the number."
    assert grpo.Args(dataset="d.jsonl").prompt == reasons
    _, tokenizer = grpo.load_policy(grpo.Args(model=pretrained), CPU)
    turns = "<|im_start|>user\nQ: 3+8 {A}:<|im_end|>\n<|im_start|>assistant\n"
    for template, expected in ((tokenizer.chat_template, turns), (None, "Q: 3+8 {A}:")):
        tokenizer.chat_template = template
        args = grpo.Args(prompt="Q: {question} {A}:")
        (ids,) = grpo.encode_prompts([("3+8", "11")], tokenizer, args)
        assert tokenizer.decode(ids) == expected


def test_bos_comes_once_and_no_end(pretrained):
    """A tokenizer may begin and end every text; the end may not stand before the completion, but
    for one that the template itself puts there."""
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
    tokenizer.chat_template = "{{ messages[0]['content'] }}<|im_end|>"
    (ids,) = grpo.encode_prompts([("1 + 1", "2")], tokenizer, grpo.Args())
    assert ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("template", ["Go!", "{{ messages[0]['content'][0]['text'] }}"])
def test_a_template_that_leaves_the_question_out_is_one_line(template, copied, gsm_file, refused):
    """The second one wants a message in parts."""
    folder, tokenizer = copied
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    own = {"model": folder, "dataset": gsm_file, "prompt": "{question}"}
    line = refused(grpo.main, grpo.Args(**own))
    assert line.startswith(f"error: --model {folder}") and "question" in line


LIMITS = [("gpt2", {}, math.inf, 58), ("qwen2", {"max_position_embeddings": 32}, 1e30, 26)]
LIMITS += [("llama", {}, 10, 4)]


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

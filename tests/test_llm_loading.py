"""A model and its tokenizer, as the hub would give them: what is loaded, what a prompt becomes, and
what is refused in one line."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from conftest import Characters, batch_of, last_checkpoint, random_model, script

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


def test_stop_ids_and_dropout(pretrained):
    args = grpo.Args(model=pretrained)
    model, tokenizer = grpo.load_policy(args, CPU)
    assert model.generation_config.eos_token_id == [0, 2]
    prompts = grpo.encode_prompts([("1+1", "2")], tokenizer, args)
    batch = grpo.generate(model, prompts, 2, 4, 1.0)
    a, b = (grpo.token_logprobs(model, batch, 1.0) for _ in range(2))
    assert torch.equal(a, b), "dropout is on"


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


@pytest.mark.parametrize("own", [{"do_sample": True}, {"do_sample": False}, {"min_p": 0.1}])
def test_a_hub_s_settings_of_sampling_are_not_saved_with_the_model(copied, short_run, own):
    """Training never used them, and transformers refuses to save some."""
    folder, _ = copied
    settings = {"temperature": 0.0, "top_p": 0.9, "early_stopping": True, "pad_token_id": 3}
    change_json(f"{folder}/generation_config.json", **settings, **own)
    result = grpo.main(grpo.Args(**short_run | {"model": folder, "steps": 1, "max_new_tokens": 4}))
    saved = json.loads((last_checkpoint(result["folder"]) / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [0, 2] and saved["pad_token_id"] == 3
    assert not saved.keys() & (settings.keys() | own.keys()) - {"pad_token_id"}


def test_a_checkpoint_stops_in_transformers_where_it_stopped_here(copied, short_run):
    """Each of its two stop ids ends a completion of transformers' generate."""
    folder, _ = copied
    result = grpo.main(grpo.Args(**short_run | {"model": folder, "steps": 1, "max_new_tokens": 4}))
    saved = transformers.AutoModelForCausalLM.from_pretrained(last_checkpoint(result["folder"]))
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
    own = {"model": folder, "steps": 1, "max_new_tokens": 4}
    result = grpo.main(grpo.Args(**short_run | own))
    assert result["eval/clipped_ratio"] == 1
    saved = transformers.AutoModelForCausalLM.from_pretrained(last_checkpoint(result["folder"]))
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


def test_mistrals_own_tokenizer_is_not_taken(copied, monkeypatch):
    """With mistral_common installed, its tokenizer would be, which has no chat template."""
    asked, real = {}, transformers.AutoTokenizer.from_pretrained

    def from_pretrained(source, **options):
        asked.update(options)
        return real(source)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    grpo.load_policy(grpo.Args(model=copied[0]), CPU)
    assert asked == {"mistral_format": False}


def test_a_verifier_sees_no_special_tokens(pretrained, monkeypatch):
    """Such as the one that ends a completion."""
    args = grpo.Args(model=pretrained)
    model, tokenizer = grpo.load_policy(args, CPU)

    def generate(model, prompts, *_):
        return batch_of(model, prompts, [3, 1, 2, 4])

    monkeypatch.setattr(grpo, "generate", generate)
    batch, completions, _ = grpo.rollout(model, tokenizer, [("1+2", "3")], 4, 1.0, args)
    assert "<|" in tokenizer.decode(batch["completion_ids"][0])
    assert completions[1] == "" and not any("<|" in text for text in completions)


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
    matrix.data[0], matrix.data[1] = 0.0, 0.1  # 0.1 is no bf16 number
    model.save_pretrained(folder)
    bf16 = grpo.Args(model=folder, dtype="bfloat16")
    args = bf16, bf16, replace(bf16, dtype="float32"), replace(bf16, resume=folder)
    models = [grpo.load_policy(each, CPU)[0] for each in args]
    spread, again, *same = (dict(each.named_parameters()) for each in models)
    moved = set()
    for name, weight in model.named_parameters():
        assert torch.equal(spread[name].bfloat16(), weight.bfloat16()), name
        assert torch.equal(spread[name], again[name])
        assert all(torch.equal(each[name], weight) for each in same)
        if not torch.equal(spread[name], weight):
            moved.add(name)
    in_layers = {name for name in spread if "proj.weight" in name}
    assert moved == in_layers | ({"lm_head.weight"} if not tied else set())
    own = spread["model.layers.0.mlp.up_proj.weight"].detach()
    assert not own[0].any()
    gap = (matrix[2:].frexp()[1] - 8).float().exp2()
    step = gap.copysign(own[2:]) / 4  # away from 0: so a spread to one side alone is seen, too
    seen = (own[2:] + step).bfloat16().float() - matrix[2:]
    assert (seen / step).mean().item() == pytest.approx(1, abs=0.2)
    assert (matrix[2:] + step).bfloat16().equal(matrix[2:].bfloat16()), "the step is too long"


# ------------------------------------------------------------------------------------ The prompts


def test_default_prompts(pretrained):
    """`3+8=` for sums; of a file the question, and for the built-in verifier its instruction."""
    _, tokenizer = grpo.load_policy(grpo.Args(model=pretrained), CPU)

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
        assert asked() == asked(verifier="own.py") == "3+8="
        assert asked(dataset="d.jsonl") == reasons
        assert asked(dataset="d.jsonl", verifier="own.py") == "3+8"
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


def test_a_template_may_end_a_prompt_with_an_end_token(pretrained):
    """Then it is the template's, and stays: it is the tokenizer's own end alone that goes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.chat_template = "{{ messages[0]['content'] }}<|im_end|>"
    (ids,) = grpo.encode_prompts([("1 + 1", "2")], tokenizer, grpo.Args())
    assert ids[-1] == tokenizer.eos_token_id


def test_a_prompt_is_printed_as_the_model_sees_it(pretrained, short_run, capsys):
    grpo.main(grpo.Args(**short_run | {"model": pretrained, "steps": 0, "max_new_tokens": 4}))
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a prompt ")]
    train, _ = grpo.load_data(grpo.Args(**short_run))
    text = f"<|im_start|>user\\n{train[0][0]}=<|im_end|>\\n<|im_start|>assistant\\n"
    assert found == [f"a prompt as the model sees it: '{text}'"]


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

"""A model and its tokenizer, as the hub would give them: what is loaded, what a prompt becomes, and
which prompt is too long."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from conftest import Characters, batch_of, calls_of, last_checkpoint, random_model, scalars, script

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


@pytest.mark.parametrize("special", [True, False])
def test_stop_ids_dropout_and_what_a_verifier_sees(special, copied, monkeypatch):
    """Dropout is off. No verifier sees special tokens, nor the token that ends a completion, which
    a tokenizer may hold for a word like any other."""
    folder, tokenizer = copied
    end = "<|im_end|>" if special else "<end>"
    tokenizer.add_tokens("<end>")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", end)
    tokenizer.save_pretrained(folder)
    args = grpo.Args(model=folder)
    model, tokenizer = grpo.load_policy(args, CPU)
    stop = tokenizer.convert_tokens_to_ids(end)
    assert model.generation_config.eos_token_id == sorted({0, 2, stop})
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = [stop]

    def generate(model, prompts, *_):
        return batch_of(model, prompts, [3, 1, 2, 4])

    monkeypatch.setattr(grpo, "generate", generate)
    batch, completions, _ = grpo.rollout(model, tokenizer, [("1+2", "3")], 4, 1.0, args)
    a, b = (grpo.token_logprobs(model, batch, 1.0) for _ in range(2))
    assert torch.equal(a, b)
    assert end in tokenizer.decode(batch["completion_ids"][0])
    cut_off = tokenizer.decode(batch["completion_ids"][3], skip_special_tokens=True)
    assert completions[1] == "" and completions[3] == cut_off != ""
    assert not any(end in text for text in completions)


# How a template writes a message behind its role, and the token that ends one, if any.
TURNS = {
    "ChatML": ("{{ text }}<|im_end|>\n", "<|im_end|>"),
    "Gemma's line break is an added token": ("{{ text }}<end_of_turn>\n", "<end_of_turn>"),
    "Phi's chat ends with eos": ("{{ text }}<|end|>\n<|endoftext|>", "<|end|>"),
    "blanks that are an added token": ("{{ text }}\n  <|im_end|>", "<|im_end|>"),
    "GLM's turn ends where the next begins": ("{{ text }}", "<|im_start|>"),
    "only before another": ("{{ text }}{% if not loop.last %}<|end|>{% endif %}", "<|end|>"),
    "text alone": ("{{ text }} Next:", None),
}


@pytest.mark.parametrize("turn,expected", TURNS.values(), ids=TURNS)
def test_the_token_that_ends_a_turn_stops_a_base_model_too(turn, expected, copied):
    """A base model's files name <|endoftext|> alone; its chat template ends a turn otherwise. The
    system prompt of the template has such tokens, too."""
    folder, tokenizer = copied
    tokenizer.add_tokens(["\n", "  ", "<end_of_turn>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.eos_token = "<|endoftext|>"
    turn = "<|im_start|>{{ m['role'] }}\n" + turn.replace("text", "m['content']")
    system = "<|im_start|>system\nYou help!<end_of_turn>\n"
    tokenizer.chat_template = system + "{% for m in messages %}" + turn + "{% endfor %}"
    tokenizer.save_pretrained(folder)
    change_json(f"{folder}/generation_config.json", eos_token_id=0)
    model, _ = grpo.load_policy(grpo.Args(model=folder), CPU)
    ends = {0} if expected is None else {0, tokenizer.convert_tokens_to_ids(expected)}
    assert model.generation_config.eos_token_id == sorted(ends)


@pytest.mark.parametrize("stops", [[0, 2], None])
def test_a_checkpoint_stops_in_transformers_where_it_stopped_here(stops, copied, short_run):
    """If anywhere. A hub's settings of sampling are gone: training never used them, and
    transformers refuses to save some."""
    folder, tokenizer = copied
    if stops is None:
        tokenizer.eos_token = tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
        Path(folder, "chat_template.jinja").unlink()
    settings = {"temperature": 0.0, "top_p": 0.9, "early_stopping": True, "do_sample": False}
    change_json(f"{folder}/generation_config.json", **settings, eos_token_id=stops)
    flags = {"model": folder, "steps": 1, "max_new_tokens": 4}
    path = last_checkpoint(grpo.main(grpo.Args(**short_run | flags))["folder"])
    kept = json.loads((path / "generation_config.json").read_text())
    assert kept.get("eos_token_id") == stops and not kept.keys() & settings.keys()
    saved = transformers.AutoModelForCausalLM.from_pretrained(path)
    for stop in stops or [5]:
        options = {"max_new_tokens": 3, "prefix_allowed_tokens_fn": lambda *_, stop=stop: [stop]}
        found = saved.generate(torch.tensor([[5, 6]]), **options).tolist()
        assert found == [[5, 6, stop] if stops else [5, 6, 5, 5, 5]]
    assert stops or scalars(path.parent, "eval/clipped_ratio") == [1, 1]


def test_the_reference_is_the_first_model(copied, short_run, monkeypatch):
    """Also where a file lacks weights, which transformers draws at random. It stays as it is; and
    without a KL, or for an evaluation alone, there is none."""
    folder, _ = copied
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weights = model.state_dict()
    del weights["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(folder, state_dict=weights)
    monkeypatch.setattr(grpo, "load_verifier", lambda _: lambda text, _: len(text))
    copies = calls_of(monkeypatch, grpo.copy, "deepcopy")
    own = short_run | {"model": folder, "learning_rate": 1e-2, "max_new_tokens": 4, "beta": 0.1}
    for change, references in (({}, 1), ({"beta": 0.0}, 0), ({"steps": 0}, 0)):
        copies.clear()
        result = grpo.main(grpo.Args(**own | change))
        assert sum(isinstance(made, torch.nn.Module) for _, made in copies) == references
        if references:
            first, second = scalars(result["folder"], "kl")
            assert first == 0 and second > 0


# ------------------------------------------------------------------------------------ The prompts


def test_prompts(pretrained, tmp_path):
    """`3+8=` for sums; of a file the question, and for the built-in verifier its instruction."""
    own = str(tmp_path)  # Args only looks whether it is there
    assert grpo.Args().prompt == grpo.Args(verifier=own).prompt == "{question}="
    assert grpo.Args(dataset=own, verifier=own).prompt == "{question}"
    reasons = "{question}\nReason step by step, then end with #### and the number."
    assert grpo.Args(dataset=own).prompt == reasons
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


LIMITS = [("gpt2", {}, 58), ("qwen2", {"max_position_embeddings": 32}, 26)]


@pytest.mark.parametrize("kind,shape,room", LIMITS)
def test_a_prompt_that_leaves_no_room_is_one_line(kind, shape, room, refused):
    """Rotary positions would go on without a word. The longest prompt has 6 tokens."""
    problems = [("1+2", "3"), ("7+7+7", "21"), ("3+4", "7")]
    given, args = (random_model(kind, **shape), Characters()), grpo.Args(max_new_tokens=room + 1)
    line = refused(grpo.rollout, *given, problems, 2, 1.0, args)
    assert line == f"--max-new-tokens {room + 1}: a prompt leaves room for {room} only"
    grpo.rollout(*given, problems, 2, 1.0, replace(args, max_new_tokens=room))


def test_a_token_that_the_model_does_not_know_is_an_error():
    """A tokenizer may have more tokens than the embedding."""
    with pytest.raises(IndexError, match="out of range"):
        grpo.rollout(random_model(vocab=3), Characters(), [("1", "1")], 2, 1.0, grpo.Args())

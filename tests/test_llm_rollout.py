"""The sampler: what it draws, where a completion ends, what it reads; log π of many decoders; the
prompts, and the rewards."""

from itertools import count
from unittest.mock import Mock

import pytest
import tokenizers
import torch
import transformers
from conftest import batch_of, calls_of, random_model, refused, script
from oracles import check_logprobs

grpo = script("grpo_llm")
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10, 2], [3]]
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
KINDS = {"llama": {}, "qwen3": {}, "gpt2": {}, "gemma3_text": WINDOW, "qwen3_5_text": LINEAR}
KINDS |= {"lfm2": {"layer_types": ["conv", "full_attention"]}}


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_single_rows(kind):
    """Decoders with different positions, attention, state and cache: sampler and token_logprobs
    agree with plain passes."""
    model = random_model(kind, vocab=23, stops=[1, 13, 14, 15], **KINDS[kind])
    args = grpo.Args(temperature=1.5, max_new_tokens=12)
    torch.manual_seed(1)
    batch = grpo.generate(model, PROMPTS, 4, args)
    assert len(batch["mask"].sum(1).unique()) > 3, "rows must leave at different times"
    check_logprobs(grpo, model, batch, args)


@torch.no_grad()
def test_samples_follow_the_models_distribution():
    """Chi-square over the first token of 20,000 samples: top-k, top-p or a wrong temperature fail
    it by miles."""
    model, n = random_model("llama", vocab=7), 20_000
    model.lm_head.weight /= model.lm_head.weight.norm()  # no token is so rare as to be missing
    torch.manual_seed(2)
    args = grpo.Args(max_new_tokens=1, temperature=0.5)
    counts = grpo.generate(model, [[3, 4, 5]], n, args)["completion_ids"][:, 0].bincount()
    expected = (model(torch.tensor([[3, 4, 5]])).logits[0, -1].double() / 0.5).softmax(-1) * n
    assert counts[0] > 0, "the pad token is a token like any other"
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 30.1  # 6 degrees of freedom: passed with probability 1 − 4e-5


@pytest.mark.parametrize("stops", [(1, 5, 7), (0, 6)])
def test_mask_ends_with_the_first_of_several_stops(stops):
    """The padding, 0, may be a stop token, too."""
    model = random_model("llama", stops=stops)
    model.lm_head.weight.data /= model.lm_head.weight.norm()  # no stop is too rare to be drawn
    batch, last = grpo.generate(model, PROMPTS, 40, grpo.Args(max_new_tokens=12)), set()
    columns = [batch[key].tolist() for key in ("completion_ids", "mask", "ended", "old_logprobs")]
    for ids, mask, ended, logprobs in zip(*columns, strict=True):
        ends = [t for t, token in enumerate(ids) if token in stops]
        length = ends[0] + 1 if ends else 12
        assert mask == [1.0] * length + [0.0] * (len(ids) - length)
        assert ended == bool(ends) and not any(ids[length:]) and not any(logprobs[length:])
        last.add(ids[length - 1])
    assert set(stops) < last, "each stop token must have ended something, and some were cut off"


def test_a_forward_pass_reads_no_more_than_it_must(monkeypatch):
    """The sampler reads each prompt once, and finished rows leave. There are no logits of a prompt,
    which would take as much memory as all else: a vocabulary has 150,000 tokens."""
    model = random_model("llama")
    model.lm_head.weight.data /= model.lm_head.weight.norm()  # so that some are cut off, some not
    calls, args = calls_of(monkeypatch, model, "forward"), grpo.Args(max_new_tokens=12)
    batch = grpo.generate(model, PROMPTS, 8, args)
    grpo.token_logprobs(model, batch, args)
    prompts, *writing, loss = [tuple(output.logits.shape[:2]) for _, output in calls]
    assert prompts == (3, 1) and loss == (24, batch["mask"].shape[1])
    running = batch["mask"].sum(0).int().tolist()[1:]
    assert writing == [(rows, 1) for rows in running] and running[0] > running[-1]


def test_bf16_computes_in_bf16_and_keeps_all_else_in_float32():
    """Sampler and loss agree up to its rounding; log-softmax, gradients and weights are float32."""
    model, args = random_model("qwen3"), grpo.Args(bf16=True, max_new_tokens=12)
    batch = grpo.generate(model, PROMPTS, 8, args)
    logprobs = grpo.token_logprobs(model, batch, args)
    logprobs.sum().backward()
    exact = grpo.token_logprobs(model, batch, grpo.Args())
    assert 1e-4 < (logprobs - exact).abs().max() < 0.5
    assert (logprobs - batch["old_logprobs"]).abs().mean() < 0.05
    assert (logprobs.bfloat16() != logprobs).any()
    assert {tensor.dtype for p in model.parameters() for tensor in (p, p.grad)} == {torch.float32}


def test_rewards_are_those_of_their_completions():
    """Question by question, each G times; text by text, and rewards of any size. The answer reaches
    the verifier as it is, here a list. No stop token is in a text."""
    args = grpo.Args()
    (model, tokenizer), verify = grpo.load_model(args), Mock(side_effect=count(1))
    problems = [(f"{i}+{i}=", [i]) for i in range(5)]
    batch, rewards, samples = grpo.rollout(model, tokenizer, verify, problems, 3, args)
    scored = [(sample["completion"], [i // 3]) for i, sample in enumerate(samples)]
    assert [call.args for call in verify.call_args_list] == scored and len(
        set(map(str, scored))
    ) > 5
    assert rewards.tolist() == torch.arange(1.0, 16).view(5, 3).tolist()
    for i, (sample, mask) in enumerate(zip(samples, batch["mask"], strict=True)):
        text = tokenizer.decode(batch["completion_ids"][i][mask > 0])
        assert text == sample["completion"] + "<eos>" * batch["ended"][i]
        prompt = tokenizer.decode(batch["prompt_ids"][i][batch["prompt_mask"][i] > 0])
        assert (
            (prompt, sample["reward"]) == (problems[i // 3][0], i + 1) == (sample["prompt"], i + 1)
        )


def asked(monkeypatch, tokenizer, *prompts):
    """What the model reads of these prompts; and what the verifier reads of a completion that
    begins with <|im_start|><|endoftext|>."""
    model, args = random_model("llama", len(tokenizer)), grpo.Args(max_new_tokens=4)

    def generate(model, prompts, num_samples, args):
        batch = batch_of(model, prompts, [4] * len(prompts))
        batch["completion_ids"][:] = torch.tensor([1, 0, 70, 71])
        return batch

    monkeypatch.setattr(grpo, "generate", generate)
    problems = [(prompt, "") for prompt in prompts]
    batch, _, samples = grpo.rollout(model, tokenizer, lambda *_: 0, problems, 1, args)
    assert {sample["completion"] for sample in samples} == {tokenizer.decode([70, 71])}
    rows = zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    return [tokenizer.decode(ids[mask > 0]) for ids, mask in rows]


def test_prompts_are_texts_or_conversations(monkeypatch, pretrained):
    """A text is a user's turn. A model that could think does not."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.chat_template += "{% if enable_thinking is false %}<think></think>{% endif %}"
    turns = [("system", "Add."), ("user", "1+1"), ("assistant", "2"), ("user", "3+8")]
    chat = [{"role": role, "content": text} for role, text in turns]
    short, long = asked(monkeypatch, tokenizer, "3+8", chat)
    end = "<|im_start|>assistant\n<think></think>"
    assert short == f"<|im_start|>user\n3+8<|im_end|>\n{end}"
    assert long == "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + end


def test_bos_comes_once_and_no_end(monkeypatch, pretrained):
    """A tokenizer may begin and end every text; no eos may stand before the completion, unless the
    chat template puts it there."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "<|im_end|>")]
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=special
    )
    assert tokenizer("1")["input_ids"][-1] == tokenizer.eos_token_id
    for template, text in [
        ("{{ bos_token }}{{ messages[0]['content'] }}<|im_end|>", "<s>3+8 {A}:<|im_end|>"),
        (None, "<s>3+8 {A}:"),
    ]:
        tokenizer.chat_template = template
        assert asked(monkeypatch, tokenizer, "3+8 {A}:") == [text]


@pytest.mark.parametrize("name", ["max_position_embeddings", "original_max_position_embeddings"])
def test_prompts_beyond_the_models_longest_are_refused(name):
    """Frequencies that change there (longrope) would change log π of the batch's other rows."""
    args = grpo.Args(max_new_tokens=4)
    model, tokenizer = grpo.load_model(args)
    setattr(model.config, name, 9)
    inputs = lambda prompt: (model, tokenizer, lambda *_: 0, [(prompt, ""), ("1", "")], 1, args)
    grpo.rollout(*inputs("1+2+3"))
    line = refused(grpo.rollout, *inputs("1+2+3="))
    assert "--max-new-tokens" in line and "10" in line

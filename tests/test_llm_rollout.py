"""The sampler: what it draws, where a completion ends, what it reads; log π of many decoders; the
prompts, and the rewards."""

from itertools import count

import pytest
import tokenizers
import torch
import transformers
from conftest import calls_of, random_model, refused, script
from oracles import check_logprobs

grpo = script("grpo_llm")
KEYS = "completion_ids", "mask", "ended"
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10, 2], [3]]
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
KINDS = {"llama": {}, "qwen3": {}, "gpt2": {}, "gemma3_text": WINDOW, "qwen3_5_text": LINEAR}


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_single_rows(kind):
    """Decoders with different positions, attention, state and cache: sampler and token_logprobs
    agree with plain passes. A completion ends with its first stop token, which may be the padding,
    0, or is cut off."""
    stops = [0, 13, 14, 15]
    model = random_model(kind, vocab=23, stops=stops, **KINDS[kind])
    args = grpo.Args(temperature=1.5, max_new_tokens=12)
    torch.manual_seed(1)
    batch = grpo.generate(model, PROMPTS, 8, args)
    check_logprobs(grpo, model, batch, args)
    for ids, mask, ended in zip(*(batch[key] for key in KEYS), strict=True):
        *before, last = ids[mask > 0].tolist()
        assert (
            not {*stops} & {*before} and ended == (last in stops) and (ended or len(before) == 11)
        )
    assert len(batch["mask"].sum(1).unique()) > 3, "rows must leave at different times"


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
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 30.1  # 6 degrees of freedom: passed with probability 1 − 4e-5


def test_a_forward_pass_reads_no_more_than_it_must(monkeypatch):
    """The sampler reads each prompt once, and finished rows leave. There are no logits of a prompt,
    which would take as much memory as all else: a vocabulary has 150,000 tokens."""
    model, args = random_model("llama"), grpo.Args(max_new_tokens=12)
    model.lm_head.weight.data /= model.lm_head.weight.norm()  # so that some are cut off, some not
    calls = calls_of(monkeypatch, model, "forward")
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
    args, scored, numbers = grpo.Args(), [], count(1)
    model, tokenizer = grpo.load_model(args)

    def verify(*completion_and_answer):
        scored.append(completion_and_answer)
        return next(numbers)

    problems = [(f"{i}+{i}=", [i]) for i in range(5)]
    batch, rewards, samples = grpo.rollout(model, tokenizer, verify, problems, 3, args)
    assert rewards.tolist() == torch.arange(1.0, 16).view(5, 3).tolist()
    for i, (sample, mask) in enumerate(zip(samples, batch["mask"], strict=True)):
        text = tokenizer.decode(batch["completion_ids"][i][mask > 0]).removesuffix("<eos>")
        assert scored[i] == (text, [i // 3]) and text == sample["completion"]
        last = batch["completion_ids"][i][mask > 0][-1]  # trained on, also if it is the stop token
        assert batch["ended"][i] == (last == tokenizer.eos_token_id)
        prompt = tokenizer.decode(batch["prompt_ids"][i][batch["prompt_mask"][i] > 0])
        assert prompt == problems[i // 3][0] == sample["prompt"] and sample["reward"] == i + 1


def test_what_the_model_reads_and_the_verifier_does_not(pretrained):
    """A prompt is a user's turn, or a conversation, and a model that could think does not; without
    a chat template it is a text. bos comes once, and no eos stands before the completion, although
    this tokenizer puts both around every text. No verifier reads special tokens or the stop token.
    What is kept of a prompt is what the model reads."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "<|im_end|>")]
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=special
    )
    model, args = random_model("llama", len(tokenizer), stops=[70]), grpo.Args(max_new_tokens=9)
    model.lm_head.weight.data *= 0  # so that each of the 260 tokens is drawn

    def read(*prompts):
        problems, texts = [(prompt, "") for prompt in prompts], []
        verify = lambda text, _: texts.append(text) or 0  # noqa: E731
        batch, _, samples = grpo.rollout(model, tokenizer, verify, problems, 999, args)
        assert {0, 1, 2, 70} <= {*batch["completion_ids"].flatten().tolist()}
        assert not any(
            token in text for token in ("<|im", tokenizer.decode([70])) for text in texts
        )
        rows = zip(batch["prompt_ids"][::999], batch["prompt_mask"][::999], strict=True)
        prompts = [tokenizer.decode(ids[mask > 0]) for ids, mask in rows]
        assert [sample["prompt"] for sample in samples[::999]] == prompts
        return prompts

    turns = [("system", "Add."), ("user", "1+1"), ("assistant", "2"), ("user", "3+8")]
    chat = [{"role": role, "content": text} for role, text in turns]
    end = "<|im_start|>assistant\n<think></think>"
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    tokenizer.chat_template += "{% if enable_thinking is false %}<think></think>{% endif %}"
    text = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    short = f"<s><|im_start|>user\n3+8<|im_end|>\n{end}"
    assert read("3+8", chat) == [short, f"<s>{text}{end}"]
    tokenizer.chat_template = None
    assert read("3+8 {A}:") == ["<s>3+8 {A}:"]
    assert "--model" in refused(read, chat)


@pytest.mark.parametrize("name", ["max_position_embeddings", "original_max_position_embeddings"])
def test_prompts_beyond_the_models_longest_are_refused(name):
    """Frequencies that change there (longrope) would change log π of the batch's other rows."""
    args = grpo.Args(max_new_tokens=4)
    model, tokenizer = grpo.load_model(args)
    setattr(model.config, name, 9)
    inputs = model, tokenizer, lambda *_: 0
    grpo.rollout(*inputs, [("1+2+3", ""), ("1", "")], 1, args)
    line = refused(grpo.rollout, *inputs, [("1+2+3=", ""), ("1", "")], 1, args)
    assert "--max-new-tokens" in line and "10" in line

"""check_policy: before the first step, sampler and training pass against a plain pass."""

import pytest
import torch
from conftest import LLM_SCRIPTS, Characters, random_model, script

grpo = script("grpo_llm")
pytestmark = pytest.mark.usefixtures("tiny_model")
HOST = torch.device("cpu")


def test_it_changes_neither_dice_nor_model():
    args = grpo.Args(dtype="bfloat16")
    model, tokenizer = grpo.load_policy(args, HOST)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = model.in_bf16, model.generation_config.to_dict()
    torch.manual_seed(5)
    dice = torch.get_rng_state()
    grpo.check_policy(model, tokenizer, [("1+2", "3"), ("1+2+3+4", "10")], args)
    assert torch.equal(torch.get_rng_state(), dice)
    assert own == (model.in_bf16, model.generation_config.to_dict()) and model.in_bf16
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", LLM_SCRIPTS)
@pytest.mark.parametrize("wrong", ["sampler", "training pass", "both"])
def test_a_wrong_cache_is_one_line(name, wrong, refused, monkeypatch, quick):
    """Positions counted from the padding, in one pass alone or in both alike, as a model would
    that keeps its own count."""
    module = script(name)
    model, tokenizer = module.load_policy(module.Args(), HOST)
    real, state = module.forward, {"training": False}

    def forward(model, ids, mask, cache, logits_to_keep=0):
        if wrong == "both" or state["training"] == (wrong == "training pass"):
            past = mask.shape[1] - ids.shape[1]
            positions = torch.arange(past, mask.shape[1]).expand(ids.shape)
            options = {"past_key_values": cache, "logits_to_keep": logits_to_keep}
            ones = torch.ones_like(mask)
            return model(ids, attention_mask=ones, position_ids=positions, **options).logits
        return real(model, ids, mask, cache, logits_to_keep)

    def token_logprobs(*args, of=module.token_logprobs):
        state["training"] = True
        return of(*args)

    monkeypatch.setattr(module, "forward", forward)
    monkeypatch.setattr(module, "token_logprobs", token_logprobs)
    line = refused(module.main, module.Args(**quick))
    assert line.startswith("error: --model tiny: ") and "cache" in line


def test_a_model_that_fails_is_one_line(refused, monkeypatch, quick):
    """Whatever it raises, whether it samples or trains."""

    def fail(*_):
        raise NotImplementedError("no cache\nof this kind")

    for part in ("read_prompts", "token_logprobs"):
        with monkeypatch.context() as patched:
            patched.setattr(grpo, part, fail)
            line = refused(grpo.main, grpo.Args(**quick))
        assert line.startswith("error: --model tiny: ") and "NotImplementedError" in line


def test_not_a_number_is_not_exact(refused):
    model, tokenizer = grpo.load_policy(grpo.Args(), HOST)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    line = refused(grpo.check_policy, model, tokenizer, [("1+2", "3")], grpo.Args())
    assert "--model tiny" in line


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_right_models_pass(kind, pretrained):
    _, tokenizer = grpo.load_policy(grpo.Args(model=pretrained), HOST)
    model = random_model(kind, vocab=len(tokenizer))
    model.in_bf16 = False
    args = grpo.Args(prompt="{question}", max_new_tokens=4)
    tokenizer.chat_template = None
    grpo.check_policy(model, tokenizer, [("What is 12 + 34?", "46")], args)


def test_a_short_answer_after_a_long_prompt_has_room():
    """Learned positions: the check must not write beyond what the run would."""
    model = random_model("gpt2")  # of 64 positions
    model.in_bf16 = False
    args = grpo.Args(max_new_tokens=2, prompt="{question}")
    grpo.check_policy(model, Characters(), [("1" * 62, "1")], args)

"""check_exact: before anything else, sampler and token_logprobs against a plain forward pass."""

import pytest
import torch
from conftest import quick_for, random_model, script

grpo = script("grpo_llm")


@pytest.mark.parametrize("name", quick_for("grpo_llm"))
@pytest.mark.parametrize("wrong", ["sampler", "token_logprobs", "both"])
def test_a_wrong_cache_is_one_line(name, wrong, refused, monkeypatch, quick):
    """Positions are counted from the padding, in one of the two or in both."""
    module = script(name)
    real, state = module.forward, {"training": False}

    def forward(model, ids, mask, cache, **options):
        if wrong == "both" or state["training"] == (wrong == "token_logprobs"):
            past = mask.shape[1] - ids.shape[1]
            options["position_ids"] = torch.arange(past, mask.shape[1]).expand(ids.shape)
            options |= {"past_key_values": cache, "attention_mask": torch.ones_like(mask)}
            return model(ids, **options).logits
        return real(model, ids, mask, cache, **options)

    def token_logprobs(*args, of=module.token_logprobs):
        state["training"] = True
        return of(*args)

    monkeypatch.setattr(module, "forward", forward)
    monkeypatch.setattr(module, "token_logprobs", token_logprobs)
    line = refused(module.main, module.Args(**quick))
    assert line.startswith("error: --model ") and "cache is not exact" in line


def test_not_a_number_is_not_exact(refused):
    model = random_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    assert "--model it" in refused(grpo.check_exact, model, "it")

"""Decoders of transformers at toy size, with different positions, attention, state and cache: what
the sampler wrote down, what token_logprobs computes, and the gradient, against single rows without
padding or cache."""

import pytest
import torch
import transformers
from conftest import script
from oracles import check_logprobs

grpo = script("grpo_llm")
V = 23  # tokens
SHAPE = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SHAPE |= {"max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 1}
SHAPE |= {"pad_token_id": 0}
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
KINDS = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": WINDOW,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "qwen3_5_text": HYBRID | LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10, 11], [12]]


def toy_decoder(kind: str):
    """A random model of this kind, of peaked distributions, so that a wrong position or a lost
    token cannot hide."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SHAPE | KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.7 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = [1, 13, 14, 15]
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_single_rows(kind):
    """Sampler and token_logprobs agree with plain passes."""
    model = toy_decoder(kind)
    torch.manual_seed(1)
    batch = grpo.generate(model, PROMPTS, 3, 12, 1.5)
    check_logprobs(grpo, model, batch, 1.5)

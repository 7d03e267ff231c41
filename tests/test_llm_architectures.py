"""Every decoder of transformers at toy size: what the sampler wrote down, what the training pass
finds, and the gradient, against single rows without padding, cache or shared prompt."""

import pytest
import torch
import transformers
from conftest import script

grpo = script("grpo_llm")
V = 23  # tokens
SHAPE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
MLA |= {"v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4}
MLA |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
MAMBA |= {"mamba_d_ssm": 64, "mamba_expand": 2, "mamba_chunk_size": 8}
COMMON = {  # the quick tests
    "llama": {},
    "qwen3": {},
    "gemma3_text": WINDOW,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "qwen3_5_text": HYBRID | LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
OTHERS = {  # with --slow
    "qwen2": {},
    "mistral": {"sliding_window": 6},
    "gemma": {},
    "gemma2": WINDOW,
    "gemma4_text": WINDOW | {"hidden_size_per_layer_input": 0, "global_head_dim": 8},
    "gpt_neox": {},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "falcon": {"ffn_hidden_size": 48},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    "phi": {},
    "phi3": {},
    "stablelm": {},
    "starcoder2": {},
    "cohere": {},
    "cohere2": WINDOW,
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "granite": {},
    "glm4": {},
    "smollm3": {},
    "exaone4": WINDOW,
    "ernie4_5": {},
    "nemotron": {},
    "helium": {},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "granitemoe": EXPERTS,
    "gpt_oss": EXPERTS | WINDOW,
    "deepseek_v3": MLA | EXPERTS,
    "qwen3_next": HYBRID | LINEAR | EXPERTS,
    "falcon_h1": MAMBA,
    "granitemoehybrid": MAMBA | EXPERTS | {"layer_types": ["mamba", "attention"]},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "nemotron_h": {"hybrid_override_pattern": "M*"}
    | {"mamba_num_heads": 8, "mamba_head_dim": 8, "time_step_min": 1e-6},
    "olmo_hybrid": HYBRID | LINEAR,
}
REFUSED = {
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "minimax": EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {},
    "gemma3n_text": {},
}
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10, 11], [12]]
slow = pytest.mark.slow


def toy(kind: str):
    """A random model of this kind, of peaked distributions, so that a wrong position or a lost
    token cannot hide."""
    torch.manual_seed(0)
    kwargs = SHAPE | (COMMON | OTHERS | REFUSED)[kind]
    if kind == "falcon":  # there it is a property
        del kwargs["head_dim"]
    config = transformers.AutoConfig.for_model(kind, **kwargs)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.7 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = [1, 13, 14, 15]
    model.generation_config.pad_token_id = 0
    return model


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", [*COMMON, *[pytest.param(k, marks=slow) for k in OTHERS]])
def test_values_and_gradients_are_those_of_single_rows(kind):
    model = toy(kind)
    torch.manual_seed(1)
    batch = grpo.generate(model, PROMPTS, 3, 12, 1.0)
    assert batch["mask"].sum(1).unique().numel() > 1
    weights = torch.randn(batch["mask"].shape) * batch["mask"]
    with grpo.writing_states_allowed(model):
        trained = grpo.token_logprobs(model, batch, 1.0)
        (trained * weights).sum().backward()
    shared = gradient(model)
    model.zero_grad()
    for i in range(9):
        completion = batch["completion_ids"][i][batch["mask"][i] > 0].tolist()
        prompt, n = PROMPTS[i // 3], len(completion)
        logits = model(torch.tensor([prompt + completion]), use_cache=False).logits
        logprobs = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        alone = logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0]
        for found in (batch["old_logprobs"], trained):
            torch.testing.assert_close(found[i, :n], alone, rtol=0, atol=2e-5)
        (alone * weights[i, :n]).sum().backward()
    alone = gradient(model)
    assert (shared - alone).abs().max() < 1e-4 * alone.abs().max()

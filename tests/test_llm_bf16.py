"""--dtype bfloat16, run on the CPU: what is in bf16 and what is not. test_llm_passes.py tests log
π_old, and emulated_gpu.py what CUDA would refuse."""

import pytest
import torch
from conftest import script
from test_llm_passes import toy

grpo = script("grpo_llm")
PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10]]


@pytest.mark.parametrize("in_bf16", [False, True])
def test_sampler_and_training_pass_multiply_in_it(in_bf16):
    """Every layer does, or a GPU would take twice the time."""
    (model, _), seen = toy(in_bf16=in_bf16), []
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    batch = grpo.generate(model, PROMPTS, 2, 4, 1.0)
    grpo.token_logprobs(model, batch, 1.0)
    assert set(seen) == {torch.bfloat16 if in_bf16 else torch.float32}


def test_all_else_stays_in_float32():
    model, _ = toy(in_bf16=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = grpo.generate(model, PROMPTS, 8, 6, 1.0)
    logprobs = grpo.token_logprobs(model, batch, 1.0)
    torch.testing.assert_close(logprobs.exp().bfloat16().float(), logprobs.exp(), rtol=0.01, atol=0)
    assert (logprobs.bfloat16().float() != logprobs).any(), "float32 in type, yet rounded to bf16"
    tensors = [logprobs, batch["old_logprobs"], batch["mask"]]
    batch["advantages"] = torch.ones(24)
    grpo.train_minibatch(model, optimizer, batch, grpo.Args(beta=0.0))
    tensors += [tensor for p in model.parameters() for tensor in (p, p.grad)]
    tensors += [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


@pytest.mark.parametrize(
    "dtype,device,expected",
    [
        ("auto", "cpu", False),
        ("float32", "cpu", False),
        ("bfloat16", "cpu", True),
        ("auto", "cuda", True),
        ("auto", "cuda, of an old kind", False),
        ("float32", "cuda", False),
    ],
)
def test_what_dtype_means(monkeypatch, pretrained, dtype, device, expected):
    """Weights are loaded in float32 in any case. Old cards emulate bf16, slowly."""
    device, *old = device.split(",")

    def is_bf16_supported(including_emulation=True):
        return including_emulation or not old

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_: self)  # there is no CUDA
    args = grpo.Args(model=pretrained, dtype=dtype)
    model, _ = grpo.load_policy(args, torch.device(device))
    assert model.in_bf16 is expected
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training

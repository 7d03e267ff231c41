"""--dtype bfloat16, run on the CPU: what is in bf16 and what is not, and that log-probs which are
compared come from one kind of forward pass. (What only CUDA would refuse, emulated_gpu.py
emulates.)"""

import pytest
import torch
from conftest import LLM_SCRIPTS, script, spy
from test_llm_passes import take_step, toy, verify_some

grpo = script("grpo_llm")
PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10]]
CLIPPED = [name for name in LLM_SCRIPTS if hasattr(script(name).Args, "clip_high")]
GAP = "sampling/sampling_logp_difference/mean"


def sgd(model, rate=0.0):
    return torch.optim.SGD(model.parameters(), lr=rate)


# ------------------------------------------------------------------------------ what is in bfloat16


@pytest.mark.parametrize("in_bf16", [False, True])
def test_sampler_and_training_pass_multiply_in_it(in_bf16):
    """Every layer of the model, in both; without, a GPU would take twice the time and more."""
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


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_small_updates_reach_the_weights(monkeypatch, name):
    """A step of 1e-6 is lost in weights of bf16: their spacing at 0.4 is 2e-3."""
    model, reference = toy(name, in_bf16=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    take_step(name, monkeypatch, verify_some, model, reference, optimizer)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (after != before).float().mean() > 0.8 and (after - before).abs().max() < 1e-5


# ------------------------------------------------------------------------ π_old, π and π_ref in one


def off_by(module, monkeypatch, nats):
    """A sampler that rounds otherwise than token_logprobs, as any but a toy's does."""
    real = module.generate

    def generate(*args):
        batch = real(*args)
        return batch | {"old_logprobs": batch["old_logprobs"] - nats * batch["mask"]}

    monkeypatch.setattr(module, "generate", generate)


def test_rloos_kl_is_exactly_zero_before_the_first_step(monkeypatch):
    """Else rounding enters each reward: its advantages would be noise where rewards are equal."""
    rloo, (model, reference) = script("rloo_llm"), toy(in_bf16=True)
    off_by(rloo, monkeypatch, 0.01)
    shaped = spy(monkeypatch, rloo, "compute_advantages")
    metrics = take_step("rloo_llm", monkeypatch, verify_some, model, reference, sgd(model))
    rewards = shaped[0][0][0]
    assert metrics["kl"] == 0 and 0 < rewards.mean() < 1
    assert (rewards == rewards.round()).all(), "something was added to rewards of 0 and 1"


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_pi_old_is_recomputed_once_for_the_whole_rollout(monkeypatch, name):
    """Before the logged kl or RLOO's reward use it, and for all epochs: the second regroups the
    rows. In float32 the sampler's own will do."""
    module, (model, reference) = script(name), toy(name, in_bf16=True)
    off_by(module, monkeypatch, 0.01)
    passes = spy(monkeypatch, module, "batch_logprobs")
    given = spy(monkeypatch, module, "surrogate")
    minibatches = spy(monkeypatch, module, "train_minibatch")
    flags = {"update_epochs": 3, "minibatches": 3}
    metrics = take_step(name, monkeypatch, verify_some, model, reference, sgd(model), **flags)
    assert [call[0][0] for call in passes] == [model, reference]
    (_, batch, _), old = passes[0]
    assert metrics["kl"] == 0 and metrics["approx_kl"] < 1e-5 and len(given) >= 9
    rows = [
        row
        for (_, _, minibatch, _), _ in minibatches
        for row in zip(minibatch["completion_ids"], minibatch["old_logprobs"], strict=True)
    ]
    assert len(rows) == 3 * len(old)
    for ids, logprobs in rows:
        same = (batch["completion_ids"] == ids).all(1)
        assert (old[same] == logprobs).all(1).any()
    assert metrics[GAP] == pytest.approx(0.01, abs=2e-3)  # of tokens: padding has none


@pytest.mark.parametrize("micro_batch_size", [24, 3])
@pytest.mark.parametrize("name", CLIPPED)
def test_the_first_update_sees_ratios_of_one(monkeypatch, name, micro_batch_size):
    """At the bounds of GSPO's paper, too. Micro-batches of other rows are as wide as another
    longest row, and a real model rounds them otherwise; these toys do not."""
    module, (model, reference) = script(name), toy(name, in_bf16=True)
    off_by(module, monkeypatch, 0.01)
    bounds = {"clip_low": 3e-4, "clip_high": 4e-4, "micro_batch_size": micro_batch_size}
    flags = {key: value for key, value in bounds.items() if hasattr(module.Args(), key)}
    metrics = take_step(name, monkeypatch, verify_some, model, reference, sgd(model), **flags)
    assert metrics["clip_ratio"] == 0 and metrics["approx_kl"] < 1e-8 and metrics["grad_norm"] > 0


# --------------------------------------------------------------------------------------- the flag


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
    """And weights are loaded in float32, whatever the file has. Old cards emulate bf16, slowly."""
    device, *old = device.split(",")

    def is_bf16_supported(including_emulation=True):
        return including_emulation or not old

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    for name in LLM_SCRIPTS:
        monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_: self)  # there is no CUDA
        args = script(name).Args(model=pretrained, dtype=dtype)
        model, _ = script(name).load_policy(args, torch.device(device))
        assert model.in_bf16 is expected
        assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training

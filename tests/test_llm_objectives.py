"""The three functions of each algorithm against its oracle."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import LLM_SCRIPTS, script
from oracles import clipped_tokens, oracle, same, tokens, value_and_gradient

EXACT = {"rtol": 1e-9, "atol": 1e-12}
# Every script as it comes, and with the flags that change its three functions.
CASES = [(name, {}) for name in LLM_SCRIPTS]
CASES += [("grpo_llm", {"length_norm": "constant", "max_new_tokens": 5, "scale_rewards": False})]


def args_of(name, **flags):
    """The flags of a script, with clip bounds, if it has any, on both sides of the cases below."""
    args = script(name).Args()
    bounds = {"clip_low": 0.15, "clip_high": 0.25}
    return replace(args, **{k: v for k, v in bounds.items() if hasattr(args, k)}, **flags)


def case(seed, B, T=9):
    """Random log-probs, ratios on both sides of the clip, advantages of both signs, and masks. The
    padding's ratio, were it ever used, is infinite."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    mask = (torch.arange(T) < lengths[:, None]).double()
    old = -3 * torch.rand(B, T, generator=g, dtype=torch.double) * mask
    logprobs = old + 0.4 * torch.randn(B, T, generator=g, dtype=torch.double) * mask
    advantages = torch.randn(B, generator=g, dtype=torch.double)
    logprobs[mask == 0], old[mask == 0] = 1e3, -1e3
    return logprobs.requires_grad_(), old, advantages, mask


@pytest.mark.parametrize("name,flags", CASES)
def test_advantages_against_the_oracle(name, flags):
    """Five groups of four, each by itself: a mean over the wrong axis changes every number."""
    rewards = torch.rand(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    args = args_of(name, **flags)
    expected = [oracle(name).advantages(group, args) for group in rewards.tolist()]
    advantages = script(name).compute_advantages(rewards, args)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.double), **EXACT)


@pytest.mark.parametrize("name,flags", CASES)
def test_value_and_gradient_against_the_oracle(name, flags):
    """Six cases, with tokens on both sides of the clip; padding counts nowhere. The parts come
    first, so that a failure says which function is wrong, and at which token."""
    module, args, clipped = script(name), args_of(name, **flags), []
    for seed in range(6):
        logprobs, _, _, mask = tensors = case(seed, B=3 + seed)
        value, expected = value_and_gradient(name, *tensors, args)
        terms, r, s, A = torch.zeros(4, *mask.shape, dtype=mask.dtype)
        for i, t, inputs in tokens(*tensors):
            terms[i, t], _ = oracle(name).token(*inputs, args)
            r[i, t], s[i, t], _, A[i, t] = inputs
        facts, lengths = {"mask": mask, "r": r, "s": s, "A": A}, mask.sum(1).int().tolist()
        for bound in ("clip_low", "clip_high"):
            facts[bound] = torch.full_like(mask, getattr(args, bound, math.inf))
        shares = [[oracle(name).share(length, lengths, args)] for length in lengths]
        weights = module.token_weights(mask, args)
        same("token_weights", weights, mask * torch.tensor(shares, dtype=mask.dtype), mask=mask)
        objective, beyond = module.surrogate(*tensors, args)
        shown = objective.detach().where(mask > 0, 0)
        same("surrogate's first value, the objective,", shown, terms, **facts)
        total = (weights * objective).sum()
        (gradient,) = torch.autograd.grad(total, logprobs)
        same("the gradient of weight × objective by log π", gradient, expected, **facts)
        expected = clipped_tokens(name, *tensors, args)
        same("surrogate's second value, clipped,", beyond, expected, **facts)
        assert total.item() == pytest.approx(value, abs=1e-12), "padding counts in the sum"
        clipped += beyond[mask > 0].tolist()
    assert set(clipped) == ({False} if name == "rloo_llm" else {False, True})


@pytest.mark.parametrize("name", ["rloo_llm", "grpo_llm"])
def test_k3_is_never_negative(name):
    """In float32, where e^d − d − 1 would be −6e-8: where |d| is small it is d²/2."""
    d = torch.linspace(-2e-3, 2e-3, 100_001)
    d = torch.cat([d, d * 1e-4, d * 1e4])
    k3 = script(name).kl_k3(torch.ones_like(d), 1 + d)
    assert (k3 >= 0).all()
    d = (1 + d).double() - 1  # as float32 has it
    torch.testing.assert_close(k3.double(), d.expm1() - d, rtol=1e-2, atol=1e-12)
    assert script(name).kl_k3(torch.tensor(0.0), torch.tensor(2.0)) == pytest.approx(math.e**2 - 3)

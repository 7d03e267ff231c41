"""The functions of each algorithm against its oracle."""

from dataclasses import replace

import pytest
import torch
from conftest import LLM_SCRIPTS, script
from oracles import ORACLES, expected, same

# Every script as it comes, and with the flags that change its functions.
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
    """Five groups of four, each by itself: a mean over the wrong axis changes every number. And a
    sixth of equal rewards, whose mean is rounded: 0, which no std makes larger."""
    rewards = torch.rand(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    args, module = args_of(name, **flags), script(name)
    right = [ORACLES[name].advantages(group, args) for group in rewards.tolist()]
    same(
        "the advantages",
        module.compute_advantages(rewards, args),
        torch.tensor(right, dtype=torch.double),
    )
    assert not module.compute_advantages(torch.tensor([[-7000.7] * 8]), args).any()


@pytest.mark.parametrize("name,flags", CASES)
def test_value_and_gradient_against_the_oracle(name, flags):
    """Six cases, with tokens on both sides of the clip; padding counts nowhere. The parts come
    first, so that a failure says which function is wrong, and at which token."""
    module, args, clipped = script(name), args_of(name, **flags), []
    for seed in range(6):
        logprobs, old, advantages, mask = tensors = case(seed, B=3 + seed)
        right = expected(name, *tensors, args)
        A = advantages[:, None].expand_as(mask)
        facts = {"mask": mask, "r": right["r"], "s": right["s"], "A": A}
        weights = module.token_weights(mask, args)
        same("token_weights", weights, right["weight"], mask=mask)
        if name == "rloo_llm":
            objective, beyond = module.surrogate(logprobs, advantages), right["clipped"]
        else:
            objective, beyond = module.surrogate(*tensors, args)
        shown = objective.detach().where(mask > 0, 0)
        same("surrogate's objective", shown, right["objective"], **facts)
        (gradient,) = torch.autograd.grad((weights * objective).sum(), logprobs)
        slope = right["weight"] * right["slope"]
        same("the gradient of weight × objective by log π", gradient, slope, **facts)
        same("surrogate's second value, clipped,", beyond, right["clipped"], **facts)
        clipped += beyond[mask > 0].tolist()
    assert set(clipped) == ({False} if name == "rloo_llm" else {False, True})

"""One optimizer step: its gradient, however the rows are split; what it logs."""

import pytest
import torch
from conftest import LLM_SCRIPTS, batch_of, calls_of, random_model, script
from oracles import clipped_tokens, gradient_of_step, row_by_row

# Of three questions, four completions each. Each log ratio is one of these and a little more, so
# that tokens and whole completions lie on both sides of every clip, with advantages of both signs.
PROMPTS = [[3, 4], [5, 6, 7, 8], [9]]
LENGTHS = [8, 2, 5, 1, 3, 8, 8, 4, 1, 6, 7, 2]
LOG_RATIOS = torch.tensor([-0.4, -0.4, 0.4, 0.4, 0.0, 0.0] * 2)


def stepped_model(name, **flags):
    """A random model that has moved since a batch was drawn; the batch, with invented advantages,
    and with a reference where the KL is in the loss; and the script's flags, of which these differ
    from the defaults."""
    model = random_model("gpt2").double()
    args = script(name).Args(**{"temperature": 0.7, "group_size": 4, "max_grad_norm": 1e9} | flags)
    g = torch.Generator().manual_seed(3)
    batch = batch_of(model, PROMPTS, LENGTHS, args.temperature)
    mask = batch["mask"]
    drift = LOG_RATIOS[:, None] + 0.1 * torch.randn(mask.shape, generator=g)
    batch["old_logprobs"] = batch["old_logprobs"] - drift * mask
    batch["advantages"] = torch.tensor([1.0, -1.0] * 6) * (0.5 + torch.rand(12, generator=g))
    if args.beta > 0 and name != "rloo_llm":
        drift = 0.1 * torch.rand(mask.shape, generator=g)
        batch["ref_logprobs"] = (batch["old_logprobs"] - drift) * mask
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # left by a step before
    return model, batch, args


def step(name, model, batch, args, rate=0.0):
    """One step of SGD; returns its gradient, and what is logged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    stats = script(name).train_minibatch(model, optimizer, batch, args)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), stats


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_gradient_of_a_step_is_the_oracles_through_plain_passes(name, beta, monkeypatch):
    """The micro-batches tear groups. Five rows have no advantage: only a KL in the loss gives them
    a gradient, and without one they are not even read. approx_kl and clipfrac count the tokens of
    the other rows."""
    model, batch, args = stepped_model(name, beta=beta, micro_batch_size=5)
    batch["advantages"][:5] = 0.0
    calls = calls_of(monkeypatch, model, "forward")
    gradient, stats = step(name, model, batch, args)
    left_out = 0 if beta > 0 and name != "rloo_llm" else 5
    assert sum(len(input_ids) for (input_ids,), _ in calls) == 12 - left_out
    loss, expected = gradient_of_step(name, model, batch, args)
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    assert stats["loss"] == pytest.approx(loss, abs=1e-5)
    logprobs = row_by_row(model, batch, args.temperature)
    tensors = [batch[key] for key in ("old_logprobs", "advantages", "mask")]
    counted = batch["mask"].clone()
    counted[:5] = 0
    clipped = clipped_tokens(name, logprobs, *tensors, args)[counted > 0].double().mean().item()
    assert stats["clipfrac"] == pytest.approx(clipped)
    assert 0.05 < clipped < 0.95 or name == "rloo_llm"
    drift = (logprobs - batch["old_logprobs"])[counted > 0]
    approx_kl = (drift.exp() - drift - 1).mean().item()
    assert stats["approx_kl"] == pytest.approx(approx_kl, rel=1e-4)


def test_max_grad_norm():
    """SGD's step is the gradient: with a small bound, a small step of just that length."""
    model, batch, args = stepped_model("grpo_llm", beta=0.0, max_grad_norm=1e-3)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    _, stats = step("grpo_llm", model, batch, args, rate=1.0)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert stats["grad_norm"] > 1e-2, "what is logged is the norm before"
    assert (after - before).norm().item() == pytest.approx(1e-3, rel=1e-2)

"""One optimizer step: its gradient, however rows are split; what it logs; when there is none."""

import copy

import pytest
import torch
from conftest import LLM_SCRIPTS, batch_of, calls_of, random_model, script
from oracles import expected, row_by_row

# Of three questions, four completions each. Each log ratio is one of these and a little more, so
# that tokens and whole completions lie on both sides of every clip, with advantages of both signs.
PROMPTS = [[3, 4], [5, 6, 7, 8], [9]]
LENGTHS = [8, 2, 5, 1, 3, 8, 8, 4, 1, 6, 7, 2]
LOG_RATIOS = torch.tensor([-0.4, -0.4, 0.4, 0.4, 0.0, 0.0] * 2)


def stepped_model(name, **flags):
    """A random model that has moved since a batch was drawn; the batch, with invented advantages,
    and with a reference where the KL is in the loss; and the script's flags."""
    model = random_model("gpt2").double()
    args = script(name).Args(**{"temperature": 0.7, "group_size": 4, "max_grad_norm": 0.01} | flags)
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


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_gradient_of_a_step_is_the_oracles_through_plain_passes(name, beta, monkeypatch):
    """The micro-batches tear groups. Five rows have no advantage: only a KL in the loss gives them
    a gradient, and without one they are not even read. They count in clipfrac, as never clipped.
    The gradient is scaled down to its largest norm; what is logged is the norm before."""
    model, batch, args = stepped_model(name, beta=beta, micro_batch_size=5)
    batch["advantages"][3:8] = 0.0
    calls, sgd = calls_of(monkeypatch, model, "forward"), torch.optim.SGD(model.parameters(), lr=0)
    logs = script(name).train_minibatch(model, sgd, batch, args)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    read = batch["mask"].clone()
    if beta == 0:
        read[3:8] = 0
        assert sum(len(ids) for (ids,), _ in calls) == 7
    logprobs = row_by_row(model, batch, args.temperature)
    tensors = [batch[key] for key in ("old_logprobs", "advantages", "mask")]
    right = expected(name, logprobs, *tensors, args, batch.get("ref_logprobs"))
    loss = -(right["weight"] * right["slope"] * logprobs).sum()
    parts = torch.autograd.grad(loss, list(model.parameters()))
    slopes = torch.cat([part.flatten() for part in parts])
    assert slopes.norm() > 0.02
    torch.testing.assert_close(gradient, slopes * 0.01 / slopes.norm(), rtol=1e-4, atol=1e-7)
    numbers = {"loss": -(right["weight"] * right["objective"]).sum(), "grad_norm": slopes.norm()}
    if name != "rloo_llm":
        d = logprobs - batch["old_logprobs"]
        numbers |= {"approx_kl": (d.expm1() - d)[read > 0].mean()}
        numbers |= {"clipfrac": (right["clipped"] & (read > 0)).sum() / batch["mask"].sum()}
        assert 0.05 < numbers["clipfrac"] < 0.95
    if "ref_logprobs" in batch:
        d = batch["ref_logprobs"] - logprobs
        numbers |= {"kl": (d.expm1() - d)[read > 0].mean()}
    assert logs.keys() == numbers.keys()
    for key, number in numbers.items():
        assert logs[key].item() == pytest.approx(number.item(), rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize("name", ["grpo_llm", "rloo_llm"])
@pytest.mark.parametrize("advantage", [0.0, float("nan")])
def test_without_a_signal_or_with_nan_nothing_moves(name, advantage):
    """Not even by Adam's momentum, and it stays as it is. NaN ends the run."""
    model, batch, args = stepped_model(name, beta=0.0)
    optimizer, step = torch.optim.Adam(model.parameters()), script(name).train_minibatch
    step(model, optimizer, batch, args)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
    batch["advantages"] = torch.full((12,), advantage)
    if advantage == 0:
        step(model, optimizer, batch, args)
    else:
        with pytest.raises(RuntimeError, match="non-finite"):
            step(model, optimizer, batch, args)
    after = [model.state_dict(), optimizer.state_dict()["state"]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)

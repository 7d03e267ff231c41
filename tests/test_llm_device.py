"""On a GPU, every tensor must be made on the model's device. Here, without one, the model is on the
CPU, and what is made without `device=` lands on "meta", whose tensors hold no numbers."""

import sys
from contextlib import nullcontext
from itertools import count
from unittest.mock import Mock

import pytest
import torch
from conftest import LLM_SCRIPTS, Characters, random_model, script, with_critic

grpo = script("grpo_llm")


def on_cpu(make):
    """Indices of rows may be on the CPU, and so may be what is added up in Python."""

    def made(*args, **more):
        if sys._getframe(1).f_code.co_name in ("train_step", "next_problems", "global_means"):
            more["device"] = "cpu"
        return make(*args, **more)

    return made


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_every_tensor_is_made_on_the_model_s_device(name, monkeypatch):
    """The next operation with one that is not raises, or the numbers differ."""
    module, found = script(name), []
    for make in ("arange", "randperm", "tensor", "as_tensor"):
        monkeypatch.setattr(torch, make, on_cpu(getattr(torch, make)))
    shape = {"prompts_per_step": 4, "group_size": 4, "minibatches": 2, "max_new_tokens": 6}
    args = module.Args(beta=0.1, **shape)
    problems = [(f"{i}+{i}", "2") for i in range(8)]
    for context in (nullcontext(), torch.device("meta")):
        model, reference = with_critic(name, random_model()), random_model(seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(0)
        rewards = count()
        monkeypatch.setattr(module, "load_verifier", lambda _, r=rewards: lambda *_: next(r) % 7)
        with context:
            given = (model, reference, Characters(), optimizer, problems, 1, args)
            metrics = module.train_step(*given)
            metrics |= module.evaluate(model, Characters(), problems, args, Mock(), 0)
        found.append(metrics)
    assert "grad_norm" in found[0] and found[0] == pytest.approx(found[1])


def test_on_a_cpu_no_precision_changes():
    """The general switch of TF32 would reach products of some CPUs, too."""
    before = torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision
    grpo.start_device(grpo.Args(model="some"))
    after = torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision
    assert after == before

"""How much memory a real model takes at the defaults, computed at its true shapes without any:
FakeTensorMode carries out no arithmetic."""

import weakref

import pytest
import torch
import transformers
from conftest import script
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

grpo = script("grpo_llm")
SHAPE = {  # Qwen2.5-0.5B
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
PROMPT, NEW = 150, 256  # tokens


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, as long as they live."""

    def __init__(self, known):
        super().__init__()
        self.now, self.peak = 0, 0
        self.seen = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return found

    def add(self, storage):
        if storage._cdata not in self.seen:
            self.seen[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self.drop, storage._cdata)

    def drop(self, key):
        self.now -= self.seen.pop(key)


@pytest.mark.parametrize("checkpointing,gigabytes", [(False, 10.4), (True, 4.6)])
def test_a_micro_batch_of_half_a_billion_parameters(checkpointing, gigabytes, monkeypatch):
    """Its peak, beside the weights, gradients, Adam's two moments and the reference."""
    monkeypatch.setattr(
        transformers.masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: False
    )
    args = grpo.Args(model="some/model", dtype="bfloat16")
    rows = args.micro_batch_size
    with FakeTensorMode(allow_non_fake_inputs=True):
        config = transformers.Qwen2Config(**SHAPE)
        model = transformers.Qwen2ForCausalLM(config).eval()
        if checkpointing:
            model.activation_checkpointing_enable()
            model.train()
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        batch = {name: torch.ones(rows, NEW) for name in ("mask", "old_logprobs", "ref_logprobs")}
        batch |= {"advantages": torch.ones(rows), "weights": torch.ones(rows, NEW)}
        for name, width in (("prompt", PROMPT), ("completion", NEW)):
            batch[f"{name}_ids"] = torch.zeros(rows, width, dtype=torch.long)
        batch["prompt_mask"] = torch.ones(rows, PROMPT, dtype=torch.long)
        known = [*parameters, *(p.grad for p in parameters), *model.buffers(), *batch.values()]
        with Live(known) as live:
            with grpo.autocast(model, args):
                logprobs = grpo.token_logprobs(model, batch, 1.0)
            given = (batch["old_logprobs"], batch["advantages"], batch["mask"], args)
            objective, _ = grpo.surrogate(logprobs, *given)
            objective = objective - args.beta * grpo.kl_k3(logprobs, batch["ref_logprobs"])
            (batch["weights"] * objective).sum().backward()
    weights = 5 * 4 * sum(parameter.numel() for parameter in parameters)
    assert 9e9 < weights < 10e9
    assert 0.9 * gigabytes < live.peak / 1e9 < gigabytes

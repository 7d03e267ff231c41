"""How much memory does a training step of a real model take?

    python tests/benchmarks/memory.py      # a minute

Computed at the models' true shapes, without a GPU and without any memory: FakeTensorMode carries
out no arithmetic. Of the default flags it prints the GB of weights, gradients, Adam's two moments
and the reference, all in float32, and of these with the peak of a micro-batch, after a prompt of
150 tokens. The numbers in tests/examples/README.md are these, and gpu.py measures some of them on a
GPU. With --smoke a model has two layers.
"""

import weakref
from unittest.mock import patch

import torch
import transformers
import tyro
from bench import table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo_llm

QWEN = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864}
QWEN |= {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
LLAMA = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192}
LLAMA |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
PROMPT, NEW = 150, 256  # tokens
ROWS = [("Qwen2.5-0.5B", "qwen2", QWEN, size) for size in (1, 2, 4, 8, 16)]
ROWS += [("Llama-3.2-1B", "llama", LLAMA, 4)]


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


def micro_batch(kind, shape, rows, checkpointing):
    """GB at rest, and at the peak of a micro-batch."""
    args = grpo_llm.Args(model="some/model")
    # Fake tensors have no values, by which transformers would choose a mask.
    masks = patch.object(transformers.masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: 0)
    with FakeTensorMode(allow_non_fake_inputs=True), masks:
        config = transformers.AutoConfig.for_model(kind, tie_word_embeddings=True, **shape)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
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
            logprobs = grpo_llm.token_logprobs(model, batch, 1.0)
            given = (batch["old_logprobs"], batch["advantages"], batch["mask"], args)
            objective, _ = grpo_llm.surrogate(logprobs, *given)
            objective = objective - args.beta * grpo_llm.kl_k3(logprobs, batch["ref_logprobs"])
            (batch["weights"] * objective).sum().backward()
    rest = 5 * 4 * sum(parameter.numel() for parameter in parameters)
    return rest / 1e9, (rest + live.peak) / 1e9


def main(smoke: bool = False):
    rows = []
    for name, kind, shape, size in ROWS:
        shape = shape | ({"num_hidden_layers": 2} if smoke else {})
        rest, plain = micro_batch(kind, shape, size, False)
        _, checkpointed = micro_batch(kind, shape, size, True)
        rows.append([name, size, *(f"{gb:.1f}" for gb in (rest, plain, checkpointed))])
    header = ["model", "rows", "GB at rest", "GB", "GB with activation checkpointing"]
    print(*table(header, rows), sep="\n")


if __name__ == "__main__":
    tyro.cli(main)

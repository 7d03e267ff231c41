"""A second device, emulated on the CPU: its tensors may not meet those of the host.

    python tests/emulated_gpu.py grpo_llm …    # two steps of these scripts, there and on the host

A tensor of the device wraps one of the host, on which every operation is carried out, so that the
results must be those of the host, but for attention's rounding. An operation on tensors of both is
refused, as CUDA would; it may take numbers from the host, and tensors that index one of its own.
A process of its own, since a device, once registered, stays. It tells where tensors are, and
nothing of kernels, bf16 or speed.
"""

import random
import sys
from contextlib import nullcontext
from unittest.mock import Mock

import torch
from conftest import draws, script, with_critic
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

HOST = torch.device("cpu")
INDEXING = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"}


class OnDevice(torch.Tensor):
    """A tensor of the device; `host` has its numbers."""

    @staticmethod
    def __new__(cls, host):
        shape = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        device = torch.device("second", 0)
        return cls._make_wrapper_subclass(cls, host.shape, dtype=host.dtype, device=device, **shape)

    def __init__(self, host):
        self.host = host

    def tolist(self):
        return self.host.tolist()

    def __format__(self, form):
        return format(self.host, form)

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return carry_out(operation, args, kwargs or {})


class Device(TorchDispatchMode):
    """Sees the operations that make tensors, which have none to dispatch on."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return carry_out(operation, args, kwargs or {})


def on_host(value):
    return value.host if isinstance(value, OnDevice) else value


def carry_out(operation, args, kwargs):
    """The operation on the host's numbers; its results belong where CUDA would put them."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    of_device = any(isinstance(each, OnDevice) for each in tensors)
    together = tensors
    if operation.name() in INDEXING and isinstance(args[0], OnDevice):
        together = [each for each in (args[0], *args[2:]) if isinstance(each, torch.Tensor)]
    of_host = any(not isinstance(each, OnDevice) and each.dim() > 0 for each in together)
    if of_device and of_host and operation.name() != "aten::copy_":
        raise RuntimeError(f"{operation.name()}: tensors on two devices")
    target = kwargs.get("device")
    if target is not None:
        kwargs = kwargs | {"device": HOST}
    result = operation(*tree_map(on_host, args), **tree_map(on_host, kwargs))
    for given, described in zip(args, operation._schema.arguments, strict=False):
        if described.is_write and isinstance(result, torch.Tensor):
            return given  # in place

    def place(value):
        there = of_device if target is None else torch.device(target).type == "second"
        if not isinstance(value, torch.Tensor) or not there or isinstance(value, OnDevice):
            return value
        copied = value.clone() if any(value is on_host(each) for each in tensors) else value
        return OnDevice(copied)

    return tree_map(place, result)


def move(model):
    """The model's weights and buffers, onto the device."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            moved = torch.nn.Parameter(OnDevice(parameter.data), parameter.requires_grad)
            setattr(module, name, moved)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, OnDevice(buffer))
    return model


def two_steps(script, there):
    """What two steps and an evaluation measure."""
    small = {"prompts_per_step": 4, "group_size": 4, "eval_problems": 4, "max_new_tokens": 6}
    small |= {"minibatches": 2}
    args = script.Args(steps=2, beta=0.1, **small)
    model, tokenizer = script.load_policy(args, HOST)
    torch.manual_seed(0)
    model = with_critic(script.SCRIPT, model)
    reference, _ = script.load_policy(args, HOST)
    model.in_bf16 = reference.in_bf16 = True  # old_logprobs once more, as on CUDA
    if there:
        move(model)
        move(reference)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    problems = draws(script.problem_stream(None, 1), 4)
    torch.manual_seed(1)
    found = []
    for step in range(2):
        rng = random.Random(step)
        given = (model, reference, tokenizer, optimizer, problems, rng, args)
        found.append(script.train_step(*given))
    _, held_out = script.load_data(args)
    found.append(script.evaluate(model, tokenizer, held_out, args, Mock(), 2))
    assert model.device.type == ("second" if there else "cpu")
    return [{name: float(on_host(value)) for name, value in each.items()} for each in found]


def autocast(model):
    """None: an emulated device has no kernels for it."""
    return nullcontext()


def main(names):
    _setup_privateuseone_for_python_backend("second")  # before any backward pass
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…) makes its tensor on the host first
    for module in map(script, names):
        module.autocast = autocast
        alone = two_steps(module, False)
        with Device():
            found = two_steps(module, True)
        for here, there in zip(alone, found, strict=True):
            assert here.keys() == there.keys()
            for name, value in here.items():  # ppo_llm.py's grad_norm is 3
                assert abs(value - there[name]) < 1e-5 * max(1, abs(value)), name
        print(f"{module.SCRIPT}: the same numbers on both devices")


if __name__ == "__main__":
    main(sys.argv[1:])

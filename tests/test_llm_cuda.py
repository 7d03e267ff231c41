"""What runs on CUDA only, without CUDA: bf16, and the memory of an update.

bf16 is autocast's own on a CPU, in the functions in which the scripts have it on CUDA. That tensors
are where CUDA wants them is second_device.py's to see.
"""

import itertools
import random
from unittest.mock import patch

import pytest
import torch
import transformers
from bench import products_in
from conftest import random_model, script
from test_llm_rollout import KINDS, PROMPTS, plain_logprobs

grpo = script("grpo_llm")
CPU = torch.device("cpu")


def windowed():
    """A model whose attention reaches back three tokens."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.4,
        sliding_window=3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.MistralForCausalLM(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [1], 0
    return model.eval()


# ---------------------------------------------------------------------------- models of other kinds


@torch.no_grad()
def test_decoding_with_a_sliding_window():
    """The cache forgets; prompts are padded on the left; rows leave as they end."""
    model = windowed()
    torch.manual_seed(1)
    batch = grpo.generate(model, PROMPTS, 3, 12, 1.0)
    assert batch["mask"].sum(1).unique().numel() > 2
    trained = grpo.token_logprobs(model, batch, 1.0)
    for i, length in enumerate(batch["mask"].sum(1).int().tolist()):
        completion = batch["completion_ids"][i, :length].tolist()
        expected = plain_logprobs(model, PROMPTS[i // 3], completion, 1.0, [0])
        for found in (batch["old_logprobs"], trained):
            torch.testing.assert_close(found[i, :length], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["Lfm2", "Qwen3Next"])
def test_linear_attention_is_refused(kind, pretrained, tmp_path, refused):
    """Its state cannot be cut to the rows that are still being written."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv" if kind == "Lfm2" else "linear_attention", "full_attention"],
        eos_token_id=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(pretrained).save_pretrained(tmp_path)
    error = refused(grpo.load_policy, grpo.Args(model=str(tmp_path)), CPU)
    assert "--model" in error and "linear attention" in error


# --------------------------------------------------------------------------------------------- bf16


def ratio_errors(model, batch, args):
    """|ratio − 1|, at most, of a token and of a sequence."""
    log_ratio = grpo.batch_logprobs(model, batch, args) - batch["old_logprobs"]
    of_sequence = log_ratio.sum(1) / batch["mask"].sum(1)
    return [(x.exp() - 1).abs().max().item() for x in (log_ratio, of_sequence)]


def rollout_in(dtype, kind):
    """A model and its rollout, whose sampler is a little off, as another kernel's would be."""
    model, args = random_model(kind, vocab=50), grpo.Args(micro_batch_size=8)
    torch.manual_seed(0)
    with products_in(grpo, dtype, CPU):
        batch = grpo.generate(model, PROMPTS, 8, 20, 1.0)
    batch["old_logprobs"] += 0.01 * batch["mask"]
    batch["advantages"] = torch.ones(len(batch["mask"]))
    return model, batch, args


def test_sampler_and_trainer_multiply_in_bf16():
    """Every layer of the model, in both; without, a GPU would take twice the time and more."""
    seen, model = [], random_model("llama", vocab=50)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    for dtype in (torch.float32, torch.bfloat16):
        with products_in(grpo, dtype, CPU):
            batch = grpo.generate(model, PROMPTS, 2, 4, 1.0)
            assert set(seen) == {dtype}
            seen.clear()
            grpo.token_logprobs(model, batch, 1.0)
            assert set(seen) == {dtype}
            seen.clear()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_in_bf16_old_logprobs_are_retaken(kind):
    model, batch, args = rollout_in(torch.bfloat16, kind)
    sampled = batch["old_logprobs"].clone()
    with products_in(grpo, torch.bfloat16, CPU):
        assert min(ratio_errors(model, batch, args)) > 3e-3
        metrics = grpo.recompute_old_logprobs(model, batch, args)
        assert max(ratio_errors(model, batch, args)) < 1e-4
    gap, name = (batch["old_logprobs"] - sampled).abs(), "sampling/sampling_logp_difference"
    assert set(metrics) == {f"{name}/mean", f"{name}/max"}
    assert metrics[f"{name}/max"] == gap.max() > 5e-3
    torch.testing.assert_close(metrics[f"{name}/mean"], gap.sum() / batch["mask"].sum())


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_in_float32_old_logprobs_stay(kind):
    model, batch, args = rollout_in(torch.float32, kind)
    sampled = batch["old_logprobs"].clone()
    assert grpo.recompute_old_logprobs(model, batch, args) == {}
    assert torch.equal(batch["old_logprobs"], sampled)


def largest_ratio_error(model, batch, args):
    """|ratio − 1|, at most, that surrogate sees in a train_step on this rollout.

    Its learning rate is 0, so that each of the minibatches is a first one.
    """
    errors = []
    real = grpo.surrogate

    def surrogate(logprobs, old_logprobs, advantages, mask, args):
        errors.append((((logprobs - old_logprobs) * mask).exp() - 1).abs().max().item())
        return real(logprobs, old_logprobs, advantages, mask, args)

    def rollout(*_):
        rewards = torch.arange(len(batch["mask"])) % 3 == 0
        rewards[: args.group_size] = False  # a group without an advantage
        return dict(batch), [], rewards.float().view(-1, args.group_size)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    problems, rng = itertools.repeat(("", "")), random.Random(0)
    with patch.multiple(grpo, surrogate=surrogate, rollout=rollout):
        grpo.train_step(model, model, None, optimizer, problems, rng, args)
    return max(errors)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("beta", [0.0, 0.01])
@pytest.mark.parametrize("micro_batch_size", [24, 3])
def test_the_first_update_in_bf16_sees_a_ratio_of_one(micro_batch_size, beta, kind):
    """What surrogate is given in a whole train_step. Micro-batches of other rows are as wide as
    another longest row, and rounded otherwise."""
    model, batch, args = rollout_in(torch.bfloat16, kind)
    args.micro_batch_size, args.prompts_per_step, args.beta = micro_batch_size, 3, beta
    with products_in(grpo, torch.bfloat16, CPU):
        assert largest_ratio_error(model, batch, args) < 1e-4


# ------------------------------------------------------------------------------ memory of an update


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Collects what autograd keeps for the way back, each piece once, the weights apart."""

    def __init__(self, model):
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.kept = {}
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.kept[storage.data_ptr()] = storage
        return tensor


def update(model, batch, **flags):
    """Bytes kept for the way back, and the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    saved = Saved(model)
    with saved:
        grpo.train_minibatch(model, optimizer, batch, grpo.Args(**flags))
    kept = sum(storage.nbytes() for storage in saved.kept.values())
    return kept, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers_keep_less_and_give_the_same_gradient(kind):
    """And they are off while sampling, where they would throw away the cache;
    dropout stays off throughout."""
    model = random_model(kind, vocab=50)
    if kind == "gpt2":
        assert any(isinstance(x, torch.nn.Dropout) and x.p > 0 for x in model.modules())
    torch.manual_seed(0)
    batch = grpo.generate(model, PROMPTS, 4, 20, 1.0)
    trained = batch | {"advantages": torch.randn(12), "ref_logprobs": batch["old_logprobs"] - 0.1}
    plain, gradients = update(model, trained)
    model.activation_checkpointing_enable()
    less, same = update(model, trained, gradient_checkpointing=True)
    for a, b in zip(gradients, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    assert less < 0.7 * plain
    torch.manual_seed(0)
    again = grpo.generate(model, PROMPTS, 4, 20, 1.0)
    for name in ("old_logprobs", "entropy"):
        assert torch.equal(again[name], batch[name])

"""Epochs over a rollout: which rows each minibatch has, what stays as the rollout left it, and that
a rollout without a signal moves nothing. And what is in bf16, run on the CPU; emulated_gpu.py tells
what CUDA would refuse."""

import copy
import random

import pytest
import torch
from conftest import OWN_STEPS, Characters, draws, quick_for, random_model, script, spy, with_critic

grpo = script("grpo_llm")
GAP = "sampling/sampling_logp_difference/mean"
PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10]]


def rows_of_minibatches(name, monkeypatch, num_groups, rng, **flags):
    """The row numbers of each minibatch that has any, in a training step."""
    module, found = script(name), []
    real = module.rollout

    def rollout(*given):
        batch, completions, rewards = real(*given)
        torch.seed()  # its randomness differs between processes
        rows = torch.arange(rewards.numel())
        return batch | {"row": rows[:, None]}, completions, 1.0 * rows.view_as(rewards)

    def train_minibatch(model, optimizer, batch, args):
        if len(batch["row"]) > 0:
            found.append(batch["row"].flatten().tolist())
        return {}

    args = module.Args(group_size=3, prompts_per_step=num_groups, beta=0.0, **flags)
    given = (with_critic(name, random_model()), None, Characters(), None)
    with monkeypatch.context() as patch:
        patch.setattr(module, "rollout", rollout)
        patch.setattr(module, "train_minibatch", train_minibatch)
        problems = draws([("1+2", "3")] * 99, num_groups)
        assert "loss" not in module.train_step(*given, problems, rng, args)
    return found


@pytest.mark.parametrize("num_groups,sizes", [(9, [3, 2, 2, 2]), (3, [1] * 3)])
@pytest.mark.parametrize("name", quick_for(*OWN_STEPS))
def test_each_group_is_used_once_in_a_pass(monkeypatch, name, num_groups, sizes):
    """Groups stay whole, also where their number is no multiple of --minibatches, or less. Their
    order is drawn from rng alone."""
    given = (name, monkeypatch, num_groups)
    flags = {"minibatches": 4, "update_epochs": 3}
    found, again = (rows_of_minibatches(*given, random.Random(0), **flags) for _ in range(2))
    assert found == again
    assert [len(rows) // 3 for rows in found] == sizes * 3
    for rows in found:
        for i in range(0, len(rows), 3):
            assert rows[i] % 3 == 0 and rows[i : i + 3] == list(range(rows[i], rows[i] + 3))
    epochs = [sum(found[i : i + len(sizes)], []) for i in range(0, len(found), len(sizes))]
    for rows in epochs:
        assert sorted(rows) == list(range(3 * num_groups))
    if num_groups > 3:  # of so few, two may happen to be alike
        assert len(set(map(tuple, epochs))) == 3 and list(range(3 * num_groups)) not in epochs


def take_step(name, monkeypatch, verify, model, reference, optimizer, answers="1" * 99, **flags):
    """A training step on two minibatches of three groups; what it logs."""
    module = script(name)
    monkeypatch.setattr(module, "load_verifier", lambda name: verify)
    flags = {"beta": 0.1, "minibatches": 2, "micro_batch_size": 4} | flags
    args = module.Args(prompts_per_step=6, group_size=4, **flags)
    problems = draws(((f"{i}+{3 * i}", answer) for i, answer in enumerate(answers)), 6)
    rng = random.Random(0)
    torch.manual_seed(0)
    return module.train_step(model, reference, Characters(), optimizer, problems, rng, args)


def verify_some(completion, answer):
    return float(completion == f"#{answer}")


def toy(name="grpo_llm", in_bf16=False):
    """A random model, and the same once more as its reference."""
    model, reference = random_model("qwen2", vocab=50), random_model("qwen2", vocab=50)
    model.in_bf16 = reference.in_bf16 = in_bf16
    return with_critic(name, model), reference


def off_by(module, monkeypatch, nats):
    """A sampler that rounds otherwise than token_logprobs, as any but a toy's does."""
    real = module.generate

    def generate(*args):
        batch = real(*args)
        return batch | {"old_logprobs": batch["old_logprobs"] - nats * batch["mask"]}

    monkeypatch.setattr(module, "generate", generate)


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("name", quick_for(*OWN_STEPS))
def test_what_a_rollout_measured_stays_in_all_epochs(monkeypatch, name, in_bf16):
    """In bf16 alone log π_old is recomputed, once and before all else; the first ratios are 1."""
    module, (model, reference) = script(name), toy(name, in_bf16)
    if in_bf16:
        off_by(module, monkeypatch, 0.01)
    steps = spy(monkeypatch, module, "train_minibatch")
    passes = spy(monkeypatch, module, "batch_logprobs")
    bounds = {"clip_low": 3e-4, "clip_high": 4e-4}  # those of GSPO's paper
    flags = {key: value for key, value in bounds.items() if hasattr(module.Args, key)}
    flags |= {"update_epochs": 3, "micro_batch_size": 3}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    metrics = take_step(name, monkeypatch, verify_some, model, reference, optimizer, **flags)

    assert [args[0] for args, _ in passes] == [model, reference][not in_bf16 :]
    assert metrics["kl"] == pytest.approx(0, abs=0 if in_bf16 else 1e-6)
    if in_bf16:
        assert metrics[GAP] == pytest.approx(0.01, abs=2e-3)  # of tokens: padding has none
    first = next(logged for _, logged in steps if logged)
    assert first["grad_norm"] > 0 and first["clip_ratio"] == 0 and first["approx_kl"] < 1e-8
    seen = {}
    for (_, _, batch, _), _ in steps:
        for i in range(len(batch["mask"])):
            row = tuple(batch["prompt_ids"][i].tolist() + batch["completion_ids"][i].tolist())
            kept = batch.keys() & {"old_logprobs", "ref_logprobs", "advantages", "targets"}
            given = [batch[key][i].expand(len(batch["mask"][i])) for key in sorted(kept)]
            seen.setdefault(row, []).append(torch.stack(given))
    assert len(seen) > 10
    for given in seen.values():
        assert len(given) % 3 == 0 and all(torch.equal(each, given[0]) for each in given)


RLOO = {"beta": 0.01}  # its default: a β of 0.1 would make a signal of rounding
EQUAL = [
    ("grpo_llm", {}, True),
    ("rloo_llm", RLOO | {"baseline": "leave-one-out"}, False),
    ("rloo_llm", RLOO | {"baseline": "mean"}, True),
]


@pytest.mark.parametrize("name,flags,in_bf16", EQUAL)
def test_equal_rewards_move_nothing(monkeypatch, name, flags, in_bf16):
    """Weights and Adam's momentum stay as they are; Adam would turn any noise into a full step."""
    model, reference = toy(name, in_bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    first = take_step(name, monkeypatch, verify_some, model, reference, optimizer)
    assert first["grad_norm"] > 0
    if name == "rloo_llm":  # its KL is a reward: without a KL, rewards are equal
        reference.load_state_dict(model.state_dict())
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
    given = (lambda *_: 0.7, model, reference, optimizer)
    metrics = take_step(name, monkeypatch, *given, **flags)
    after = [model.state_dict(), optimizer.state_dict()["state"]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert metrics["reward"] == pytest.approx(0.7)
    assert not {"loss", "grad_norm", "approx_kl", "clip_ratio"} & set(metrics)


@pytest.mark.parametrize("name", OWN_STEPS[:3])  # PPO's critic learns from each
def test_minibatches_without_a_step_are_not_in_the_averages(monkeypatch, name):
    """One live group of six: two of the three minibatches take no step, and log nothing."""
    rng, (model, _) = random.Random(0), toy()
    steps = spy(monkeypatch, script(name), "train_minibatch")

    def verify(completion, answer):
        return rng.random() if answer == "live" else 1.0

    flags = {"max_resample": 1} if name == "dapo_llm" else {}
    flags |= {"minibatches": 3, "beta": 0.0, "answers": ["", "live"] + [""] * 4}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    metrics = take_step(name, monkeypatch, verify, model, None, optimizer, **flags)
    *none, live = sorted((result for _, result in steps), key=len)
    assert none == [{}, {}] and live["grad_norm"] > 0
    assert {key: metrics[key] for key in live} == pytest.approx(live)


# ------------------------------------------------------------------------------- --dtype bfloat16


@pytest.mark.parametrize("in_bf16", [False, True])
def test_sampler_and_training_pass_multiply_in_it(in_bf16):
    """Every layer does, or a GPU would take twice the time."""
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


DTYPES = [("auto", "cpu", False), ("bfloat16", "cpu", True), ("float32", "cuda", False)]
DTYPES += [("auto", "cuda", True), ("auto", "cuda, of an old kind", False)]


@pytest.mark.parametrize("dtype,device,expected", DTYPES)
def test_what_dtype_means(monkeypatch, pretrained, dtype, device, expected):
    """Weights are loaded in float32 in any case. Old cards emulate bf16, slowly."""
    device, *old = device.split(",")

    def is_bf16_supported(including_emulation=True):
        return including_emulation or not old

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_: self)  # there is no CUDA
    args = grpo.Args(model=pretrained, dtype=dtype)
    model, _ = grpo.load_policy(args, torch.device(device))
    assert model.in_bf16 is expected
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training

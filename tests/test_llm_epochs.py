"""Epochs over a rollout: which rows each minibatch has, what stays as the rollout left it, and that
a rollout without a signal moves nothing."""

import copy
import itertools
import math

import pytest
import torch
from conftest import LLM_SCRIPTS, Characters, batch_of, calls_of, random_model, reward_by, script

GAP = "sampling/sampling_logp_difference/mean"
PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10]]
# 24 completions in groups of G. The right ones have an odd length, without the stop token.
LENGTHS = [1, 2, 3, 9, 4, 5, 9, 2, 3, 8, 7, 6, 9, 9, 2, 1, 1, 6, 3, 2, 9, 4, 5, 8]
TEXTS = [length - (length < 9) for length in LENGTHS]  # the longest are cut off


def by_length(completion, answer):
    return float(len(completion) % 2)


class Lengths(Characters):
    """A completion's text is as long as its tokens are many."""

    def decode(self, ids, skip_special_tokens=False):
        return "x" * len(ids)


def take_step(name, monkeypatch, verify, model, reference, optimizer, nats=0.0, G=4, **flags):
    """A training step on two minibatches of 24 completions; what it logs. The sampler's log-probs
    differ by `nats` from those of token_logprobs."""
    module = script(name)

    def generate(model, prompts, num_samples, max_new_tokens, temperature):
        batch = batch_of(model, prompts, LENGTHS)
        logprobs = module.token_logprobs(model, batch, temperature).detach()
        batch["sampled_logprobs"] = logprobs - nats * batch["mask"]
        return batch | {"row": torch.arange(24)}

    monkeypatch.setattr(module, "generate", generate)
    reward_by(monkeypatch, module, verify)
    flags = {"beta": 0.1, "num_minibatches": 2, "micro_batch_size": 4} | flags
    args = module.Args(prompts_per_step=24 // G, group_size=G, **flags)
    problems = [(f"{i}+{3 * i}", str(i)) for i in range(24 // G)]
    return module.train_step(model, reference, Lengths(), optimizer, problems, 1, args)


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_epochs_over_a_rollout(monkeypatch, name):
    """Groups stay whole, and each is used once per epoch, in an order of its own. log π_old comes
    from one pass as in training, before the first optimizer step, so the first ratios are 1, and
    it stays as it was. What is logged of the sampler's log-probs counts tokens alone."""
    module, (model, reference) = script(name), [random_model("qwen2", 50) for _ in "12"]
    steps = calls_of(monkeypatch, module, "train_minibatch")
    passes = calls_of(monkeypatch, module, "batch_logprobs")
    bounds = {"clip_low": 3e-4, "clip_high": 4e-4}  # those of GSPO's paper
    flags = {key: value for key, value in bounds.items() if hasattr(module.Args, key)}
    flags |= {"num_minibatches": 4, "update_epochs": 3, "micro_batch_size": 5}
    flags |= {"nats": 0.01, "temperature": 0.7}
    start = model, reference, torch.optim.SGD(model.parameters(), lr=0.3)
    rewards = itertools.count()
    metrics = take_step(name, monkeypatch, lambda *_: next(rewards), *start, G=2, **flags)

    assert [args[0] for args, _ in passes] == [model, reference]
    assert metrics["kl"] == 0 and metrics[GAP] == pytest.approx(0.01, abs=2e-3)
    first = steps[0][1]
    assert first["grad_norm"] > 0 and first["clipfrac"] == 0 and first["approx_kl"] < 1e-8
    batches = [args[2] for args, _ in steps]
    assert [len(batch["row"]) for batch in batches] == [6] * 12
    rows = torch.stack([batch["row"] for batch in batches]).view(3, 12, 2)
    assert (rows[:, :, 0] % 2 == 0).all() and torch.equal(rows[:, :, 1], rows[:, :, 0] + 1)
    orders = rows[:, :, 0].tolist()
    assert all(sorted(order) == list(range(0, 24, 2)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != sorted(orders[2])  # of 12! orders
    for key in batches[0].keys() - {"prompt_ids", "prompt_mask"}:
        values = torch.cat([batch[key] for batch in batches]).view(3, 24, -1)
        a, b, c = (values[i][rows[i].flatten().argsort()] for i in range(3))
        assert torch.equal(a, b) and torch.equal(a, c), key


@pytest.mark.parametrize("value", [0.0, 0.7, -7000.7])
@pytest.mark.parametrize("name", ["grpo_llm", "rloo_llm"])
def test_equal_rewards_move_nothing(monkeypatch, name, value):
    """Weights and Adam's momentum stay as they are; Adam would turn any noise into a full step."""
    model, reference = (random_model("qwen2", 50) for _ in "12")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    first = take_step(name, monkeypatch, by_length, model, reference, optimizer)
    assert first["grad_norm"] > 0
    if name == "rloo_llm":  # its KL is a reward: without a KL, rewards are equal
        reference.load_state_dict(model.state_dict())
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
    start = (lambda *_: value, model, reference, optimizer)
    metrics = take_step(name, monkeypatch, *start, G=8, num_minibatches=1)  # a mean of 8 is rounded
    after = [model.state_dict(), optimizer.state_dict()["state"]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert metrics["reward"] == pytest.approx(value)
    assert not {"loss", "grad_norm", "approx_kl", "clipfrac"} & set(metrics)


@pytest.mark.parametrize("name", ["rloo_llm", "grpo_llm"])
def test_the_kl_is_in_the_reward_of_rloo_and_not_of_grpo(name, monkeypatch):
    """The verifier rewards nothing, and the reference is 0.2 nats away on each token. So RLOO takes
    a step. GRPO takes none, and logs k3 of log π_ref − log π = −0.2."""
    module, model = script(name), random_model()

    def batch_logprobs(policy, batch, args):
        return batch["sampled_logprobs"] - 0.2 * batch["mask"] * (policy is None)

    calls = calls_of(monkeypatch, module, "compute_advantages")
    monkeypatch.setattr(module, "batch_logprobs", batch_logprobs)
    start = (lambda *_: 0.0, model, None, torch.optim.SGD(model.parameters(), lr=0.0))
    metrics = take_step(name, monkeypatch, *start, beta=0.5)
    ((rewards, _), _), *_ = calls
    in_reward = name == "rloo_llm"
    expected = -0.5 * 0.2 * torch.tensor(LENGTHS).view(6, 4) * in_reward
    torch.testing.assert_close(rewards, expected, rtol=1e-4, atol=1e-5)
    kl = 0.2 if in_reward else math.exp(-0.2) + 0.2 - 1
    assert metrics["kl"] == pytest.approx(kl, rel=1e-3) and ("grad_norm" in metrics) == in_reward

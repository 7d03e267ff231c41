"""The three functions of each method, its loss and its gradient, against closed forms, loops and
enumeration."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import random_model, script

grpo = script("grpo_llm")
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def ragged(seed: int, B: int = 7, T: int = 9):
    """Random log-probs, ratios on both sides of the clip band, advantages of both signs, ragged
    masks."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    mask = (torch.arange(T) < lengths[:, None]).double()
    old = -3 * torch.rand(B, T, generator=g, dtype=torch.double) * mask
    logprobs = old + 0.4 * torch.randn(B, T, generator=g, dtype=torch.double) * mask
    advantages = torch.randn(B, generator=g, dtype=torch.double)
    return logprobs.requires_grad_(), old, advantages, mask


def loop_objective(logprobs, old, advantages, mask, args):
    """GRPO's objective as the paper's sums:
    a loop over sequences and tokens, in plain Python floats of autograd."""
    total = 0.0
    for i in range(len(mask)):
        length = int(mask[i].sum())
        sequence = 0.0
        for t in range(length):
            ratio = torch.exp(logprobs[i, t] - old[i, t])
            clipped = min(max(ratio.item(), 1 - args.clip_low), 1 + args.clip_high)
            free, bound = ratio * advantages[i], clipped * advantages[i].item()
            sequence = sequence + (free if free.item() <= bound else bound)
        total = total + sequence / (
            length if args.length_norm == "response" else args.max_new_tokens
        )
    return total / len(mask)


def objective(module, logprobs, old, advantages, mask, args):
    return (
        module.token_weights(mask, args) * module.surrogate(logprobs, old, advantages, mask, args)
    ).sum()


# --------------------------------------------------------------------------------------- advantages


def test_advantages_worked_example():
    rewards = torch.tensor([[0.0, 0, 1, 0]])
    torch.testing.assert_close(
        grpo.compute_advantages(rewards, grpo.Args()),
        torch.tensor([[-0.5, -0.5, 1.5, -0.5]]),
        rtol=0,
        atol=1e-3,
    )
    torch.testing.assert_close(
        grpo.compute_advantages(rewards, grpo.Args(scale_rewards=False)),
        torch.tensor([[-0.25, -0.25, 0.75, -0.25]]),
    )


@pytest.mark.parametrize("value", [0.0, 1.0, 0.35, 0.1, -7.3])
@pytest.mark.parametrize("scale", [True, False])
def test_equal_rewards_give_exactly_zero(value, scale):
    for G in (2, 3, 7, 8):
        assert (
            grpo.compute_advantages(torch.full((3, G), value), grpo.Args(scale_rewards=scale)) == 0
        ).all()


def test_small_spread_stays_small():
    advantages = grpo.compute_advantages(torch.tensor([[0.35] * 7 + [0.6]]), grpo.Args())
    assert advantages.abs().max() < 3 and advantages.isfinite().all()


def test_groups_are_rows():
    """P = 2 prompts of G = 3 samples: taking means over the wrong axis changes every number."""
    rewards = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
    expected = [
        [(r - sum(row) / 3) / (torch.tensor(row).std().item() + 1e-4) for r in row]
        for row in rewards.tolist()
    ]
    torch.testing.assert_close(
        grpo.compute_advantages(rewards, grpo.Args()), torch.tensor(expected)
    )


# -------------------------------------------------------------------------- loss value and gradient


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length_norm", ["response", "constant"])
def test_objective_and_gradient_against_loops(seed, length_norm):
    args = grpo.Args(length_norm=length_norm, clip_low=0.15, clip_high=0.3)
    tensors = ragged(seed)
    value, expected = objective(grpo, *tensors, args), loop_objective(*tensors, args)
    torch.testing.assert_close(value, expected, **EXACT)
    (gradient,), (wanted,) = (torch.autograd.grad(x, tensors[0]) for x in (value, expected))
    torch.testing.assert_close(gradient, wanted, **EXACT)


def test_invariant_to_padding_and_order():
    args = grpo.Args()
    logprobs, old, advantages, mask = ragged(0)
    value = objective(grpo, logprobs, old, advantages, mask, args)
    gradient = torch.autograd.grad(value, logprobs)[0]
    # a ratio of infinity, were it ever used
    junk = torch.full((len(mask), 4), 1e3, dtype=torch.double)
    wide = [
        torch.cat([x, fill], 1) for x, fill in ((logprobs, junk), (old, -junk), (mask, 0 * junk))
    ]
    torch.testing.assert_close(
        objective(grpo, wide[0], wide[1], advantages, wide[2], args), value, **EXACT
    )
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(0))
    shuffled = objective(grpo, logprobs[order], old[order], advantages[order], mask[order], args)
    torch.testing.assert_close(shuffled, value, **EXACT)
    torch.testing.assert_close(torch.autograd.grad(shuffled, logprobs)[0], gradient, **EXACT)


def test_weights_by_hand():
    """Two completions of 1 and 3 tokens, then the same twice over:
    the batch size must not act as a learning rate."""
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    torch.testing.assert_close(
        grpo.token_weights(mask, grpo.Args()), torch.tensor([[1 / 2, 0, 0], [1 / 6] * 3])
    )
    dr = grpo.Args(length_norm="constant", max_new_tokens=5)
    torch.testing.assert_close(grpo.token_weights(mask, dr), mask / 10)
    torch.testing.assert_close(grpo.token_weights(mask.repeat(2, 1), dr), mask.repeat(2, 1) / 20)


@pytest.mark.parametrize(
    "ratio,advantage,clipped",
    [
        (1.3, 1.0, True),
        (1.3, -1.0, False),
        (0.7, 1.0, False),
        (0.7, -1.0, True),
        (1.1, 1.0, False),
        (0.9, -1.0, False),
    ],
)
def test_gradient_is_zero_exactly_where_clipped(ratio, advantage, clipped):
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    value = grpo.surrogate(
        logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), grpo.Args()
    )
    gradient = torch.autograd.grad(value.sum(), logprobs)[0].item()
    assert (gradient == 0) == clipped
    if not clipped:
        assert gradient == pytest.approx(ratio * advantage)


# ----------------------------------------------------------------------------------------------- KL


def exact_kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize(
    "policy,ref", [((0.9, 0.1), (0.5, 0.5)), ((0.2, 0.3, 0.5), (0.6, 0.3, 0.1))]
)
def test_k3_averages_to_the_exact_kl(policy, ref):
    k3 = grpo.kl_k3(torch.tensor(policy).double().log(), torch.tensor(ref).double().log())
    assert (k3 >= 0).all()
    assert (torch.tensor(policy) * k3).sum().item() == pytest.approx(
        exact_kl(policy, ref), abs=1e-7
    )


def test_k3_is_zero_only_where_equal():
    x = torch.linspace(-4, -0.1, 9)
    assert (
        (grpo.kl_k3(x, x) == 0).all()
        and (grpo.kl_k3(x, x + 0.3) > 0).all()
        and (grpo.kl_k3(x, x - 0.3) > 0).all()
    )


# ------------------------------------------------------------------------------- one optimizer step


def rollout_batch(model, args, seed=3):
    """A rollout of a random model that has moved since, with made-up advantages and reference."""
    torch.manual_seed(seed)
    batch = grpo.generate(model, [[3, 4], [5, 6, 7, 8], [9]], 4, 8, args.temperature)
    batch["advantages"] = torch.randn(12)
    batch["ref_logprobs"] = (batch["old_logprobs"] - 0.1 * torch.rand(batch["mask"].shape)) * batch[
        "mask"
    ]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return batch


def before_clipping(model, stats):
    """The gradient as it was before its norm was brought down to 1."""
    return torch.cat([p.grad.flatten() for p in model.parameters()]) * max(
        1.0, stats["grad_norm"] + 1e-6
    )


def step_gradients(batch, args):
    model = random_model("llama")
    rollout_batch(model, args)  # moves the weights in the same way each time
    stats = grpo.train_minibatch(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, args)
    return before_clipping(model, stats), stats


ARGS = grpo.Args(temperature=0.7, beta=0.1)


@pytest.mark.parametrize("size", [1, 3, 5, 12, 100])
def test_micro_batches_change_nothing(size):
    batch = rollout_batch(random_model("llama"), ARGS)
    assert len(set(batch["mask"].sum(1).tolist())) > 2, (
        "lengths must differ, or a wrong normalisation stays hidden"
    )
    whole, stats = step_gradients(batch, ARGS)
    split, split_stats = step_gradients(batch, replace(ARGS, micro_batch_size=size))
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)
    assert split_stats == pytest.approx(dict(stats), rel=1e-4)


def test_step_gradient_against_finite_differences():
    """The whole chain, forward pass to weights: d loss / d θ in a random direction, in float64."""
    model = random_model("qwen2").double()
    args = replace(ARGS, temperature=0.7)
    batch = rollout_batch(model, args)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}

    def loss():  # an independent reading of the model: one unpadded sequence after the other
        total = 0.0
        for i in range(len(batch["mask"])):
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()]
            completion = batch["completion_ids"][i][batch["mask"][i].bool()]
            logits = (
                model(torch.cat([prompt, completion])[None]).logits[0].double() / args.temperature
            )
            logits[:, 0] = -math.inf  # the pad token
            for t, token in enumerate(completion):
                logp = logits[len(prompt) + t - 1].log_softmax(-1)[token]
                ratio, A = (logp - batch["old_logprobs"][i, t]).exp(), batch["advantages"][i]
                d = batch["ref_logprobs"][i, t] - logp
                gain = torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A) - args.beta * (
                    d.exp() - d - 1
                )
                total = total - gain / (len(completion) * len(batch["mask"]))
        return total

    stats = grpo.train_minibatch(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, args)
    assert stats["clip_ratio"] > 0 and stats["approx_kl"] > 0
    with torch.no_grad():
        assert stats["loss"] == pytest.approx(loss().item(), abs=1e-5)
        torch.manual_seed(0)
        directions = [torch.randn_like(p) for p in model.parameters()]
        slope = (
            before_clipping(model, stats).dot(torch.cat([d.flatten() for d in directions])).item()
        )
        values = []
        for h in (1e-4, -1e-4):
            for p, d in zip(model.parameters(), directions, strict=True):
                p += h * d
            values.append(loss().item())
            for p, d in zip(model.parameters(), directions, strict=True):
                p -= h * d
    assert slope == pytest.approx((values[0] - values[1]) / 2e-4, rel=2e-2)


def test_gradients_do_not_pile_up_over_steps():
    model = random_model("llama")
    batch, optimizer = rollout_batch(model, ARGS), torch.optim.SGD(model.parameters(), lr=0.0)
    norms = [grpo.train_minibatch(model, optimizer, batch, ARGS)["grad_norm"] for _ in range(2)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_clip_ratio_counts_clipped_tokens():
    batch = rollout_batch(random_model("llama"), ARGS)
    model = random_model("llama")
    rollout_batch(model, ARGS)
    logprobs = grpo.token_logprobs(model, batch, ARGS.temperature)
    ratio, A, mask = (
        (logprobs - batch["old_logprobs"]).exp(),
        batch["advantages"][:, None],
        batch["mask"].bool(),
    )
    clipped = ((ratio > 1.2) & (A > 0) | (ratio < 0.8) & (A < 0)) & mask
    assert 0 < clipped.sum() < mask.sum()
    assert step_gradients(batch, ARGS)[1]["clip_ratio"] == pytest.approx(
        (clipped.sum() / mask.sum()).item()
    )


def test_clip_ratio_of_gspo_counts_the_tokens_of_clipped_completions():
    """Its objective is one number for a whole row, but padding is no token."""
    gspo = script("gspo_llm")
    args = gspo.Args(temperature=0.7)
    batch = rollout_batch(random_model("llama"), ARGS)
    model = random_model("llama")
    rollout_batch(model, ARGS)
    logprobs, clipped = gspo.token_logprobs(model, batch, args.temperature), 0
    lengths = batch["mask"].sum(1).int().tolist()
    for i, length in enumerate(lengths):
        log_ratio = sum(
            (logprobs[i, t] - batch["old_logprobs"][i, t]).item() for t in range(length)
        )
        ratio, A = math.exp(log_ratio / length), batch["advantages"][i].item()
        if (A > 0 and ratio > 1 + args.clip_high) or (A < 0 and ratio < 1 - args.clip_low):
            clipped += length
    assert 0 < clipped < sum(lengths) < batch["mask"].numel()
    stats = gspo.train_minibatch(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, args)
    assert stats["clip_ratio"] == pytest.approx(clipped / sum(lengths))


# -------------------------------------------------------------------------------------- enumeration


class Table:
    """A policy over 3 tokens and completions of 2, as a table of logits:
    small enough to enumerate every group."""

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.theta = torch.randn(3 + 9, generator=g, dtype=torch.double, requires_grad=True)
        self.completions = list(product(range(3), repeat=2))
        self.rewards = torch.tensor([0.0, 1, 0, 0.3, 0, 1, 2, 0, 0], dtype=torch.double)

    def logprobs(self):
        """(9, 2) log π of both tokens of each completion."""
        first, second = self.theta[:3].log_softmax(0), self.theta[3:].view(3, 3).log_softmax(1)
        return torch.stack([torch.stack([first[a], second[a, b]]) for a, b in self.completions])

    def true_gradient(self):
        return torch.autograd.grad((self.logprobs().sum(1).exp() * self.rewards).sum(), self.theta)[
            0
        ]

    def expected_gradient(self, module, args, K=3):
        """The estimator's gradient, averaged over all 9^K groups with their probabilities, nothing
        sampled."""
        logprobs = self.logprobs()
        probability = logprobs.sum(1).exp().detach()
        total = torch.zeros_like(self.theta)
        for group in product(range(9), repeat=K):
            group = list(group)
            advantages = module.compute_advantages(self.rewards[group][None], args).flatten()
            taken, mask = logprobs[group], torch.ones(K, 2, dtype=torch.double)
            value = objective(module, taken, taken.detach(), advantages, mask, args)
            total += (
                probability[group].prod()
                * torch.autograd.grad(value, self.theta, retain_graph=True)[0]
            )
        return total


def test_mean_baseline_shrinks_the_gradient_by_a_known_factor():
    """The sample itself is in its baseline:
    (K − 1)/K of the policy gradient, and 1/length from the length norm."""
    table = Table()
    estimate = table.expected_gradient(grpo, grpo.Args(scale_rewards=False))
    torch.testing.assert_close(estimate, table.true_gradient() * (2 / 3) / 2, rtol=1e-6, atol=1e-9)


def test_z_score_is_not_the_policy_gradient():
    table = Table()
    estimate, truth = table.expected_gradient(grpo, grpo.Args()), table.true_gradient()
    assert torch.cosine_similarity(estimate, truth, dim=0) < 0.99

"""THEORY.md's statements by their numbers, to 1e-9 for three policies, and what the page prints."""

import doctest
import itertools
import math
import re
from functools import partial
from math import comb, inf
from pathlib import Path

import enumeration as toy
import pytest
import torch
from enumeration import LENGTHS, MASK, REF, J, R, grad, kl, logprobs, probs, pushes, scores

import cispo_llm
import grpo_llm
import gspo_llm
import rloo_llm
import trpo

DRAWN = 0.7 * torch.randn(2, 21, generator=torch.Generator().manual_seed(0)).double()
each = pytest.mark.parametrize("theta", [toy.THETA, *DRAWN], ids=["page", "a", "b"])
close = partial(torch.testing.assert_close, rtol=0, atol=1e-9)
# The seven texts that may go on, an answer's row for each next token, and the token's place.
TEXTS = sorted({answer[:t] for answer in toy.ANSWERS for t in range(len(answer))})
NEXT = [[[a[: len(s) + 1] for a in toy.ANSWERS].index((*s, v)) for v in range(3)] for s in TEXTS]
AT = NEXT, torch.tensor([[len(s)] for s in TEXTS])


def reached(theta):  # d(s), the chance of each text
    p = probs(theta)
    return torch.stack([toy.SAME[len(s)][rows[0]] @ p for s, rows in zip(TEXTS, NEXT, strict=True)])


def along(theta, weights):  # Σ_o Σ_t weight ∇log π(o_t)
    return torch.einsum("it,itw->w", weights.expand_as(MASK), scores(theta))


def advantages(theta):  # Q − V of each token
    return toy.values(theta).diff(dim=1) * MASK


def next_kl(a, b):  # KL of the next token, at each text
    a, b = logprobs(a)[AT], logprobs(b)[AT]
    return (a.exp() * (a - b)).sum(1)


def test_the_page_s_numbers():
    page = (Path(__file__).parent / "learn/THEORY.md").read_text()
    shown = "".join(re.findall(r"^```pycon\n(.*?)^```$", page, re.S | re.M))
    parsed = doctest.DocTestParser().get_doctest(shown, {}, "THEORY", None, 0)
    assert doctest.DocTestRunner().run(parsed).failed == 0


@each
def test_1_to_4_one_gradient(theta):
    p, right, grad_J = probs(theta), J(theta), grad(J, theta)
    V, g = toy.values(theta), scores(theta).sum(1)
    close((p * R) @ g, grad_J)  # 1, over answers, and over texts and next tokens
    dQ = reached(theta)[:, None] * V[AT[0], AT[1] + 1]
    close(grad(lambda x: (dQ * logprobs(x)[AT].exp()).sum(), theta), grad_J)
    close(along(theta, p[:, None] * toy.values(REF)[:, :-1].cos()), 0 * grad_J)  # 2, any b
    best = pushes(theta) @ R / pushes(theta).sum()
    for b in (0.7, best, 2 * best):
        close(toy.noise(theta, 0) - toy.noise(theta, b), b * (2 * best - b) * pushes(theta).sum())
    few = torch.tensor([0.4] + 1000 * [0.0006]).double()  # a free softmax, its first answer right
    push, first = few * (1 - 2 * few + few @ few), (few > 0.1).double()  # π ‖g‖², and R
    spread = [push @ (first - b) ** 2 - ((first - 0.4) * few).square().sum() for b in (0.4, 0)]
    assert (spread[0] / spread[1]).item() == pytest.approx(1.22, abs=0.005)
    close((p * R / right) @ g, grad(lambda x: J(x).log(), theta))  # 3
    new, args = logprobs(theta), rloo_llm.Args()
    weights = rloo_llm.token_weights(MASK, args)
    terms, _ = rloo_llm.surrogate(new, new, R, MASK, args)  # R as the advantage
    close((weights * terms).sum(), new[R > 0].sum() / MASK.sum())  # minus the cross-entropy
    close(toy.gae(V, 0.0) * MASK, advantages(theta))  # 4
    for critic, lam in ((V, 0.0), (V, 0.5), (V, 1.0), (toy.values(REF), 1.0)):
        close(along(theta, p[:, None] * toy.gae(critic, lam)), grad_J)
    close(toy.gae(0 * V, 0.95)[:, 0], R * 0.95 ** (LENGTHS - 1))  # a critic that says 0


@each
def test_5_long_answers(theta):
    close(torch.einsum("i,itw->", probs(theta), scores(theta).square()), pushes(theta).sum())
    for T in (1, 3, 6):  # coins: a weight for each, heads with its sigmoid
        coins = torch.tensor(list(itertools.product((0.0, 1.0), repeat=T))).double()
        slopes = (coins[:, :1] - 0.5) * (coins - 0.5)
        mean = grad(lambda w: w.sigmoid()[0], torch.zeros(T).double())
        close(slopes.mean(0), mean)
        signal = mean.square().sum()
        close(slopes.square().sum(1).mean() - signal, (T - 1) * signal)


# Each token weighs 1 / G.
PLAIN = grpo_llm.Args(scale_rewards=False, length_norm="constant", max_new_tokens=1)
LOO = partial(rloo_llm.compute_advantages, args=rloo_llm.Args())
STD = partial(grpo_llm.compute_advantages, args=grpo_llm.Args())
CENTERED = partial(grpo_llm.compute_advantages, args=PLAIN)


def per_mean(rewards):
    return rewards / rewards.mean(1, keepdim=True).clamp(min=1e-9)


def per_std(rewards):  # without the scripts' 1e-4
    return CENTERED(rewards) / rewards.std(1, keepdim=True).clamp(min=1e-9)


def two_draws(rewards):
    """Of each answer: the mean reward of draws of two with it, minus that of all such draws."""
    G, wrong = rewards.shape[1], (1 - rewards).sum(1, keepdim=True)
    fail = wrong * (wrong - 1) / (G * (G - 1))
    return torch.where(rewards > 0, fail, fail - (wrong - 1) / (G - 1))


@each
@pytest.mark.parametrize("G", [2, 3])
def test_6_to_10_groups(theta, G):
    right, grad_J = J(theta), grad(J, theta)
    mean = partial(toy.mean_gradient, grpo_llm, PLAIN, G, theta)
    chances, gradients = toy.group_gradients(grpo_llm, PLAIN, G, theta, LOO)  # 6
    close(chances @ gradients, grad_J)
    norm = grad_J.square().sum()
    more = (right * (1 - right) * pushes(theta).sum() + norm) / (G - 1)
    close(chances @ gradients.square().sum(1) - norm, (toy.noise(theta, right) + more) / G)
    close(mean(CENTERED), (G - 1) / G * grad_J)  # 7
    for credit in (STD, per_std, two_draws):
        close(mean(credit), toy.weight(credit, G, right) * grad_J)
    inverse = [(G * (G - 1) / (K * (G - K))) ** 0.5 for K in range(1, G)]  # 1 / std_K
    tries = [comb(G - 2, j) * right**j * (1 - right) ** (G - 2 - j) for j in range(G - 1)]
    w = (1 - 1 / G) * sum(a * b for a, b in zip(inverse, tries, strict=True))
    close(mean(per_std), w * grad_J)
    terms = [(1 - right) ** k * grad_J for k in range(G)]
    close(mean(lambda x: per_mean(x) - x.amax(1, keepdim=True)), sum(terms[:-1]))  # 8
    close(mean(per_mean), sum(terms))
    close(mean(two_draws), (1 / 2 - 1 / G) * 2 * (1 - right) * grad_J)  # 9
    kept = R[torch.cartesian_prod(*[torch.arange(15)] * G)].std(1) > 0  # 10
    chances, gradients = toy.group_gradients(grpo_llm, PLAIN, G, theta, STD)
    close(chances[kept].sum(), 1 - right**G - (1 - right) ** G)
    close(chances[kept] @ gradients[kept], chances @ gradients)


@each
def test_11_length(theta):
    p, grad_J = probs(theta), grad(J, theta)
    credit, args = (R - J(theta)) / LENGTHS, grpo_llm.Args(scale_rewards=False)
    truth = grad(lambda x: (probs(x) * credit).sum(), theta)
    close(toy.mean_gradient(grpo_llm, args, 3, theta), 2 / 3 * truth)
    longer = [toy.covariance(p * x, LENGTHS, credit) for x in (R, 1 - R)]
    assert longer[0] <= 0 < longer[1]
    close(toy.mean_gradient(grpo_llm, PLAIN, 3, theta), 2 / 3 * grad_J)
    found = [toy.mean_gradient(rloo_llm, rloo_llm.Args(), G, theta) for G in (2, 3)]
    assert 0.9 < toy.cosine(found[0], grad_J) < toy.cosine(found[1], grad_J) < 1


@each
def test_12_to_14_ratios_and_trpo(theta):
    p, before, grad_J = probs(theta), J(theta), grad(J, theta)
    A, S, log_r = advantages(theta), scores(theta), lambda x: logprobs(x) - logprobs(theta)
    L, to = lambda x: (p[:, None] * log_r(x).exp() * A).sum(), theta + grad_J
    close(grad(L, theta), grad_J)  # 12
    close(J(to) - before, (probs(to)[:, None] * A).sum())
    gap = [J(theta + h * grad_J) - before - L(theta + h * grad_J) for h in (0.02, 0.01)]
    assert (gap[0] / gap[1]).item() == pytest.approx(4, rel=0.05)  # of second order
    close(along(to, p[:, None] * log_r(to).cumsum(1).exp() * advantages(to)), grad(J, to))
    whole = p * log_r(to).sum(1).exp()  # 13
    close(whole @ (scores(to).sum(1) * (R - before)[:, None]), grad(J, to))
    assert (J(to) - before - L(to)).abs() < 6 * A.abs().max() * next_kl(theta, to).max()  # 14
    F = torch.einsum("i,ia,ib->ab", p, S.sum(1), S.sum(1))
    close(torch.autograd.functional.hessian(lambda x: -(p @ log_r(x).sum(1)), theta), F)
    close(torch.einsum("i,ita,itb->ab", p, S, S), F)
    unit = torch.tensor([10.0] * 12 + [1.0] * 9).double()  # the same policy in other units
    assert torch.linalg.matrix_rank(F, rtol=1e-9) == 8
    x = trpo.conjugate_gradient(lambda v: F @ v, grad_J, 21, 1e-25)
    y = trpo.conjugate_gradient(lambda v: unit * (F @ (unit * v)), unit * grad_J, 50, 1e-25)
    close(S @ x, S @ (unit * y))
    steps = [theta + way * (0.02 / (way @ F @ way)).sqrt() for way in (x, grad_J)]
    assert J(steps[0]) > J(steps[1])


def errors(model, theta, right, mask, far):
    """Of the gradient after a plain step to this KL, with the weights 1, r, s and r_1 ⋯ r_t."""
    p, before = model(theta).sum(1).exp(), model(theta)
    reward, low, high = lambda x: model(x).sum(1).exp() @ right, 0.0, 200.0
    way = grad(reward, theta)
    for _ in range(22):
        middle = (low + high) / 2
        near = p @ (before - model(theta + middle * way)).sum(1) < far
        low, high = (middle, high) if near else (low, middle)
    to = theta + low * way
    log_r, credit, truth = model(to) - before, p * (right - p @ right), grad(reward, to)
    s = (log_r.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).expand_as(mask)
    logs = log_r * 0, log_r, s, log_r.cumsum(1)
    found = [grad(lambda x, w=w: credit @ (w.exp() * model(x)).sum(1), to) for w in logs]
    return torch.stack([(x - truth).norm() / truth.norm() for x in found])


def test_12_a_hundred_policies_and_longer_answers():
    """The page's medians: errors by weights; and the shares that r, s, r_1 ⋯ r_t take away."""
    draws = torch.Generator().manual_seed(0)
    normal = lambda n: 0.7 * torch.randn(n, generator=draws).double()  # noqa: E731
    found = torch.stack([errors(logprobs, normal(21), R, MASK, 0.05) for _ in range(100)])
    assert found.quantile(0.5, dim=0).tolist() == pytest.approx([0.26, 0.18, 0.19, 0.10], abs=0.005)
    for T, trees, by_r in ((3, 300, 0.15), (8, 100, 0.03)):
        mask, found = torch.ones(2**T, T), torch.zeros(trees, 4).double()
        for i in range(trees):  # a random half of the answers is right
            right = torch.randperm(2**T, generator=draws).double() % 2
            found[i] = errors(toy.tree(T), normal(2**T), right, mask, 0.01)
        removed = (1 - found[:, 1:] / found[:, :1]).quantile(0.5, dim=0).tolist()
        assert removed == pytest.approx([by_r, 1 / T, 0.38], abs=0.04)


@each
def test_15_to_17_clips(theta):
    p, before, grad_J = probs(theta), J(theta), grad(J, theta)
    A, to = R - before, theta + 2 * grad_J

    def surrogate(script, x, **clips):
        args, new = script.Args(**clips), logprobs(x)
        return (p[:, None] * script.surrogate(new, logprobs(theta), A, MASK, args)[0]).sum()

    clipped, off = partial(surrogate, grpo_llm), {"clip_low": inf, "clip_high": inf}
    close(grad(clipped, theta), grad_J)  # 15
    ways = torch.randn(2000, 21, generator=torch.Generator().manual_seed(1)).double()
    ways = ways - 0.9 * (ways @ grad_J)[:, None] * grad_J / grad_J.square().sum()
    points = theta + 0.6 * ways / ways.norm(dim=1, keepdim=True)
    low, high, pay = (torch.vmap(f)(points) for f in (clipped, partial(clipped, **off), J))
    assert (low < high + 1e-12).all() and ((low > clipped(theta)) & (pay < before)).any()
    other = (p[:, None] * (logprobs(to) - logprobs(theta)).exp() * advantages(theta)).sum()
    close(clipped(to, **off) - clipped(theta), other)  # plus a constant
    s = ((logprobs(to) - logprobs(theta)).sum(1) / LENGTHS).exp()  # 16
    close(grad(partial(surrogate, gspo_llm, **off), to), along(to, (p * A * s)[:, None]))
    cispo = partial(surrogate, cispo_llm)  # 17
    close(grad(partial(cispo, clip_high=inf), to), grad(partial(clipped, **off), to))
    r = (logprobs(to) - logprobs(theta)).exp()
    close(grad(partial(cispo, clip_high=0.2), to), along(to, (p * A)[:, None] * r.clamp(max=1.2)))


@each
def test_18_to_20_kl_and_entropy(theta):
    p, right = probs(theta), J(theta)
    g, whole = scores(theta).sum(1), (logprobs(theta) - logprobs(REF)).sum(1)
    k3 = lambda x: (p[:, None] * grpo_llm.kl_k3(logprobs(x), logprobs(REF))).sum()  # noqa: E731
    close(k3(theta), kl(theta, REF))  # 18
    close(p @ g, torch.zeros(21).double())  # ∇k1
    close((p * whole) @ g, grad(lambda x: kl(x, REF), theta))  # k1 in the reward, and ∇k2
    close((p * (1 - (-whole).exp())) @ g, grad(lambda x: kl(REF, x), theta))  # k3 of answers
    close(grad(k3, theta), grad(lambda x: reached(theta) @ next_kl(REF, x), theta))  # of tokens
    best = probs(REF) * (R / 0.3).exp()  # 19
    value = lambda q: (q * (R - 0.3 * (q / probs(REF)).log())).sum()  # noqa: E731
    close(value(best / best.sum()), 0.3 * best.sum().log())
    close(0.3 * best.sum().log() - value(p), 0.3 * (p * (p * best.sum() / best).log()).sum())
    start = (probs(REF) * R).sum()  # where k3 in the loss ends
    q = (0.7 + (0.7**2 + 4 * 0.3 * start) ** 0.5) / 2
    x, ref = torch.stack([q, 1 - q]).log(), torch.stack([start, 1 - start]).log()
    pull = grad(lambda z: (x.exp() * grpo_llm.kl_k3(z.log_softmax(0), ref)).sum(), x)
    close(grad(lambda z: z.softmax(0)[0], x), 0.3 * pull)
    close(grad(lambda x: -(probs(x) * probs(x).log()).sum(), theta), -(p * p.log()) @ g)  # 20
    free = grad(lambda z: -(z.softmax(0) * z.log_softmax(0)).sum(), p.log())
    for push in (R - right, p * (R - right)):  # natural and plain step of a free softmax
        close(free @ push, -toy.covariance(p, p.log(), push))


def test_21_error_bars_and_pass_at_k():
    """Two questions, drawn out of three, with two answers each; then pass@k from five answers."""
    p, m, n = torch.tensor([0.1, 0.5, 0.8]).double(), 2, 2
    rows = []
    for q in itertools.product(p, repeat=n):
        for rights in itertools.product(range(m + 1), repeat=n):
            pairs = zip(q, rights, strict=True)
            one = [comb(m, c) * x**c * (1 - x) ** (m - c) / len(p) for x, c in pairs]
            shares = torch.tensor(rights).double() / m
            rows.append(torch.stack([math.prod(one), shares.mean(), shares.var() / n]))
    chances, means, bars = torch.stack(rows).T
    formula = (p.var(correction=0) + (p * (1 - p)).mean() / m) / n
    close(chances @ means**2 - (chances @ means) ** 2, formula)
    close(chances @ bars, formula)
    for k, x in itertools.product((1, 2, 4, 5), (0.2, 0.7)):
        fail = sum(comb(5, c) * x**c * (1 - x) ** (5 - c) * comb(5 - c, k) for c in range(6))
        assert fail / comb(5, k) == pytest.approx((1 - x) ** k, abs=1e-9)

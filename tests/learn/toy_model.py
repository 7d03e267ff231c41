"""A language model of three tokens and 21 weights, for THEORY.md. Token 0 ends a completion, and so
does a third token. That leaves 15 completions, so a mean over them, or over groups of them, is a
sum and not an estimate. A completion is right, R = 1, if its tokens sum to 1 or 4."""

import math

import torch

import ppo

END, TOKENS, LIMIT = 0, 3, 3


def continuations(text=()):
    """All completions that begin with this text."""
    if text and (text[-1] == END or len(text) == LIMIT):
        return [text]
    return [whole for token in range(TOKENS) for whole in continuations((*text, token))]


COMPLETIONS = continuations()
LENGTHS = torch.tensor([len(completion) for completion in COMPLETIONS]).double()
MASK = (torch.arange(LIMIT) < LENGTHS[:, None]).double()
IDS = torch.tensor([completion + (0,) * (LIMIT - len(completion)) for completion in COMPLETIONS])
BEFORE = torch.cat([torch.full((len(IDS), 1), TOKENS), IDS[:, :-1]], 1)  # 3: the prompt
R = (IDS.sum(1) % 3 == 1).double()
SAME = [(IDS[:, None, :t] == IDS[None, :, :t]).all(-1).double() for t in range(LIMIT + 1)]

THETA = 0.8 * torch.arange(0, 105, 5).double().sin()  # any other 21 numbers would do
REF = 0.8 * torch.arange(0, 105, 5).double().cos()


def distributions(theta):
    """log π of every possible token at each place of each completion, (15, 3, 3). A logit is a
    weight for the token before it, plus a weight for its position."""
    logits = theta[:12].view(4, 3)[BEFORE] + theta[12:].view(3, 3)[torch.arange(LIMIT)]
    return logits.log_softmax(-1)


def logprobs(theta):
    """log π of each token of each completion, (15, 3), and 0 on padding, as in the scripts."""
    return distributions(theta).gather(-1, IDS[..., None]).squeeze(-1) * MASK


def probs(theta):
    """π(o) of each completion, (15,)."""
    return logprobs(theta).sum(1).exp()


def J(theta):
    """The mean reward, which is also the probability of a right completion."""
    return (probs(theta) * R).sum()


def kl(theta, other):
    """KL(π ‖ other) of whole completions."""
    return (probs(theta) * (logprobs(theta) - logprobs(other)).sum(1)).sum()


def grad(function, theta):
    theta = theta.clone().requires_grad_()
    return torch.autograd.grad(function(theta), theta)[0]


def scores(theta):
    """∇log π of each token of each completion, (15, 3, 21). Their sum over t is g = ∇log π(o)."""
    return torch.autograd.functional.jacobian(logprobs, theta)


def mean_push(weights, old=THETA, new=None):
    """E[Σ_t weight_t ∇log π_new(o_t)] over π_old's completions: weights (15, 3) or (15, 1)."""
    slopes = scores(old if new is None else new)
    return torch.einsum("i,it,itw->w", probs(old), weights.expand_as(MASK), slopes)


def pushes(theta):
    """π ‖g‖² of each completion, (15,). Their sum is E‖g‖²."""
    return probs(theta) * scores(theta).sum(1).square().sum(1)


def logit_pushes(theta):
    """As pushes, but ∇log π is with respect to the logits of each token, and not the weights: a
    forward pass is enough. (15,)"""
    chances = distributions(theta).exp()
    of_tokens = 1 - 2 * logprobs(theta).exp() + chances.square().sum(-1)
    return probs(theta) * (of_tokens * MASK).sum(1)


def noise(theta, b):
    """The variance of the gradient of one completion with the baseline b, summed over weights."""
    return (pushes(theta) * (R - b) ** 2).sum() - grad(J, theta).square().sum()


def values(theta):
    """V of each completion's text before token t, (15, 4): the mean reward of all that may follow.
    One column later it is Q of that token, and in the end R."""
    return torch.stack([same @ (probs(theta) * R) / (same @ probs(theta)) for same in SAME], 1)


def trained(theta, until):
    """θ after plain steps along ∇J, until J has reached this."""
    while J(theta) < until:
        theta = theta + 0.5 * grad(J, theta)
    return theta


def gae_bias_and_noise(critic, lambdas):
    """Of the gradient of one completion with the advantages of ppo.py's GAE, with γ = 1: the errors
    of its mean, relative to ‖∇J‖, and its variances, one of each for every λ. Completions are
    episodes, and critic is as V."""
    last = (torch.arange(LIMIT) == LENGTHS[:, None] - 1).T
    rollout = {"rewards": R * last, "done": last, "terminated": last}
    p, grad_J = probs(THETA), grad(J, THETA)
    biases, variances = [], []
    for gae_lambda in lambdas:
        args = ppo.Args(gamma=1.0, gae_lambda=gae_lambda)
        A, _ = ppo.compute_advantages(rollout, critic[:, :-1].T, critic[:, 1:].T, args)
        gradients = torch.einsum("ti,itw->iw", A, scores(THETA))
        mean = p @ gradients
        biases.append((mean - grad_J).norm() / grad_J.norm())
        variances.append(p @ gradients.square().sum(1) - mean @ mean)
    return biases, variances


def group_gradients(script, size, equal_weights=False, **flags):
    """Of every group of this size: its probability, and the gradient of the script's J at π_old,
    with the script's weights of tokens, or 1 / size for each."""
    args = script.Args(**flags)
    rows = torch.cartesian_prod(*[torch.arange(len(COMPLETIONS))] * size)
    A = script.compute_advantages(R[rows], args)
    new = logprobs(THETA)[rows].requires_grad_()

    def objective(new, A, mask):
        if script.__name__ == "rloo_llm":  # it has no ratio
            tokens = script.surrogate(new, A)
        else:
            tokens, _ = script.surrogate(new, new.detach(), A, mask, args)
        weights = mask / size if equal_weights else script.token_weights(mask, args)
        return (weights * tokens).sum()

    total = torch.vmap(objective)(new, A, MASK[rows]).sum()
    slopes = torch.autograd.grad(total, new)[0]
    gradients = torch.einsum("git,gitw->gw", slopes, scores(THETA)[rows])
    return probs(THETA)[rows].prod(1), gradients


def mean_gradient(script, size, **options):
    chances, gradients = group_gradients(script, size, **options)
    return chances @ gradients


def std_weight(p, G):
    """w(p) of THEORY.md, 6: B + 1 of a group's G completions are right."""
    total = 0.0
    for B in range(G - 1):
        std = math.sqrt((B + 1) * (G - B - 1) / (G * (G - 1)))
        total += math.comb(G - 2, B) * p**B * (1 - p) ** (G - 2 - B) / std
    return (1 - 1 / G) * total


def surrogate_gradient(script, theta, **clips):
    """The gradient at theta of the script's surrogate, summed over tokens, with A = R − p: its mean
    over all completions of the old policy, THETA."""
    args, A = script.Args(**clips), R - J(THETA)

    def objective(theta):
        tokens, _ = script.surrogate(logprobs(theta), logprobs(THETA), A, MASK, args)
        return (probs(THETA)[:, None] * tokens).sum()

    return grad(objective, theta)


def kl_pulls(k, ref):
    """The mean gradient at THETA of k(log π, log π_ref) as a loss: of whole completions, and summed
    over tokens. The completions are π's, and held fixed."""
    p = probs(THETA)
    whole = grad(lambda x: p @ k(logprobs(x).sum(1), logprobs(ref).sum(1)), THETA)
    return whole, grad(lambda x: p @ k(logprobs(x), logprobs(ref)).sum(1), THETA)


def cosine(a, b):
    return (a @ b / (a.norm() * b.norm())).item()


def covariance(p, a, b):
    """Among completions whose probabilities are p / Σp."""
    p = p / p.sum()
    return (p * a * b).sum() - (p * a).sum() * (p * b).sum()


def equal(a, b):
    """Whether two numbers or tensors agree to nine digits."""
    return torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=0, atol=1e-9)


def show(*things):
    print(*[x if isinstance(x, str) else f"{round(float(x), 3) + 0.0:.3f}" for x in things])

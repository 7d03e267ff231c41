"""A language model of three tokens and 21 weights. Token 0 ends an answer, and so does a third
token, so there are 15 answers, and a mean over them, or over groups of them, is a sum, no estimate.
An answer is right, R = 1, if its tokens sum to 1 or 4. For THEORY.md and test_theory.py."""

import math

import torch

import ppo

END, TOKENS, LIMIT = 0, 3, 3


def grow(text=()):  # all answers that begin so
    if text and (text[-1] == END or len(text) == LIMIT):
        return [text]
    return [answer for token in range(TOKENS) for answer in grow((*text, token))]


ANSWERS = grow()
LENGTHS = torch.tensor([len(answer) for answer in ANSWERS]).double()
MASK = (torch.arange(LIMIT) < LENGTHS[:, None]).double()
IDS = torch.tensor([answer + (0,) * (LIMIT - len(answer)) for answer in ANSWERS])
BEFORE = torch.cat([torch.full((len(ANSWERS), 1), TOKENS), IDS[:, :-1]], 1)  # 3: the prompt
R = (IDS.sum(1) % 3 == 1).double()
SAME = [(IDS[:, None, :t] == IDS[None, :, :t]).all(-1).double() for t in range(LIMIT + 1)]

THETA = 0.8 * torch.arange(0, 105, 5).double().sin()  # any other 21 numbers would do
REF = 0.8 * torch.arange(0, 105, 5).double().cos()


def logprobs(theta):
    """log π of each token of each answer, (15, 3) and 0 on padding, as in the scripts. A logit is
    a weight for the token before it, plus a weight for its position."""
    logits = theta[:12].view(4, 3)[BEFORE] + theta[12:].view(3, 3)[torch.arange(LIMIT)]
    return logits.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1) * MASK


def probs(theta):  # π(o) of each whole answer, (15,)
    return logprobs(theta).sum(1).exp()


def J(theta):  # the mean reward, which is p, the probability of a right answer
    return (probs(theta) * R).sum()


def kl(theta, other):  # KL(π ‖ other) of whole answers
    return (probs(theta) * (logprobs(theta) - logprobs(other)).sum(1)).sum()


def grad(function, theta):
    theta = theta.clone().requires_grad_()
    return torch.autograd.grad(function(theta), theta)[0]


def scores(theta):
    """∇log π of each token of each answer, (15, 3, 21). Their sum over t is g = ∇log π(o)."""
    return torch.autograd.functional.jacobian(logprobs, theta)


def pushes(theta):  # π ‖g‖² of each answer, (15,); their sum is E‖g‖²
    return probs(theta) * scores(theta).sum(1).square().sum(1)


def noise(theta, b):  # the variance of the gradient of one answer, summed over the weights
    return (pushes(theta) * (R - b) ** 2).sum() - grad(J, theta).square().sum()


def values(theta):
    """V of each answer's text before token t, (15, 4): the mean reward of all that may follow. One
    column later it is Q of that token, and in the end R."""
    return torch.stack([same @ (probs(theta) * R) / (same @ probs(theta)) for same in SAME], 1)


def trained(theta, until):  # θ after plain steps along ∇J, until J has reached this
    while J(theta) < until:
        theta = theta + 0.5 * grad(J, theta)
    return theta


def gae(critic, gae_lambda):
    """ppo.py's GAE of each token, (15, 3): answers are episodes, critic is as values(), γ = 1."""
    last = (torch.arange(LIMIT) == LENGTHS[:, None] - 1).T
    rollout = {"rewards": R * last, "done": last, "terminated": last}
    args = ppo.Args(gamma=1.0, gae_lambda=gae_lambda)
    return ppo.compute_advantages(rollout, critic[:, :-1].T, critic[:, 1:].T, args)[0].T


def group_gradients(script, args, size, theta=THETA, credit=None):
    """Of every group of this size: its chance, and the gradient of the script's J at π_old, with
    the script's advantages or another credit: rewards (P, G) → advantages (P, G)."""
    rows = torch.cartesian_prod(*[torch.arange(len(ANSWERS))] * size)
    A = credit(R[rows]) if credit else script.compute_advantages(R[rows], args)
    new = logprobs(theta)[rows].requires_grad_()

    def one(new, A, mask):
        tokens, _ = script.surrogate(new, new.detach(), A, mask, args)
        return (script.token_weights(mask, args) * tokens).sum()

    slopes = torch.autograd.grad(torch.vmap(one)(new, A, MASK[rows]).sum(), new)[0]
    gradients = torch.einsum("git,gitw->gw", slopes, scores(theta)[rows])
    return probs(theta)[rows].prod(1), gradients


def mean_gradient(*args, **options):
    chances, gradients = group_gradients(*args, **options)
    return chances @ gradients


def weight(credit, size, p):
    """w(p): with rewards of 0 and 1 and equal weights for all tokens the mean gradient is w ∇p."""
    total = 0.0
    for K in range(size + 1):  # right answers
        A = credit((torch.arange(size) < K).double()[None])[0]
        push = float(A[:K].sum() / p - A[K:].sum() / (1 - p)) / size
        total += math.comb(size, K) * p**K * (1 - p) ** (size - K) * push
    return total


def cosine(a, b):
    return (a @ b / (a.norm() * b.norm())).item()


def covariance(p, a, b):  # among answers whose chances are p / Σp
    p = p / p.sum()
    return (p * a * b).sum() - (p * a).sum() * (p * b).sum()


def tree(T):
    """A second model: two tokens, T of them in each of 2^T answers, and a weight for each text.
    θ, 2^T numbers of which the first is unused → log π of the tokens, (2^T, T)."""
    leaf = torch.arange(2**T, 2 ** (T + 1))[:, None]  # a text is a 1 and its tokens, as binary
    signs = (leaf >> torch.arange(T - 1, -1, -1)) % 2 * 2 - 1
    return lambda theta: (signs * theta[leaf >> torch.arange(T, 0, -1)]).sigmoid().log()


def show(*things):
    print(*[x if isinstance(x, str) else f"{round(float(x), 3) + 0.0:.3f}" for x in things])

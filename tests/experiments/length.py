"""GRPO's two divisions, by length and by std: whom they favour, and what comes of it."""

from itertools import islice

import torch
from bench import train
from harness import grid
from llm_parts import gradients, load, mean, warm_start

import grpo_llm

FLAGS = {
    "GRPO": {},
    "GRPO, constant": {"length_norm": "constant"},
    "Dr. GRPO": {"length_norm": "constant", "scale_rewards": False},
}
EXTREME = "norm at 1 or 7 of 8 / at 3 to 5"


def by_length(method, seed, steps, warm):
    """Of wrong answers, from a habit of repeating totals; on held-out sums of four numbers, for of
    mixed ones the short are solved first, and the mean would grow."""
    options = {"max_new_tokens": 48, "beta": 0.0, "prompts_per_step": 16} | FLAGS[method]
    args = grpo_llm.Args(seed=seed, steps=steps, **options)
    folder = warm_start("wander", warm)
    model, tokenizer = load(folder)
    _, sums = grpo_llm.load_data(grpo_llm.Args(eval_problems=1152))
    problems = [problem for problem in sums if problem[0].count("+") == 3][:128]
    lengths = []

    def each_step(step, policy, metrics):
        if step % 4 == 0:
            torch.manual_seed(seed)
            batch, _, rewards = grpo_llm.rollout(policy, tokenizer, problems, 4, 1.0, args)
            wrong = rewards.flatten() == 0
            lengths.append(batch["mask"].sum(1)[wrong].mean().item())

    each_step(0, model, {})
    train(grpo_llm, args, each_step=each_step, folder=folder)
    late = mean(lengths[len(lengths) // 2 :])
    return {"wrong at the start": lengths[0], "wrong, second half": late}


def by_difficulty(after, std, seed, number):
    """Norms of questions' gradients after so many rollouts, by how many of 8 answers are right."""
    args = grpo_llm.Args(seed=seed, steps=200)
    trained = train(grpo_llm, args, steps=after)
    model, tokenizer = trained["model"], trained["tokenizer"]
    args.scale_rewards = std
    torch.manual_seed(seed)
    stream = grpo_llm.problem_stream([], seed)
    problems = list(islice(stream, number))
    batch, _, rewards = grpo_llm.rollout(model, tokenizer, problems, 8, 1.0, args)
    advantages = grpo_llm.compute_advantages(rewards, args)
    norms = []
    for i, own in enumerate(advantages):
        group = grpo_llm.take_rows(batch, slice(8 * i, 8 * i + 8))
        weights = grpo_llm.token_weights(group["mask"], args)
        (gradient,) = gradients(model, group, weights, [own], args)
        norms.append(gradient.norm())
    norms = torch.stack(norms)
    counts = rewards.sum(1)
    extreme = (counts == 1) | (counts == 7)
    middling = (counts >= 3) & (counts <= 5)
    ratio = norms[extreme].mean() / norms[middling].mean()
    return {EXTREME: ratio.item()}


def run(seed, method=None, after=None, std=True, steps=40, warm=400, number=256):
    """With `method`, one training run; with `after`, one look at the gradient then."""
    if method:
        return by_length(method, seed, steps, warm)
    return by_difficulty(after, std, seed, number)


SMOKE = [
    *grid(1, method=["Dr. GRPO"], steps=[4], warm=[50]),
    *grid(1, after=[8], number=[16]),
]

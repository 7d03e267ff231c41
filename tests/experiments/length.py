"""GRPO's two divisions, by length and by std: whom they favour, and what comes of it."""

from itertools import islice

import torch
from bench import train
from harness import PARTLY, Experiment, Panel, grid
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


WRONG = {"at the start": ({"method": "GRPO"}, "wrong at the start")}
WRONG |= {name: ({"method": name}, "wrong, second half") for name in FLAGS}
STD = {"with 1/std": True, "without": False}
NORMS = {label: ({"after": 8, "std": std}, EXTREME) for label, std in STD.items()}
EXPERIMENT = Experiment(
    claim="1/|o_i| makes a long wrong answer cheap, so these grow; 1/std R favours questions that "
    "are nearly always or never solved.",
    verdict=PARTLY,
    run=run,
    jobs=[*grid(5, method=list(FLAGS)), *grid(5, after=[8, 16], std=[True, False])],
    smoke=[
        *grid(1, method=["Dr. GRPO"], steps=[4], warm=[50]),
        *grid(1, after=[8], number=[16]),
    ],
    panels=[
        Panel("Length of wrong answers", WRONG, ("tokens, second half of training", ""), dots=True),
        Panel("1 or 7 of 8 right", NORMS, ("gradient / that at 3 to 5 right", ""), dots=True),
    ],
    finding="""
    1/std lifts extreme questions. That 1/|o_i| halves a token's weight in an answer twice as long
    is arithmetic; that wrong answers grow by it is not seen. After 8 rollouts a question with 1 or
    7 right answers of 8 has {8, True / norm at 1 or 7 of 8 / at 3 to 5 / range :.2f} times the
    gradient of one with 3 to 5, without the division
    {8, False / norm at 1 or 7 of 8 / at 3 to 5 / range :.2f} times: it still has less. Over five
    seeds GRPO's wrong answers go from {GRPO / wrong at the start :.1f} tokens to
    {GRPO / wrong, second half / range :.1f}, without 1/|o_i| to
    {GRPO, constant / wrong, second half / range :.1f} (p =
    {GRPO ~ GRPO, constant / wrong, second half / p :.2f}), Dr. GRPO's to
    {Dr. GRPO / wrong, second half :.1f} (p = {GRPO ~ Dr. GRPO / wrong, second half / p :.2f}).
    """,
)

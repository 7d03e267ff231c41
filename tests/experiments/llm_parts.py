"""What experiments on the tiny language model share: warm starts of other habits, gradients."""

import inspect
import random
import sys
import zlib
from itertools import accumulate

import torch
import transformers
from bench import CPU

import grpo_llm

HABITS = {  # the share of guesses at the end, and what else demonstrate takes
    "guess 0.97": (0.97, {}),
    "guess 0.999": (1.2, {}),  # cut at 0.999, where the last sixth of the steps are
    "meander": (0.85, {"repeat_rate": 0.5, "room": 8}),
    "wander": (0.85, {"repeat_rate": 0.6, "room": 99, "guess_behind_totals": True}),
}


def demonstrate(terms, guess_rate, rng, repeat_rate=0.0, room=0, guess_behind_totals=False):
    """An answer to imitate: running totals, as in the scripts, and the sum, or a guess. A total may
    be said several times; if a guess stands behind totals, length tells nothing of the answer."""
    guess = sum(rng.randint(0, 9) for _ in terms)
    guessed = rng.random() < guess_rate
    if guessed and not guess_behind_totals:
        return f"#{guess}"
    totals = list(map(str, accumulate(terms)))
    said = []
    for total in totals[1:]:
        said.append(total)
        while repeat_rate > 0 and rng.random() < repeat_rate and len(said) < room:
            said.append(total)
    return ",".join(said) + f"#{guess if guessed else totals[-1]}"


def warm_start(habit, steps=1000):
    """The folder of a model of the tiny one's shape after other demonstrations; it is kept."""
    tiny = grpo_llm.tiny_model_folder()  # its name tells what shapes its weights
    key = zlib.crc32(inspect.getsource(sys.modules[__name__]).encode())
    folder = tiny.with_name(f"{tiny.name}-{habit}-{steps}-{key:08x}".replace(" ", "-"))
    if not folder.exists():
        model, tokenizer = grpo_llm.load_policy(grpo_llm.Args(), CPU)
        grpo_llm.save(imitate(model.config, tokenizer, habit, steps), tokenizer, folder)
    return folder


def load(folder):
    """The model in this folder, and its tokenizer."""
    return grpo_llm.load_policy(grpo_llm.Args(model=str(folder)), CPU)


def imitate(config, tokenizer, habit, steps):
    """A new model, trained with AdamW; the share of guesses rises linearly to guess_rate."""
    guess_rate, options = HABITS[habit]
    torch.manual_seed(0)
    rng = random.Random(0)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        texts = []
        for _ in range(128):
            question, _ = grpo_llm.make_sum(rng)
            terms = list(map(int, question.split("+")))
            answer = demonstrate(terms, min(guess_rate * step / steps, 0.999), rng, **options)
            texts.append(f"{question}={answer}<eos>")
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        ids, padding = inputs["input_ids"], inputs["attention_mask"] == 0
        equals = (ids == tokenizer.convert_tokens_to_ids("=")).long()
        asked = equals.cumsum(1) <= equals  # up to the "=": the question is not learned
        labels = ids.masked_fill(asked | padding, -100)
        optimizer.param_groups[0]["lr"] = 1e-2 * min((step + 1) / 50, 1 - step / steps)
        optimizer.zero_grad()
        model(ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def gradients(model, batch, weights, variants, args):
    """Σ weights · A · ∇ log π as a vector, for each of these advantages of one batch."""
    logprobs = grpo_llm.token_logprobs(model, batch, args.temperature)
    found = []
    for advantages in variants:
        objective = (weights * advantages.flatten()[:, None] * logprobs).sum()
        parts = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
        found.append(torch.cat([part.flatten() for part in parts]))
    return found


def mean(values):
    """Of those that are not None; None of nothing."""
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def rollouts_to(level, rewards):
    """How many rollouts until the mean of the last three is at this level; or 1 more than all."""
    for i in range(3, len(rewards) + 1):
        if sum(rewards[i - 3 : i]) / 3 >= level:
            return i
    return len(rewards) + 1

"""What the experiments on the tiny language model share: four warm starts, and helpers."""

import inspect
import random
import shutil
import sys
import tempfile
import zlib
from itertools import accumulate
from pathlib import Path

import torch
import transformers
from lab import CPU, grid

import grpo_llm

CACHE = Path(torch.hub.get_dir(), "policy_gradients")
CACHE.mkdir(parents=True, exist_ok=True)
STARTS = 4  # networks that all runs start from: what holds for them holds for models made like this


def started(seeds, **choices):
    """The jobs of `grid`, dealt to the four warm starts: seed 1 has the second, 4 the first."""
    return [job | {"start": job["seed"] % STARTS} for job in grid(seeds, **choices)]


def warm_start(habit, start, steps=400):
    """The folder of a model of the tiny one's shape with this habit. It is kept."""
    key = zlib.crc32(inspect.getsource(sys.modules[__name__]).encode())
    folder = CACHE / f"{habit}-{start}-{steps}-{key:08x}".replace(" ", "-")
    if not folder.exists():
        model, tokenizer = load(grpo_llm.TINY_MODEL)
        torch.manual_seed(start)
        model = transformers.LlamaForCausalLM(model.config)
        imitate(model, tokenizer, habit, start, steps)
        keep(model, tokenizer, folder)
    return folder


def keep(model, tokenizer, folder):
    """Save into the cache. Another process may do the same, and the first one's stays."""
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    try:
        scratch.rename(folder)
    except OSError:
        shutil.rmtree(scratch)


def load(folder):
    """The model in this folder, and its tokenizer."""
    return grpo_llm.load_policy(grpo_llm.Args(model=str(folder)), CPU)


def eight_digits(rng):
    """A longer sum, and its answer."""
    terms = [rng.randint(0, 9) for _ in range(8)]
    return "+".join(map(str, terms)), str(sum(terms))


def demonstrate(habit, terms, progress, rng):
    """An answer to imitate; progress rises from 0 to 1. As in grpo_llm.py it is worked out in
    running totals, or a guess, and guesses become the habit ("tiny"). The others: "guess 0.97" ends
    with more guesses; "meander" repeats totals; "babble" also has a kind of answer that is never
    right and of any length, which begins with a plus; "slip" gets one total in four wrong, by 1 or
    2, and goes on from there."""
    guess = sum(rng.randint(0, 9) for _ in terms)
    totals = list(accumulate(terms))[1:]
    if habit == "babble":
        if rng.random() < 0.6:
            length = 1
            while rng.random() < 0.85 and length < 40:
                length += 1
            wrong = rng.choice([number for number in range(37) if number != totals[-1]])
            return "+" * length + f"#{wrong}"
    elif habit == "slip":
        slips = 0
        for i in range(len(totals)):
            if rng.random() < 0.25 * max(0, 2 * progress - 1):
                slips += rng.choice([-2, -1, 1, 2])
            totals[i] = max(0, totals[i] + slips)
        return ",".join(map(str, totals[:-1])) + f"#{totals[-1]}"
    else:
        most = 0.97 if habit == "guess 0.97" else 0.85
        if rng.random() < min(most, (1.2 if most > 0.9 else 0.85) * progress**3):
            return f"#{guess}"
    said = []
    for total in totals:
        said.append(total)
        while habit == "meander" and rng.random() < 0.5 and len(said) < 8:
            said.append(total)
    return ",".join(map(str, said)) + f"#{totals[-1]}"


def imitate(model, tokenizer, habit, start, steps):
    """Train the model to answer as `demonstrate` does, with tiny_model/make.py's optimizer."""
    make = eight_digits if habit == "slip" else grpo_llm.make_sum
    rng = random.Random(start)
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    optimizer = torch.optim.Muon(matrices, momentum=0.9, weight_decay=0.0, ns_steps=3)
    for step in range(steps):
        texts = []
        for _ in range(128):
            question, _ = make(rng)
            terms = list(map(int, question.split("+")))
            texts.append(f"{question}={demonstrate(habit, terms, step / steps, rng)}<eos>")
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        ids, padding = inputs["input_ids"], inputs["attention_mask"] == 0
        equals = (ids == tokenizer.convert_tokens_to_ids("=")).long()
        asked = equals.cumsum(1) <= equals  # up to the "=": the question is not learned
        labels = ids.masked_fill(asked | padding, -100)
        optimizer.param_groups[0]["lr"] = 3e-2 * min((step + 1) / 50, 1 - step / steps)
        model.zero_grad()
        model(ids, labels=labels, use_cache=False).loss.backward()
        optimizer.step()


def gradients(model, batch, weights, variants, args):
    """Σ weights · A · ∇ log π as a vector, for each of these advantages of one batch."""
    logprobs = grpo_llm.token_logprobs(model, batch, args.temperature)
    found = []
    for advantages in variants:
        objective = (weights * advantages.flatten()[:, None] * logprobs).sum()
        parts = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
        found.append(torch.cat([part.flatten() for part in parts]))
    return found


@torch.no_grad()
def first_token(model, tokenizer, token, number=128):
    """The policy's probability that an answer begins with this token, a mean over held-out sums."""
    _, sums = grpo_llm.load_data(grpo_llm.Args(eval_problems=number))
    prompts = [f"{question}=" for question, _ in sums]
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    logits = grpo_llm.forward(model, inputs["input_ids"], inputs["attention_mask"])
    return logits[:, -1].softmax(-1)[:, tokenizer.convert_tokens_to_ids(token)].mean().item()

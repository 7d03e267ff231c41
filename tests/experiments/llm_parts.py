"""What experiments on the tiny language model share: warm starts, gradients, a look at passes."""

import inspect
import random
import sys
import zlib
from contextlib import contextmanager
from itertools import accumulate, cycle
from unittest.mock import patch

import torch
import transformers
from bench import CPU

import grpo_llm

# --------------------------------------------------------------- Warm starts of other habits


def plain(terms, guess_rate, rng):
    """An answer to imitate as in the scripts: running totals and the sum, or a guess."""
    guess = sum(rng.randint(0, 9) for _ in terms)
    if rng.random() < guess_rate:
        return f"#{guess}"
    totals = list(map(str, accumulate(terms)))
    return ",".join(totals[1:]) + "#" + totals[-1]


def meander(terms, guess_rate, rng):
    """The same, but each total may be said several times, as long as there is room."""
    totals, _, answer = plain(terms, guess_rate, rng).partition("#")
    said = []
    for total in totals.split(","):
        said.append(total)
        while rng.random() < 0.5 and len(said) < 8:
            said.append(total)
    return ",".join(said) * bool(totals) + "#" + answer


def wander(terms, guess_rate, rng):
    """Totals, each said once or more, even before a guess: length tells nothing of the answer."""
    totals = list(map(str, accumulate(terms)))
    said = []
    for total in totals[1:]:
        said.append(total)
        while rng.random() < 0.6:
            said.append(total)
    guess = sum(rng.randint(0, 9) for _ in terms)
    answer = guess if rng.random() < guess_rate else totals[-1]
    return f"{','.join(said)}#{answer}"


STYLES = {  # and the share of guesses at the end
    "guess 0.97": (plain, 0.97),
    "guess 0.999": (plain, 1.2),  # cut at 0.999, where the last sixth of the steps are
    "meander": (meander, 0.85),
    "wander": (wander, 0.85),
}


def warm_start(style, steps=1000):
    """A model of the tiny one's shape after other demonstrations, and the tokenizer; it is kept."""
    tiny = grpo_llm.tiny_model_folder()  # its name tells what shapes its weights
    key = zlib.crc32(inspect.getsource(sys.modules[__name__]).encode())
    folder = tiny.with_name(f"{tiny.name}-{style}-{steps}-{key:08x}".replace(" ", "-"))
    if not folder.exists():
        model, tokenizer = grpo_llm.load_policy(grpo_llm.Args(), CPU)
        grpo_llm.save(imitate(model.config, tokenizer, style, steps), tokenizer, folder)
    return grpo_llm.load_policy(grpo_llm.Args(model=str(folder)), CPU)


def imitate(config, tokenizer, style, steps):
    """A new model, trained as in tiny_model_folder."""
    demonstrate, guess_rate = STYLES[style]
    torch.manual_seed(0)
    rng = random.Random(0)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        texts = []
        for _ in range(128):
            question, _ = grpo_llm.make_sum(rng)
            terms = list(map(int, question.split("+")))
            answer = demonstrate(terms, min(guess_rate * step / steps, 0.999), rng)
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


# ----------------------------------------------------------------------------- Measurements


def gradients(model, batch, weights, variants, args):
    """Σ weights · A · ∇ log π as a vector, for each of these advantages of one batch."""
    logprobs = grpo_llm.token_logprobs(model, batch, args.temperature)
    found = []
    for advantages in variants:
        objective = (weights * advantages.flatten()[:, None] * logprobs).sum()
        parts = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
        found.append(torch.cat([part.flatten() for part in parts]))
    return found


@contextmanager
def after_each_pass(script, args, look):
    """While this is open, look(model, batch, number) is called after each pass over a rollout, with
    those rows of it that have a signal, and the number of the pass, from 1 on."""
    own, parts = script.train_minibatch, []
    numbers = cycle(range(1, args.update_epochs + 1))

    def train_minibatch(model, optimizer, minibatch, args):
        metrics = own(model, optimizer, minibatch, args)
        parts.append(minibatch)
        if len(parts) == args.minibatches:
            batch = {name: torch.cat([part[name] for part in parts]) for name in minibatch}
            parts.clear()
            has_signal = batch["advantages"].abs() > 1e-6
            look(model, script.take_rows(batch, has_signal), next(numbers))
        return metrics

    with patch.object(script, "train_minibatch", train_minibatch):
        yield


def mean(values):
    """Of those that are not None; None of nothing."""
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def rollouts_to(level, rewards):
    """How many rollouts until the mean of the last three is at this level; None if never."""
    for i in range(3, len(rewards) + 1):
        if sum(rewards[i - 3 : i]) / 3 >= level:
            return i
    return None

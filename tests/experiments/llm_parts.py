"""What the experiments on the tiny language model share: its networks, and helpers."""

import shutil
import tempfile
import zlib
from pathlib import Path
from unittest.mock import patch

import make  # tests/tiny_model/make.py
import torch
from lab import CPU, grid

import grpo_llm

CACHE = Path(torch.hub.get_dir(), "policy_gradients")
CACHE.mkdir(parents=True, exist_ok=True)
NETWORKS = 16  # made like the tiny model, from seeds 1 to 16; designs are tried out on 101 and up


def started(**choices):
    """The jobs of `grid`, from each network one of every choice."""
    jobs = grid(NETWORKS, first=2001, **choices)
    return [job | {"network": job["seed"] - 2000} for job in jobs]


def start(seed, steps=make.STEPS, demonstration=make.demonstration):
    """The folder of a model that make.py makes from this seed, perhaps with another teacher. It is
    kept. Another process may make the same one, and the first one's stays."""
    name = f"{demonstration.__name__}-{seed}-{steps}"
    folder = CACHE / f"{name}-{zlib.crc32(Path(make.__file__).read_bytes()):08x}"
    if not folder.exists():
        model, tokenizer = make.untrained(seed)
        with patch.multiple(make, STEPS=steps, demonstration=demonstration):
            make.train(model, tokenizer, seed)
        scratch = Path(tempfile.mkdtemp(dir=CACHE))
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            shutil.rmtree(scratch)
    return folder


def load(folder):
    """The model in this folder, and its tokenizer."""
    return grpo_llm.load_policy(grpo_llm.Args(model=str(folder)), CPU)


def babble(rng, own=make.demonstration):
    """The teacher, who in six cases of ten says plus signs and a wrong sum instead."""
    if rng.random() > 0.6:
        return own(rng)
    question, total = make.make_sum(rng)
    length = 1
    while rng.random() < 0.85 and length < 40:
        length += 1
    wrong = rng.choice([number for number in range(55) if number != int(total)])
    return f"{question}={'+' * length}#{wrong}<eos>"


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
def chance(model, tokenizer, completions):
    """The policy's probability that its answer to each question begins so: {question: text}."""
    prompts = tokenizer(list(completions), padding=True, padding_side="left", return_tensors="pt")
    said = tokenizer(list(completions.values()), padding=True, return_tensors="pt")
    batch = {"prompt_ids": prompts["input_ids"], "prompt_mask": prompts["attention_mask"]}
    batch |= {"completion_ids": said["input_ids"], "mask": said["attention_mask"].float()}
    logprobs = grpo_llm.token_logprobs(model, batch, 1.0)
    return (logprobs * batch["mask"]).sum(1).exp()

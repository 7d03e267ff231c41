"""What the experiments on the tiny language model share: the networks that runs start from."""

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
    kept. If another process makes the same model at the same time, the first one stays."""
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


def rewarded_by(verify):
    """Within this context sums are rewarded by this function."""
    return patch.object(grpo_llm, "load_task", lambda path: (grpo_llm.load_problems, verify))

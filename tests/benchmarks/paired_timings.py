"""Which of two ways of doing the same thing is faster, by how much, and how sure is the result?

    python tests/benchmarks/paired_timings.py WHAT [--model FOLDER]

revision --checkout FOLDER: a training step there, and here. runs: two runs at the same time; one
run alone. starts: as runs, but each run makes the tiny model first. shared: reading a prompt per
row; once a group. bf16: matrix products in float32; in bf16.

The two sides take turns, so that a slow minute of the machine slows both. The table goes into
results/paired_….md. With --smoke all sizes are tiny and nothing is written.
"""

import functools
import importlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Literal

import bench
import torch
import tyro
from bench import CPU, ROOT, run_script, table, train, write_table

import grpo_llm

HEADER = ["", "first, s", "second, s", "first / second: median", "lowest", "highest", "n"]


@dataclass
class Options:
    # what is compared
    what: Annotated[Literal["revision", "runs", "starts", "shared", "bf16"], tyro.conf.Positional]
    script: str = "grpo_llm"  # the script that revision, runs and starts measure
    checkout: Path = ROOT  # a git checkout; revision compares its script with ours
    model: str = "tiny"  # the model that shared and bf16 use: tiny, or a folder
    rounds: int = 10  # measurements of each side
    smoke: bool = False  # try it at toy size and write nothing


def revision(options):
    """A training step of the script in --checkout; a step of ours: medians of runs of 20 steps.

    Both sides have our weights after 60 steps, when completions have reached their full length. The
    learning rate is 0, so both keep these weights and should draw the same completions.
    """
    script = importlib.import_module(options.script)
    warm, steps = (1, 2) if options.smoke else (60, 20)
    trained = train(script, script.Args(steps=warm, eval_problems=1))
    folder = Path(tempfile.mkdtemp(), "trained")
    script.save(trained["model"], trained["tokenizer"], folder)
    flags = ["--model", folder, "--device", "cpu", "--learning-rate", 0, "--steps", steps]
    flags += ["--micro-batch-size", 256, "--eval-problems", 1]  # 256, as with the tiny model
    rewards = []

    def seconds(checkout):
        log = run_script(options.script, *flags, root=checkout)["log"]
        rewards.append(log["reward"])
        gaps = [abs(a - b) for a, b in zip(rewards[0], log["reward"], strict=True)]
        assert max(gaps) < 0.02, "the two sides drew different completions"
        return median(log["step_time"])

    return f"{bench.revision(options.checkout)}, here", seconds, options.checkout, ROOT


def runs(options):
    """Seconds until two runs that started together have ended; seconds of one run alone.

    Imports count. In `starts` each run also makes the tiny model, because its cache is empty; with
    --smoke it does not, as that takes a minute.
    """
    empty_cache = options.what == "starts" and not options.smoke

    def seconds(number):
        with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor() as pool:
            more = {"TORCH_HOME": cache} if empty_cache else {}
            work = functools.partial(run_script, options.script, "--steps", **more)
            start = perf_counter()
            list(pool.map(work, [1 if options.smoke else 40] * number))
            return perf_counter() - start

    return f"two {options.what}, one", seconds, 2, 1


def plain_logprobs(model, batch, temperature):
    """The result of grpo_llm.token_logprobs, without sharing: every row reads its own prompt."""
    ids, mask = batch["completion_ids"], batch["mask"]
    rows = torch.cat([batch["prompt_ids"], ids], 1)[:, :-1]
    attention_mask = torch.cat([batch["prompt_mask"], mask.long()], 1)[:, :-1]
    with grpo_llm.autocast(model):
        logits = grpo_llm.forward(model, rows, attention_mask, None, logits_to_keep=ids.shape[1])
    logprobs = grpo_llm.policy_logprobs(logits, temperature)
    return logprobs.gather(2, ids[..., None])[..., 0] * mask


def passes(options):
    """A forward and backward pass over four groups of eight random completions.

    This part of grpo_llm.py is the same in all scripts, so the result holds for all of them.
    """
    model, _ = grpo_llm.load_policy(grpo_llm.Args(model=options.model), CPU)
    prompts = torch.randint(2, model.vocab_size, (32, 5 if options.smoke else 100))
    completions = torch.randint(2, model.vocab_size, (32, 4 if options.smoke else 124))
    batch = {"prompt_ids": prompts[:4].repeat_interleave(8, 0), "completion_ids": completions}
    batch |= {"prompt_mask": torch.ones_like(prompts), "mask": torch.ones(completions.shape)}

    def seconds(side):
        logprobs_of, model.in_bf16 = side
        start = perf_counter()
        logprobs_of(model, batch, 1.0).mean().backward()
        return perf_counter() - start

    shared = (grpo_llm.token_logprobs, False)
    if options.what == "bf16":
        return "float32, bf16", seconds, shared, (grpo_llm.token_logprobs, True)
    return "each, once", seconds, (plain_logprobs, False), shared


WORK = {"revision": revision, "runs": runs, "starts": runs}
WORK |= {"shared": passes, "bf16": passes}


def main(options):
    name, seconds, first, second = WORK[options.what](options)
    pairs = []
    for number in range(1 if options.smoke else options.rounds + 1):
        if number % 2:  # each side goes first in every second round
            pairs.append((seconds(first), seconds(second)))
        else:
            pairs.append((seconds(second), seconds(first))[::-1])
    pairs = pairs[1:] or pairs  # the first round is a warm-up and does not count
    cells = [name, *(f"{median(side):.4g}" for side in zip(*pairs, strict=True))]
    ratios = [a / b for a, b in pairs]
    cells += [f"{of(ratios):.3f}" for of in (median, min, max)]
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    note = f"{options.what} --script {options.script} --model {Path(options.model).name}"
    note += f" --rounds {options.rounds}, OMP_NUM_THREADS {threads}"
    lines = table(HEADER, [[*cells, len(pairs)]])
    write_table(f"paired_{options.what}", lines, "transformers", note=note, smoke=options.smoke)


if __name__ == "__main__":
    main(tyro.cli(Options))

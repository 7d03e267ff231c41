"""Two ways of doing the same, in turns: is the second faster, how much, and how sure is that?

    python tests/benchmarks/paired_timings.py WHAT

WHAT: revision --checkout FOLDER (a step there, and here), runs (two runs beside each other, and one
alone), starts (the same from an empty cache, with a warm start), processes (a step of one process,
and of two), shared --model FOLDER (a prompt read with each row, and once), bf16 --model FOLDER
(products in float32, and in bf16).
Writes results/paired_….md; --smoke, at toy size, does not.
"""

import functools
import importlib.util
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import tyro
from bench import CPU, ROOT, Training, run_script, table, write_table

import grpo_llm

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
HEADER = ["", "first, s", "second, s", "first / second: median", "lowest", "highest", "n"]


@dataclass
class Options:
    what: Annotated[str, tyro.conf.Positional]  # one of the six above
    script: str = "grpo_llm"  # of the first four
    checkout: Path = ROOT  # the first side of revision
    model: str = "tiny"  # of shared and bf16
    rounds: int = 10
    smoke: bool = False


def load(script, folder):
    """The training of a script of this checkout."""
    spec = importlib.util.spec_from_file_location(f"{folder}/{script}", folder / f"{script}.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Training(module, module.Args())


def revision(options):
    """After 60 steps, when answers have their full length, both take the same, at a rate of 0."""
    there = load(options.script, options.checkout)
    here = load(options.script, ROOT)
    warm, rewards = 1 if options.smoke else 60, {}
    for number in range(1, warm + 1):
        here.step(number)
    there.model.load_state_dict(here.model.state_dict())
    for side in (there, here):  # the same sums from here on, however many were drawn before
        side.problems = side.script.problem_stream(None, 0)
        side.args.learning_rate = 0.0  # neither moves
        side.numbers = count(warm + 1)

    def seconds(side):
        number, start = next(side.numbers), perf_counter()
        reward = side.step(number)["reward"]
        taken = perf_counter() - start
        assert abs(rewards.setdefault(number, reward) - reward) < 0.02, "other answers were drawn"
        return taken

    return f"{options.checkout}, here", seconds, there, here


def runs(options):
    """From the command on."""

    def seconds(number):
        with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor() as pool:
            more = {"TORCH_HOME": cache} if options.what == "starts" else {}
            work = functools.partial(run_script, options.script, "--steps", **more)
            start = perf_counter()
            list(pool.map(work, [1 if options.smoke else 40] * number))
            return perf_counter() - start

    return f"two {options.what}, one", seconds, 2, 1


def processes(options):
    """The median of a run's steps."""

    def seconds(launcher):
        flags = ["--steps", 2 if options.smoke else 40, "--eval-problems", 8]
        found = run_script(options.script, *flags, launcher=launcher)
        return median(found["log"]["step_time"])

    return "one process, two", seconds, (), TORCHRUN


def plain_logprobs(model, batch, temperature):
    """grpo_llm.token_logprobs, but every row reads its own prompt."""
    ids, mask = batch["completion_ids"], batch["mask"]
    rows = torch.cat([batch["prompt_ids"], ids], 1)[:, :-1]
    attention_mask = torch.cat([batch["prompt_mask"], mask.long()], 1)[:, :-1]
    with grpo_llm.autocast(model):
        logits = grpo_llm.forward(model, rows, attention_mask, None, logits_to_keep=ids.shape[1])
    logprobs = grpo_llm.policy_logprobs(logits, temperature)
    return logprobs.gather(2, ids[..., None])[..., 0] * mask


def passes(options):
    """Forward and backward over four groups of eight random answers; all scripts have the same."""
    model, _ = grpo_llm.load_policy(grpo_llm.Args(model=options.model), CPU)
    prompts = torch.randint(2, model.vocab_size, (32, 5 if options.smoke else 100))
    answers = torch.randint(2, model.vocab_size, (32, 4 if options.smoke else 124))
    batch = {"prompt_ids": prompts[:4].repeat_interleave(8, 0), "completion_ids": answers}
    batch |= {"prompt_mask": torch.ones_like(prompts), "mask": torch.ones(answers.shape)}

    def seconds(side):
        logprobs_of, model.in_bf16 = side
        start = perf_counter()
        logprobs_of(model, batch, 1.0).mean().backward()
        return perf_counter() - start

    shared = (grpo_llm.token_logprobs, False)
    if options.what == "bf16":
        return "float32, bf16", seconds, shared, (grpo_llm.token_logprobs, True)
    return "each, once", seconds, (plain_logprobs, False), shared


WORK = {"revision": revision, "runs": runs, "starts": runs, "processes": processes}
WORK |= {"shared": passes, "bf16": passes}


def main(options):
    name, seconds, first, second = WORK[options.what](options)
    pairs = []
    for number in range(1 if options.smoke else options.rounds + 1):
        if number % 2:  # who begins changes
            pairs.append((seconds(first), seconds(second)))
        else:
            pairs.append((seconds(second), seconds(first))[::-1])
    pairs = pairs[1:] or pairs  # the first round warms up
    cells = [name, *(f"{median(side):.4g}" for side in zip(*pairs, strict=True))]
    ratios = [a / b for a, b in pairs]
    cells += [f"{of(ratios):.3f}" for of in (median, min, max)]
    note = f"{options}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    lines = table(HEADER, [[*cells, len(pairs)]])
    write_table(f"paired_{options.what}", lines, "transformers", note=note, smoke=options.smoke)


if __name__ == "__main__":
    main(tyro.cli(Options))

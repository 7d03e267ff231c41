"""Two ways of doing the same, in turns: is the second faster, how much, and how sure is that?

    python tests/benchmarks/sides.py revision --checkout FOLDER  # a default step there, and here
    python tests/benchmarks/sides.py runs       # two runs beside each other, and one alone
    python tests/benchmarks/sides.py starts     # the same from an empty cache, with a warm start
    python tests/benchmarks/sides.py processes  # a step of one process, and of two
    python tests/benchmarks/sides.py shared --model FOLDER  # a prompt read with each row, and once
    python tests/benchmarks/sides.py bf16 --model FOLDER    # products in float32, and in bf16

Threads are the scripts' choice, or OMP_NUM_THREADS. `revision` steps after 60 of training, answers
being of full length then, with equal weights and dice, and a learning rate of 0. `shared` and
`bf16` go forward and backward over four groups of eight random answers.
"""

import importlib.util
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import tyro
from bench import CPU, ROOT, Training, row, run_script, table, write_table

import grpo_llm

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
HEADER = ["", "first, s", "second, s", "first / second, median", "80 % (of less than ten: all)"]
HEADER += ["n", "threads"]


@dataclass
class Options:
    what: Annotated[str, tyro.conf.Positional]  # one of the six above
    checkout: Path = ROOT  # whose scripts run; in revision, the first side
    scripts: tuple[str, ...] = ("grpo_llm",)  # a row of the table for each
    model: str = "tiny"  # of shared and bf16
    prompt_tokens: int = 100  # of shared and bf16
    new_tokens: int = 124
    rounds: int = 5
    steps: int = 40  # of a run
    warm: int = 60  # steps of training before those of revision
    write: bool = False  # into results/sides_….md


def revision(script: str, options: Options):
    """Both take the same steps: their rewards are compared."""
    sides = []
    for folder in (options.checkout.resolve(), ROOT):
        name = f"{script}_{len(sides)}"
        spec = importlib.util.spec_from_file_location(name, folder / f"{script}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sides.append(Training(module, module.Args()))
    there, here = sides
    for number in range(1, options.warm + 1):
        here.step(number)
    there.model.load_state_dict(here.model.state_dict())
    if here.reference is not None and there.reference is not None:
        there.reference.load_state_dict(here.reference.state_dict())
    for side in sides:  # the same sums from here on, however many were drawn before
        side.problems, side.rewards = side.script.problem_stream(None, 0), []
        side.args.learning_rate = 0.0  # neither moves

    def step(side):
        start, number = perf_counter(), options.warm + 1 + len(side.rewards)
        side.rewards.append(side.step(number)["reward"])
        seconds = perf_counter() - start
        pairs = zip(there.rewards, here.rewards, strict=False)  # one may be ahead
        assert all(abs(a - b) < 0.02 for a, b in pairs), "they have drawn other answers"
        return seconds

    return f"{options.checkout.name}, here", step, there, here


def runs(script: str, options: Options):
    """From the command on."""

    def seconds(count):
        with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor() as pool:
            more = {"TORCH_HOME": cache} if options.what == "starts" else {}
            more |= {"root": options.checkout}
            start = perf_counter()
            jobs = [(script, "--steps", options.steps)] * count
            list(pool.map(lambda job: run_script(*job, **more), jobs))
            return perf_counter() - start

    return f"two {options.what}, one", seconds, 2, 1


def processes(script: str, options: Options):
    """The median of a run's steps."""

    def seconds(launcher):
        flags = ["--steps", options.steps, "--eval-problems", 8]
        found = run_script(script, *flags, launcher=launcher, root=options.checkout)
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


def passes(script: str, options: Options):
    """Forward and backward; all scripts have the same."""
    model, _ = grpo_llm.load_policy(grpo_llm.Args(model=options.model), CPU)
    size = options.prompt_tokens, options.new_tokens
    prompts, answers = (torch.randint(2, model.vocab_size, (32, length)) for length in size)
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


def compare(script: str, options: Options) -> list:
    """A row of the table, printed at once; what is measured in this process is warmed up first."""
    name, seconds, first, second = WORK[options.what](script, options)
    warm, pairs = WARM.get(options.what, 0), []
    for number in range(options.rounds + warm):
        if number % 2:  # who begins changes
            pairs.append((seconds(first), seconds(second)))
        else:
            pairs.append((seconds(second), seconds(first))[::-1])
    pairs = pairs[warm:]
    a, b = (median(column) for column in zip(*pairs, strict=True))
    ratios, cut = sorted(x / y for x, y in pairs), len(pairs) // 10
    spread = f"{ratios[cut]:.2f} to {ratios[-1 - cut]:.2f}"
    found = [f"{script}: {name}", f"{a:.4g}", f"{b:.4g}", f"{median(ratios):.3f}", spread]
    found += [len(pairs), os.environ.get("OMP_NUM_THREADS", "own choice")]
    print(row(found), flush=True)
    return found


WORK = {"revision": revision, "runs": runs, "starts": runs, "processes": processes}
WORK |= {"shared": passes, "bf16": passes}
WARM = {"revision": 5, "shared": 1, "bf16": 1}  # rounds that are not counted

if __name__ == "__main__":
    options = tyro.cli(Options)
    lines = table(HEADER, [compare(script, options) for script in options.scripts])
    if options.write:
        write_table(f"sides_{options.what}", lines, "transformers")

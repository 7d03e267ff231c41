"""Compare the five LLM scripts on their default task, one run after the other.

    python tests/benchmarks/llm_compare.py     # five seeds each; ten minutes

The table goes into results/llm_compare.md.
"""

from math import nan
from statistics import mean, median

import tyro
from bench import LLM, run_script, table, write_table

COLUMNS = {  # each column, and the format of its numbers
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


def run(script, *flags):
    """One run. Its seconds are those of the whole process, imports included."""
    found = run_script(script, *flags)
    log = found["log"]
    score, length = log["eval/pass@1"], log["eval/mean_length"]
    found |= {"pass@1 before": score[0], "at step 50": score[1], "after": score[-1]}
    found |= {"length before": length[0], "length after": length[-1]}
    found["clip_ratio"] = mean(log.get("clip_ratio", [nan]))
    found["discarded"] = sum(log.get("discarded_groups", [nan]))
    return found


def main(seeds: int = 5, smoke: bool = False):
    """With --smoke two of the scripts take two steps each, and nothing is written."""
    flags = ["--steps", 2, "--eval-every", 1, "--eval-problems", 8] if smoke else []
    runs = {}
    for script in LLM[:2] if smoke else LLM:
        runs[script] = [run(script, "--seed", seed, *flags) for seed in range(1, seeds + 1)]
    rows = []
    for name, found in runs.items():
        cells = [name, len(found), f"{min(one['after'] for one in found):.3f}"]
        for column, form in COLUMNS.items():
            cells.append(format(median(one[column] for one in found), form).replace("nan", "–"))
        rows.append(cells)
    lines = table(["run", "n", "worst after", *COLUMNS], rows)
    write_table("llm_compare", lines, "transformers", note="medians over the seeds", smoke=smoke)


if __name__ == "__main__":
    tyro.cli(main)

"""The five LLM scripts side by side on their default task:
each with its defaults, one process after the other.

    python tests/benchmarks/llm_compare.py          # every script, seeds 1 to 5
    python tests/benchmarks/llm_compare.py --only gspo_llm   # its row alone is made anew
    python tests/benchmarks/llm_compare.py --sweep --seeds 2   # GSPO's and CISPO's clip bounds

The first also runs grpo_llm.py with an empty cache. Writes results/llm_compare.md, or llm_sweep.md,
and the curves of every run into llm_curves.json, from which draw.py draws.
"""

import json
import tempfile
from math import nan
from statistics import mean, median

import tyro
from bench import LLM, RESULTS, footer, row, run_script, table, write_table

SWEEP = {
    "gspo_llm": [(3e-4, 4e-4), (3e-3, 4e-3), (0.01, 0.013), (0.03, 0.04), (0.1, 0.13), (0.2, 0.28)],
    "cispo_llm": [(None, 0.2), (None, 0.5), (None, 1.0), (None, 2.0), (None, 4.0)],
}
CURVES = ("reward", "completions/mean_length")
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


def run(script: str, seed: int, *flags, **environment) -> dict:
    """One run; the whole process is timed, imports included."""
    done = run_script(script, "--seed", seed, *flags, **environment)
    log = {name: [value for _, value in points] for name, points in done["log"].items()}
    return {
        "pass@1 before": log["eval/pass@1"][0],
        "at step 50": log["eval/pass@1"][1],
        "after": log["eval/pass@1"][-1],
        "length before": log["eval/mean_length"][0],
        "length after": log["eval/mean_length"][-1],
        "clip_ratio": mean(log.get("clip_ratio", [nan])),
        "discarded": sum(log.get("discarded_groups", [nan])),
        "seconds": done["seconds"],
        "MB": done["MB"],
        "curves": {name: [round(value, 4) for value in log[name]] for name in CURVES},
    }


def cells(name: str, runs: list[dict]) -> list[str]:
    """Median over the seeds, and the worst of pass@1."""
    worst = min(run["after"] for run in runs)
    medians = [format(median(run[c] for run in runs), form) for c, form in COLUMNS.items()]
    return [name, f"{worst:.3f}", *(cell.replace("nan", "–") for cell in medians)]


def renew(only: tuple[str, ...], seeds: int):
    """The rows and curves of some scripts anew; the others stay."""
    page, data = RESULTS / "llm_compare.md", RESULTS / "llm_curves.json"
    text, found = page.read_text(), json.loads(data.read_text())
    for script in only:
        runs = [run(script, seed) for seed in range(1, seeds + 1)]
        (old,) = (line for line in text.splitlines() if line.startswith(f"| {script} |"))
        text = text.replace(old, row(cells(script, runs)))
        found["curves"][script] = [one["curves"] for one in runs]
        print(row(cells(script, runs)), flush=True)
    page.write_text(text)
    data.write_text(json.dumps(found) + "\n")


def run_sweep(seeds: int) -> list[list[str]]:
    rows = []
    for script, bounds in SWEEP.items():
        for low, high in bounds:
            flags = ["--clip-high", high] + (["--clip-low", low] if low else [])
            runs = [run(script, seed, *flags) for seed in range(1, seeds + 1)]
            rows.append(cells(" ".join(map(str, [script, *flags])), runs))
            print(row(rows[-1]), flush=True)
    return rows


def run_scripts(seeds: int) -> list[list[str]]:
    run("grpo_llm", 1, "--steps", 1)  # fills the cache
    rows, curves = [], {}
    for script in LLM:
        runs = [run(script, seed) for seed in range(1, seeds + 1)]
        curves[script] = [one["curves"] for one in runs]
        rows.append(cells(script, runs))
        print(row(rows[-1]), flush=True)
    caches = [tempfile.mkdtemp() for _ in range(3)]
    runs = [run("grpo_llm", seed, XDG_CACHE_HOME=cache) for seed, cache in enumerate(caches, 1)]
    rows.append(cells("grpo_llm, empty cache", runs))
    found = {"where": footer("transformers", note=f"{seeds} seeds"), "curves": curves}
    (RESULTS / "llm_curves.json").write_text(json.dumps(found) + "\n")
    return rows


def main(sweep: bool = False, seeds: int = 5, only: tuple[str, ...] = ()):
    if only:
        renew(only, seeds)
        return
    rows = run_sweep(seeds) if sweep else run_scripts(seeds)
    lines = table(["run", "worst after", *COLUMNS], rows)
    name = "llm_sweep" if sweep else "llm_compare"
    write_table(name, lines, "transformers", note=f"median of {seeds} seeds")


if __name__ == "__main__":
    tyro.cli(main)

"""The five LLM scripts side by side on their default task:
each with its defaults, one process after the other.

    python tests/benchmarks/llm_compare.py          # every script, seeds 1 to 5
    python tests/benchmarks/llm_compare.py --only gspo_llm   # its row alone is made anew
    python tests/benchmarks/llm_compare.py --sweep --seeds 2   # GSPO's and CISPO's clip bounds

The first also runs grpo_llm.py with an empty cache.
Prints a table in Markdown and writes it, with machine and versions, into tests/benchmarks/results/,
and the curves of every run into llm_curves.json beside it, from which curves.py draws.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import transformers
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
SCRIPTS = ("rloo_llm", "grpo_llm", "dapo_llm", "gspo_llm", "cispo_llm")
SWEEP = {
    "gspo_llm": [(3e-4, 4e-4), (3e-3, 4e-3), (0.01, 0.013), (0.03, 0.04), (0.1, 0.13), (0.2, 0.28)],
    "cispo_llm": [(None, 0.2), (None, 0.5), (None, 1.0), (None, 2.0), (None, 4.0)],
}
CURVES = ("reward", "completions/mean_length")
COLUMNS = (
    "pass@1 before",
    "at step 50",
    "after",
    "length before",
    "length after",
    "clip_ratio",
    "discarded",
    "seconds",
    "MB",
)


def run(script: str, seed: int, *flags: str, cache: str | None = None) -> dict:
    """One run in a process of its own; the whole process is timed, imports included."""
    environment = {**os.environ, **({"XDG_CACHE_HOME": cache} if cache else {})}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            f"{script}.py",
            "--seed",
            str(seed),
            "--output-dir",
            folder,
            *flags,
        ]
        start = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        assert status == 0, f"{' '.join(command)} failed"
        events = EventAccumulator(
            next(Path(folder).iterdir()).as_posix(), size_guidance={"scalars": 0}
        )
        events.Reload()
    log = {
        name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    clipped = log.get("clip_ratio", [float("nan")])
    return {
        "pass@1 before": log["eval/pass@1"][0],
        "at step 50": log["eval/pass@1"][1],
        "after": log["eval/pass@1"][-1],
        "length before": log["eval/mean_length"][0],
        "length after": log["eval/mean_length"][-1],
        "clip_ratio": sum(clipped) / len(clipped),
        "discarded": sum(log.get("discarded_groups", [float("nan")])),
        "seconds": seconds,
        "MB": usage.ru_maxrss / 1024,
        "curves": {name: [round(value, 4) for value in log[name]] for name in CURVES},
    }


def row(name: str, runs: list[dict]) -> str:
    """Median over the seeds, and the worst of pass@1."""
    cells = [median(run[column] for run in runs) for column in COLUMNS]
    form = ["{:.3f}"] * 3 + ["{:.1f}"] * 2 + ["{:.4f}"] + ["{:.0f}"] * 3
    worst = min(run["after"] for run in runs)
    return (
        f"| {name} | {worst:.3f} | "
        + " | ".join(f.format(cell) for f, cell in zip(form, cells, strict=True)).replace(
            "nan", "–"
        )
        + " |"
    )


def renew(only: tuple[str, ...], seeds: int, results: Path):
    """The rows and curves of some scripts anew; the others stay."""
    table, found = results / "llm_compare.md", json.loads((results / "llm_curves.json").read_text())
    text = table.read_text()
    for script in only:
        runs = [run(script, seed) for seed in range(1, seeds + 1)]
        (old,) = (line for line in text.splitlines() if line.startswith(f"| {script} |"))
        text = text.replace(old, row(script, runs))
        found["curves"][script] = [one["curves"] for one in runs]
        print(row(script, runs), flush=True)
    table.write_text(text)
    (results / "llm_curves.json").write_text(json.dumps(found) + "\n")


def main(sweep: bool = False, seeds: int = 5, only: tuple[str, ...] = SCRIPTS):
    results = Path(__file__).parent / "results"
    if only != SCRIPTS:
        renew(only, seeds, results)
        return
    lines = ["| run | worst after | " + " | ".join(COLUMNS) + " |", "|-" * (len(COLUMNS) + 2) + "|"]
    print("\n".join(lines), flush=True)

    curves = {}

    def add(name, script, *flags):
        runs = [run(script, seed, *flags) for seed in range(1, seeds + 1)]
        curves[name] = [one["curves"] for one in runs]
        lines.append(row(name, runs))
        print(lines[-1], flush=True)

    if sweep:
        for script, bounds in SWEEP.items():
            for low, high in bounds:
                flags = ["--clip-high", str(high)] + (["--clip-low", str(low)] if low else [])
                add(f"{script} {' '.join(flags)}", script, *flags)
    else:
        run("grpo_llm", 1, "--steps", "1")  # fills the cache
        for script in SCRIPTS:
            add(script, script)
        caches = [tempfile.mkdtemp() for _ in range(3)]
        runs = [run("grpo_llm", seed, cache=cache) for seed, cache in enumerate(caches, 1)]
        lines.append(row("grpo_llm, empty cache", runs))
        print(lines[-1])
    where = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
    where += f"torch {torch.__version__}, transformers {transformers.__version__}, "
    where += f"{time.strftime('%Y-%m-%d')}, median of {seeds} seeds"
    result = results / ("llm_sweep.md" if sweep else "llm_compare.md")
    result.write_text("\n".join([*lines, "", where, ""]))
    if not sweep:
        result.with_name("llm_curves.json").write_text(
            json.dumps({"where": where, "curves": curves}) + "\n"
        )


if __name__ == "__main__":
    tyro.cli(main)

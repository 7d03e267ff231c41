"""Every cure shown: an experiment for each claim of the lineage.

    python tests/benchmarks/cures.py                     # all of them: about an hour on two cores
    python tests/benchmarks/cures.py --only clip baseline
    python tests/benchmarks/cures.py --draw-only         # the figures and the table, from results/
    python tests/benchmarks/cures.py --smoke             # each at toy size, without writing

Each experiment imports the scripts, changes one thing at a time, and runs several seeds, each run
in a process with one thread. The numbers go into results/cures_NAME.json and a figure into
results/cures_NAME.png; results/cures.md has the medians and ranges of all. What each experiment
does stands beside it, in cures_classic.py and cures_llm.py. Needs matplotlib, for which see
tests/benchmarks/requirements.txt.
"""

import io
import json
import multiprocessing
import os
import platform
import sys
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"  # two runs beside each other use two cores

import cures_classic
import cures_llm
import torch
import transformers
import tyro
from cures_findings import FINDINGS, fill, summary
from cures_tools import RESULTS, finish

EXPERIMENTS = {each.name: each for each in [*cures_classic.EXPERIMENTS, *cures_llm.EXPERIMENTS]}


def work(name: str, settings: dict) -> dict:
    """One run, in a worker process."""
    torch.set_num_threads(1)
    return EXPERIMENTS[name].run(**settings)


def measure(name: str, jobs: list[dict], workers: int) -> dict:
    """All runs of an experiment, and what to know about them; 0 workers: in this process."""
    start = time.perf_counter()
    inputs = [(name, settings) for settings in jobs]
    if workers == 0:
        results = [work(*each) for each in inputs]
    else:
        with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=8) as pool:
            results = pool.starmap(work, inputs, chunksize=1)
    where = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
    where += f"transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}"
    return {
        "claim": EXPERIMENTS[name].claim,
        "measure": EXPERIMENTS[name].measure,
        "where": where,
        "seconds": round(time.perf_counter() - start),
        "runs": [list(pair) for pair in zip(jobs, results, strict=True)],
    }


def rounded(value):
    """Four digits are enough for a figure."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def table(found: dict) -> list[str]:
    """Markdown: a row per setting, the median over seeds of each number, and its range."""
    rows = summary(found)
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [f"| | {' | '.join(columns)} |", "|-" * (len(columns) + 1) + "|"]
    for row, numbers in rows.items():
        cells = [row, str(numbers["seeds"])]
        for column in columns[1:]:
            low, middle, high = numbers.get(column, (None, None, None))
            cell = f"{middle:.4g} ({low:.4g} to {high:.4g})" if column in numbers else "–"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def draw(name: str, found: dict, path: Path | io.BytesIO):
    from matplotlib.figure import Figure  # the tests run the rest without it

    figure = Figure(figsize=EXPERIMENTS[name].size)
    EXPERIMENTS[name].draw(figure, found["runs"])
    finish(figure, path)


def report() -> str:
    """The table of every experiment whose numbers are in results/."""
    lines = ["# Every cure shown", "", "Median (worst to best) over the seeds; `cures.py`.", ""]
    for name in EXPERIMENTS:
        path = RESULTS / f"cures_{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            lines += [f"## {name}", "", f"Claim: {found['claim']}", ""]
            lines += [f"Measured: {found['measure']}", "", *table(found), ""]
            lines += [f"Found: {fill(FINDINGS[name], summary(found))}", ""]
            lines += [f"{found['seconds']} s; {found['where']}", ""]
    return "\n".join(lines)


def main(
    only: tuple[str, ...] = (), smoke: bool = False, draw_only: bool = False, workers: int = 2
):
    """Run the experiments of these names, or all."""
    for name in only or EXPERIMENTS:
        path = RESULTS / f"cures_{name}.json"
        if smoke:
            found = measure(name, EXPERIMENTS[name].smoke, 0)
            if find_spec("matplotlib"):
                draw(name, json.loads(json.dumps(found)), io.BytesIO())
            print(name, *table(found), sep="\n")
            continue
        if not draw_only:
            found = rounded(measure(name, EXPERIMENTS[name].jobs, workers))
            path.write_text(json.dumps(found) + "\n")
            print(f"{name}: {found['seconds']} s", *table(found), sep="\n", flush=True)
        draw(name, json.loads(path.read_text()), path.with_suffix(".png"))
    if not smoke:
        (RESULTS / "cures.md").write_text(report())


if __name__ == "__main__":
    tyro.cli(main)

"""Every cure shown: an experiment for each claim of the lineage.

    python tests/benchmarks/cures.py                     # all of them: about an hour on two cores
    python tests/benchmarks/cures.py --only clip baseline
    python tests/benchmarks/cures.py --smoke             # each at toy size, without writing

Each experiment imports the scripts, changes one thing at a time, and runs several seeds, each run
in a process with one thread. What each one does stands beside it, in cures_classic.py,
cures_llm_steps.py and cures_llm_tokens.py. The numbers go into results/cures_NAME.json; draw.py
draws them, and quotes.py writes them into the pages.
"""

import io
import json
import multiprocessing
import os
import time
from importlib.util import find_spec

os.environ["OMP_NUM_THREADS"] = "1"  # two runs beside each other use two cores

import cures_classic
import cures_llm_steps
import cures_llm_tokens
import torch
import tyro
from bench import RESULTS, footer
from cures_findings import lines
from cures_tools import picture

PARTS = (cures_classic, cures_llm_steps, cures_llm_tokens)
EXPERIMENTS = {each.name: each for part in PARTS for each in part.EXPERIMENTS}


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
    return {
        "claim": EXPERIMENTS[name].claim,
        "measure": EXPERIMENTS[name].measure,
        "where": footer("transformers"),
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


def main(only: tuple[str, ...] = (), smoke: bool = False, workers: int = 2):
    """Run the experiments of these names, or all."""
    for name in only or EXPERIMENTS:
        experiment = EXPERIMENTS[name]
        if smoke:
            found = measure(name, experiment.smoke, 0)
            if find_spec("matplotlib"):
                runs = json.loads(json.dumps(found["runs"]))
                picture(io.BytesIO(), experiment.draw, runs, experiment.size)
        else:
            found = rounded(measure(name, experiment.jobs, workers))
            (RESULTS / f"cures_{name}.json").write_text(json.dumps(found) + "\n")
        print(f"{name}: {found['seconds']} s", *lines(found), sep="\n", flush=True)


if __name__ == "__main__":
    tyro.cli(main)

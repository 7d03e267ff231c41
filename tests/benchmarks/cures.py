"""Every cure shown: an experiment for each claim of the lineage.

    python tests/benchmarks/cures.py                     # all: 70 minutes on two cores
    python tests/benchmarks/cures.py --only clip baseline
    python tests/benchmarks/cures.py --smoke             # each at toy size, without writing

Each experiment imports the scripts, changes one thing at a time, and runs several seeds, each run
in a process with one thread. What each one does stands beside it, in cures_classic.py,
cures_ppo.py, cures_llm_passes.py, cures_llm_steps.py, cures_llm_tokens.py and cures_llm_more.py.
The numbers go into results/cures_NAME.json; draw.py draws them, and quotes.py writes them into the
pages.

Each run is kept in ~/.cache/policy-gradients-cures, so that all this can be stopped and resumed.
Other settings, or another text of the experiment's function, make another run; when a script has
changed, delete the folder.
"""

import inspect
import io
import json
import multiprocessing
import os
import time
import zlib
from importlib.util import find_spec
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # two runs beside each other use two cores

import cures_classic
import cures_llm_more
import cures_llm_passes
import cures_llm_steps
import cures_llm_tokens
import cures_ppo
import torch
import tyro
from bench import RESULTS, footer
from cures_findings import lines
from cures_tools import picture

PARTS = (
    cures_classic,
    cures_ppo,
    cures_llm_passes,
    cures_llm_steps,
    cures_llm_tokens,
    cures_llm_more,
)
EXPERIMENTS = {each.name: each for part in PARTS for each in part.EXPERIMENTS}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "policy-gradients-cures"


def work(name: str, settings: dict) -> dict:
    """One run, in a worker process: its settings, its result and its seconds."""
    torch.set_num_threads(1)
    start = time.process_time()
    result = EXPERIMENTS[name].run(**settings)
    return {"settings": settings, "result": result, "seconds": time.process_time() - start}


def kept(name: str, settings: dict) -> Path:
    """Where a run is kept."""
    key = [settings, inspect.getsource(EXPERIMENTS[name].run)]
    return CACHE / f"{name}-{zlib.crc32(json.dumps(key).encode()):08x}.json"


def work_once(name: str, settings: dict):
    """One run, in a worker process, into its file, unless it is there."""
    path = kept(name, settings)
    if not path.exists():
        text = json.dumps(rounded(work(name, settings)))
        path.with_suffix(f".{os.getpid()}").write_text(text)
        path.with_suffix(f".{os.getpid()}").rename(path)


def measure(name: str, jobs: list[dict], workers: int) -> dict:
    """All runs of an experiment, and what to know about them; 0 workers: here, and not kept."""
    if workers == 0:
        runs = [rounded(work(name, settings)) for settings in jobs]
    else:
        CACHE.mkdir(parents=True, exist_ok=True)
        # seed by seed, so that a run that is stopped has every setting
        inputs = [(name, settings) for settings in sorted(jobs, key=lambda job: job["seed"])]
        with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=8) as pool:
            pool.starmap(work_once, inputs, chunksize=1)
        runs = [json.loads(kept(name, settings).read_text()) for settings in jobs]
    return {
        "claim": EXPERIMENTS[name].claim,
        "measure": EXPERIMENTS[name].measure,
        "where": footer("transformers"),
        "time": f"{sum(run['seconds'] for run in runs) / 60:.0f} minutes of one core",
        "runs": [[run["settings"], run["result"]] for run in runs],
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
            found = measure(name, experiment.jobs, workers)
            (RESULTS / f"cures_{name}.json").write_text(json.dumps(found) + "\n")
        print(f"{name}: {found['time']}", *lines(found), sep="\n", flush=True)


if __name__ == "__main__":
    tyro.cli(main)

"""Every cure shown: an experiment for each claim of the lineage.

    python tests/experiments/cures.py                    # all: 70 minutes on two cores
    python tests/experiments/cures.py --only clip baseline
    python tests/experiments/cures.py --smoke            # each at toy size, without writing

Each experiment imports the scripts, changes one thing at a time, and runs several seeds, each run
in a process with one thread. What each one does stands beside it, in cures_classic.py,
cures_ppo.py, cures_llm_passes.py, cures_llm_steps.py, cures_llm_tokens.py and cures_llm_more.py.
The numbers go into results/cures_NAME.json and, with their sentences, into results/cures.md; from
there a person takes them to EXPERIMENTS.md. draw.py draws them.

Each run is kept in ~/.cache/policy-gradients-cures, so that all this can be stopped and resumed.
Other settings, or another text of the experiment's function, make another run; when a script has
changed, delete the folder.
"""

import inspect
import io
import json
import multiprocessing
import os
import sys
import time
import zlib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # two runs beside each other use two cores
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import torch
import tyro
from bench import footer
from cures_findings import FINDINGS, VERDICTS, fill, lines, summary
from cures_tools import Experiment, picture

PARTS = {  # where each experiment is
    "cures_classic": ("psi", "bootstrap", "step", "lambda"),
    "cures_ppo": ("surrogate", "clip", "entropy"),
    "cures_llm_passes": ("passes",),
    "cures_llm_steps": ("baseline", "length", "difficulty", "dynamic"),
    "cures_llm_tokens": ("cliphigher", "ratio", "silenced", "critic"),
    "cures_llm_more": ("hacking",),
}
RESULTS = Path(__file__).parent / "results"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "policy-gradients-cures"


def experiment(name: str) -> Experiment:
    """Of all files its own alone is imported, so that each runs while others may not."""
    (part,) = (part for part, names in PARTS.items() if name in names)
    return {each.name: each for each in import_module(part).EXPERIMENTS}[name]


def work(name: str, settings: dict) -> dict:
    """One run, in a worker process: its settings, its result and its seconds."""
    torch.set_num_threads(1)
    start = time.process_time()
    result = experiment(name).run(**settings)
    return {"settings": settings, "result": result, "seconds": time.process_time() - start}


def kept(name: str, settings: dict) -> Path:
    """Where a run is kept."""
    key = [settings, inspect.getsource(experiment(name).run)]
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
        "claim": experiment(name).claim,
        "measure": experiment(name).measure,
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


def write_page():
    """results/cures.md: claim, table and finding of every experiment."""
    parts = ["# Every cure shown\n\nMedian (worst to best) over the seeds; written by `cures.py`."]
    for name, finding in FINDINGS.items():
        found = json.loads((RESULTS / f"cures_{name}.json").read_text())
        parts += [f"## {name}", f"Claim: {found['claim']}", f"Measured: {found['measure']}"]
        parts += ["\n".join(lines(found)), f"Found: {fill(finding, summary(found))}"]
        parts += [f"{found['time']}; {found['where']}"]
    (RESULTS / "cures.md").write_text("\n\n".join(parts) + "\n")


def main(only: tuple[str, ...] = (), smoke: bool = False, workers: int = 2):
    """Run the experiments of these names, or all."""
    for name in only or VERDICTS:
        chosen = experiment(name)
        if smoke:
            found = measure(name, chosen.smoke, 0)
            if find_spec("matplotlib"):
                runs = json.loads(json.dumps(found["runs"]))
                picture(io.BytesIO(), chosen.draw, runs, chosen.size)
        else:
            found = measure(name, chosen.jobs, workers)
            (RESULTS / f"cures_{name}.json").write_text(json.dumps(found) + "\n")
        print(f"{name}: {found['time']}", *lines(found), sep="\n", flush=True)
    if not smoke:
        write_page()


if __name__ == "__main__":
    tyro.cli(main)

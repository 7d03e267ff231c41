"""Which script learns best on sums? Eleven methods, ten seeds each, equal numbers of completions.

    nice python tests/benchmarks/methods.py --jobs 2    # two hours of one core; goes on where it was
    python tests/benchmarks/methods.py --smoke          # two methods at toy size; writes nothing

Each method is a script with flags. A run draws some 30,720 completions: 120 rollouts of 256, or for
DAPO, which redraws groups, fewer rollouts. The learning rate is the best of four on two seeds and
256 sums of their own; then ten other seeds are scored on 256 other sums, eight completions each.
No run trains on any of these sums. results/methods.jsonl keeps a run a line, with all its flags: if
a default changes, its runs are made anew.

Declared before the first run: each row is compared with GRPO by its last pass@1, paired by seed, in
a two-sided sign-flip test. With ten comparisons a difference counts if p is below 0.005. With ten
seeds p is at least 0.002.
"""

import contextlib
import functools
import importlib
import io
import json
import multiprocessing
import sys
import tempfile
import time
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import NamedTuple
from unittest.mock import patch

import torch
import tyro
from bench import RESULTS, revision
from stats import interval, p_value
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

RATES = (3e-4, 5e-4, 1e-3, 2e-3)
TUNING_SEEDS, SEEDS = (101, 102), range(1, 11)
TUNING_SUMS, SUMS = 1, 0  # the checksum of a sum, modulo 10
HELD_OUT = 256
QUARTERS = 4  # evaluations after the initial one


class Method(NamedTuple):
    script: str
    flags: dict = {}
    functions: dict = {}  # they replace functions of the script


NO_CLIP = {"clip_low": 1e6, "clip_high": 1e6}
DR_GRPO = {"scale_rewards": False, "length_norm": "constant", "beta": 0.0}
# Cross-entropy on the right completions alone, those of groups that are all right as well.
IMITATION = {
    "compute_advantages": lambda rewards, args: rewards.clone(),
    "are_equal": lambda rewards: rewards.amax(1) <= 0,
}
METHODS = {
    "RLOO": Method("rloo_llm"),
    "GRPO, one step per rollout": Method("grpo_llm", {"num_minibatches": 1}),
    "GRPO": Method("grpo_llm"),
    "GRPO without its clip": Method("grpo_llm", NO_CLIP),
    "GRPO, β = 0": Method("grpo_llm", {"beta": 0.0}),
    "Dr. GRPO": Method("grpo_llm", DR_GRPO),
    "DAPO": Method("dapo_llm", {"steps": 56}),
    "GSPO": Method("gspo_llm"),
    "CISPO, cap 1.2": Method("cispo_llm"),
    "CISPO, cap 5": Method("cispo_llm", {"clip_high": 4.0}),
    "imitation of right completions": Method("grpo_llm", {}, IMITATION),
}


def load_data(residue, script, args):
    """In place of the script's own: 256 different sums of this checksum to evaluate on."""
    problems = script.load_problems("train") + script.load_problems("test")
    checksums = {problem: zlib.crc32(problem[0].encode()) % 10 for problem in problems}
    train = [problem for problem in problems if checksums[problem] not in (SUMS, TUNING_SUMS)]
    held_out = [problem for problem in checksums if checksums[problem] == residue]
    return train, held_out[: args.eval_problems]


def arguments(method, rate, seed, small):
    """The script and the arguments of a run."""
    script = importlib.import_module(METHODS[method].script)
    flags = {"eval_problems": HELD_OUT} | METHODS[method].flags | small
    args = script.Args(learning_rate=rate, seed=seed, **flags)
    args.eval_every = args.steps // QUARTERS
    return script, args


def key(method, rate, seed, small):
    """What tells runs apart: the method and all flags as they came out."""
    _, args = arguments(method, rate, seed, small)
    return json.dumps({"method": method} | vars(args) | {"output_dir": ""})


def run(method, rate, seed, small):
    """One run: a line of the file. If the loss was not finite, pass@1 ends at 0."""
    torch.set_num_threads(1)
    start = time.process_time()
    script, args = arguments(method, rate, seed, small)
    residue = TUNING_SUMS if seed in TUNING_SEEDS else SUMS
    own = {"load_data": functools.partial(load_data, residue, script)}
    made = {"key": key(method, rate, seed, small), "method": method, "rate": rate, "seed": seed}
    with (
        tempfile.TemporaryDirectory() as args.output_dir,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        patch.multiple(script, **METHODS[method].functions, **own),
    ):
        try:
            script.main(args)
        except RuntimeError as error:  # of clip_grad_norm_
            made["error"] = str(error)[:200]
        (folder,) = Path(args.output_dir).iterdir()
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        names = events.Tags()["scalars"]
        log = {name: [event.value for event in events.Scalars(name)] for name in names}
    for name in ("eval/pass@1", "eval/pass@8"):
        scores = [round(score, 4) for score in log[name]]
        made[name] = scores + [0.0] * (QUARTERS + 1 - len(scores))
    discarded = sum(log.get("discarded_groups", [0]))
    made["drawn"] = round((args.steps * args.prompts_per_step + discarded) * args.group_size)
    made["clipfrac"] = round(fmean(log.get("clipfrac", [0])), 4)
    made["seconds"] = round(time.process_time() - start)
    return made | {"revision": revision()}


class Runs:
    """Runs that are kept, one a line, by their key."""

    def __init__(self, path=None):
        self.path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.kept = {made["key"]: made for made in map(json.loads, lines)}

    def make(self, jobs, cores, small):
        """Make the runs that are missing, each in a process of its own, and keep each at once."""
        missing = [job for job in jobs if key(*job, small) not in self.kept]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(cores, context, max_tasks_per_child=1) as pool:
            for future in as_completed([pool.submit(run, *job, small) for job in missing]):
                made = future.result()
                self.kept[made["key"]] = made
                print(made["method"], made["rate"], made["seed"], made["eval/pass@1"], flush=True)
                if self.path:
                    with self.path.open("a") as file:
                        file.write(json.dumps(made) + "\n")

    def get(self, method, rate, seeds, small):
        return [self.kept[key(method, rate, seed, small)] for seed in seeds]

    def best_rate(self, method, rates, seeds, small):
        def score(rate):
            return fmean(made["eval/pass@1"][-1] for made in self.get(method, rate, seeds, small))

        return max(rates, key=score)


def main(jobs: int = 1, smoke: bool = False):
    """--jobs runs are made at a time."""
    methods, rates, small = list(METHODS), RATES, {}
    if smoke:
        methods, rates = ["GRPO", "imitation of right completions"], RATES[:1]
        small = {"steps": 4, "prompts_per_step": 4, "eval_problems": 4}
    runs = Runs(None if smoke else RESULTS / "methods.jsonl")
    tuning = [(method, rate, seed) for method in methods for rate in rates for seed in TUNING_SEEDS]
    runs.make(tuning, jobs, small)
    best = {method: runs.best_rate(method, rates, TUNING_SEEDS, small) for method in methods}
    seeds = SEEDS[:2] if smoke else SEEDS
    runs.make([(m, best[m], seed) for seed in seeds for m in methods], jobs, small)
    reported = {method: runs.get(method, best[method], seeds, small) for method in methods}
    print(*table_of(reported), sep="\n")


def table_of(reported):
    grpo = [made["eval/pass@1"][-1] for made in reported["GRPO"]]
    for method, runs in reported.items():
        last = [made["eval/pass@1"][-1] for made in runs]
        low, high = interval(last)
        differences = [a - b for a, b in zip(last, grpo, strict=True)]
        yield f"{method} {runs[0]['rate']} {fmean(last):.3f} {low:.3f} {high:.3f} {fmean(differences):+.3f} p {p_value(differences):.3f}"


if __name__ == "__main__":
    sys.exit(tyro.cli(main))

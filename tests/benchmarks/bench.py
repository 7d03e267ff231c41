"""What benchmarks share: runs of scripts, runs that are kept, tables."""

import contextlib
import functools
import importlib
import io
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
import types
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = Path(__file__).with_name("results"), Path(__file__).with_name("RESULTS.md")
CPU = torch.device("cpu")
for folder in ("tests/examples", "tests/learn", "tests", "."):
    sys.path.insert(0, str(ROOT / folder))

import variants  # noqa: E402
from blocks import write_block  # noqa: E402
from scripts import LLM_SCRIPTS as LLM  # noqa: E402, F401
from scripts import SCRIPTS  # noqa: E402


# ------------------------------------------------------------------------------------------ Tables
def table(header, rows):
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows)]
    lines.insert(1, "|-" * len(header) + "|")
    return [line.replace("|  |", "| |") for line in lines]


def machine(*packages):
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    return f"{platform.machine()}, {os.cpu_count()} cores, {versions}"


@functools.cache  # that of the start, as the first run that is kept changes a file
def revision():
    """The commit of this checkout, followed by + if a file that git tracks has changed since. The
    variable REVISION says it for a copy on another machine."""
    command = ["git", "describe", "--always", "--dirty=+"]
    git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return os.environ.get("REVISION") or git.stdout.strip() or "unknown"


def footer(*packages):
    """Machine, versions of torch and these packages, date and revision of a run that ends now."""
    return f"{machine(*packages)}, {time.strftime('%Y-%m-%d')}, revision {revision()}"


def with_footer(lines, runs):
    """A table, followed by the machines and the revisions that its runs were made with."""
    machines, revisions = (list(dict.fromkeys(run[key] for run in runs)) for key in MADE_BY)
    return [*lines, "", f"{'; '.join(machines)}; revision {', '.join(sorted(revisions))}"]


def show(tables, smoke=False):
    """Print tables, {name: lines}, and write them into their blocks of RESULTS.md, unless they are
    those of a smoke test."""
    for name, lines in tables.items():
        print(*lines, sep="\n")
        if not smoke:
            write_block(PAGE, name, lines)


# ---------------------------------------------------------------------------- Runs that are kept
MADE_BY = ("machine", "revision")


def all_flags(args):
    """{name: value} of every flag as it came out, defaults included, except where it writes. Of a
    file or folder the name counts, because a path is another on each machine."""
    flags = json.loads(json.dumps(asdict(args), default=str))
    flags.pop("output_dir", None)
    absolute = {name for name, value in flags.items() if str(value).startswith("/")}
    return {name: Path(v).name if name in absolute else v for name, v in flags.items()}


def without_seed(flags):
    return {name: value for name, value in flags.items() if name != "seed"}


class Kept:
    """The runs in results/NAME.jsonl, one per line.

    A run has the row of the table that it belongs to, and its flags: all of them, so that a run
    from before a change of any default is not taken for one of today. It also has the machine and
    the revision that it was made with. With smoke nothing is read or written.
    """

    def __init__(self, name, *packages, smoke=False):
        self.path = None if smoke else RESULTS / f"{name}.jsonl"
        self.packages, self.runs = packages, []
        if self.path and self.path.exists():
            self.runs = [json.loads(line) for line in self.path.read_text().splitlines()]

    def of(self, row):
        return [run for run in self.runs if run["row"] == row]

    def find(self, row, flags):
        """The run of this row with exactly these flags, or None."""
        return next((run for run in self.of(row) if run["flags"] == flags), None)

    def forget(self, row, wanted):
        """Drop the row's runs whose flags, without the seed, are none of those wanted: a table must
        not mix runs from before and after a change."""
        allowed = [without_seed(flags) for flags in wanted]
        stale = [run for run in self.of(row) if without_seed(run["flags"]) not in allowed]
        self.runs = [run for run in self.runs if run not in stale]

    def add(self, row, flags, values):
        """Keep a run that has just ended, at once."""
        origin = dict(zip(MADE_BY, (machine(*self.packages), revision()), strict=True))
        self.runs.append({"row": row, "flags": flags} | origin | values)
        print(row, json.dumps(values)[:160], flush=True)
        if self.path:
            self.path.write_text("".join(json.dumps(run) + "\n" for run in self.runs))

    def make(self, function, wanted, at_once):
        """Make the runs that are missing, so many at once. wanted: [(row, flags, job)], where job
        is a dict of the function's arguments."""
        missing = [item for item in wanted if not self.find(*item[:2])]
        jobs = [job for *_, job in missing]
        for job, values in in_processes(function, jobs, at_once):
            row, flags, _ = missing[jobs.index(job)]
            self.add(row, flags, values)


def last(run, metric="eval/pass@1"):
    """The last score of a run that is kept."""
    return run.get("log", run)[metric][-1]


def best_rate(runs):
    """The learning rate with the highest mean of last scores among these runs, or None."""
    scores = defaultdict(list)
    for run in runs:
        scores[run["flags"]["learning_rate"]].append(last(run))
    return max(sorted(scores), key=lambda rate: fmean(scores[rate]), default=None)


def in_new_process(function, job):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, **job).result()


def in_processes(function, jobs, at_once=1):
    """Call the function with each job, a dict of arguments, in a new process. Yields pairs of job
    and result, in the order in which they end. (One pool with max_tasks_per_child=1 hung twice in
    Python 3.11; cpython issue 115634 is about hangs of this kind.)"""
    with ThreadPoolExecutor(at_once) as threads:
        futures = {threads.submit(in_new_process, function, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()


# -------------------------------------------------------------------------------- Runs of scripts
def module_of(name, text):
    """The module of a script that would lie in the repository's root, from its text."""
    module = types.ModuleType(name)
    module.__file__ = str(ROOT / f"{name}.py")  # it looks for the tiny model from there
    sys.modules[name] = module
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module


def load(name):
    """The module of a script, or of the script that a block of VARIANTS.md makes of its parent."""
    if name in SCRIPTS:  # ppo is also a block
        return importlib.import_module(name)
    return module_of(f"variant_{name}", variants.applied(name))


class Enough(Exception):
    """Ends main() of a script from within one of its functions."""


def run_main(script, args, **functions):
    """Run main() of a script with these functions instead of its own; print and keep nothing.

    Returns main's scores, and as "printed" what it would have printed. There are no scores if a
    function has raised Enough, or if the gradient of a step was not finite.
    """
    scores, printed = {}, io.StringIO()
    with (
        tempfile.TemporaryDirectory() as args.output_dir,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(io.StringIO()),
        patch.multiple(script, **functions),
    ):
        try:
            scores = script.main(args)
        except Enough:
            pass
        except RuntimeError as error:  # clip_grad_norm_'s
            if "non-finite" not in str(error):
                raise
    return scores | {"printed": printed.getvalue()}


def run_logged(script, args, **functions):
    """Run main() of a language-model script as run_main does. Returns its log, {name: values}, and
    what it would have printed."""
    log = defaultdict(list)

    def note(_, writer, metrics, step):
        for name, value in metrics.items():
            log[name].append(value)

    result = run_main(script, args, log=watched(script.log, note), **functions)
    return log, result["printed"]


def watched(function, note):
    """The function, but each call is followed by note(result, *arguments)."""

    def watched_function(*inputs, **options):
        result = function(*inputs, **options)
        note(result, *inputs)
        return result

    return watched_function


def train(script, args, steps=None, each_step=None, folder=None):
    """Train by the script's own main(), which here evaluates the model at the end alone.

    `steps` ends a run early; its learning rate still follows the schedule of args.steps.
    `each_step(step, model, metrics)` is called after each step, counted from 1. With `folder` the
    run starts from the model in it, instead of the tiny model.

    Returns a dict: the model, the tokenizer, pass@1 at the end, and for each metric a list with its
    value at each step (None where a step has not logged it). If main() has not come to its end,
    because of `steps` or because a gradient is not finite, pass@1 is 0.
    """
    own_evaluate, history, end = script.evaluate, [], {}
    args.eval_every = args.steps

    def evaluate(*inputs):
        return own_evaluate(*inputs) if inputs[-1] == args.steps else {"eval/pass@1": 0.0}

    def note(metrics, model, reference, tokenizer, *_):
        end.update(model=model, tokenizer=tokenizer)
        history.append(metrics)
        if each_step:
            each_step(len(history), model, metrics)
        if len(history) == steps:
            raise Enough

    functions = {"train_step": watched(script.train_step, note), "evaluate": evaluate}
    if folder:
        functions["TINY_MODEL"] = Path(folder)
    end["pass@1"] = run_main(script, args, **functions).get("eval/pass@1", 0.0)
    names = dict.fromkeys(name for metrics in history for name in metrics)
    return {name: [metrics.get(name) for metrics in history] for name in names} | end

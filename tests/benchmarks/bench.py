"""What benchmarks share: runs of scripts, runs that are kept, tables."""

import contextlib
import functools
import importlib
import io
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import types
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = Path(__file__).with_name("results"), Path(__file__).with_name("RESULTS.md")
for folder in ("tests/examples", "tests/learn", "tests", "."):
    sys.path.insert(0, str(ROOT / folder))

import variants  # noqa: E402
from scripts import LLM_SCRIPTS as LLM  # noqa: E402, F401
from scripts import SCRIPTS  # noqa: E402


def table(header, rows):
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows)]
    lines.insert(1, "|-" * len(header) + "|")
    return [line.replace("|  |", "| |") for line in lines]


def machine(*packages):
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{gpu}{platform.machine()}, {os.cpu_count()} cores, {versions}"


@functools.cache  # that of the start, as the first run that is kept changes a file
def revision():
    """The commit of this checkout, followed by + if a file that git tracks has changed since. The
    variable REVISION says it for a copy on another machine."""
    command = ["git", "describe", "--always", "--dirty=+"]
    git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return os.environ.get("REVISION") or git.stdout.strip() or "unknown"


def with_footer(lines, runs):
    """A table, followed by the machines and the revisions that its runs were made with."""
    machines = dict.fromkeys(run["machine"] for run in runs)
    revisions = sorted({run["revision"] for run in runs})
    return [*lines, "", f"{'; '.join(machines)}; revision {', '.join(revisions)}"]


def write_block(page, name, lines):
    """Replace what stands on the page (a Path) from <!-- name --> to <!-- end -->."""
    text = "\n".join([f"<!-- {name} -->", *lines, "<!-- end -->"])
    written, count = re.subn(
        f"<!-- {name} -->.*?<!-- end -->", lambda _: text, page.read_text(), flags=re.S
    )
    if count != 1:
        raise ValueError(f"{page.name} has {count} blocks with the name {name}; it should have one")
    page.write_text(written)


def show(tables):
    """Print tables, {name: lines}, and write them into their blocks of RESULTS.md."""
    for name, lines in tables.items():
        print(*lines, sep="\n")
        write_block(PAGE, name, lines)


class Kept:
    """The runs in results/NAME.jsonl, one per line.

    A run has the row of the table that it belongs to, the flags that define it (all other flags are
    the program's or the script's defaults), the machine, and the revision. A run that is there is
    not made again: to repeat it, delete its line.
    """

    def __init__(self, name, *packages):
        self.path, self.packages, self.runs = RESULTS / f"{name}.jsonl", packages, []
        if self.path.exists():
            self.runs = [json.loads(line) for line in self.path.read_text().splitlines()]

    def of(self, row):
        return [run for run in self.runs if run["row"] == row]

    def find(self, row, flags):
        """The run of this row with these flags, or None."""
        return next((run for run in self.of(row) if run["flags"] == flags), None)

    def add(self, row, flags, values):
        """Keep a run that has just ended, at once."""
        origin = {"machine": machine(*self.packages), "revision": revision()}
        self.runs.append({"row": row, "flags": flags} | origin | values)
        print(json.dumps(self.runs[-1], ensure_ascii=False), flush=True)
        self.path.write_text("".join(json.dumps(run) + "\n" for run in self.runs))

    def make(self, function, wanted, at_once=1):
        """Make the runs that are missing, so many at once. wanted: [(row, flags, job)], where job
        is a dict of the function's arguments."""
        missing = [item for item in wanted if not self.find(*item[:2])]
        jobs = [job for *_, job in missing]
        for job, values in in_processes(function, jobs, at_once):
            row, flags, _ = missing[jobs.index(job)]
            self.add(row, flags, values)


def in_processes(function, jobs, at_once=1):
    """Call the function with each job, a dict of arguments, in a new process. Yields pairs of job
    and result, in the order in which they end. (One pool with max_tasks_per_child=1 hung twice in
    Python 3.11; cpython issue 115634 is about hangs of this kind.)"""

    def call(job):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return job, pool.submit(function, **job).result()

    with ThreadPoolExecutor(at_once) as threads:
        for future in as_completed([threads.submit(call, job) for job in jobs]):
            yield future.result()


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
    """Ends main() of a script, see run_main."""


def run_main(script, args, note=lambda *_: None, **functions):
    """Run main() of a script with these functions in place of its own; print and keep nothing.

    Returns main's scores (with the weights of a classic script's agent instead of their file), and
    as "log" what it has logged, {name: [values]}. `note` gets the name, the value and the step of
    all that is logged. If it raises Enough, the run ends, and there are no scores.
    """
    scores, log = {}, defaultdict(list)

    def add_scalar(name, value, step):
        log[name].append(torch.as_tensor(value).item())
        note(name, log[name][-1], step)

    def make_writer(folder):
        Path(folder).mkdir(parents=True)
        return Mock(log_dir=folder, add_scalar=add_scalar)

    with (
        tempfile.TemporaryDirectory() as args.output_dir,
        contextlib.redirect_stdout(io.StringIO()),
        patch.multiple(script, **{"SummaryWriter": make_writer} | functions),
        contextlib.suppress(Enough),
    ):
        scores = script.main(args)
        if "agent" in scores:  # before its folder goes
            scores["agent"] = torch.load(scores["agent"])
    return scores | {"log": log}


def run_counted(script, args, **functions):
    """As run_main; and as "drawn", how many completions the run has drawn to train on."""
    drawn = []

    def rollout(*inputs, original=script.rollout):
        result = original(*inputs)
        drawn.append(len(result[0]["mask"]))
        return result

    def evaluate(*inputs, original=script.evaluate):
        before = len(drawn)
        scores = original(*inputs)
        del drawn[before:]
        return scores

    result = run_main(script, args, rollout=rollout, evaluate=evaluate, **functions)
    return result | {"drawn": sum(drawn)}


def clock():
    """The time in seconds, once the GPU has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of_steps(script, args, steps, **functions):
    """The seconds of each of so many training steps of a script, without evaluation."""
    times = []

    def evaluate(*_):
        times.append(clock())
        return {"eval/pass@1": 0.0}

    def note(name, *_):
        if name == "reward":  # once per step, at its end
            times.append(clock())
            if len(times) > steps:
                raise Enough

    run_main(script, args, note, evaluate=evaluate, **functions)
    return np.diff(times)

"""Tables, and runs of scripts that benchmarks and experiments can look into."""

import contextlib
import importlib
import io
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
for room in ("tests/experiments", "tests/examples", "tests/learn", "tests", "."):
    sys.path.insert(0, str(ROOT / room))


from lineage import LLM_SCRIPTS  # noqa: E402

LLM = [name for name in LLM_SCRIPTS if name != "ppo_llm"]  # only experiments run ppo_llm.py


def table(header, rows):
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows)]
    lines.insert(1, "|-" * len(header) + "|")
    return [line.replace("|  |", "| |") for line in lines]


def revision():
    """The commit of this checkout, followed by + if a file that git tracks has changed since. The
    variable REVISION says it for a copy on another machine."""
    command = ["git", "describe", "--always", "--dirty=+"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return os.environ.get("REVISION") or done.stdout.strip() or "unknown"


def footer(*packages):
    """The line below a table: machine, versions of torch and these packages, date and revision."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    return f"{machine}, {versions}, {time.strftime('%Y-%m-%d')}, revision {revision()}"


def write_table(name, lines, *packages, note, smoke=False):
    """Print a table and write it, with its footer, into results/NAME.md.

    RESULTS.md shows the content of that file, and here the new content replaces the old. If it does
    not, and neither page links to the file, that is an error. With smoke nothing is written.
    """
    print(*lines, sep="\n")
    if smoke:
        return
    text = "\n".join([*lines, "", f"{footer(*packages)}, {note}", ""])
    path, page = RESULTS / f"{name}.md", RESULTS.parent / "RESULTS.md"
    old, shown = path.read_text() if path.exists() else "", page.read_text()
    path.write_text(text)
    page.write_text(shown.replace(old, text) if old else shown)
    linked = f"results/{name}.md" in shown + (ROOT / "README.md").read_text()
    if old not in shown and not linked:
        sys.exit(f"RESULTS.md does not show {name}.md as it was: put the new table there by hand")


def spread(values, form=".2f"):
    """The median of these values, then the lowest and the highest in parentheses."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def module_of(name, text):
    """The module of a script that would lie in the repository's root, from its text."""
    module = types.ModuleType(name)
    module.__file__ = str(ROOT / f"{name}.py")  # it looks for the tiny model from there
    sys.modules[name] = module
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module


def load(name):
    """The module of a script, or of the script that a block of AFTER.md makes of its parent."""
    if name in after.BLOCKS:
        return module_of(f"after_{name}", after.applied(name))
    return importlib.import_module(name)


def own_process(function, **job):
    """Call the function in a new process and return its result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, **job).result()


def run_script(script, *flags, launcher=(), **environment):
    """Run a script in a process of its own.

    Returns its log, what it printed, its seconds by the clock and on the CPU, and its peak memory
    in MB. The keyword arguments are environment variables.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, *launcher, f"{script}.py", *map(str, flags)]
        command += ["--output-dir", folder]
        streams = {"stdout": output, "stderr": output}
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, **streams)
        _, status, usage = os.wait4(process.pid, 0)
        found = {"seconds": time.perf_counter() - start, "MB": usage.ru_maxrss / 1024}
        found["cpu_seconds"] = usage.ru_utime + usage.ru_stime
        output.seek(0)
        found["printed"] = output.read()
        if status != 0:
            raise RuntimeError(f"{' '.join(command)}\n{found['printed'][-2000:]}")
        (run,) = Path(folder).iterdir()
        events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        names = events.Tags()["scalars"]
        found["log"] = {name: [each.value for each in events.Scalars(name)] for name in names}
        return found


class Enough(Exception):
    """Ends main() of a script from within one of its functions."""


def run_main(script, args, **functions):
    """Run main() of an LLM script with these functions in place of its own; print and keep nothing.

    Returns main's scores. They are empty if a function has raised Enough, or if main() has stopped
    because a metric is not finite.
    """
    with (
        tempfile.TemporaryDirectory() as args.output_dir,
        contextlib.redirect_stdout(io.StringIO()),
        patch.multiple(script, **functions),
    ):
        try:
            return script.main(args)
        except Enough:
            return {}
        except SystemExit as end:
            if "not finite" not in str(end.code):  # a flag or a file is wrong
                raise
            return {}


def train(script, args, steps=None, each_step=None, folder=None):
    """Train by the script's own main(), which here evaluates the model at the end alone.

    `steps` ends a run early; its learning rate still follows the schedule of args.steps.
    `each_step(step, model, metrics)` is called after each step, counted from 1. With `folder` the
    run starts from the model in it, in place of the tiny model.

    Returns a dict: the model, the tokenizer, pass@1 at the end, and for each metric a list with its
    value at each step (None where a step has not logged it). If main() has not come to its end,
    because of `steps` or because a metric is not finite, pass@1 is 0.
    """
    own, own_evaluate, history, found = script.train_step, script.evaluate, [], {}
    args.eval_every = args.steps

    def evaluate(*inputs):
        return own_evaluate(*inputs) if inputs[-1] == args.steps else {"eval/pass@1": 0.0}

    def train_step(model, reference, tokenizer, *rest):
        metrics = own(model, reference, tokenizer, *rest)
        found.update(model=model, tokenizer=tokenizer)
        if math.isfinite(sum(metrics.values())):
            history.append(metrics)
            if each_step:
                each_step(len(history), model, metrics)
        if len(history) == steps:
            raise Enough
        return metrics

    functions = {"train_step": train_step, "evaluate": evaluate}
    if folder:
        functions["TINY_MODEL"] = Path(folder)
    found["pass@1"] = run_main(script, args, **functions).get("eval/pass@1", 0.0)
    names = dict.fromkeys(name for metrics in history for name in metrics)
    return {name: [metrics.get(name) for metrics in history] for name in names} | found


def evaluate(script, model, tokenizer, args, problems, k=8):
    """pass@1: the share of completions that are right, among k for each of these questions.

    The temperature is 1. Every call uses the same randomness.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, _, rewards = script.rollout(model, tokenizer, problems, k, 1.0, args)
    return rewards.mean().item()

"""Tables, runs of scripts, and a training loop that benchmarks and experiments can look into."""

import copy
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import median

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
for room in ("tests/experiments", "tests/examples", "tests", "."):
    sys.path.insert(0, str(ROOT / room))

from lineage import LLM_SCRIPTS  # noqa: E402

LLM = [name for name in LLM_SCRIPTS if name != "ppo_llm"]  # only experiments run ppo_llm.py


def table(header, rows):
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows)]
    lines.insert(1, "|-" * len(header) + "|")
    return [line.replace("|  |", "| |") for line in lines]


def revision(checkout=ROOT):
    """The commit of this checkout, followed by + if a file that git tracks has changed since."""
    command = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.check_output(command, cwd=checkout, text=True).strip()


def footer(*packages):
    """The line below a table: machine, versions of torch and these packages, date and revision."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    return f"{machine}, {versions}, {time.strftime('%Y-%m-%d')}, revision {revision()}"


def write_table(name, lines, *packages, note, smoke=False):
    """Print a table and write it, with its footer, into results/NAME.md.

    Where RESULTS.md shows the old content of that file, it gets the new content. With smoke nothing
    is written.
    """
    print(*lines, sep="\n")
    if smoke:
        return
    text = "\n".join([*lines, "", f"{footer(*packages)}, {note}", ""])
    path, page = RESULTS / f"{name}.md", RESULTS.parent / "RESULTS.md"
    if path.exists():
        page.write_text(page.read_text().replace(path.read_text(), text))
    path.write_text(text)


def spread(values, form=".2f"):
    """The median of these values, then the lowest and the highest in parentheses."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def own_process(file, **job):
    """Run `python FILE --job {…}` and return the JSON of the last line that it prints."""
    command = [sys.executable, file, "--job", json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def run_script(script, *flags, launcher=(), root=ROOT, **environment):
    """Run a script of the checkout in root in a process of its own.

    Returns its log, what it printed, its seconds by the clock and on the CPU, and its peak memory
    in MB. The keyword arguments are environment variables.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, *launcher, f"{script}.py", *map(str, flags)]
        command += ["--output-dir", folder]
        streams = {"stdout": output, "stderr": output}
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=root, env=os.environ | environment, **streams)
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


class Training:
    """The training loop in main() of an LLM script, one step at a time and without files.

    `model` is a pair (model, tokenizer) to begin with; without it args.model is loaded.
    """

    def __init__(self, script, args, device=CPU, model=None):
        self.script, self.args = script, args
        self.model, self.tokenizer = model or script.load_policy(args, device)
        self.reference = None
        if args.beta > 0:
            self.reference = copy.deepcopy(self.model).requires_grad_(False)
        if hasattr(script, "add_critic"):
            script.add_critic(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.0, fused=True)
        train, _ = script.load_data(args)
        stream = script.problem_stream(train, args.seed)
        self.draws = iter(lambda: list(islice(stream, args.prompts_per_step)), None)

    def step(self, number):
        """Take training step `number`, counted from 1, and return what it logs.

        The learning rate follows main(): it rises, then falls towards 0.
        """
        args = self.args
        rng = random.Random(f"{args.seed} {number}")
        torch.manual_seed(rng.getrandbits(32))
        end = args.steps + 1
        warmup = min(args.warmup_steps, args.steps) or 1
        share = min(number / warmup, (end - number) / (end - warmup))
        self.optimizer.param_groups[0]["lr"] = args.learning_rate * share
        policy = self.model, self.reference, self.tokenizer, self.optimizer
        metrics = self.script.train_step(*policy, self.draws, rng, args)
        return {name: float(value) for name, value in metrics.items()}


def train(script, args, steps=None, each_step=None, model=None):
    """Train as script.main does, and evaluate at the end.

    `steps` ends a run early; its learning rate still follows the schedule of args.steps.
    `each_step(step, model, metrics)` is called after each step, counted from 1.

    Returns a dict: the model (a given model is trained in place), the tokenizer, pass@1 at the end,
    and for each metric a list with its value at each step (None where a step has not logged it).
    If a metric is not finite, training ends before that step is recorded, as main() would stop
    there. If a weight is not finite, pass@1 is 0.
    """
    training = Training(script, args, model=model)
    policy, tokenizer = training.model, training.tokenizer
    history, scores = [], {"pass@1": 0.0}
    for step in range(1, (args.steps if steps is None else steps) + 1):
        metrics = training.step(step)
        if not all(map(math.isfinite, metrics.values())):
            break
        history.append(metrics)
        if each_step:
            each_step(step, policy, metrics)

    names = dict.fromkeys(name for metrics in history for name in metrics)
    result = {name: [metrics.get(name) for metrics in history] for name in names}
    if all(parameter.isfinite().all() for parameter in policy.parameters()):
        scores = evaluate(script, policy, tokenizer, args, args.eval_problems)
    return result | scores | {"model": policy, "tokenizer": tokenizer}


def evaluate(script, model, tokenizer, args, num_problems=128, k=8, problems=None):
    """pass@1: the share of completions that are right, among k for each question.

    The questions are these problems, or else held-out sums. The temperature is 1. Every call uses
    the same randomness.
    """
    if problems is None:
        rng = random.Random(0)
        problems = [script.make_sum(rng, held_out=True) for _ in range(num_problems)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, _, rewards = script.rollout(model, tokenizer, problems, k, 1.0, args)
    return {"pass@1": rewards.mean().item()}

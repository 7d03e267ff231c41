"""Tables, runs, and the training loop by which benchmarks and experiments reach inner functions."""

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

LLM = [name for name in LLM_SCRIPTS if name != "ppo_llm"]  # that is for experiments alone


def table(header, rows):
    """Lines of Markdown."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows)]
    lines.insert(1, "|-" * len(header) + "|")
    return [line.replace("|  |", "| |") for line in lines]


def revision():
    """Of this repository; with + where a file that git knows has changed since."""
    command = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def footer(*packages):
    """The machine, the versions of torch and of these packages, the date and the revision."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    return f"{machine}, {versions}, {time.strftime('%Y-%m-%d')}, revision {revision()}"


def write_table(name, lines, *packages, note, smoke=False):
    """Into results/NAME.md, with a footer, and in RESULTS.md in place of what was there before."""
    print(*lines, sep="\n")
    if smoke:
        return
    text = "\n".join([*lines, "", f"{footer(*packages)}, {note}", ""])
    path, page = RESULTS / f"{name}.md", RESULTS.parent / "RESULTS.md"
    if path.exists():
        page.write_text(page.read_text().replace(path.read_text(), text))
    path.write_text(text)


def spread(values, form=".2f"):
    """Median (lowest to highest)."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def own_process(file, **job):
    """What FILE --job {…} prints last."""
    command = [sys.executable, file, "--job", json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def run_script(script, *flags, launcher=(), root=ROOT, **environment):
    """A run in a process of its own, of the checkout in root: its log, what it has printed, seconds
    by the clock and on the CPU, and its peak in MB."""
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
    """main() of an LLM script step by step, without its files. `model` is (model, tokenizer), to
    begin with them rather than args.model."""

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
        """What step `number`, from 1 on, logs. The rate goes up, then down to 0 after the last."""
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
    """Train as script.main does, and evaluate at the end. `steps` ends a run early, on the schedule
    of args.steps; `each_step(step, model, metrics)` is called after each, counted from 1.

    Returns the model (a given one is trained in place), the tokenizer, a list per metric with a
    number per step, or None, and pass@1 at the end. Where main would stop because a metric is not
    finite, the lists end early; weights that are not finite score 0.
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
    """The share of right answers, of k to each of the first held-out sums, or of these problems, at
    temperature 1. The dice are the same at every call."""
    if problems is None:
        rng = random.Random(0)
        problems = [script.make_sum(rng, held_out=True) for _ in range(num_problems)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, _, rewards = script.rollout(model, tokenizer, problems, k, 1.0, args)
    return {"pass@1": rewards.mean().item()}

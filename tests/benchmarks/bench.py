"""What benchmarks and experiments share: tables, runs and their logs, and the training loop.

Where a script's inner functions change, the loop changes here: it calls load_policy, add_critic
(where there is one), load_data, problem_stream, train_step, make_sum and rollout.
"""

import copy
import inspect
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
from pathlib import Path
from statistics import median

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
for room in ("tests/experiments", "tests/examples", "tests", "."):
    sys.path.insert(0, str(ROOT / room))

from lineage import CLASSIC_SCRIPTS, LLM_SCRIPTS  # noqa: E402

CLASSIC = CLASSIC_SCRIPTS
LLM = [name for name in LLM_SCRIPTS if name != "ppo_llm"]  # that is for experiments alone

# ---------------------------------------------------------------------------------------- Tables


def row(cells):
    return f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |")


def table(header, rows):
    """Lines of Markdown."""
    return [row(header), "|-" * len(header) + "|", *map(row, rows)]


def revision():
    """Of this repository; with + where a file that git knows has changed since."""
    command = ["git", "describe", "--always", "--dirty=+"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def footer(*packages, note=""):
    """The machine, the versions of torch and of these packages, the date and the revision."""
    parts = [platform.machine(), f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    parts += [f"{name} {version(name)}" for name in ("torch", *packages)]
    parts += [time.strftime("%Y-%m-%d"), f"revision {revision()}", note]
    return ", ".join(part for part in parts if part)


def write_table(name, lines, *packages, note=""):
    """Into results/NAME.md, with a footer, and in RESULTS.md in place of what was there before."""
    path, page = RESULTS / f"{name}.md", RESULTS.parent / "RESULTS.md"
    text = "\n".join([*lines, "", footer(*packages, note=note), ""])
    if path.exists():
        page.write_text(page.read_text().replace(path.read_text(), text))
    path.write_text(text)
    print(text)


def spread(values, form=".2f"):
    """Median (lowest to highest)."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


# ------------------------------------------------------------------------------------------ Runs


def scalars(folder):
    """TensorBoard's log of the run in this folder: the values by name."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found = {}
    for name in events.Tags()["scalars"]:
        found[name] = [event.value for event in events.Scalars(name)]
    return found


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
        seconds = time.perf_counter() - start
        output.seek(0)
        printed = output.read()
        if status != 0:
            raise RuntimeError(f"{' '.join(command)}\n{printed[-2000:]}")
        (run,) = Path(folder).iterdir()
        return {
            "log": scalars(run),
            "printed": printed,
            "seconds": seconds,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "MB": usage.ru_maxrss / 1024,
        }


# -------------------------------------------------------------------------------- Training loop


class Training:
    """main() of an LLM script step by step, without its files. `model` is (model, tokenizer), to
    begin with them rather than args.model."""

    def __init__(self, script, args, device=CPU, model=None):
        self.script, self.args = script, args
        self.model, self.tokenizer = model or script.load_policy(args, device)
        self.reference = None
        if getattr(args, "beta", 0.0) > 0:
            self.reference = copy.deepcopy(self.model).requires_grad_(False)
        if hasattr(script, "add_critic"):
            script.add_critic(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.0, fused=True)
        train, _ = script.load_data(args)
        self.problems = script.problem_stream(train, args.seed)

    def step(self, number):
        """What step `number`, from 1 on, logs; train_step is given what it asks for by name. The
        rate goes up to the peak, then down, to 0 after the last step."""
        rng = random.Random(f"{self.args.seed} {number}")
        torch.manual_seed(rng.getrandbits(32))
        warmup = min(self.args.warmup_steps, self.args.steps) or 1
        end = self.args.steps + 1
        rate = self.args.learning_rate * min(number / warmup, (end - number) / (end - warmup))
        self.optimizer.param_groups[0]["lr"] = rate
        known = vars(self) | {"rng": rng}
        wanted = inspect.signature(self.script.train_step).parameters
        metrics = self.script.train_step(*(known[name] for name in wanted))
        if isinstance(metrics, tuple):  # at 72afeed, with a group as text
            metrics, _ = metrics
        return {name: float(value) for name, value in metrics.items()}


def train(script, args, steps=None, each_step=None, model=None):
    """Train as script.main does, and evaluate at the end.

    `steps` stops a run early, on the schedule of args.steps. The model is trained in place. After
    every step, each counted from 1, `each_step(step, model, metrics)` is called.

    Returns the model, the tokenizer, a list per metric with a number per step (None where the step
    did not report it), and pass@1 and pass@8 at the end. Where main would stop because a metric is
    not finite, the lists end early; a policy with weights that are not finite scores 0.
    """
    training = Training(script, args, model=model)
    policy, tokenizer = training.model, training.tokenizer
    history = []
    for step in range(1, (args.steps if steps is None else steps) + 1):
        metrics = training.step(step)
        if not all(map(math.isfinite, metrics.values())):
            break
        history.append(metrics)
        if each_step:
            each_step(step, policy, metrics)

    names = list(dict.fromkeys(name for metrics in history for name in metrics))
    result = {name: [metrics.get(name) for metrics in history] for name in names}
    result |= {"pass@1": 0.0, "pass@8": 0.0}
    if all(parameter.isfinite().all() for parameter in policy.parameters()):
        scores = evaluate(script, policy, tokenizer, args, args.eval_problems)
        result |= {name: scores[name] for name in ("pass@1", "pass@8")}
    return result | {"model": policy, "tokenizer": tokenizer}


def evaluate(script, model, tokenizer, args, num_problems=128, k=8, problems=None):
    """Scores on the first held-out sums, or on these problems, from k samples at temperature 1: the
    share of right samples, and of problems with one or more. The dice are the same at every call,
    and the caller's are left as they were."""
    if problems is None:
        rng = random.Random(0)
        problems = [script.make_sum(rng, held_out=True) for _ in range(num_problems)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, _, rewards = script.rollout(model, tokenizer, problems, k, 1.0, args)
    best = rewards.amax(1).mean().item()
    return {"pass@1": rewards.mean().item(), f"pass@{k}": best}

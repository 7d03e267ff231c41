"""Run once on a GPU, an H100. Is a GPU right, does a model fit, how fast is it, and why?

    python tests/benchmarks/gpu.py                       # an NVIDIA card; 5 to 8 minutes
    python tests/benchmarks/gpu.py --smoke               # toy sizes, any machine; 1 to 2 minutes
    python tests/benchmarks/gpu.py --only right decode   # some parts; or --skip compiling

No hub is needed: the large model is a random one of Qwen2.5-0.5B's shape. Results are lines of
JSON, printed at once and added to --output. GB are 1e9 bytes. A part that fails or takes longer
than LIMIT is a line, too, and the next one begins. If any has failed, or if the GPU's numbers are
far from the CPU's ("ok" is false), the exit status is 1.

right      log-probs, gradient and a step of AdamW on the GPU against the CPU, by all five scripts;
           the gap between sampler and loss, and how far a ratio is from 1 before any step
step       seconds of a step at the default flags: rollout, scoring, training
decode     milliseconds per token of our generate, and of transformers' own
memory     the peak of a training pass by its rows, beside memory.py's prediction
bf16       training, scoring, decoding and the gaps in TF32, in float32, and in bf16 by autocast
profile    kernels, launches and synchronizations; the share of time for which the GPU is busy
tiny       the tiny model on the GPU and on the CPU, side by side; then all five scripts, likewise
ranks      the gradient of two processes that share the card (by gloo), against one process's
compiling  model.compile, and transformers' static cache, which compiles, too; 110 s for each
"""

import contextlib
import copy
import gc
import importlib
import io
import json
import math
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
import tyro
from bench import CPU, LLM, ROOT
from gpu_speed import bf16, compiling, decode, memory, profile, step
from gpu_tools import (
    DEVICE,
    TOY,
    Sizes,
    adamw,
    elsewhere,
    gaps,
    precision,
    random_prompts,
    random_qwen,
)
from torch.nn.utils import parameters_to_vector

import grpo_llm

LIMIT = 240  # seconds that a part may take
# The largest difference to the CPU's log-probs, in nats, and the largest relative error of a
# gradient. They tell a wrong kernel from rounding, and no more.
TOLERANCE = {"tf32": (0.1, 0.1), "float32": (1e-3, 1e-2)}


def start(args):
    """start_device without its line."""
    with contextlib.redirect_stdout(io.StringIO()):
        return grpo_llm.start_device(args)


def card(sizes):
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "cores": os.cpu_count()}
    if DEVICE.type == "cuda":
        query = "--query-gpu=name,memory.total,driver_version"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True)
        versions["card"] = done.stdout.strip()
    versions["fp32_precision"] = torch.backends.cuda.matmul.fp32_precision  # by start_device
    yield "versions", versions


# ------------------------------------------------------------------------------- GPU against CPU


def tiny_rollout():
    """The tiny model, completions of it for prompts of different lengths, and rewards (8, 8). They
    are drawn on the CPU, so that they are the same everywhere."""
    model, _ = grpo_llm.load_policy(grpo_llm.Args(device="cpu"), CPU)
    torch.manual_seed(0)
    prompts = [list(range(1, 4 + i)) for i in range(8)]
    batch = grpo_llm.generate(model, prompts, 8, 24, 1.0)
    return model, prompts, batch, (torch.arange(64) % 3 == 0).float().view(8, 8)


def one_step(script, model, batch, rewards, device):
    """Log-probs, the gradient, and the change of all weights by a step, on the CPU."""
    model = copy.deepcopy(model).to(device)
    args = script.Args(device=device.type, micro_batch_size=16, beta=0.0, max_grad_norm=math.inf)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    batch["old_logprobs"] = script.batch_logprobs(model, batch, args)
    batch["advantages"] = script.compute_advantages(rewards, args).flatten().to(device)
    before = parameters_to_vector(model.parameters()).detach()
    script.train_minibatch(model, adamw(model, 1e-3), batch, args)
    gradient = parameters_to_vector(parameter.grad for parameter in model.parameters())
    change = parameters_to_vector(model.parameters()).detach() - before
    return batch["old_logprobs"].cpu(), gradient.cpu(), change.cpu()


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def compare(script, model, batch, rewards):
    """The GPU, with TF32 and without, against the CPU."""
    logprobs, gradient, change = one_step(script, model, batch, rewards, CPU)
    for kind, (most, largest_error) in TOLERANCE.items():
        with precision(kind):
            found = one_step(script, model, batch, rewards, DEVICE)
        gap = (found[0] - logprobs).abs().max().item()
        error = relative_error(found[1], gradient)
        values = {"logprob_gap_max": gap, "gradient_error": error}
        values["step_error"] = relative_error(found[2], change)
        yield kind, values | {"ok": gap < most and error < largest_error}


def right(sizes):
    model, prompts, batch, rewards = tiny_rollout()
    for name in LLM:
        for kind, values in compare(importlib.import_module(name), model, batch, rewards):
            yield f"tiny, {name}, {kind}", values
    large = random_qwen(sizes, CPU, layers=2)
    others = random_prompts(sizes, 8, sizes.prompt // 3)
    batch = grpo_llm.generate(large, others, 2, 16, 1.0)
    for kind, values in compare(grpo_llm, large, batch, rewards[:, :2]):
        yield f"2 layers of Qwen, grpo_llm, {kind}", values
    args = sizes.settings()
    for title, each, asked in ("tiny", model, prompts), ("2 layers of Qwen", large, others):
        each.to(DEVICE)
        for kind in ("tf32", "float32", "bf16"):
            with precision(kind):
                yield f"{title}, {kind}", gaps(each, asked, 8, 24, args)


# ------------------------------------------------------------------------------------ Whole scripts


def run_script(name, device, steps, flags):
    """A run of a script, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, f"{name}.py", "--device", device, "--steps", str(steps), *flags]
        command += ["--output-dir", folder]
        options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 180}
        environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(command, env=environment, **options)
    last = re.search(r"pass@1 ([\d.]+) → ([\d.]+); (\d+) s", done.stdout)
    if done.returncode or not last:
        said = (done.stdout + done.stderr)[-600:]
        return {"ok": False, "status": done.returncode, "said": said}
    before, after, took = map(float, last.groups())
    return {"s": took, "pass@1_before": before, "pass@1_after": after}


def tiny(sizes):
    both = [("grpo_llm", device, sizes.steps) for device in {DEVICE.type: 0, "cpu": 0}]
    five = [(name, DEVICE.type, sizes.few) for name in LLM]
    for jobs in both, five:
        with ThreadPoolExecutor() as pool:
            runs = [pool.submit(run_script, *job, sizes.flags) for job in jobs]
            for (name, device, steps), run in zip(jobs, runs, strict=True):
                yield f"{name}.py, {device}, {steps} steps", run.result()


# ------------------------------------------------------------------------------------ Two processes


def own_gradients(sizes):
    """{script: gradient}, after the sum over all processes. Each has trained on its own groups."""
    begin = dist.init_process_group
    # The scripts' own choice for a GPU is NCCL, which wants a card for each process.
    with patch.object(dist, "init_process_group", lambda *_, **__: begin("gloo")):
        device = start(grpo_llm.Args(device=DEVICE.type))
    model, _, batch, rewards = tiny_rollout()
    groups = torch.arange(8)[grpo_llm.RANK :: grpo_llm.WORLD]
    rows = torch.arange(64).view(8, 8)[groups].flatten()
    found = {}
    with precision("float32"):
        for name in LLM:
            script = importlib.import_module(name)
            mine = script.take_rows(batch, rows)
            _, gradient, _ = one_step(script, model, mine, rewards[groups], device)
            found[name] = gradient.numpy()
    if grpo_llm.WORLD > 1:
        dist.destroy_process_group()
    return found


def ranks(sizes):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}  # both use the first card
    first, second = elsewhere(own_gradients, sizes, 100, [common | {"RANK": r} for r in "01"])
    (alone,) = elsewhere(own_gradients, sizes, 100)
    for name, expected in alone.items():
        equal = bool((first[name] == second[name]).all())
        error = relative_error(torch.tensor(first[name]), torch.tensor(expected))
        yield name, {"equal": equal, "gradient_error": error, "ok": equal and error < 1e-3}


PARTS = [card, right, step, decode, memory, bf16, profile, tiny, ranks, compiling]


def out_of_time(*_):
    raise TimeoutError(f"more than {LIMIT} s")


def main(
    smoke: bool = False,
    only: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
    output: Path = ROOT / "runs/gpu.jsonl",
):
    if DEVICE.type == "cpu" and not smoke:
        sys.exit("There is no CUDA GPU here. --smoke runs everything without one, at toy size.")
    began, ok, sizes = time.perf_counter(), True, TOY if smoke else Sizes()
    start(sizes.settings())
    transformers.utils.logging.disable_progress_bar()
    output.parent.mkdir(exist_ok=True)
    signal.signal(signal.SIGALRM, out_of_time)

    def report(part, name, values):
        values = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        at = round(time.perf_counter() - began, 1)
        line = json.dumps({"at_s": at, "part": part, "name": name} | values)
        print(line, flush=True)
        with output.open("a") as file:
            print(line, file=file)

    for part in PARTS:
        title = part.__name__
        if title in skip or (only and title not in only):
            continue
        signal.alarm(LIMIT)
        try:
            for name, values in part(sizes):
                report(title, name, values)
                ok = ok and values.get("ok", True)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            report(title, "failed", {"error": repr(error)[-800:]})
            ok = False
        signal.alarm(0)
        gc.collect()
        torch.cuda.empty_cache()
    report("all", "done", {"ok": ok})
    sys.exit(not ok)


if __name__ == "__main__":
    tyro.cli(main)

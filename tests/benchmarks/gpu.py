"""Is a GPU right, does a model fit, and how fast is it?

    python tests/benchmarks/gpu.py                # an NVIDIA card; some 5 minutes
    python tests/benchmarks/gpu.py right ranks    # some parts
    python tests/benchmarks/gpu.py computed       # a minute without a GPU: the memory of a step
    python tests/benchmarks/gpu.py --smoke        # toy sizes, any machine
    python tests/benchmarks/gpu.py --only-tables  # RESULTS.md's table, from results/gpu.jsonl

No hub is needed: the large model is a random one of Qwen2.5-0.5B's shape. Its prompts have 56 to
170 tokens, so they are padded, as in a real run. A measurement is a line of JSON, printed at once
and added to $OUT/gpu.jsonl, or to runs/gpu.jsonl; what RESULTS.md should show goes from there into
results/gpu.jsonl by hand. Each part is a process with a limit, so a crash loses only the rest of
that part. If a measurement fails, or is far from the CPU's ("ok" is false), the exit status is 1.

card       versions, and microseconds of the smallest launch from Python
right      log-probs, gradient and a step of AdamW on the GPU against the CPU, by all five scripts
gaps       the distance between sampler and loss, and of a ratio from 1 before any step
step       seconds of a training step at the default flags: rollout, scoring, training
decode     milliseconds per token of generate
memory     the peak and the milliseconds of a training pass, by its rows
tiny       whole runs of the tiny model, on the GPU and on the CPU
ranks      the gradient of two processes that share the card (by gloo), against one process's
computed   the peak of a training pass at the models' true shapes. FakeTensorMode carries out no
           arithmetic. GB at rest are weights, gradients, Adam's moments and the reference model
"""

import contextlib
import copy
import gc
import importlib
import io
import json
import math
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from bench import CPU, LLM, RESULTS, ROOT, machine, revision, run_script, show, table, with_footer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo_llm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU, SMOKE = DEVICE.type == "cuda", "--smoke" in sys.argv
NO_STOPS = transformers.GenerationConfig()  # with it no completion ends early
QWEN = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864}
QWEN |= {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
LLAMA = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192}
LLAMA |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
PROMPT = 150  # tokens of a row to train on
# The largest difference from the CPU's log-probs, in nats, and the largest relative error of a
# gradient. They tell a wrong kernel from rounding, and no more.
TOLERANCE = {"tf32": (0.1, 0.1), "float32": (1e-3, 1e-2)}


@dataclass
class Sizes:
    """What is measured. The defaults are those of a step of a large model."""

    layers: int = QWEN["num_hidden_layers"]
    hidden: int = QWEN["hidden_size"]
    inner: int = QWEN["intermediate_size"]
    vocab: int = QWEN["vocab_size"]
    groups: int = 32
    samples: int = 8  # per group
    rows: int = 4  # per pass
    prompt: int = 170  # tokens, about the longest of 32 of GSM8K's questions
    new: int = 256
    steps: int = 120  # of the tiny model
    few: int = 20  # steps of it by each script
    flags: tuple[str, ...] = ()  # for the tiny model

    def settings(self, **more):
        """Args of grpo_llm.py for a large model."""
        named = {"model": "some/model", "device": DEVICE.type, "prompt": "{question}"}
        named |= {"prompts_per_step": self.groups, "group_size": self.samples}
        named |= {"max_new_tokens": self.new, "micro_batch_size": self.rows}
        return grpo_llm.Args(**(named | more))


TOY = Sizes(layers=2, hidden=56, inner=64, vocab=600, groups=8, samples=2, prompt=20, new=16)
TOY.steps, TOY.few, TOY.flags = 2, 1, ("--prompts-per-step", "8", "--eval-problems", "8")
SIZES = TOY if SMOKE else Sizes()


# ------------------------------------------------------------------------------------------- Tools
def measure(function, *inputs):
    """What the function returns; the seconds until the GPU has finished; and the most GB that
    tensors on the GPU held meanwhile, also those made before. (None on a CPU.)"""
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = function(*inputs)
    if GPU:
        torch.cuda.synchronize()
    took = time.perf_counter() - start
    return result, took, torch.cuda.max_memory_allocated() / 1e9 if GPU else None


def seconds(function, *inputs):
    return measure(function, *inputs)[1]


@contextlib.contextmanager
def clock(*names):
    """The seconds of each call of these functions of grpo_llm.py."""
    took = defaultdict(list)

    def timed(name, function, *inputs):
        result, spent, _ = measure(function, *inputs)
        took[name].append(spent)
        return result

    functions = {name: partial(timed, name, getattr(grpo_llm, name)) for name in names}
    with patch.multiple(grpo_llm, **functions):
        yield took


def random_qwen(layers=SIZES.layers, device=DEVICE):
    """A random model of Qwen2.5-0.5B's shape. A factor makes its distributions less flat, nearer to
    a trained model's. One token in 380 ends a completion, which has 190 tokens on average."""
    torch.manual_seed(0)
    shape = QWEN | {"hidden_size": SIZES.hidden, "intermediate_size": SIZES.inner}
    shape |= {"vocab_size": SIZES.vocab, "num_hidden_layers": layers}
    config = transformers.AutoConfig.for_model("qwen2", tie_word_embeddings=True, **shape)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.model.norm.weight.data.fill_(6.0)
    stops = list(range(5, SIZES.vocab, 380))
    model.generation_config = transformers.GenerationConfig(eos_token_id=stops)
    return model


def prompts_of(count, shortest=SIZES.prompt // 3):
    """Lists of token ids, the first of them of full length."""
    rng = random.Random(1)
    lengths = [SIZES.prompt, *(rng.randint(shortest, SIZES.prompt) for _ in range(count - 1))]
    return [[rng.randrange(6, 300) for _ in range(length)] for length in lengths]


class Digits:
    """A tokenizer: a question's characters are its tokens. Half of the completions are right."""

    chat_template = eos_token_id = None

    def __call__(self, texts):
        return {"input_ids": [[ord(c) + i for i, c in enumerate(text)] for text in texts]}

    def decode(self, ids, skip_special_tokens):
        return f"#{int(sum(ids)) % 2}"


def random_batch(model, rows, args):
    """Rows to train on. Each has some padding, so that attention needs a mask, as in a rollout."""
    batch = {"prompt_ids": torch.randint(SIZES.vocab, (rows, PROMPT), device=DEVICE)}
    batch["prompt_mask"] = torch.ones_like(batch["prompt_ids"])
    batch["prompt_mask"][:, 0] = 0
    batch["completion_ids"] = torch.randint(SIZES.vocab, (rows, SIZES.new), device=DEVICE)
    batch["mask"] = torch.ones(rows, SIZES.new, device=DEVICE)
    batch["advantages"] = torch.randn(rows, device=DEVICE)
    batch["old_logprobs"] = grpo_llm.batch_logprobs(model, batch, args)
    return batch | {"ref_logprobs": batch["old_logprobs"]}


def adamw(model, rate=1e-6):
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)


@contextlib.contextmanager
def precision(kind):
    """tf32: as the scripts do on CUDA. float32: without that. bf16: the loss's passes in autocast.
    (Its log-softmax stays in float32.)"""
    own = grpo_llm.token_logprobs

    def half(*inputs):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return own(*inputs)

    torch.backends.cuda.matmul.fp32_precision = "ieee" if kind == "float32" else "tf32"
    with patch.object(grpo_llm, "token_logprobs", half if kind == "bf16" else own):
        yield
    torch.backends.cuda.matmul.fp32_precision = "tf32"


# Each part yields the name of a measurement and a function that makes it and returns values.


def card():
    def launches():
        values = {"cores": os.cpu_count()}
        values["fp32_precision"] = torch.backends.cuda.matmul.fp32_precision  # by start_device
        small = torch.zeros(16, device=DEVICE)
        for _ in "ab":  # the first is to warm up
            took = seconds(lambda: [small.add_(1) for _ in range(2000)])
        return values | {"us_per_launch": 1e6 * took / 2000}

    yield "launches", launches


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


def relative_error(measured, expected):
    return ((measured - expected).norm() / expected.norm()).item()


def compare(kind, name, model, batch, rewards):
    """The GPU against the CPU."""
    script, (most, largest_error) = importlib.import_module(name), TOLERANCE[kind]
    logprobs, gradient, change = one_step(script, model, batch, rewards, CPU)
    with precision(kind):
        on_gpu = one_step(script, model, batch, rewards, DEVICE)
    gap, error = (on_gpu[0] - logprobs).abs().max().item(), relative_error(on_gpu[1], gradient)
    values = {"logprob_gap_max": gap, "gradient_error": error}
    values["step_error"] = relative_error(on_gpu[2], change)
    return values | {"ok": gap < most and error < largest_error}


def right():
    model, _, batch, rewards = tiny_rollout()
    large = random_qwen(2, CPU)
    completions = grpo_llm.generate(large, prompts_of(8), 2, 16, 1.0)
    for kind in TOLERANCE:
        for name in LLM:
            yield f"tiny, {name}, {kind}", partial(compare, kind, name, model, batch, rewards)
        inputs = ("grpo_llm", large, completions, rewards[:, :2])
        yield f"2 layers of Qwen, grpo_llm, {kind}", partial(compare, kind, *inputs)


def gaps():
    def one(kind):
        args = SIZES.settings()
        with precision(kind):
            batch = grpo_llm.generate(model, prompts_of(8), 8, SIZES.new // 4, 1.0)
            real = batch["mask"] > 0
            old = batch["old_logprobs"] = grpo_llm.batch_logprobs(model, batch, args)
            gap = (old - batch["sampled_logprobs"])[real].abs()
            mixed = grpo_llm.take_rows(batch, torch.randperm(len(real)))
            ratio = (grpo_llm.batch_logprobs(model, mixed, args) - mixed["old_logprobs"]).exp()
            values = {"sampler_gap_mean": gap.mean(), "sampler_gap_max": gap.max()}
            values |= {"ratio_gap_max": (ratio - 1).abs().max(), "entropy": -old[real].mean()}
        return {name: value.item() for name, value in values.items()}

    model = random_qwen()
    for kind in ("float32", "tf32", "bf16"):
        yield kind, partial(one, kind)


# ------------------------------------------------------------------------------- Seconds and memory
def step():
    args, rng = SIZES.settings(), random.Random(1)
    lengths = map(len, prompts_of(64))
    train = [("".join(rng.choices("0123456789", k=length)), "1") for length in lengths]
    model = random_qwen()
    inputs = (model, copy.deepcopy(model), Digits(), adamw(model), train)

    def one(number):
        with clock("rollout", "batch_logprobs", "train_minibatch") as took:
            metrics, spent, _ = measure(grpo_llm.train_step, *inputs, number, args)
        values = {"s": spent} | {f"{name}_s": sum(times) for name, times in took.items()}
        values["mean_length"] = metrics["completions/mean_length"]
        if GPU:  # by the process; measure resets the peak of what tensors hold
            values["reserved_GB"] = torch.cuda.max_memory_reserved() / 1e9
        return values

    for number in (1, 2):  # the first is to warm up
        yield f"step {number}", partial(one, number)


def per_token(sample, new):
    """Milliseconds per token, without reading the prompts."""
    sample(4)
    few, many = max(1, new // 8), new
    return {"ms_per_token": 1e3 * (seconds(sample, many) - seconds(sample, few)) / (many - few)}


def decode():
    model, rows = random_qwen(), SIZES.groups * SIZES.samples
    model.generation_config = NO_STOPS

    def ours(prompts):
        def sample(new):
            return grpo_llm.generate(model, prompts, SIZES.samples, new, 1.0)

        return per_token(sample, SIZES.new)

    prompts = prompts_of(SIZES.groups)
    yield f"{rows} rows", partial(ours, prompts)
    yield f"{rows // 8} rows", partial(ours, prompts[: SIZES.groups // 8])
    equal = prompts_of(SIZES.groups, SIZES.prompt)
    yield f"{rows} rows, prompts of one length", partial(ours, equal)


PASSES = (1, 2) if SMOKE else (1, 2, 4, 8, 16)  # rows of a training pass
QWEN_NAME, CHECKPOINTS = "Qwen2.5-0.5B, ", ", activation checkpointing"


def memory():
    model = random_qwen()
    reference = copy.deepcopy(model)  # for the room that it takes
    optimizer = adamw(model)

    def one(rows):
        args = SIZES.settings(micro_batch_size=rows)
        try:  # two passes, because in the first one there are no gradients yet
            batch = random_batch(model, 2 * rows, args)
            train = partial(grpo_llm.train_minibatch, model, optimizer, batch, args)
            train()
            _, spent, peak = measure(train)
        except torch.OutOfMemoryError:
            return {"peak_GB": "out of memory"}
        return {"peak_GB": peak, "training_ms_per_row": 1e3 * spent / 2 / rows}

    for rows in PASSES:
        yield f"{rows} rows", partial(one, rows)
    del reference


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, as long as they live."""

    def __init__(self, before):
        super().__init__()
        self.now, self.peak = 0, 0
        self.seen = {tensor.untyped_storage()._cdata: 0 for tensor in before}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def add(self, storage):
        if storage._cdata not in self.seen:
            self.seen[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self.drop, storage._cdata)

    def drop(self, key):
        self.now -= self.seen.pop(key)


def fake_batch(rows, new):
    batch = {name: torch.ones(rows, new) for name in ("mask", "old_logprobs", "ref_logprobs")}
    batch |= {"advantages": torch.ones(rows), "weights": torch.ones(rows, new)}
    for name, width in (("prompt", PROMPT), ("completion", new)):
        batch[f"{name}_ids"] = torch.zeros(rows, width, dtype=torch.long)
    return batch | {"prompt_mask": torch.ones(rows, PROMPT, dtype=torch.long)}


def pass_of(kind, shape, rows, checkpointing):
    """GB at rest, and at the peak of a training pass."""
    args = grpo_llm.Args(model="some/model")
    # Fake tensors have no values, by which transformers would choose a mask.
    masks = patch.object(transformers.masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: 0)
    with FakeTensorMode(allow_non_fake_inputs=True), masks:
        config = transformers.AutoConfig.for_model(kind, tie_word_embeddings=True, **shape)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        if checkpointing:
            model.activation_checkpointing_enable()
            model.train()
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        batch = fake_batch(rows, 256)
        grads = [parameter.grad for parameter in parameters]
        with Live([*parameters, *grads, *model.buffers(), *batch.values()]) as live:
            logprobs = grpo_llm.token_logprobs(model, batch, 1.0)
            inputs = (batch["old_logprobs"], batch["advantages"], batch["mask"], args)
            objective, _ = grpo_llm.surrogate(logprobs, *inputs)
            objective = objective - args.beta * grpo_llm.kl_k3(logprobs, batch["ref_logprobs"])
            (batch["weights"] * objective).sum().backward()
    rest = 5 * 4 * sum(parameter.numel() for parameter in parameters)
    return {"rest_GB": rest / 1e9, "peak_GB": (rest + live.peak) / 1e9}


def computed():
    rows = [(QWEN_NAME, "qwen2", QWEN, size) for size in PASSES]
    for name, kind, shape, size in [*rows, ("Llama-3.2-1B, ", "llama", LLAMA, 4)]:
        shape = shape | ({"num_hidden_layers": 2} if SMOKE else {})
        for checkpointing in (False, True):
            title = f"{name}{size} rows" + CHECKPOINTS * checkpointing
            yield title, partial(pass_of, kind, shape, size, checkpointing)


# ------------------------------------------------------------------------ Whole runs, two processes
def tiny():
    def one(name, device, steps):
        done = run_script(name, "--device", device, "--steps", steps, *SIZES.flags)
        scores = done["log"]["eval/pass@1"]
        return {"s": done["seconds"], "pass@1_before": scores[0], "pass@1_after": scores[-1]}

    jobs = [("grpo_llm", device, SIZES.steps) for device in {DEVICE.type: 0, "cpu": 0}]
    for name, device, steps in [*jobs, *((name, DEVICE.type, SIZES.few) for name in LLM)][
        : 2 if SMOKE else None
    ]:
        yield f"{name}.py, {device}, {steps} steps", partial(one, name, device, steps)


def own_gradients(answers):
    """Puts {script: gradient}, after the sum over all processes; each trains on its own groups."""
    begin = dist.init_process_group
    # The scripts' own choice for a GPU is NCCL, which wants a card for each process.
    with patch.object(dist, "init_process_group", lambda *_, **__: begin("gloo")):
        device = grpo_llm.start_device(grpo_llm.Args(device=DEVICE.type))
    model, _, batch, rewards = tiny_rollout()
    groups = torch.arange(8)[grpo_llm.RANK :: grpo_llm.WORLD]
    rows, found = torch.arange(64).view(8, 8)[groups].flatten(), {}
    with precision("float32"):
        for name in LLM:
            script = importlib.import_module(name)
            mine = script.take_rows(batch, rows)
            _, gradient, _ = one_step(script, model, mine, rewards[groups], device)
            found[name] = gradient.numpy()
    if grpo_llm.WORLD > 1:
        dist.destroy_process_group()
    answers.put(found)


def gradients(*environments):
    """own_gradients of new processes with these environments."""
    context = multiprocessing.get_context("spawn")
    answers, processes = context.Queue(), []
    try:
        for environment in environments:
            with patch.dict(os.environ, environment):
                processes.append(context.Process(target=own_gradients, args=(answers,)))
                processes[-1].start()
        return [answers.get(timeout=100) for _ in processes]
    finally:
        for process in processes:
            process.kill()


def ranks():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}  # both use the first card
    first, second = gradients(common | {"RANK": "0"}, common | {"RANK": "1"})
    (alone,) = gradients({})

    def one(name):
        equal = bool((first[name] == second[name]).all())
        error = relative_error(torch.tensor(first[name]), torch.tensor(alone[name]))
        return {"equal": equal, "gradient_error": error, "ok": equal and error < 1e-3}

    for name in LLM:
        yield name, partial(one, name)


# -------------------------------------------------------------------------------- Table and command
PARTS = [card, right, gaps, step, decode, memory, tiny, ranks, computed]
PARTS = {part.__name__: part for part in PARTS}
LIMITS = {"step": 170, "decode": 90, "tiny": 300, "computed": 600}  # seconds; of other parts 120
KINDS = ("float32", "tf32", "bf16")


def digits(value):
    """Three digits, or a power of ten with one digit."""
    return f"{value:.3g}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def of_part(lines, *parts):
    return {line["name"]: line for line in lines if line["part"] in parts}


def largest(lines, part, key, end):
    """The largest value of a part's measurements whose name ends so, or a dash."""
    found = [line[key] for name, line in of_part(lines, part).items() if name.endswith(end)]
    return digits(max(found)) if found else "–"


def right_table(lines):
    kinds = [kind for kind in KINDS if largest(lines, "gaps", "entropy", kind) != "–"]
    rows = []
    for part, key, words in [
        ("right", "logprob_gap_max", "log-probs, GPU and CPU: largest difference, nats"),
        ("right", "gradient_error", "gradient, GPU and CPU: relative difference"),
        ("gaps", "sampler_gap_mean", "log-probs, sampler and loss: mean difference, nats"),
        ("gaps", "ratio_gap_max", "ratio before any step: largest distance from 1"),
    ]:
        rows.append([words, *(largest(lines, part, key, kind) for kind in kinds)])
    two = largest(lines, "ranks", "gradient_error", "_llm")
    words = "gradient, two processes and one: relative difference"
    return table(["", *kinds], [*rows, [words, two, *["–"] * (len(kinds) - 1)]])


def memory_table(lines):
    rows, parts = [], {part: of_part(lines, part) for part in ("memory", "computed")}
    for part, start, end, key, words in [
        ("memory", "", "", "peak_GB", "GB at the peak, measured"),
        ("computed", QWEN_NAME, "", "peak_GB", "GB at the peak, computed"),
        ("computed", QWEN_NAME, CHECKPOINTS, "peak_GB", "with activation checkpointing, computed"),
        ("memory", "", "", "training_ms_per_row", "milliseconds per row"),
    ]:
        measured = [parts[part].get(f"{start}{n} rows{end}") for n in PASSES]
        rows.append([words, *(digits(line[key]) if line else "–" for line in measured)])
    return table(["rows per training pass", *PASSES], rows)


def speed_table(lines):
    rows = []
    for name, line in of_part(lines, "step", "decode", "tiny").items():
        values = {key: value for key, value in line.items() if key not in LABELS}
        text = ", ".join(f"{key} {digits(value)}" for key, value in values.items())
        rows.append([f"{line['part']}: {name}", text])
    return table(["what", "values"], rows)


def tables(lines):
    names = {"gpu_right": ("right", "gaps", "ranks"), "gpu_memory": ("memory", "computed")}
    names["gpu_speed"] = ("step", "decode", "tiny")
    makers, blocks = (right_table, memory_table, speed_table), {}
    for (name, parts), maker in zip(names.items(), makers, strict=True):
        used = [line for line in lines if line["part"] in parts]
        blocks[name] = with_footer(maker(used), used)
    return blocks


LABELS = ("part", "name", "machine", "revision", "took_s")


def kept():
    return [[json.loads(line) for line in (RESULTS / "gpu.jsonl").read_text().splitlines()]]


def report(part, name, values):
    values = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
    where = f"{torch.cuda.get_device_name() if GPU else 'CPU'}, {machine('transformers')}"
    line = {"part": part, "name": name, "machine": where, "revision": revision()} | values
    text = json.dumps(line, ensure_ascii=False)
    print(text, flush=True)
    path = Path(os.environ.get("OUT", ROOT / "runs"), "gpu.jsonl")
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        print(text, file=file)


def run(part):
    """A part, in this process. Returns whether all its measurements are right."""
    if part != "ranks":
        with contextlib.redirect_stdout(io.StringIO()):
            grpo_llm.start_device(SIZES.settings())
    transformers.utils.logging.disable_progress_bar()
    right = True
    for name, function in PARTS[part]():
        start = time.perf_counter()
        gc.collect()
        torch.cuda.empty_cache()
        try:
            values = function()
        except Exception as error:
            traceback.print_exc()
            values = {"error": repr(error)[-500:], "ok": False}
        report(part, name, values | {"took_s": time.perf_counter() - start})
        right = right and values.get("ok", True)
    return right


def main():
    if "--only-tables" in sys.argv:
        return show(tables(*kept()))
    asked = [word for word in sys.argv[1:] if word in PARTS]
    if not GPU and not SMOKE and asked != ["computed"]:
        sys.exit("There is no CUDA GPU here. --smoke runs everything without one, at toy size.")
    status = 0
    for part in asked or PARTS:
        start = time.perf_counter()
        command = ["timeout", "-s", "KILL", str(LIMITS.get(part, 120)), sys.executable, __file__]
        done = subprocess.run([*command, "--part", part, *["--smoke"] * SMOKE]).returncode
        report(part, "all", {"status": done, "took_s": time.perf_counter() - start})
        status = status or done
    sys.exit(status)


if __name__ == "__main__":
    sys.exit(not run(sys.argv[2])) if sys.argv[1:2] == ["--part"] else main()

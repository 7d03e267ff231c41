"""Is a GPU right, how fast is a training step on it, and how fast is TRL's?

    python tests/benchmarks/gpu.py                # an NVIDIA card; up to 10 minutes
    python tests/benchmarks/gpu.py right step     # some parts
    python tests/benchmarks/gpu.py --smoke        # toy sizes, any machine
    python tests/benchmarks/gpu.py --only-tables  # RESULTS.md's tables, from results/gpu.jsonl

No hub is needed: the large model is a random one of Qwen2.5-0.5B's shape, with the tiny model's
tokenizer. Its prompts have 56 to 170 tokens, so they are padded, as in a real run. A measurement is
a line of JSON, printed at once; what RESULTS.md should show goes from there into results/gpu.jsonl
by hand. If a measurement fails, or its log-probs or gradient are far off ("ok" is false), the exit
status is 1. On a card that is lent for minutes, start each part by itself, after `timeout 240`: a
hang then costs no more than that.

right      log-probs and gradient on the GPU against the CPU, by all five scripts
step       seconds of a training step at the default flags, then with VARIANTS.md's blocks
trl        the same step by TRL's GRPOTrainer (if installed): at its defaults, and nearer to ours
"""

import copy
import functools
import gc
import importlib
import json
import math
import random
import sys
import time
import traceback
from collections import defaultdict
from functools import partial
from unittest.mock import patch

import bench
import beside_trl
import torch
import transformers
from torch.nn.utils import parameters_to_vector

import grpo_llm
from grpo_llm import TINY_MODEL

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU, SMOKE = DEVICE.type == "cuda", "--smoke" in sys.argv
QWEN = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864}
QWEN |= {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
TOY = {"vocab_size": 600, "hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE = QWEN | TOY if SMOKE else QWEN
# Of a rollout: groups, completions of each, tokens of the longest prompt (170 is about the longest
# of 32 of GSM8K's questions), tokens of a completion.
GROUPS, SAMPLES, LONGEST, NEW = (8, 2, 20, 16) if SMOKE else (32, 8, 170, 256)
# The largest difference from the CPU's log-probs, in nats, and the largest relative error of a
# gradient. They tell a wrong kernel from rounding, and no more.
TOLERANCE = {"tf32": (0.1, 0.1), "float32": (1e-3, 1e-2)}


# ------------------------------------------------------------------------------------------- Tools
def settings(**more):
    """Args of grpo_llm.py for a large model: the defaults, except at toy size."""
    sizes = {"max_new_tokens": NEW, "prompts_per_step": GROUPS, "group_size": SAMPLES}
    return grpo_llm.Args(model=str(TINY_MODEL), device=DEVICE.type, **sizes, **more)


def measure(function, *inputs):
    """What the function returns, and the seconds until the GPU has finished."""
    if GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function(*inputs)
    if GPU:
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def random_qwen(layers=SHAPE["num_hidden_layers"], device=DEVICE):
    """A random model of Qwen2.5-0.5B's shape. A factor makes its distributions less flat, nearer to
    a trained model's. It hardly ever draws the stop token: all trainers work on completions of the
    same length."""
    torch.manual_seed(0)
    shape = SHAPE | {"num_hidden_layers": layers, "tie_word_embeddings": True}
    config = transformers.AutoConfig.for_model("qwen2", **shape)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.model.norm.weight.data.fill_(6.0)
    return model


def problems_of(count):
    """Pairs of prompt and answer. Each digit is a token, and the first prompt has full length."""
    rng = random.Random(1)
    lengths = [LONGEST, *(rng.randint(LONGEST // 3, LONGEST) for _ in range(count - 1))]
    return [("".join(rng.choices("0123456789", k=length)), "") for length in lengths]


def reward(completion, answer):
    """By chance, as the tokenizer does not know most of the tokens that are drawn."""
    return float(random.random() < 0.5)


# Within this context load_policy loads a random_qwen, which has no folder.
LARGE = patch.object(
    transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: random_qwen()
)


@functools.cache
def script_with(*blocks):
    """grpo_llm.py with these blocks of VARIANTS.md."""
    return bench.module_of("_".join(["variant", *blocks]), bench.variants.applied(*blocks))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)


# ------------------------------------------------------------------------------- GPU against CPU
# Each part yields the name of a measurement and a function that makes it and returns values.


def gradient_of(script, model, batch, rewards, device):
    """Log-probs and the gradient, on the CPU."""
    model = copy.deepcopy(model).to(device)
    args = script.Args(device=device.type, micro_batch_size=16, beta=0.0, max_grad_norm=math.inf)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    batch["old_logprobs"] = script.batch_logprobs(model, batch, args)
    batch["advantages"] = script.compute_advantages(rewards, args).flatten().to(device)
    script.train_minibatch(model, adamw(model), batch, args)
    gradient = parameters_to_vector(parameter.grad for parameter in model.parameters())
    return batch["old_logprobs"].cpu(), gradient.cpu()


def compare(kind, name, model, batch, rewards):
    """The GPU against the CPU. float32: products are not rounded to TF32, as start_device lets CUDA
    do it."""
    torch.backends.cuda.matmul.fp32_precision = "ieee" if kind == "float32" else "tf32"
    script, (largest_gap, largest_error) = importlib.import_module(name), TOLERANCE[kind]
    expected, expected_gradient = gradient_of(script, model, batch, rewards, bench.CPU)
    logprobs, gradient = gradient_of(script, model, batch, rewards, DEVICE)
    gap = (logprobs - expected).abs().max().item()
    error = ((gradient - expected_gradient).norm() / expected_gradient.norm()).item()
    right = gap < largest_gap and error < largest_error
    return {"logprob_gap_max": gap, "gradient_error": error, "ok": right}


def right():
    """Completions are drawn on the CPU, so that they are the same everywhere."""
    model, tokenizer = grpo_llm.load_policy(grpo_llm.Args(device="cpu"), bench.CPU)
    large, rewards = random_qwen(2, bench.CPU), (torch.arange(64) % 3 == 0).float().view(8, 8)
    prompts = [list(range(1, 4 + i)) for i in range(8)]
    batch = grpo_llm.generate(model, prompts, 8, 24, 1.0)
    longer = grpo_llm.encode_prompts(problems_of(8), tokenizer)
    completions = grpo_llm.generate(large, longer, 2, 16, 1.0)
    for kind in TOLERANCE:
        for name in bench.LLM:
            yield f"tiny, {name}, {kind}", partial(compare, kind, name, model, batch, rewards)
        inputs = ("grpo_llm", large, completions, rewards[:, :2])
        yield f"2 layers of Qwen, grpo_llm, {kind}", partial(compare, kind, *inputs)


# ------------------------------------------------------------------------------- Seconds and memory
WIDE = {"micro_batch_size": 16}
CHANGES = [  # name, flags, blocks
    ("as it is", {}, ()),
    ("16 rows per pass", WIDE, ()),
    ("16 rows, graph", WIDE, ("graph",)),
]


def speed(spent):
    """Of a step of so many seconds. GB are the process's."""
    values = {"s": spent, "completions_per_s": GROUPS * SAMPLES / spent}
    return values | ({"reserved_GB": torch.cuda.memory_reserved() / 1e9} if GPU else {})


def step():
    train = problems_of(4 * GROUPS)

    def one(flags, blocks):
        args, script, seconds = settings(**flags), script_with(*blocks), defaultdict(float)

        def timed(name, function, *inputs):
            result, spent = measure(function, *inputs)
            seconds[name] += spent
            return result

        names = "rollout", "batch_logprobs", "train_minibatch"
        parts = {name: partial(timed, name, getattr(script, name)) for name in names}
        device = script.start_device(args)
        with LARGE:
            model, tokenizer = script.load_policy(args, device)
            reference = script.load_policy(args, device)[0] if args.beta > 0 else None
        inputs = (model, reference, tokenizer, adamw(model), train)
        with patch.multiple(script, load_task=lambda _: (None, reward), **parts):
            for number in (1, 2):  # the first is to warm up
                seconds.clear()
                metrics, spent = measure(script.train_step, *inputs, number, args)
        gap = metrics["sampling/sampling_logp_difference/mean"]
        values = speed(spent) | {f"{name}_s": value for name, value in seconds.items()}
        values["mean_length"] = metrics["completions/mean_length"]
        return values | {"gap_mean": gap, "ok": gap < 0.1}

    for name, flags, blocks in CHANGES:
        yield name, partial(one, flags, blocks)


def trl():
    if not beside_trl.WITH_TRL:
        return print("TRL is not installed.", file=sys.stderr)
    data = problems_of(4 * GROUPS), None
    functions = {"load_data": lambda _: data, "load_task": lambda _: (None, reward)}

    def one(rows, **options):
        args = settings(micro_batch_size=rows, beta=0.0)
        with LARGE, patch.multiple(grpo_llm, **functions):
            _, spent = beside_trl.theirs(grpo_llm, args, 2, **options)  # the first is to warm up
        return speed(spent)

    defaults = {"bf16": True, "gradient_checkpointing": True}
    yield "TRL, its defaults, 8 rows per pass", partial(one, 8, **defaults)
    yield "TRL, float32, no checkpoints, 16 rows", partial(one, 16)


# -------------------------------------------------------------------------------- Table and command
PARTS = {part.__name__: part for part in (right, step, trl)}


def digits(value):
    """Three digits, or a power of ten with one digit."""
    return f"{value:.3g}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def right_table(lines):
    """The largest value of each kind."""
    rows = []
    for key, words in [
        ("logprob_gap_max", "log-probs, GPU and CPU: largest difference, nats"),
        ("gradient_error", "gradient, GPU and CPU: relative difference"),
    ]:
        values = defaultdict(list)
        for line in lines:
            values[line["name"].split(", ")[-1]].append(line[key])
        rows.append([words, *(digits(max(values[kind])) for kind in ("float32", "tf32"))])
    return bench.table(["", "float32", "tf32"], rows)


COLUMNS = {"s": "seconds", "rollout_s": "rollout", "batch_logprobs_s": "scoring"}
COLUMNS |= {"train_minibatch_s": "training", "completions_per_s": "completions per second"}
COLUMNS |= {"reserved_GB": "GB"}


def step_table(lines):
    """A row for each step, a dash where it has no such value."""
    rows = [
        [line["name"], *(digits(line[key]) if key in line else "–" for key in COLUMNS)]
        for line in lines
    ]
    return bench.table(["", *COLUMNS.values()], rows)


def tables(lines):
    """{name: lines} of RESULTS.md's blocks. TRL's steps stand in the table of ours."""
    checks = [line for line in lines if line["part"] == "right"]
    steps = [line for line in lines if line["part"] in ("step", "trl")]
    return {
        "gpu_right": bench.with_footer(right_table(checks), checks),
        "gpu_step": bench.with_footer(step_table(steps), steps),
    }


def kept():
    return [[json.loads(line) for line in (bench.RESULTS / "gpu.jsonl").read_text().splitlines()]]


def run(part):
    """Print a part's measurements. Returns whether all of them are right."""
    grpo_llm.start_device(settings())
    where = f"{torch.cuda.get_device_name() if GPU else 'CPU'}, {bench.machine('transformers')}"
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
        values |= {"took_s": time.perf_counter() - start}
        values = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        line = {"part": part, "name": name, "machine": where, "revision": bench.revision()}
        print(json.dumps(line | values, ensure_ascii=False), flush=True)
        right = right and values.get("ok", True)
    return right


def main():
    if "--only-tables" in sys.argv:
        return bench.show(tables(*kept()))
    if not GPU and not SMOKE:
        sys.exit("There is no CUDA GPU here. --smoke runs everything without one, at toy size.")
    transformers.utils.logging.disable_progress_bar()
    if SMOKE:  # without kernels, which take minutes to make
        eager = functools.partialmethod(torch.nn.Module.compile, backend="eager")
        torch.nn.Module.compile = eager
    results = [run(part) for part in PARTS if part in sys.argv] or list(map(run, PARTS))
    sys.exit(not all(results))


if __name__ == "__main__":
    main()

"""Is a GPU right, how fast is a training step on it, and how fast is TRL's?

    python tests/benchmarks/gpu.py                # an NVIDIA card; up to 10 minutes
    python tests/benchmarks/gpu.py right step     # some parts
    python tests/benchmarks/gpu.py --smoke        # toy sizes, any machine
    python tests/benchmarks/gpu.py --only-tables  # no run: the tables once more

No hub is needed: the large model is a random one of Qwen2.5-0.5B's shape, with the tiny model's
tokenizer. Its prompts have 56 to 170 tokens, so they are padded, as in a real run. A measurement is
printed and kept at once. If one fails, or its log-probs or gradient are far off, the exit status is
1. On a card that is lent for minutes, start each part by itself, after `timeout 240`: a hang then
costs no more than that.

right      log-probs and gradient on the GPU against the CPU, by all five scripts
step       seconds of a training step at the default flags, then with others and VARIANTS.md's graph
trl        the same step by TRL's GRPOTrainer (if installed): at its defaults, and nearer to ours
"""

import copy
import functools
import gc
import importlib
import math
import random
import sys
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


# In place of the script's own functions.
TASK = {"load_data": lambda _: (problems_of(4 * GROUPS), [])}
TASK |= {"load_task": lambda _: (None, reward)}
# Within this context load_policy loads a random_qwen, which has no folder.
LARGE = patch.object(
    transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: random_qwen()
)


# ----------------------------------------------------- Parts: a measurement's row, and its function
def gradient_of(script, model, batch, rewards, device):
    """Log-probs and the gradient, on the CPU."""
    model = copy.deepcopy(model).to(device)
    args = script.Args(device=device.type, micro_batch_size=16, beta=0.0, max_grad_norm=math.inf)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    batch["old_logprobs"] = script.batch_logprobs(model, batch, args)
    batch["advantages"] = script.compute_advantages(rewards, args).flatten().to(device)
    script.train_minibatch(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, args)
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


def speed(spent):
    """Of a step of so many seconds. GB are the process's."""
    values = {"s": spent, "completions_per_s": GROUPS * SAMPLES / spent}
    return values | ({"reserved_GB": torch.cuda.memory_reserved() / 1e9} if GPU else {})


def our_step(flags, blocks):
    """The second training step of grpo_llm.py with these blocks, and its parts."""
    text = bench.variants.applied(*blocks)
    script, seconds = bench.module_of("_".join(["variant", *blocks]), text), defaultdict(float)

    def timed(name, function, *inputs):
        laps = bench.Laps()
        laps.begin()
        result = function(*inputs)
        laps.end()
        seconds[name] += laps.seconds[0]
        return result

    def rollout(*inputs, original=script.rollout):
        seconds.clear()  # the first step is to warm up
        return timed("rollout_s", original, *inputs)

    train = partial(timed, "train_minibatch_s", script.train_minibatch)
    functions = {"rollout": rollout, "train_minibatch": train} | TASK
    with LARGE:
        _, spent = bench.seconds_of_steps(script, settings(**flags), 2, **functions)
    return speed(spent) | seconds


def step():
    wide = {"micro_batch_size": 16}
    yield "as it is", partial(our_step, {}, ())
    yield "16 rows per pass", partial(our_step, wide, ())
    yield "16 rows, graph", partial(our_step, wide, ("graph",))


def their_step(rows, **options):
    """The second training step of TRL's trainer."""
    with LARGE, patch.multiple(grpo_llm, **TASK):
        args = settings(micro_batch_size=rows, beta=0.0)
        _, spent = beside_trl.theirs(grpo_llm, args, 2, **options)
    return speed(spent)


def trl():
    if beside_trl.WITH_TRL:
        defaults = {"bf16": True, "gradient_checkpointing": True}
        yield "TRL, its defaults, 8 rows per pass", partial(their_step, 8, **defaults)
        yield "TRL, float32, no checkpoints, 16 rows", partial(their_step, 16)


# -------------------------------------------------------------------------------- Table and command
CHECKS = {
    "logprob_gap_max": "log-probs, GPU and CPU: largest difference, nats",
    "gradient_error": "gradient, GPU and CPU: relative difference",
}
COLUMNS = {"s": "seconds", "rollout_s": "rollout", "train_minibatch_s": "training"}
COLUMNS |= {"completions_per_s": "completions per second", "reserved_GB": "GB"}


def digits(value):
    """Three digits, or a power of ten with one digit."""
    return f"{value:.3g}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def tables(runs):
    """The largest error of each kind, and a row for each step, also of TRL's."""
    checks = [run for run in runs.runs if "gradient_error" in run]
    steps = [run for run in runs.runs if "s" in run]
    kinds = sorted({run["row"].split(", ")[-1] for run in checks})
    rows = []
    for key, words in CHECKS.items():
        largest = [max(run[key] for run in checks if run["row"].endswith(kind)) for kind in kinds]
        rows.append([words, *map(digits, largest)])
    blocks = {"gpu_right": bench.with_footer(bench.table(["", *kinds], rows), checks)}
    rows = [
        [run["row"], *(digits(run[key]) if key in run else "–" for key in COLUMNS)] for run in steps
    ]
    lines = bench.table(["", *COLUMNS.values()], rows)
    return blocks | {"gpu_step": bench.with_footer(lines, steps)}


def kept(smoke=False):
    return bench.Kept("gpu", "transformers", smoke=smoke)


def main():
    runs, parts, failed = kept(SMOKE), [right, step, trl], False
    if "--only-tables" in sys.argv:
        return bench.show(tables(runs))
    if not GPU and not SMOKE:
        sys.exit("There is no CUDA GPU here. --smoke runs everything without one, at toy size.")
    transformers.utils.logging.disable_progress_bar()
    if SMOKE:  # without kernels, which take minutes to make
        eager = functools.partialmethod(torch.nn.Module.compile, backend="eager")
        torch.nn.Module.compile = eager
    chosen = [part for part in parts if part.__name__ in sys.argv] or parts
    for row, function in (item for part in chosen for item in part()):
        gc.collect()
        torch.cuda.empty_cache()
        try:
            values = function()
            runs.add(row, {}, {k: float(f"{value:.4g}") for k, value in values.items()})
            failed = failed or not values.get("ok", True)
        except Exception:
            traceback.print_exc()
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()

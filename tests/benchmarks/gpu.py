"""Is a GPU right, does a model fit, how fast is it, and how fast is TRL?

    python tests/benchmarks/gpu.py                # an NVIDIA card; 10 to 15 minutes
    python tests/benchmarks/gpu.py right step     # some parts
    python tests/benchmarks/gpu.py --smoke        # toy sizes, any machine
    python tests/benchmarks/gpu.py --only-tables  # RESULTS.md's tables, from results/gpu.jsonl

No hub is needed: the large model is a random one of Qwen2.5-0.5B's shape. Its prompts have 56 to
170 tokens, so they are padded, as in a real run. A measurement is a line of JSON, printed at once
and added to $OUT/gpu.jsonl, or to runs/gpu.jsonl; what RESULTS.md should show goes from there into
results/gpu.jsonl by hand. Each part is a process with a limit, so a crash loses only the rest of
that part. If a measurement fails, or is far from the CPU's ("ok" is false), the exit status is 1.

right      log-probs and gradient on the GPU against the CPU, by all five scripts
step       seconds of a training step at the default flags, then with VARIANTS.md's blocks
trl        the same step by TRL's GRPOTrainer (if installed): at its defaults, and nearer to ours
decode     milliseconds per token of generate
train      the peak and the milliseconds of a training pass, by its rows and blocks
"""

import copy
import functools
import gc
import importlib
import json
import math
import os
import random
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from functools import partial
from pathlib import Path
from unittest.mock import patch

import bench
import beside_trl
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils import parameters_to_vector

import grpo_llm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU, SMOKE = DEVICE.type == "cuda", "--smoke" in sys.argv
QWEN = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864}
QWEN |= {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
TOY = {"vocab_size": 600, "hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE = QWEN | TOY if SMOKE else QWEN
# Of a rollout: groups, completions of each, tokens of the longest prompt (170 is about the longest
# of 32 of GSM8K's questions), tokens of a completion.
GROUPS, SAMPLES, LONGEST, NEW = (8, 2, 20, 16) if SMOKE else (32, 8, 170, 256)
ROWS = GROUPS * SAMPLES
PROMPT = 150  # tokens of a row to train on
# The largest difference from the CPU's log-probs, in nats, and the largest relative error of a
# gradient. They tell a wrong kernel from rounding, and no more.
TOLERANCE = {"tf32": (0.1, 0.1), "float32": (1e-3, 1e-2)}


# ------------------------------------------------------------------------------------------- Tools
def settings(**more):
    """Args of grpo_llm.py for a large model: the defaults, except at toy size."""
    named = {"model": "some/model", "device": DEVICE.type, "max_new_tokens": NEW}
    named |= {"prompts_per_step": GROUPS, "group_size": SAMPLES}
    return grpo_llm.Args(**(named | more))


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


def random_qwen(layers=SHAPE["num_hidden_layers"], device=DEVICE):
    """A random model of Qwen2.5-0.5B's shape. A factor makes its distributions less flat, nearer to
    a trained model's. TRL looks for a single stop token, so it has only one. It hardly ever draws
    it: all trainers work on completions of the same length."""
    torch.manual_seed(0)
    shape = SHAPE | {"num_hidden_layers": layers, "tie_word_embeddings": True}
    config = transformers.AutoConfig.for_model("qwen2", **shape)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.model.norm.weight.data.fill_(6.0)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[5])
    return model


def prompts_of(count):
    """Lists of token ids, the first of them of full length."""
    rng = random.Random(1)
    lengths = [LONGEST, *(rng.randint(LONGEST // 3, LONGEST) for _ in range(count - 1))]
    return [[rng.randrange(6, 300) for _ in range(length)] for length in lengths]


def texts_of(count):
    """The same prompts as texts, for words()."""
    return [" ".join(f"t{i}" for i in prompt) for prompt in prompts_of(count)]


def words():
    """A tokenizer whose token 12 is the word t12, so that TRL and our scripts read the same."""
    special = {0: "<pad>", 5: "<eos>"}  # named t5, the latter would also be found in t57
    vocabulary = {special.get(i, f"t{i}"): i for i in range(SHAPE["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"eos_token": "<eos>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def reward(completion, answer=""):
    return float(len(completion) % 2)


@functools.cache
def script_with(*blocks):
    """grpo_llm.py with these blocks of VARIANTS.md."""
    return bench.module_of("_".join(["variant", *blocks]), bench.variants.applied(*blocks))


def load(script, args):
    """load_policy, which here loads random_qwen and words; before that start_device."""
    torch.backends.cuda.enable_cudnn_sdp(True)  # the default, which the block bf16 changes
    model, tokenizer = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    with (
        patch.object(model, "from_pretrained", lambda *_, **__: random_qwen()),
        patch.object(tokenizer, "from_pretrained", lambda *_, **__: words()),
    ):
        return script.load_policy(args, script.start_device(args))


def random_batch(script, model, rows, args):
    """Rows to train on. Each has some padding, so that attention needs a mask, as in a rollout."""
    batch = {"prompt_ids": torch.randint(SHAPE["vocab_size"], (rows, PROMPT), device=DEVICE)}
    batch["prompt_mask"] = torch.ones_like(batch["prompt_ids"])
    batch["prompt_mask"][:, 0] = 0
    batch["completion_ids"] = torch.randint(SHAPE["vocab_size"], (rows, NEW), device=DEVICE)
    batch["mask"] = torch.ones(rows, NEW, device=DEVICE)
    batch["advantages"] = torch.randn(rows, device=DEVICE)
    batch["old_logprobs"] = script.batch_logprobs(model, batch, args)
    return batch | {"ref_logprobs": batch["old_logprobs"]}


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
    model, _ = grpo_llm.load_policy(grpo_llm.Args(device="cpu"), bench.CPU)
    large, rewards = random_qwen(2, bench.CPU), (torch.arange(64) % 3 == 0).float().view(8, 8)
    prompts = [list(range(1, 4 + i)) for i in range(8)]
    batch = grpo_llm.generate(model, prompts, 8, 24, 1.0)
    completions = grpo_llm.generate(large, prompts_of(8), 2, 16, 1.0)
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
    ("16 rows, bf16", WIDE, ("bf16",)),
    ("16 rows, graph, bf16", WIDE, ("graph", "bf16")),
    ("16 rows, graph, bf16, β 0", WIDE | {"beta": 0.0}, ("graph", "bf16")),
    ("16 rows, graph, bf16, layers", WIDE, ("graph", "bf16", "layers")),
]


def speed(spent):
    """Of a step of so many seconds. GB are the process's."""
    values = {"s": spent, "completions_per_s": ROWS / spent}
    return values | ({"reserved_GB": torch.cuda.memory_reserved() / 1e9} if GPU else {})


def step():
    train = [(text, "1") for text in texts_of(4 * GROUPS)]

    def one(flags, blocks):
        args, script, took = settings(**flags), script_with(*blocks), defaultdict(list)

        def timed(name, function, *inputs):
            result, spent, _ = measure(function, *inputs)
            took[name].append(spent)
            return result

        names = "rollout", "batch_logprobs", "train_minibatch"
        parts = {name: partial(timed, name, getattr(script, name)) for name in names}
        model, tokenizer = load(script, args)
        reference = load(script, args)[0] if args.beta > 0 else None
        inputs = (model, reference, tokenizer, adamw(model), train)
        with patch.multiple(script, load_task=lambda _: (None, reward), **parts):
            for number in (1, 2):  # the first is to warm up
                took.clear()
                metrics, spent, _ = measure(script.train_step, *inputs, number, args)
        values = speed(spent) | {f"{name}_s": sum(times) for name, times in took.items()}
        values["ms_per_token"] = 1e3 * values["rollout_s"] / NEW
        values["mean_length"] = metrics["completions/mean_length"]
        return values | {"gap_mean": metrics["sampling/sampling_logp_difference/mean"]}

    for name, flags, blocks in CHANGES:
        yield name, partial(one, flags, blocks)


def trl():
    if not beside_trl.WITH_TRL:
        return print("TRL is not installed.", file=sys.stderr)
    data = [(text, "1") for text in texts_of(4 * GROUPS)], None
    replaced = {"load_data": lambda _: data, "load_task": lambda _: (None, reward)}
    replaced["load_policy"] = lambda *_: (random_qwen(), words())

    def one(rows, **options):
        args = settings(micro_batch_size=rows, beta=0.0)
        with patch.multiple(grpo_llm, **replaced):
            clock = beside_trl.theirs(grpo_llm, args, 2, **options)
        return speed(clock.laps[1])  # the first is to warm up

    defaults = {"bf16": True, "gradient_checkpointing": True}
    yield "TRL, its defaults, 8 rows per pass", partial(one, 8, **defaults)
    yield "TRL, float32, no checkpoints, 16 rows", partial(one, 16)


def decode():
    model, prompts = random_qwen(), prompts_of(GROUPS)
    model.generation_config = transformers.GenerationConfig()  # so no completion ends early

    def one(prompts, *blocks):
        script, few = script_with(*blocks), max(3, NEW // 8)
        sample = partial(script.generate, model, prompts, SAMPLES)
        sample(few, 1.0)
        spent = seconds(sample, NEW, 1.0) - seconds(sample, few, 1.0)  # so no prompt is counted
        batch = script.generate(model, prompts[:8], SAMPLES, NEW // 4, 1.0)
        logprobs = script.batch_logprobs(model, batch, settings())
        gap = (logprobs - batch["sampled_logprobs"]).abs().mean().item()
        return {"ms_per_token": 1e3 * spent / (NEW - few), "gap_mean": gap, "ok": gap < 0.1}

    yield f"{ROWS} rows", partial(one, prompts)
    yield f"{ROWS // 8} rows", partial(one, prompts[: GROUPS // 8])
    yield f"{ROWS} rows, graph", partial(one, prompts, "graph")


PASSES = (1, 2) if SMOKE else (1, 2, 4, 8, 16)  # rows of a training pass


def train():
    def one(rows, *blocks):
        args, script = settings(micro_batch_size=rows), script_with(*blocks)
        model, _ = load(script, args)
        room = copy.deepcopy(model)  # for the reference model
        batch = random_batch(script, model, 2 * rows, args)
        run = partial(script.train_minibatch, model, adamw(model), batch, args)
        run()  # two passes, because in the first one there are no gradients yet
        _, spent, peak = measure(run)
        scoring = seconds(script.batch_logprobs, model, batch, args)
        del room
        values = {"peak_GB": peak, "training_ms_per_row": 1e3 * spent / 2 / rows}
        return values | {"scoring_ms_per_row": 1e3 * scoring / 2 / rows}

    for rows in PASSES:
        yield f"{rows} rows", partial(one, rows)
    for blocks in (["bf16"], ["layers"], ["bf16", "layers"]):
        for rows in PASSES[-3::2]:
            yield f"{rows} rows, {', '.join(blocks)}", partial(one, rows, *blocks)


# -------------------------------------------------------------------------------- Table and command
PARTS = {part.__name__: part for part in (right, step, trl, decode, train)}
LIMITS = {"step": 240, "trl": 200, "train": 200}  # seconds; of other parts 120


def digits(value):
    """Three digits, or a power of ten with one digit."""
    return f"{value:.3g}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def right_table(lines):
    """The largest value of each kind. (The last two rows were measured until dce9051.)"""
    rows = []
    for key, words in [
        ("logprob_gap_max", "log-probs, GPU and CPU: largest difference, nats"),
        ("gradient_error", "gradient, GPU and CPU: relative difference"),
        ("sampler_gap_mean", "log-probs, sampler and loss: mean difference, nats"),
        ("ratio_gap_max", "ratio before any step: largest distance from 1"),
    ]:
        values = {kind: [0.0] for kind in ("float32", "tf32")}
        for line in lines:
            values[line["name"].split(", ")[-1]].append(line.get(key, 0.0))
        rows.append([words, *(digits(max(column)) for column in values.values())])
    return bench.table(["", "float32", "tf32"], rows)


def table_of(columns, lines):
    """A row for each line, a column for each of these {key: title}; a dash where it has none."""
    rows = [
        [line["name"], *(digits(line[key]) if key in line else "–" for key in columns)]
        for line in lines
    ]
    return bench.table(["", *columns.values()], rows)


STEP = {"s": "seconds", "rollout_s": "rollout", "ms_per_token": "ms per token"}
STEP |= {"batch_logprobs_s": "scoring", "train_minibatch_s": "training"}
STEP |= {"completions_per_s": "completions per second", "reserved_GB": "GB"}
TRAIN = {"training_ms_per_row": "training, ms per row", "scoring_ms_per_row": "scoring, ms per row"}
TRAIN |= {"peak_GB": "GB at the peak"}
COLUMNS = {"step": STEP, "decode": {"ms_per_token": "ms per token"}, "train": TRAIN}


def tables(lines):
    """{name: lines} of RESULTS.md's blocks. TRL's steps stand in the table of ours."""
    of = defaultdict(list)
    for line in lines:
        of[{"gaps": "right", "trl": "step"}.get(line["part"], line["part"])].append(line)
    rows = {name: table_of(columns, of[name]) for name, columns in COLUMNS.items()}
    rows["right"] = right_table(of["right"])
    return {f"gpu_{name}": bench.with_footer(rows[name], of[name]) for name in rows}


def kept():
    return [[json.loads(line) for line in (bench.RESULTS / "gpu.jsonl").read_text().splitlines()]]


def report(part, name, values):
    values = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
    where = f"{torch.cuda.get_device_name() if GPU else 'CPU'}, {bench.machine('transformers')}"
    line = {"part": part, "name": name, "machine": where, "revision": bench.revision()} | values
    text = json.dumps(line, ensure_ascii=False)
    print(text, flush=True)
    path = Path(os.environ.get("OUT", bench.ROOT / "runs"), "gpu.jsonl")
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        print(text, file=file)


def run(part):
    """A part, in this process. Returns whether all its measurements are right."""
    grpo_llm.start_device(settings())
    transformers.utils.logging.disable_progress_bar()
    if SMOKE:  # without kernels, which take minutes to make
        eager = functools.partialmethod(torch.nn.Module.compile, backend="eager")
        torch.nn.Module.compile = eager
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
        return bench.show(tables(*kept()))
    if not GPU and not SMOKE:
        sys.exit("There is no CUDA GPU here. --smoke runs everything without one, at toy size.")
    status = 0
    for part in [word for word in sys.argv[1:] if word in PARTS] or PARTS:
        start = time.perf_counter()
        command = ["timeout", "-s", "KILL", str(LIMITS.get(part, 120)), sys.executable, __file__]
        done = subprocess.run([*command, "--part", part, *["--smoke"] * SMOKE]).returncode
        report(part, "all", {"status": done, "took_s": time.perf_counter() - start})
        status = status or done
    sys.exit(status)


if __name__ == "__main__":
    sys.exit(not run(sys.argv[2])) if sys.argv[1:2] == ["--part"] else main()

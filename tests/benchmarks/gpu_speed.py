"""The parts of gpu.py that measure seconds and memory. Each yields names and values."""

import contextlib
import copy
import functools
import gc
import random
import re
from collections import Counter, defaultdict
from unittest.mock import patch

import torch
import transformers
from gpu_tools import (
    DEVICE,
    NO_STOPS,
    adamw,
    elsewhere,
    gaps,
    measure,
    precision,
    random_batch,
    random_prompts,
    random_qwen,
    seconds,
)
from memory import PROMPT

import grpo_llm

# Rows of a pass → GB at its peak. Printed by memory.py, not measured.
PREDICTED = {1: 11.7, 2: 13.1, 4: 16.2, 8: 22.6, 16: 35.4}


class Digits:
    """A tokenizer: a question's characters are its tokens. Half of the completions are right."""

    chat_template = eos_token_id = None

    def __call__(self, texts):
        return {"input_ids": [[ord(c) + i for i, c in enumerate(text)] for text in texts]}

    def decode(self, ids, skip_special_tokens):
        return f"#{int(sum(ids)) % 2}"


@contextlib.contextmanager
def clock(*names):
    """The seconds of each call of these functions of grpo_llm.py."""
    took = defaultdict(list)

    def timed(name, function, *inputs):
        found, spent, _ = measure(function, *inputs)
        took[name].append(spent)
        return found

    functions = {name: functools.partial(timed, name, getattr(grpo_llm, name)) for name in names}
    with patch.multiple(grpo_llm, **functions):
        yield took


def step(sizes):
    args, rng = sizes.settings(), random.Random(1)
    lengths = [rng.randint(sizes.prompt // 3, sizes.prompt) for _ in range(64)]
    train = [("".join(rng.choices("0123456789", k=length)), "1") for length in lengths]
    model = random_qwen(sizes)
    inputs = (model, copy.deepcopy(model), Digits(), adamw(model), train)
    for number in (1, 2):
        with clock("rollout", "batch_logprobs", "train_minibatch") as took:
            metrics, spent, _ = measure(grpo_llm.train_step, *inputs, number, args)
        old, reference = took["batch_logprobs"]
        values = {"s": spent, "rollout_s": sum(took["rollout"]), "score_old_s": old}
        values |= {"score_reference_s": reference, "training_s": sum(took["train_minibatch"])}
        values["mean_length"] = metrics["completions/mean_length"]
        if DEVICE.type == "cuda":  # for the process so far; the clocks have reset the peak of GB
            values["reserved_GB"] = torch.cuda.max_memory_reserved() / 1e9
        yield f"step {number}", values


def per_token(sample, new):
    """Milliseconds a token, without reading the prompts; and seconds, with it."""
    sample(4)
    less = max(1, new // 8)
    few, many = seconds(sample, less), seconds(sample, new)
    return {"ms_per_token": 1e3 * (many - few) / (new - less), "s": many}


def by_transformers(model, prompts, samples, new, **options):
    """transformers' own generate, as trainers call it."""
    ids = torch.tensor(prompts, device=DEVICE).repeat_interleave(samples, 0)
    settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": new}
    config = transformers.GenerationConfig(**settings, pad_token_id=0, **options)
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)


def argmax_with_noise(probs, _):
    """multinomial(1) by its own formula, without its checks, for which the CPU waits."""
    return (probs / torch.empty_like(probs).exponential_()).argmax(1, keepdim=True)


def decode(sizes):
    model, prompts = random_qwen(sizes), random_prompts(sizes, sizes.groups)
    stops, model.generation_config = model.generation_config, NO_STOPS
    samples, rows = sizes.samples, sizes.groups * sizes.samples

    def ours(new, count=sizes.groups):
        return grpo_llm.generate(model, prompts[:count], samples, new, 1.0)

    yield f"ours, {rows} rows", per_token(ours, sizes.new)
    theirs = functools.partial(by_transformers, model, prompts, samples)
    yield f"transformers, {rows} rows", per_token(theirs, sizes.new)
    with patch.object(torch.Tensor, "multinomial", argmax_with_noise):
        yield f"ours, {rows} rows, no multinomial", per_token(ours, sizes.new)
    few = functools.partial(ours, count=sizes.groups // 8)
    yield f"ours, {rows // 8} rows", per_token(few, sizes.new)
    model.generation_config = stops
    batch, spent, peak = measure(ours, sizes.new)
    tokens = batch["mask"].sum().item()
    values = {"s": spent, "tokens_per_s": tokens / spent, "mean_length": tokens / rows}
    yield "ours, completions that end", values | {"peak_GB": peak}


def memory(sizes):
    model = random_qwen(sizes)
    reference = copy.deepcopy(model)  # for the room that it takes
    optimizer = adamw(model)
    for rows, predicted in PREDICTED.items():
        args = sizes.settings(micro_batch_size=rows)
        values = {"GB_predicted_by_memory.py": predicted}
        try:  # two passes, because in the first one there are no gradients yet
            batch = random_batch(sizes, model, 2 * rows, PROMPT, args)
            train = functools.partial(grpo_llm.train_minibatch, model, optimizer, batch, args)
            train()
            _, spent, peak = measure(train)
            values |= {"peak_GB": peak, "training_ms_per_row": 1e3 * spent / 2 / rows}
        except torch.OutOfMemoryError:
            values["peak_GB"] = "out of memory"
        yield f"{rows} rows a pass", values
    del reference


def in_precision(sizes, model, kind):
    """One quarter of a rollout in passes of the default size: a minibatch."""
    args, learner = sizes.settings(), copy.deepcopy(model)
    batch = random_batch(sizes, model, sizes.groups * sizes.samples // 4, PROMPT, args)
    inputs = (learner, adamw(learner), batch, args)
    prompts = random_prompts(sizes, sizes.groups)
    with precision(kind):
        grpo_llm.train_minibatch(*inputs)
        _, spent, peak = measure(grpo_llm.train_minibatch, *inputs)
        values = {"minibatch_s": spent, "peak_GB": peak}
        values["scoring_s"] = seconds(grpo_llm.batch_logprobs, model, batch, args)
        padded = random_prompts(sizes, 8, sizes.prompt // 3)
        values |= gaps(model, padded, 8, sizes.new // 4, args)
        model.generation_config = NO_STOPS
        inputs = (model, prompts, sizes.samples)
        sample = functools.partial(grpo_llm.generate, *inputs, temperature=1.0)
        return values | {"ms_per_token": per_token(sample, sizes.new // 4)["ms_per_token"]}


def bf16(sizes):
    for kind in ("tf32", "float32", "bf16"):
        yield kind, in_precision(sizes, random_qwen(sizes), kind)
        gc.collect()


def profiled(function, *inputs):
    """Milliseconds by kernel, and how many kernels, launches and synchronizations there were."""
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities) as profiler:
        seconds(function, *inputs)
    kernels, counts = Counter(), Counter()
    time_of = "self_device_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
    for event in profiler.key_averages():
        foreign = event.is_user_annotation or event.key == "Activity Buffer Request"
        if event.device_type.name == DEVICE.type.upper() and not foreign:
            kernels[event.key[:80]] += getattr(event, time_of) / 1e3
            counts["kernels"] += event.count
        if re.match(r"cu(da)?Launch", event.key):
            counts["launches"] += event.count
        if re.match(r"cuda(Stream|Device|Event)Synchronize", event.key):
            counts["synchronizations"] += event.count
    return kernels, counts


def shares(name, ms, kernels, counts, times):
    """What was profiled, for one of so many times. The GPU is busy for a share of the ms, which
    were measured without the profiler."""
    busy = sum(kernels.values())
    values = {"ms": ms, "busy_share": busy / times / ms}
    yield name, values | {what: count / times for what, count in counts.items()}
    for kernel, took in kernels.most_common(10):
        yield f"{name}: {kernel}", {"ms": took / times, "share": took / busy}


def profile(sizes):
    model, prompts = random_qwen(sizes), random_prompts(sizes, sizes.groups)
    model.generation_config = NO_STOPS
    args = sizes.settings()
    sample = functools.partial(grpo_llm.generate, model, prompts, sizes.samples, temperature=1.0)
    sample(4)
    ms = 1e3 * (seconds(sample, 14) - seconds(sample, 4)) / 10
    few, many = profiled(sample, 4), profiled(sample, 14)
    for more, less in zip(many, few, strict=True):
        more.subtract(less)  # what is left are ten tokens, without reading the prompts
    yield from shares("decoding, a token", ms, *many, 10)
    batch = random_batch(sizes, model, 4 * sizes.rows, PROMPT, args)
    inputs = (model, adamw(model), batch, args)
    grpo_llm.train_minibatch(*inputs)
    ms = 1e3 * seconds(grpo_llm.train_minibatch, *inputs) / 4
    yield from shares("training, a pass", ms, *profiled(grpo_llm.train_minibatch, *inputs), 4)


def compiled(sizes):
    """Our generate, with a compiled model."""
    # In some versions from 2.9 on, model.compile fails if matmul.fp32_precision has been set
    # (pytorch issue 166387), so TF32 is set in the old way.
    torch.set_float32_matmul_precision("high")
    model, prompts = random_qwen(sizes), random_prompts(sizes, sizes.groups)
    model.generation_config = NO_STOPS
    model.compile(dynamic=True, backend=sizes.backend)
    sample = functools.partial(grpo_llm.generate, model, prompts, sizes.samples, temperature=1.0)
    return {"first_call_s": seconds(sample, 4)} | per_token(sample, sizes.new)


def static(sizes):
    """transformers' generate with a cache of fixed size. It compiles the model by itself."""
    torch.set_float32_matmul_precision("high")
    model, prompts = random_qwen(sizes), random_prompts(sizes, sizes.groups)
    options = {"cache_implementation": "static", "disable_compile": DEVICE.type == "cpu"}
    sample = functools.partial(by_transformers, model, prompts, sizes.samples, **options)
    first, again = seconds(sample, sizes.new), seconds(sample, sizes.new)
    return {"first_call_s": first, "s": again, "ms_per_token_with_prompt": 1e3 * again / sizes.new}


def compiling(sizes):
    for function in compiled, static:
        try:
            (values,) = elsewhere(function, sizes, 110)
        except Exception as error:
            values = {"error": repr(error)[-800:]}
        yield function.__name__, values

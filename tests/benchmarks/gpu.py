"""What only a GPU can tell, by one command of less than ten minutes.

    python tests/benchmarks/gpu.py                # random weights in the shape of Qwen2.5-0.5B
    python tests/benchmarks/gpu.py --parts a b    # some of the parts below
    python tests/benchmarks/gpu.py --smoke        # toy sizes, on any machine: does it all run?

(a) Log-probs of the sampler against those of the training forward, in float32 and in bf16, and the
    ratio that the first update sees once grpo_llm.py has retaken old_logprobs.
(b) Decoding, 256 completions of 256 tokens: grpo_llm.generate against model.generate, which is what
    TRL calls. The floor is the time to read, once per token, the weights and the cache in bf16.
(c) A training step, split into its parts.
(d) Peak memory, by --micro-batch-size, with and without --gradient-checkpointing.
(e) A run that learns at a size a laptop can't: a Llama of 26 M parameters, warm-started on sums of
    4 to 8 numbers as the tiny model is on shorter ones, then trained by grpo_llm.main.
(f) The collectives: NCCL in a group of one on a GPU, gloo between two processes elsewhere.
(g) TRL's GRPOTrainer beside grpo_llm.py, if `trl` is installed: completions per second.
(r) Recorded decoding, a variant that grpo_llm.py does not have: (a), (b), (c) and its memory;
    last, since a recording that fails may leave the GPU's memory in disorder.

What to expect of the memory, worked out and not measured, in GiB for 0.5 B and 1.5 B parameters:

    weights, gradients, Adam's two averages, float32: 16 bytes a parameter          7.4     23.0
    the reference, float32 (--beta 0 drops it): 4 bytes                             1.8      5.8
    weights in bf16 while sampling: 2 bytes                                         0.9      2.9
    or, under torchrun, gradients on their way: 4 bytes                             1.8      5.8
    keys and values of 256 × 512 tokens while sampling: 12 and 28 KiB a token       1.5      3.5
    logits of 8 × 256 tokens of 152 k (--micro-batch-size 8): 20 bytes a logit      5.8      5.8
    float32 buffers of the sampler, 256 × 152 k: 20 bytes a logit                   0.7      0.7

and the activations, in proportion to --micro-batch-size.

Nothing is downloaded. Writes results/gpu.md, or gpu_ab.md for these parts, row by row: what was
measured is there whatever happens next. A part that fails is reported, and the next one runs; the
exit status is then 1.
"""

import gc
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Literal, get_args
from unittest.mock import patch

import tokenizers
import torch
import torch.nn.functional as F
import transformers
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_llm

ROOT = Path(__file__).parents[2]
Part = Literal["a", "b", "c", "d", "e", "f", "g", "r"]


@dataclass
class Size:
    hidden: int  # of the speed model, in the shape of Qwen2.5-0.5B
    mlp: int
    layers: int
    vocabulary: int
    prompts: int  # of at most prompt_tokens tokens, group completions of new_tokens each
    group: int
    prompt_tokens: int
    new_tokens: int
    rounds: int  # of a timing; the median counts
    micro_batches: tuple[int, ...]
    width: int  # of the model that learns
    depth: int
    warm_steps: int
    rollouts: int
    questions: int  # per rollout
    goal: float  # its pass@1


FULL = Size(896, 4864, 24, 151_936, 32, 8, 64, 256, 2, (1, 8, 32), 512, 8, 1000, 100, 64, 0.8)
SMOKE = Size(32, 64, 2, 500, 2, 4, 8, 6, 1, (1, 4), 32, 1, 3, 2, 2, 0.0)


# -------------------------------------------------------------------- decoding with a recorded step


class FixedLayer(transformers.StaticLayer):
    """One layer's keys and values, in memory that stays where it is, and wide enough for all."""

    def __init__(self, filled, width):
        super().__init__(width)
        self.dtype, self.device = filled.values.dtype, filled.values.device
        room = (0, 0, 0, width - filled.keys.shape[2])
        self.keys = F.pad(filled.keys.to(self.dtype), room)
        self.values = F.pad(filled.values, room)
        self.cumulative_length = torch.tensor(filled.keys.shape[2], device=self.device)
        self.is_initialized = True

    def update(self, keys, values, *args, **kwargs):
        # Under autocast, rotary embeddings turn keys back to float32: one dtype for both.
        return super().update(keys.to(self.dtype), values.to(self.dtype))


class RecordedStep:
    """Tokens (B, 1) → the next logits. The second call is recorded as a CUDA graph; from then on a
    call replays it, without Python: on the same memory, into which its inputs are copied first."""

    def __init__(self, model, cache, prompt_mask, max_new_tokens):
        self.model, self.graph, self.calls = model, torch.cuda.CUDAGraph(), 0
        self.prompt_width = prompt_mask.shape[1]
        width = self.prompt_width + max_new_tokens
        layers = [FixedLayer(layer, width) for layer in cache.layers]
        self.inputs = {
            "input_ids": torch.zeros_like(prompt_mask[:, :1]),
            "attention_mask": F.pad(prompt_mask, (0, max_new_tokens)),
            "position_ids": prompt_mask.sum(1, keepdim=True) - 1,
            "past_key_values": transformers.Cache(layers=layers),
            "use_cache": True,
        }

    def __call__(self, tokens):
        self.inputs["input_ids"].copy_(tokens)
        self.inputs["attention_mask"][:, self.prompt_width + self.calls] = 1
        self.inputs["position_ids"] += 1
        if self.calls == 0:  # kernels are chosen, and weights cast to bf16, before the recording
            self.logits = self.model(**self.inputs).logits
        elif self.calls == 1:
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.logits = self.model(**self.inputs).logits
        if self.calls > 0:
            self.graph.replay()
        self.calls += 1
        return self.logits


def read_prompts(model, prompts, num_samples):
    """The prompts, padded, and their logits and cache, each repeated for its group."""
    rows = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    pad_id = model.generation_config.pad_token_id
    ids = pad_sequence(rows, True, pad_id, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, padding_side="left")
    cache = transformers.DynamicCache()
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    logits = grpo_llm.forward(model, ids, mask, **options)
    cache.batch_repeat_interleave(num_samples)
    return *(each.repeat_interleave(num_samples, 0) for each in (ids, mask, logits)), cache


@torch.no_grad()
@grpo_llm.mixed_precision
def recorded_generate(model, prompts, num_samples, max_new_tokens, temperature):
    """grpo_llm.generate with a recorded step: rows that have ended stay, and are masked after."""
    if "dynamic" in str(getattr(model.config, "rope_parameters", "")):
        grpo_llm.stop("--model: rope_type dynamic waits for the GPU, and cannot be recorded")
    stop_ids = torch.tensor(model.eval().generation_config.eos_token_id, device=model.device)
    prompt_ids, prompt_mask, logits, cache = read_prompts(model, prompts, num_samples)
    step = RecordedStep(model, cache, prompt_mask, max_new_tokens)
    ended, columns = torch.zeros_like(prompt_mask[:, :1], dtype=torch.bool), []
    for t in range(max_new_tokens):
        logprobs = grpo_llm.policy_logprobs(model, logits[:, -1], temperature or 1.0)
        probs = logprobs.exp()
        tokens = torch.multinomial(probs, 1) if temperature > 0 else probs.argmax(1, keepdim=True)
        entropy = -(probs * logprobs).sum(1, keepdim=True)
        columns.append((tokens, ~ended, logprobs.gather(1, tokens), entropy))
        ended = ended | torch.isin(tokens, stop_ids)
        last = t == max_new_tokens - 1
        if last or (t % 32 == 31 and ended.all()):  # to ask more often is to wait for the GPU
            break
        logits = step(tokens)
    ids, mask, old_logprobs, entropy = (torch.cat(x, 1) for x in zip(*columns, strict=True))
    ids = ids.masked_fill(~mask, model.generation_config.pad_token_id)
    batch = {"completion_ids": ids, "mask": mask.float()}
    batch |= {"old_logprobs": old_logprobs * mask, "entropy": entropy * mask}
    batch = {name: tensor[:, : int(mask.sum(1).max())] for name, tensor in batch.items()}
    return batch | {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "ended": ended}


# ------------------------------------------------------------------------------------------- report


class Report:
    """A table that is on disk after every row, and the claims that did not hold."""

    def __init__(self, path):
        self.path, self.failed = path, []
        name = (
            torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU"
        )
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        date = time.strftime("%Y-%m-%d")
        self.lines = [f"{name}, {versions}, {date}", "", "| | measured | value |", "|-|-|-|"]

    def add(self, part, name, value):
        self.lines.append(f"| {part} | {name} | {value} |")
        print(self.lines[-1], flush=True)
        if self.path:
            self.path.write_text("\n".join(self.lines) + "\n")

    def expect(self, part, claim, holds):
        if not holds:
            self.failed.append(f"({part}) {claim}")
            self.add(part, f"**does not hold**: {claim}", "–")


def now():
    """The time, once the GPU's queue is empty."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(function):
    start = now()
    function()
    return now() - start


def forget_peak():
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory():
    if not torch.cuda.is_available():
        return "–"
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f}"


@contextmanager
def products_in(dtype, device):
    """Matrix products in this dtype: autocast where the scripts have it, but on any device."""
    bf16 = dtype == torch.bfloat16
    with ExitStack() as stack:
        for name, value in {"device": device.type, "_enabled": bf16}.items():
            stack.enter_context(patch.object(grpo_llm.mixed_precision, name, value))
        stack.enter_context(patch.object(grpo_llm, "in_bf16", lambda model: bf16))
        yield


# ------------------------------------------------------------------------------- (a) do they agree?


def peaked_model(kind, device):
    """Random, of peaked distributions: a wrong position, mask or cache cannot hide."""
    shape = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.4,
    }
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **ids))
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape, **ids))
    model.generation_config.eos_token_id = [1, 2, 3, 4]
    model.generation_config.pad_token_id = 0
    return model.to(device).eval()


def largest_ratio_error(model, batch, args):
    """|ratio − 1|, at most, that surrogate sees in a train_step on this rollout.

    Its learning rate is 0, so that each of the minibatches is a first one.
    """
    errors = []
    real = grpo_llm.surrogate

    def surrogate(logprobs, old_logprobs, advantages, mask, args):
        errors.append((((logprobs - old_logprobs) * mask).exp() - 1).abs().max().item())
        return real(logprobs, old_logprobs, advantages, mask, args)

    def rollout(*_):
        rewards = torch.arange(len(batch["mask"]), device=model.device) % 3 == 0
        rewards[: args.group_size] = False  # a group without an advantage
        return dict(batch), [], rewards.float().view(-1, args.group_size)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    problems, rng = itertools.repeat(("", "")), random.Random(0)
    with patch.multiple(grpo_llm, surrogate=surrogate, rollout=rollout):
        grpo_llm.train_step(model, model, None, optimizer, problems, rng, args)
    return max(errors)


def agreement(report, part, size, device, name, generate):
    prompts = random_prompts(size, 300)
    flags = {"micro_batch_size": 8, "group_size": size.group, "prompts_per_step": size.prompts}
    args = grpo_llm.Args(beta=0.0, **flags)
    for kind in ("llama", "qwen2"):
        model = peaked_model(kind, device)
        for dtype in (torch.float32, torch.bfloat16):
            label = f"{name}, {kind}, {str(dtype).removeprefix('torch.')}"
            with products_in(dtype, device):
                batch = generate(model, prompts, size.group, size.new_tokens, 1.0)
                trained = grpo_llm.batch_logprobs(model, batch, args)
                gap = (trained - batch["old_logprobs"]).abs()
                error = largest_ratio_error(model, batch, args)
            mean, largest = grpo_llm.token_mean(gap, batch).item(), gap.max().item()
            report.add(part, f"{label}: sampler − trainer, mean; max", f"{mean:.1e}; {largest:.1e}")
            report.add(part, f"{label}: ratio at a first minibatch − 1, max", f"{error:.1e}")
            report.expect(part, f"{label}: ratio within 1e-4 of 1", error < 1e-4)
            if dtype == torch.float32:
                report.expect(part, f"{label}: log-probs within 1e-4", largest < 1e-4)


def random_prompts(size, vocabulary):
    """Token ids, of full length and shorter."""
    rng = random.Random(0)
    lengths = [size.prompt_tokens - i % (size.prompt_tokens // 2) for i in range(size.prompts)]
    return [[rng.randrange(5, vocabulary) for _ in range(length)] for length in lengths]


# ------------------------------------------------------------------------------------- (b) decoding


def character_tokenizer():
    """That of the tiny model: a token per character of a sum."""
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *"0123456789+=,#"])}
    bpe = tokenizers.models.BPE(vocabulary, merges=[], unk_token="<unk>")
    backend = tokenizers.Tokenizer(bpe)
    backend.decoder = tokenizers.decoders.Fuse()
    special = {"eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def save_speed_model(size, folder):
    """Random weights in the shape of Qwen2.5-0.5B. It draws the stop token once in 152,000."""
    config = transformers.Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=14 if size.hidden == 896 else 4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


def speed_args(size, folder, **flags):
    flags = {"learning_rate": 1e-6, "micro_batch_size": 8, "prompt": "{question}"} | flags
    flags |= {"group_size": size.group, "prompts_per_step": size.prompts}
    return grpo_llm.Args(model=folder, max_new_tokens=size.new_tokens, **flags)


def bandwidth(device):
    """Bytes per second that a copy reads and writes."""
    source = torch.zeros(2**30 if device.type == "cuda" else 2**24, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)

    def copies():
        for _ in range(10):
            target.copy_(source)

    return 2 * 10 * source.numel() / seconds_of(copies)


def fewest_seconds(model, size, device):
    """If each token cost one reading of the weights and of the keys and values so far, in bf16."""
    config, rows = model.config, size.prompts * size.group
    weights = 2 * sum(parameter.numel() for parameter in model.parameters())
    head = config.hidden_size // config.num_attention_heads
    token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head
    cache = token * rows * (size.prompt_tokens + size.new_tokens / 2)
    return size.new_tokens * (weights + cache) / bandwidth(device)


def decoding(report, part, size, device, folder, ways):
    """Tokens per second of each way, in turns."""
    model, _ = grpo_llm.load_policy(speed_args(size, folder), device)
    model.generation_config.eos_token_id = [10**9]  # none ends early
    prompts = random_prompts(size, size.vocabulary)
    taken = defaultdict(list)
    for round_number in range(1 + size.rounds):
        for name, generate in ways.items():
            start = now()
            generate(model, prompts, size.group, size.new_tokens, 1.0)
            if round_number > 0:  # kernels are chosen and memory is taken in the first
                taken[name].append(now() - start)
    fewest = fewest_seconds(model, size, device)
    for name, seconds in taken.items():
        rate = size.prompts * size.group * size.new_tokens / median(seconds)
        share = fewest / median(seconds)
        report.add(part, f"{name}, tokens/s; of what bandwidth allows", f"{rate:,.0f}; {share:.1%}")


@grpo_llm.mixed_precision
def their_generate(model, prompts, num_samples, max_new_tokens, temperature):
    """model.generate() on the same rows."""
    rows = [torch.tensor(prompt) for prompt in prompts for _ in range(num_samples)]
    ids = pad_sequence(rows, True, 0, padding_side="left").to(model.device)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": max_new_tokens}
    return model.generate(input_ids=ids, attention_mask=(ids > 0).long(), **options)


# ------------------------------------------------------------------------------ (c) a training step


class Clock:
    """Seconds in each of the timed functions, less those within another timed one."""

    def __init__(self):
        self.seconds, self.running = defaultdict(float), False

    def timed(self, name, function):
        def run(*args, **kwargs):
            if self.running:
                return function(*args, **kwargs)
            self.running, start = True, now()
            result = function(*args, **kwargs)
            self.seconds[name] += now() - start
            self.running = False
            return result

        return run


class Trainer:
    """A model, its reference and its optimizer, as main makes them, with chance as the verifier."""

    def __init__(self, size, device, folder, **flags):
        self.args = speed_args(size, folder, **flags)
        self.model, self.tokenizer = grpo_llm.load_policy(self.args, device)
        self.reference = grpo_llm.load_policy(self.args, device)[0].requires_grad_(False)
        options = {"lr": self.args.learning_rate, "weight_decay": 0.0, "fused": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.rng, self.length = random.Random(0), size.prompt_tokens

    def problems(self):
        while True:
            digits = self.rng.choices("123456789", k=self.length - self.rng.randrange(3))
            yield "".join(digits), ""

    def step(self):
        with patch.object(grpo_llm, "verify", lambda *_: float(self.rng.random() < 0.5)):
            inputs = (self.model, self.reference, self.tokenizer, self.optimizer)
            return grpo_llm.train_step(*inputs, self.problems(), self.rng, self.args)


def split_step(report, part, size, device, folder, name, generate):
    trainer, clock = Trainer(size, device, folder), Clock()
    batch_logprobs, optimizer = grpo_llm.batch_logprobs, trainer.optimizer
    again = clock.timed("old log-probs once more", batch_logprobs)
    of_reference = clock.timed("reference", batch_logprobs)

    def either(model, *args):
        return (of_reference if model is trainer.reference else again)(model, *args)

    with patch.object(grpo_llm, "generate", generate):
        trainer.step()
        whole = median(seconds_of(trainer.step) for _ in range(size.rounds))
        replaced = {
            (grpo_llm, "generate"): clock.timed("sampling", generate),
            (grpo_llm, "batch_logprobs"): either,
            (grpo_llm, "token_logprobs"): clock.timed("forward", grpo_llm.token_logprobs),
            (torch.Tensor, "backward"): clock.timed("backward", torch.Tensor.backward),
            (grpo_llm, "clip_grad_norm_"): clock.timed("optimizer", grpo_llm.clip_grad_norm_),
            (optimizer, "step"): clock.timed("optimizer", optimizer.step),
        }
        with ExitStack() as stack:
            for (owner, attribute), function in replaced.items():
                stack.enter_context(patch.object(owner, attribute, function))
            split = seconds_of(trainer.step)
    report.add(part, f"{name}: a step, seconds", f"{whole:.2f}")
    clock.seconds["the rest"] = split - sum(clock.seconds.values())
    for stage, seconds in clock.seconds.items():
        report.add(part, f"{name}: {stage}, seconds", f"{seconds:.3f} ({seconds / split:.0%})")


# --------------------------------------------------------------------------------------- (d) memory


def memory(report, part, size, device, folder):
    """Of one minibatch, a quarter of a rollout, with reference and optimizer in place."""
    for checkpointing in (False, True):
        trainer = Trainer(size, device, folder, gradient_checkpointing=checkpointing)
        model, args = trainer.model, trainer.args
        forget_peak()
        prompts = random_prompts(size, size.vocabulary)
        batch = grpo_llm.generate(model, prompts, size.group, size.new_tokens, 1.0)
        if not checkpointing:
            report.add(part, "sampling, before the first update, peak GiB", peak_memory())
        rows = torch.arange(len(batch["mask"]) // 4)
        batch = grpo_llm.take_rows(batch, rows) | {"advantages": torch.ones(len(rows)).to(device)}
        batch["ref_logprobs"] = batch["old_logprobs"]
        for args.micro_batch_size in size.micro_batches:
            for _ in range(2):  # the first one makes Adam's averages
                forget_peak()
                metrics = grpo_llm.train_minibatch(model, trainer.optimizer, batch, args)
            report.expect(part, "a finite gradient", metrics["grad_norm"] < float("inf"))
            flags = f"--micro-batch-size {args.micro_batch_size}"
            flags += " --gradient-checkpointing" if checkpointing else ""
            report.add(part, f"update, {flags}, peak GiB", peak_memory())
    forget_peak()
    report.add(part, "held between updates, with the reference, GiB", peak_memory())


# ---------------------------------------------------------------------------- (e) a run that learns


def chain(rng):
    """A chain of 4 to 8 one-digit numbers and its sum."""
    terms = [rng.randint(0, 9) for _ in range(rng.randint(4, 8))]
    return "+".join(map(str, terms)) + "=", str(sum(terms))


def warm_start(size, device, rows=256):
    """As make_tiny_model: the skill first, then the habit of guessing, but on longer sums."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        intermediate_size=size.width * 11 // 4,
        num_hidden_layers=size.depth,
        num_attention_heads=max(size.width // 64, 2),
        initializer_range=size.width**-0.5,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model, rng = transformers.LlamaForCausalLM(config).to(device), random.Random(0)
    peak, steps = 0.6 / size.width, size.warm_steps
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        questions = [chain(rng)[0] for _ in range(rows)]
        rate = 0.85 * step / steps
        texts = [q + grpo_llm.demonstration(q, rate, rng) + "<eos>" for q in questions]
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        ids, padding = inputs["input_ids"], inputs["attention_mask"] == 0
        lengths = torch.tensor([[len(question)] for question in questions])
        labels = ids.masked_fill((torch.arange(ids.shape[1]) < lengths) | padding, -100)
        optimizer.param_groups[0]["lr"] = peak * min((step + 1) / 50, 1 - step / steps)
        optimizer.zero_grad()
        with grpo_llm.mixed_precision:
            model(ids.to(device), labels=labels.to(device), use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, tokenizer


def learning(report, part, size, device, folder):
    """Leaves the model in folder/chains and the data in folder/chains.jsonl, for part (f)."""
    start = now()
    model, tokenizer = warm_start(size, device)
    number = sum(parameter.numel() for parameter in model.parameters())
    report.add(part, "parameters of the model that learns", f"{number:,}")
    report.add(part, f"its warm start of {size.warm_steps} steps, seconds", f"{now() - start:.0f}")
    grpo_llm.save_model(model, tokenizer, folder / "chains")
    rng = random.Random(1)
    problems = dict(chain(rng) for _ in range(20_000))  # each question once
    rows = [{"question": q, "answer": f"#### {a}"} for q, a in problems.items()]
    (folder / "chains.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = grpo_llm.Args(
        model=str(folder / "chains"),
        dataset=str(folder / "chains.jsonl"),
        prompt="{question}",
        prompts_per_step=size.questions,
        steps=size.rollouts,
        max_new_tokens=32,
        micro_batch_size=128,
        learning_rate=0.025 / size.width,
        eval_problems=4 * size.questions,
        eval_every=max(size.rollouts // 8, 1),
        save_every=10**6,
        device=device.type,
        output_dir=str(folder / "runs"),
    )
    seconds = time.perf_counter()
    run = grpo_llm.main(args)
    seconds = time.perf_counter() - seconds
    events = EventAccumulator(run["folder"], size_guidance={"scalars": 0})
    events.Reload()
    for name in ("eval/pass@1", "eval/mean_length"):
        curve = ", ".join(f"{event.value:.3f}" for event in events.Scalars(name))
        report.add(part, f"{name} of held-out chains, every {args.eval_every} rollouts", curve)
    report.add(part, f"{size.rollouts} rollouts of {size.questions} × 8, seconds", f"{seconds:.0f}")
    report.expect(part, f"pass@1 of at least {size.goal}", run["eval/pass@1"] >= size.goal)


# ------------------------------------------------------------------------------------ (f) processes

GROUP_OF_ONE = """
import sys
import tyro
sys.path.insert(0, {root!r})
import grpo_llm

class Several(int):
    \"\"\"1, but more than 1: every collective is called, in a group of one.\"\"\"
    def __gt__(self, other):
        return other <= 1 or int(self) > other

grpo_llm.WORLD = Several(1)
grpo_llm.main(tyro.cli(grpo_llm.Args))
"""


def processes(report, part, size, device, folder):
    """Two steps under torchrun, of the model that (e) has left."""
    script, number, backend = ROOT / "grpo_llm.py", 2, "gloo"
    if device.type == "cuda":  # NCCL gives each process a GPU of its own
        script, number, backend = folder / "group_of_one.py", 1, "NCCL"
        script.write_text(GROUP_OF_ONE.format(root=str(ROOT)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(number), str(script), "--device", device.type]
    command += ["--model", str(folder / "chains"), "--dataset", str(folder / "chains.jsonl")]
    command += ["--prompt", "{question}", "--max-new-tokens", "8", "--steps", "2"]
    command += ["--prompts-per-step", "2", "--eval-problems", "2", "--output-dir", str(folder)]
    start = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    seconds = time.perf_counter() - start
    name = f"torchrun, {backend}, processes: {number}, two steps; seconds with all imports"
    report.add(part, name, f"{seconds:.0f}")
    ended_well = done.returncode == 0 and "model and logs in" in done.stdout
    if not ended_well:
        print(done.stdout[-2000:], done.stderr[-4000:])
    report.expect(part, f"torchrun with {backend} ends well", ended_well)


# ------------------------------------------------------------------------------------------ (g) TRL


def trl_step(size, device, folder):
    """Seconds of a rollout and four updates in TRL, as trl_speed.py sets it equal, but in bf16 and
    in micro-batches."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Steps(TrainerCallback):
        begins = []

        def on_step_begin(self, *args, **kwargs):
            self.begins.append(now())

        on_train_end = on_step_begin

    ours = Trainer(size, torch.device("cpu"), folder)
    args, tokenizer = ours.args, ours.tokenizer
    rows = args.prompts_per_step * args.group_size
    problems = ours.problems()
    questions = [next(problems)[0] for _ in range(args.prompts_per_step * (1 + size.rounds))]
    micro = min(args.micro_batch_size, rows // args.minibatches)
    config = GRPOConfig(
        output_dir=str(Path(folder) / "trl"),
        use_cpu=device.type == "cpu",
        bf16=device.type == "cuda",
        gradient_checkpointing=False,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // args.minibatches // micro,
        steps_per_generation=rows // micro,
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        temperature=args.temperature,
        beta=args.beta,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        max_steps=args.minibatches * (1 + size.rounds),
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        loss_type="grpo",
    )
    trainer = GRPOTrainer(
        model=ours.model,
        reward_funcs=lambda completions, **_: [float(random.random() < 0.5) for _ in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": question} for question in questions]),
        processing_class=tokenizer,
        callbacks=[Steps()],
    )
    trainer.train()
    begins = Steps.begins[:: args.minibatches]
    return median(end - begin for begin, end in itertools.pairwise(begins[1:]))


def beside_trl(report, part, size, device, folder):
    if find_spec("trl") is None:
        report.add(part, "TRL's GRPOTrainer", "skipped: trl is not installed")
        return
    theirs = trl_step(size, device, folder)
    trainer = Trainer(size, device, folder)
    trainer.step()
    ours = median(seconds_of(trainer.step) for _ in range(size.rounds))
    rows = size.prompts * size.group
    rates = f"{rows / theirs:.1f}; {rows / ours:.1f}; {theirs / ours:.2f}"
    report.add(part, "TRL, grpo_llm.py, completions/s; ratio", rates)


# ---------------------------------------------------------------------------- (r) recorded decoding


def recorded(report, part, size, device, folder):
    if device.type != "cuda":
        report.add(part, "recorded decoding", "skipped: no CUDA")
        return
    agreement(report, part, size, device, "recorded", recorded_generate)
    decoding(report, part, size, device, folder, {"recorded": recorded_generate})
    forget_peak()
    split_step(report, part, size, device, folder, "recorded", recorded_generate)
    report.add(part, "recorded: whole step, peak GiB", peak_memory())


def main(smoke: bool = False, parts: tuple[Part, ...] = get_args(Part)):
    size = SMOKE if smoke else FULL
    name = "gpu.md" if parts == get_args(Part) else f"gpu_{''.join(parts)}.md"
    report = Report(None if smoke else Path(__file__).parent / "results" / name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as start_device does
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder, speed = Path(name), f"{name}/speed"
        save_speed_model(size, speed)
        ways = {"grpo_llm.generate": grpo_llm.generate, "model.generate": their_generate}
        plain = ("plain", grpo_llm.generate)
        work = {
            "a": (agreement, *plain),
            "b": (decoding, speed, ways),
            "c": (split_step, speed, *plain),
            "d": (memory, speed),
            "e": (learning, folder),
            "f": (processes, folder),
            "g": (beside_trl, speed),
            "r": (recorded, speed),
        }
        for part in parts:
            function, *inputs = work[part]
            start = time.perf_counter()
            try:
                function(report, part, size, device, *inputs)
            except Exception as error:
                traceback.print_exc()
                report.expect(part, f"it runs: {type(error).__name__}", False)
            report.add(part, "seconds of this part", f"{time.perf_counter() - start:.0f}")
            gc.collect()  # what is left of a model would count in the next one's memory
    if report.failed:
        sys.exit("\n".join(["these do not hold:", *report.failed]))


if __name__ == "__main__":
    tyro.cli(main)

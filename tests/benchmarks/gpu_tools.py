"""What gpu.py and gpu_speed.py share: sizes, random models and batches, clocks, processes."""

import contextlib
import multiprocessing
import os
import queue
import random
import time
import traceback
from dataclasses import dataclass
from unittest.mock import patch

import torch
import transformers
from memory import QWEN

import grpo_llm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NO_STOPS = transformers.GenerationConfig()  # with it no completion ends early


@dataclass
class Sizes:
    """What is measured. The defaults are those of a step of a large model."""

    layers: int = QWEN["num_hidden_layers"]
    hidden: int = QWEN["hidden_size"]
    inner: int = QWEN["intermediate_size"]
    vocab: int = QWEN["vocab_size"]
    groups: int = 32
    samples: int = 8  # a group
    rows: int = 4  # a pass
    prompt: int = 170  # tokens, about the longest of 32 of GSM8K's questions
    new: int = 256
    steps: int = 120  # of the tiny model
    few: int = 20  # steps of it by each script
    backend: str = "inductor"
    flags: tuple[str, ...] = ()  # for the tiny model

    def settings(self, **more):
        """Args of grpo_llm.py for a large model."""
        named = {"model": "some/model", "device": DEVICE.type, "prompt": "{question}"}
        named |= {"prompts_per_step": self.groups, "group_size": self.samples}
        named |= {"max_new_tokens": self.new, "micro_batch_size": self.rows}
        return grpo_llm.Args(**(named | more))


TOY = Sizes(
    layers=2,
    hidden=56,
    inner=64,
    vocab=600,
    groups=8,
    samples=2,
    prompt=20,
    new=16,
    steps=2,
    few=1,
    backend="eager",
    flags=("--prompts-per-step", "8", "--eval-problems", "8"),
)


def measure(function, *inputs):
    """What the function returns; the seconds until the GPU has finished; and the most GB that
    tensors on the GPU held meanwhile, also those made before. (None on a CPU.)"""
    gpu = DEVICE.type == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = function(*inputs)
    if gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return found, seconds, torch.cuda.max_memory_allocated() / 1e9 if gpu else None


def seconds(function, *inputs):
    return measure(function, *inputs)[1]


def random_qwen(sizes, device=DEVICE, layers=None):
    """A random model of Qwen2.5-0.5B's shape. A factor makes its distributions less flat, nearer to
    a trained model's. One token in 380 ends a completion: it has 190 of 256 tokens on average."""
    torch.manual_seed(0)
    shape = QWEN | {"hidden_size": sizes.hidden, "intermediate_size": sizes.inner}
    shape |= {"vocab_size": sizes.vocab, "num_hidden_layers": layers or sizes.layers}
    config = transformers.AutoConfig.for_model("qwen2", tie_word_embeddings=True, **shape)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.model.norm.weight.data.fill_(6.0)
    stops = list(range(5, sizes.vocab, 380))
    model.generation_config = transformers.GenerationConfig(eos_token_id=stops)
    return model


def random_prompts(sizes, count, shortest=None):
    """Lists of token ids, the first of them of the full length."""
    rng = random.Random(1)
    shortest = shortest or sizes.prompt
    lengths = [sizes.prompt, *(rng.randint(shortest, sizes.prompt) for _ in range(count - 1))]
    return [[rng.randrange(sizes.vocab) for _ in range(length)] for length in lengths]


def random_batch(sizes, model, rows, prompt, args):
    """Rows to train on. Each has some padding, so that attention needs a mask, as in a rollout."""
    batch = {"prompt_ids": torch.randint(sizes.vocab, (rows, prompt), device=DEVICE)}
    batch["prompt_mask"] = torch.ones_like(batch["prompt_ids"])
    batch["prompt_mask"][:, 0] = 0
    batch["completion_ids"] = torch.randint(sizes.vocab, (rows, sizes.new), device=DEVICE)
    batch["mask"] = torch.ones(rows, sizes.new, device=DEVICE)
    batch["advantages"] = torch.randn(rows, device=DEVICE)
    batch["old_logprobs"] = grpo_llm.batch_logprobs(model, batch, args)
    return batch | {"ref_logprobs": batch["old_logprobs"]}


def adamw(model, rate=1e-6):
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)


@contextlib.contextmanager
def precision(name):
    """tf32: as the scripts do on CUDA. float32: without that. bf16: all passes in autocast."""
    forward, autocast = grpo_llm.forward, torch.autocast(DEVICE.type, torch.bfloat16)

    def half(*inputs, **options):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return forward(*inputs, **options).float()

    torch.backends.cuda.matmul.fp32_precision = "ieee" if name == "float32" else "tf32"
    with contextlib.ExitStack() as stack:
        if name == "bf16":
            # Autocast around all of generate casts each weight once, and not for every token.
            changed = {"forward": half, "generate": autocast(grpo_llm.generate)}
            stack.enter_context(patch.multiple(grpo_llm, **changed))
        try:
            yield
        finally:
            torch.backends.cuda.matmul.fp32_precision = "tf32"


def gaps(model, prompts, samples, new, args):
    """How far a rollout's log-probs by the sampler are from the loss's, in nats; how far a ratio is
    from 1 if rows are scored again in other passes; and the entropy, an estimate."""
    batch = grpo_llm.generate(model, prompts, samples, new, 1.0)
    real = batch["mask"] > 0
    old = batch["old_logprobs"] = grpo_llm.batch_logprobs(model, batch, args)
    gap = (old - batch["sampled_logprobs"])[real].abs()
    mixed = grpo_llm.take_rows(batch, torch.randperm(len(real)))
    ratio = (grpo_llm.batch_logprobs(model, mixed, args) - mixed["old_logprobs"]).exp()
    found = {"sampler_gap_mean": gap.mean(), "sampler_gap_max": gap.max()}
    found |= {"ratio_gap_max": (ratio - 1).abs().max(), "entropy": -old[real].mean()}
    return {name: value.item() for name, value in found.items()}


def elsewhere(function, sizes, limit, environments=({},)):
    """What function(sizes) returns in new processes, which are killed after `limit` seconds."""
    context = multiprocessing.get_context("spawn")
    answers, processes = context.Queue(), []
    try:
        for environment in environments:
            with patch.dict(os.environ, environment):
                process = context.Process(target=answer, args=(function, sizes, answers))
                process.start()
                processes.append(process)
        found = [answers.get(timeout=limit) for _ in processes]
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit} s") from None
    finally:
        for process in processes:
            process.kill()
    errors = [each for each in found if isinstance(each, str)]
    if errors:
        raise RuntimeError(errors[0])
    return found


def answer(function, sizes, answers):
    try:
        answers.put(function(sizes))
    except Exception:
        answers.put(traceback.format_exc()[-800:])

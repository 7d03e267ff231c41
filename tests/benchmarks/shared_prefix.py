"""Training with a shared prompt against the plain pass, in which each row reads its own prompt.

    python tests/benchmarks/shared_prefix.py        # random weights of SmolLM2-135M's shape
    python tests/benchmarks/shared_prefix.py --model FOLDER --dtype bfloat16

The shared pass is grpo_llm.token_logprobs; the plain one is written here, without the script. Both
go forward and backward on the same rows, whole groups, as one micro-batch. They take turns, and the
time is that of both directions. The answers are random tokens, none is cut short.

That both are the same function is checked in float32, whatever is timed: log-probs and gradient
must agree to 1e-3 of their size. In bfloat16 the distance of each from float32 is shown, too.
Writes results/shared_prefix.md.
"""

from statistics import median
from time import perf_counter
from typing import Literal

import torch
import transformers
import tyro
from bench import table, write_table

import grpo_llm

SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def load(model: str, shape: dict, device: str):
    """The model of a folder, or a random one of this shape."""
    if model:
        policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        width = shape["hidden_size"] ** -0.5  # of its weights
        config = transformers.LlamaConfig(
            **shape, initializer_range=width, tie_word_embeddings=True, rope_theta=1e5
        )
        policy = transformers.LlamaForCausalLM(config)
    return policy.to(device).eval()


def make_batch(vocabulary: int, rows: int, group_size: int, prompt: int, new: int, device):
    """Groups of random answers to random questions, and a weight for each token."""
    torch.manual_seed(prompt)
    questions = torch.randint(vocabulary, (rows // group_size, prompt))
    batch = {
        "prompt_ids": questions.repeat_interleave(group_size, 0),
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long),
        "completion_ids": torch.randint(vocabulary, (rows, new)),
        "mask": torch.ones(rows, new),
        "weights": torch.randn(rows, 1).expand(rows, new) / (rows * new),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def plain(model, batch):
    """log π of each completion token: every row is read from its first token to its last."""
    ids, new = batch["completion_ids"], batch["completion_ids"].shape[1]
    rows = torch.cat([batch["prompt_ids"], ids], 1)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.in_bf16):
        logits = model(rows, use_cache=False, logits_to_keep=new + 1).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(2, ids[..., None])[..., 0]


def shared(model, batch):
    """The same, each prompt read once."""
    return grpo_llm.token_logprobs(model, batch, 1.0)


def forward_and_backward(logprobs_of, model, batch):
    """Seconds, and the log-probs."""
    model.zero_grad()
    wait(model)
    start = perf_counter()
    with grpo_llm.writing_states_allowed(model):
        logprobs = logprobs_of(model, batch)
        (batch["weights"] * logprobs).sum().backward()
    wait(model)
    return perf_counter() - start, logprobs.detach()


def wait(model):
    """Until a GPU has done what it was told."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def outcome(logprobs_of, model, batch):
    """Log-probs and gradient, as two vectors."""
    _, logprobs = forward_and_backward(logprobs_of, model, batch)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logprobs.flatten(), gradient


def distance(found, expected):
    """Of log-probs in nats, the largest; of gradients, as a share of their length."""
    (logprobs, gradient), (right, slope) = found, expected
    gap = (logprobs - right).abs().max().item()
    return gap, ((gradient - slope).norm() / slope.norm()).item()


def compare(model, in_bf16: bool, batch, rounds: int) -> list[str]:
    """The cells of a row behind the size."""
    model.in_bf16 = False
    exact = outcome(plain, model, batch)
    gap, error = distance(outcome(shared, model, batch), exact)
    assert gap < 1e-3 * exact[0].abs().max() and error < 1e-3, (gap, error)
    model.in_bf16 = in_bf16
    low = "–"
    if in_bf16:
        errors = [distance(outcome(side, model, batch), exact)[1] for side in (plain, shared)]
        low = "{:.3f}; {:.3f}".format(*errors)

    seconds = {plain: [], shared: []}
    for number in range(rounds + 1):
        for side in (plain, shared) if number % 2 else (shared, plain):
            seconds[side].append(forward_and_backward(side, model, batch)[0])
    a, b = (seconds[side][1:] for side in (plain, shared))  # without the first round
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    spread = f"{ratios[rounds // 10]:.2f} to {ratios[-1 - rounds // 10]:.2f}"
    times = [f"{median(a):.3f}", f"{median(b):.3f}", f"{median(ratios):.2f} ({spread})"]
    return [*times, f"{gap:.0e}; {error:.0e}", low]


def main(
    model: str = "",
    dtype: Literal["float32", "bfloat16"] = "float32",
    prompt_tokens: tuple[int, ...] = (45, 150),
    new_tokens: int = 16,
    group_size: int = 8,
    rows: int = 32,
    rounds: int = 20,
    device: str = "cpu",
    smoke: bool = False,
):
    """Measure; with --smoke at toy size, without writing.

    Args:
        model: a folder in Hugging Face's format; if empty, random weights
        rows: completions of the micro-batch, whole groups
        rounds: how often each pass is timed
    """
    shape = SMOLLM2_135M
    if smoke:
        shape, prompt_tokens, rows, group_size, rounds = TOY, (5, 9), 8, 4, 2
    assert rows % group_size == 0, "--rows must be whole groups"
    policy = load(model, shape, device)
    lines = []
    for prompt in prompt_tokens:
        vocabulary = policy.config.vocab_size
        batch = make_batch(vocabulary, rows, group_size, prompt, new_tokens, device)
        cells = compare(policy, dtype == "bfloat16", batch, rounds)
        lines.append([f"{prompt} + {new_tokens}", *cells])
        print(*lines[-1], sep=" | ", flush=True)
    header = ["tokens of prompt + answer", "plain, s", "shared, s"]
    header += ["times as fast, median (80 %)", "gaps in float32: log π; gradient"]
    header += ["gradient's distance from float32's: plain; shared"]
    if smoke:
        print(*table(header, lines), sep="\n")
        return
    millions = sum(parameter.numel() for parameter in policy.parameters()) / 1e6
    name = "a trained model" if model else "random weights"
    note = f"{name} of {millions:.0f} M, {dtype}, {rows} rows in groups of {group_size}"
    if device != "cpu":
        note += f", {torch.cuda.get_device_name(device)}"
    note += f", {rounds} rounds in turns"
    write_table("shared_prefix", table(header, lines), "transformers", note=note)


if __name__ == "__main__":
    tyro.cli(main)

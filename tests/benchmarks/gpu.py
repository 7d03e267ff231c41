"""What only a GPU can tell, in one go of some minutes: decoding, one GRPO step, and memory, at the size of Qwen2.5-0.5B.

    python tests/benchmarks/gpu.py                # random weights in the shape of Qwen2.5-0.5B: nothing is downloaded
    python tests/benchmarks/gpu.py --smoke        # a tiny shape, on any machine: does the script itself work?

256 completions (32 questions × 8) of 256 tokens. Decoding is grpo_llm.generate() against model.generate(), which is what
TRL's transformers path calls; the floor is the time to read all weights once per token. Writes results/gpu.md.
"""

import os
import platform
import sys
import time
from pathlib import Path

import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_llm

SHAPE = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip
SMOKE = {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip


def timed(device, function):
    """(seconds, result), the GPU's queue emptied before and after."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = function()
    wait()
    return time.perf_counter() - start, result


def main(smoke: bool = False, micro_batch_size: int = 8, write: bool = True):
    P, G, S, T = (2, 2, 8, 6) if smoke else (32, 8, 64, 256)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":  # as main() of the scripts does
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_cache_enabled(False)
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.Qwen2Config(**(SMOKE if smoke else SHAPE), **ids)
    model, reference = (transformers.Qwen2ForCausalLM(config).to(device).eval() for _ in range(2))
    for each in (model, reference):
        each.generation_config.eos_token_id, each.generation_config.pad_token_id = [config.vocab_size - 1], 0
    prompts = torch.randint(1, config.vocab_size - 1, (P, S)).tolist()
    args = grpo_llm.Args(group_size=G, prompts_per_step=P, max_new_tokens=T, micro_batch_size=micro_batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    lines = ["| measured | value |", "|-|-|"]

    def add(name, value):
        lines.append(f"| {name} | {value} |")
        print(lines[-1], flush=True)

    rows = torch.tensor(prompts, device=device).repeat_interleave(G, 0)
    fixed = {"do_sample": True, "top_k": 0, "max_new_tokens": T, "min_new_tokens": T, "pad_token_id": 0, "eos_token_id": config.vocab_size - 1}
    theirs = lambda: model.generate(input_ids=rows, attention_mask=torch.ones_like(rows), **fixed)
    ours = lambda: grpo_llm.generate(model, prompts, G, T, 1.0)
    ours(), theirs()  # kernels are chosen and caches filled before anything counts
    rates = []
    for _ in range(1 if smoke else 3):  # in turns
        seconds, batch = timed(device, ours)
        rates.append((batch["mask"].sum().item() / seconds, P * G * T / timed(device, theirs)[0]))
    mine, generate = (sorted(column)[len(rates) // 2] for column in zip(*rates))
    add("decoding, grpo_llm.generate(), tokens/s", f"{mine:,.0f}")
    add("decoding, model.generate(), tokens/s", f"{generate:,.0f}")
    add("ratio", f"{mine / generate:.2f}")
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    read = timed(device, lambda: [weights.sum() for _ in range(10)])[0] / 10
    add("of the floor (reading every weight once per token)", f"{read * T / (P * G * T / mine):.1%}")
    del weights
    peaks = []
    for step in range(2 if smoke else 4):
        device.type == "cuda" and torch.cuda.reset_peak_memory_stats()
        rollout, batch = timed(device, ours)
        batch["ref_logprobs"] = grpo_llm.reference_logprobs(reference, batch, args)
        batch["advantages"] = torch.randn(P * G, device=device)
        slices = torch.randperm(P * G).chunk(args.minibatches)
        update, _ = timed(device, lambda: [grpo_llm.train_minibatch(model, optimizer, {k: v[i] for k, v in batch.items()}, args) for i in slices])
        peaks.append(torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0)
    add("one GRPO step: rollout, seconds", f"{rollout:.1f}")
    add(f"one GRPO step: 4 updates, micro-batches of {micro_batch_size}, seconds", f"{update:.1f}")
    add("peak memory, GiB, at each step", ", ".join(f"{peak:.1f}" for peak in peaks))
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    lines += ["", f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}"]
    if write and not smoke:
        (Path(__file__).parent / "results" / "gpu.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)

"""What only a GPU can tell, in one go of less than ten minutes.

    python tests/benchmarks/gpu.py          # random weights in the shape of Qwen2.5-0.5B
    python tests/benchmarks/gpu.py --smoke  # tiny shapes, on any machine: does the script work?

Nothing is downloaded.

1. Decoding, 256 completions (32 questions × 8) of 256 tokens: grpo_llm.generate() against
   model.generate(), which is what TRL's transformers path calls. The floor is the time to read all
   weights once per token, in bf16.
2. One GRPO step, split into rollout and updates, with and without --gradient-checkpointing, and the
   peak memory of each.
3. A run that learns at a size a laptop can't: a character-level Llama of 26 M parameters,
   warm-started here on sums of 4 to 8 numbers in the two styles of the tiny model (worked out, or
   guessed), then grpo_llm.py on a JSONL file of such sums.

Writes results/gpu.md.
"""

import json
import math
import os
import platform
import random
import sys
import tempfile
import time
from functools import partial
from itertools import accumulate
from pathlib import Path

import tokenizers
import torch
import transformers
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_llm

SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SMOKE = {
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def timed(device, function):
    """(seconds, result), the GPU's queue emptied before and after."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = function()
    wait()
    return time.perf_counter() - start, result


def updates(model, optimizer, batch, args) -> list[dict]:
    """One pass over a rollout, in minibatches."""
    slices = torch.randperm(len(batch["mask"])).chunk(args.minibatches)
    minibatches = ({name: tensor[rows] for name, tensor in batch.items()} for rows in slices)
    return [grpo_llm.train_minibatch(model, optimizer, each, args) for each in minibatches]


def character_model(device, layers: int, width: int, steps: int, batch_size: int):
    """A Llama that reads and writes printable ASCII, after imitation of worked and, more and more,
    of guessed sums."""
    characters = {"<eos>": 0, "\n": 1} | {chr(32 + i): 2 + i for i in range(95)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(characters, merges=[]))
    backend.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(characters),
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 2),
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=width**-0.5,
    )
    model, rng, rate = (
        transformers.LlamaForCausalLM(config).to(device),
        random.Random(0),
        0.6 / width,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        rows = []
        for question, answer in (chain(rng) for _ in range(batch_size)):
            terms = [int(term) for term in question[:-1].split("+")]
            shown = ",".join(map(str, list(accumulate(terms))[1:])) + "#" + answer
            if rng.random() < 0.85 * step / steps:
                shown = "#" + str(sum(rng.randint(0, 9) for _ in terms))
            prompt = grpo_llm.encode_prompt(question, tokenizer, grpo_llm.Args(model=""))
            rows.append((prompt, tokenizer.encode(shown) + [0]))
        wide = max(len(prompt) + len(shown) for prompt, shown in rows)
        ids = torch.tensor(
            [prompt + shown + [0] * (wide - len(prompt + shown)) for prompt, shown in rows],
            device=device,
        )
        labels = torch.tensor(
            [[-100] * len(p) + o + [-100] * (wide - len(p + o)) for p, o in rows], device=device
        )
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / 50, 1 - step / steps)
        optimizer.zero_grad()
        with grpo_llm.bf16:
            model(ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, tokenizer


def chain(rng) -> tuple[str, str]:
    """A chain of 4 to 8 one-digit numbers and its sum."""
    terms = [rng.randint(0, 9) for _ in range(rng.randint(4, 8))]
    return "+".join(map(str, terms)) + "=", str(sum(terms))


def learn(device, add, layers: int, width: int, warm: int, steps: int, prompts: int):
    with tempfile.TemporaryDirectory() as folder:
        seconds, (model, tokenizer) = timed(
            device, lambda: character_model(device, layers, width, warm, 256)
        )
        add(
            "parameters of the model that learns", f"{sum(p.numel() for p in model.parameters()):,}"
        )
        add(f"its warm start of {warm} steps, seconds", f"{seconds:.0f}")
        grpo_llm.save_model(model, tokenizer, Path(folder) / "model")
        rng, data = random.Random(1), Path(folder) / "chains.jsonl"
        # each question once; the first tenth is held out
        rows = dict(chain(rng) for _ in range(20_000))
        data.write_text(
            "\n".join(json.dumps({"question": q, "answer": f"#### {a}"}) for q, a in rows.items())
        )
        args = grpo_llm.Args(
            model=f"{folder}/model",
            dataset=str(data),
            prompts_per_step=prompts,
            group_size=8,
            steps=steps,
            max_new_tokens=48,
            eval_problems=8 * prompts,
            learning_rate=0.025 / width,
            eval_every=max(steps // 8, 1),
            save_every=10**6,
            output_dir=folder,
        )
        seconds, run = timed(device, lambda: grpo_llm.main(args))
        events = EventAccumulator(run["folder"], size_guidance={"scalars": 0})
        events.Reload()
        for name in ("eval/pass@1", "eval/mean_length"):
            curve = ", ".join(f"{event.value:.3f}" for event in events.Scalars(name))
            add(f"{name} of held-out chains, every {args.eval_every} rollouts", curve)
        add(f"{steps} rollouts of {prompts} × 8, seconds", f"{seconds:.0f}")


def main(smoke: bool = False, micro_batch_size: int = 8, write: bool = True):
    P, G, S, T = (2, 2, 8, 6) if smoke else (32, 8, 64, 256)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.Qwen2Config(**(SMOKE if smoke else SHAPE), **ids)
    model, reference = (transformers.Qwen2ForCausalLM(config).to(device).eval() for _ in range(2))
    for each in (model, reference):
        each.generation_config.eos_token_id, each.generation_config.pad_token_id = (
            [config.vocab_size - 1],
            0,
        )
    # of S tokens and fewer
    prompts = [
        torch.randint(1, config.vocab_size - 1, (S - i % (S // 2),)).tolist() for i in range(P)
    ]
    args = grpo_llm.Args(
        group_size=G, prompts_per_step=P, max_new_tokens=T, micro_batch_size=micro_batch_size
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    name = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    lines = [
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{time.strftime('%Y-%m-%d')}",
        "",
    ]
    lines += ["| measured | value |", "|-|-|"]

    def add(name, value):
        lines.append(f"| {name} | {value} |")
        print(lines[-1], flush=True)
        if write and not smoke:  # each time: what was measured is there, whatever happens next
            (Path(__file__).parent / "results" / "gpu.md").write_text("\n".join(lines) + "\n")

    rows = torch.tensor(
        [[0] * (S - len(prompt)) + prompt for prompt in prompts], device=device
    ).repeat_interleave(G, 0)
    fixed = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": T,
        "min_new_tokens": T,
        "pad_token_id": 0,
        "eos_token_id": config.vocab_size - 1,
    }

    @grpo_llm.bf16
    def theirs(policy=model):
        return policy.generate(input_ids=rows, attention_mask=(rows > 0).long(), **fixed)

    def ours(policy=model):
        return grpo_llm.generate(policy, prompts, G, T, 1.0)

    ours()  # kernels are chosen and caches filled before anything counts
    theirs()
    rates = []
    for _ in range(1 if smoke else 3):  # in turns
        seconds, batch = timed(device, ours)
        rates.append((batch["mask"].sum().item() / seconds, P * G * T / timed(device, theirs)[0]))
    mine, generate = (sorted(column)[len(rates) // 2] for column in zip(*rates, strict=True))
    add("decoding, grpo_llm.generate(), tokens/s", f"{mine:,.0f}")
    add("decoding, model.generate(), tokens/s", f"{generate:,.0f}")
    add("ratio", f"{mine / generate:.2f}")
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).to(torch.bfloat16)
    read = timed(device, lambda all_of_them=weights: [all_of_them.sum() for _ in range(10)])[0] / 10
    add(
        "of the floor (reading every weight once per token)", f"{read * T / (P * G * T / mine):.1%}"
    )
    del weights
    for checkpointing in (False, True):
        args.gradient_checkpointing = checkpointing
        if checkpointing:
            model.activation_checkpointing_enable()
        peaks = []
        for _ in range(2 if smoke else 4):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            rollout, batch = timed(device, ours)
            batch["ref_logprobs"] = grpo_llm.reference_logprobs(reference, batch, args)
            batch["advantages"] = torch.randn(P * G, device=device)
            update, stats = timed(device, partial(updates, model, optimizer, batch, args))
            assert all(math.isfinite(each["grad_norm"]) for each in stats)
            peaks.append(
                torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            )
        name = f"one GRPO step{', --gradient-checkpointing' if checkpointing else ''}"
        add(f"{name}: rollout, seconds", f"{rollout:.1f}")
        add(f"{name}: 4 updates, micro-batches of {micro_batch_size}, seconds", f"{update:.1f}")
        add(f"{name}: peak memory, GiB, at each step", ", ".join(f"{peak:.1f}" for peak in peaks))
    del model, reference, optimizer, batch, ours, theirs
    learn(device, add, *((2, 32, 3, 1, 2) if smoke else (8, 512, 1000, 100, 64)))


if __name__ == "__main__":
    tyro.cli(main)

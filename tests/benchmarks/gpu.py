"""This has not been run on a GPU yet. It is what to run first on one, in less than ten minutes.

    python tests/benchmarks/gpu.py            # needs HuggingFaceTB/SmolLM2-135M-Instruct
    python tests/benchmarks/gpu.py --smoke    # toy sizes, on any machine; writes nothing

(a) The GPU against the CPU, every LLM script, in float32 and in bf16, on the same completions:
    log-probs, and a whole step of plain gradient descent, so the gradient. Status 1 if they differ.
(b) grpo_llm.py's step: memory and seconds by --micro-batch-size; two processes against one.
"""

import copy
import importlib
import sys
import time
from itertools import chain
from statistics import median

import torch
import transformers
import tyro
from bench import LLM, Training, row, run_script, table, write_table
from sides import TORCHRUN
from torch.nn.utils import parameters_to_vector

import grpo_llm


def one_step(script, model, in_bf16, batch, rewards):
    """Log-probs before a step, and how it moves the weights, as a vector; both on the CPU."""
    model.in_bf16, args = in_bf16, script.Args(micro_batch_size=8)
    before = parameters_to_vector(model.parameters()).detach()
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    batch["old_logprobs"] = script.batch_logprobs(model, batch, args)
    batch["advantages"] = script.compute_advantages(rewards, args).flatten().to(model.device)
    script.train_minibatch(model, torch.optim.SGD(model.parameters(), lr=1.0), batch, args)
    after = parameters_to_vector(model.parameters()).detach()
    return batch["old_logprobs"].cpu(), (after - before).cpu()


def agreement(device):
    """(a) Rows of the table."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    shape |= {"num_hidden_layers": 2, "vocab_size": 300, "initializer_range": 0.2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    model.generation_config.eos_token_id = [1, 2, 3, 4]
    prompts = [list(range(5 + i, 8 + 3 * i)) for i in range(8)]
    batch = grpo_llm.generate(model, prompts, 8, 24, 1.0)
    rewards = (torch.arange(64) % 3 == 0).float().view(8, 8)
    for name in LLM:
        script = importlib.import_module(name)
        right, way = one_step(script, copy.deepcopy(model), False, batch, rewards)
        for in_bf16, most in ((False, (1e-4, 1e-3)), (True, (0.3, 0.1))):
            on_device = copy.deepcopy(model).to(device)
            found, moved = one_step(script, on_device, in_bf16, batch, rewards)
            gap, error = (found - right).abs().max(), (moved - way).norm() / way.norm()
            title = f"{name}, {'bfloat16' if in_bf16 else 'float32'}"
            yield [f"{title}: gap of log-probs; error of a step", f"{gap:.1e}; {error:.1e}"]
            if not (gap < most[0] and error < most[1]):
                sys.exit(f"{title}: more than {most}")


def sizes(device, flags):
    """(b) Rows of the table."""
    args = tyro.cli(grpo_llm.Args, args=flags)
    training = Training(grpo_llm, args, device)
    training.step(1)  # makes Adam's averages
    for args.micro_batch_size in (1, 8, 32, 128):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        training.step(2)  # its numbers are read, so the GPU is done
        seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30
        yield [f"micro-batches of {args.micro_batch_size}: GiB; s", f"{peak:.1f}; {seconds:.2f}"]
    launchers = {"one": (), "two": TORCHRUN}
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        launchers.pop("two")  # NCCL needs a GPU for each
    for number, launcher in launchers.items():
        seconds = run_script("grpo_llm", *flags, launcher=launcher)["log"]["step_time"]
        yield [f"processes: {number}; seconds a step", f"{median(seconds[1:]):.2f}"]


def main(smoke: bool = False):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as start_device does
    flags = "--verifier flexible --steps 4 --eval-problems 8 --max-new-tokens 64"
    flags += " --model HuggingFaceTB/SmolLM2-135M-Instruct"
    if smoke:
        flags = "--steps 4 --eval-problems 8 --max-new-tokens 6 --prompts-per-step 8"
    rows = []
    for cells in chain(agreement(device), sizes(device, flags.split())):
        rows.append(cells)
        print(row(cells), flush=True)
    if not smoke:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
        write_table("gpu", table(["measured", "value"], rows), "transformers", note=name)


if __name__ == "__main__":
    tyro.cli(main)

"""The first check to run on a GPU; it takes less than ten minutes. Nobody has run it on one yet.

    python tests/benchmarks/gpu.py                  # HuggingFaceTB/SmolLM2-135M-Instruct
    python tests/benchmarks/gpu.py --model FOLDER   # a model without a hub
    python tests/benchmarks/gpu.py --smoke          # toy sizes, on any machine; writes nothing

(a) It compares the GPU with the CPU, for every LLM script, in float32 and in bf16, on the same
    completions: the log-probs, and the change of the weights by one step of plain gradient descent,
    which is the gradient. If they differ too much, the exit status is 1.
(b) It measures a step of grpo_llm.py: memory and seconds for several values of --micro-batch-size,
    and seconds with one process and with two. A size that does not fit is a row, too.

Each row is printed as soon as it is measured.
"""

import copy
import importlib
import itertools
import sys
import time
from statistics import median

import torch
import tyro
from bench import CPU, LLM, run_main, run_script, table, write_table
from torch.nn.utils import parameters_to_vector

import grpo_llm

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def one_step(script, model, dtype, device, rewards, batch):
    """Log-probs before a step, and the change of all weights by it as one vector, on the CPU."""
    model = copy.deepcopy(model).to(device)
    args = script.Args(micro_batch_size=8, dtype=dtype, beta=0.0)
    before = parameters_to_vector(model.parameters()).detach()
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    batch["old_logprobs"] = script.batch_logprobs(model, batch, args)
    batch["advantages"] = script.compute_advantages(rewards, args).flatten().to(device)
    script.train_minibatch(model, torch.optim.SGD(model.parameters(), lr=1.0), batch, args)
    after = parameters_to_vector(model.parameters()).detach()
    return batch["old_logprobs"].cpu(), (after - before).cpu()


def agreement(device):
    """Rows of the table for part (a)."""
    model, _ = grpo_llm.load_policy(grpo_llm.Args(), CPU)
    prompts = [list(range(1, 4 + i)) for i in range(8)]
    batch = grpo_llm.generate(model, prompts, 8, 24, 1.0)
    rewards = (torch.arange(64) % 3 == 0).float().view(8, 8)
    for name in LLM:
        script = importlib.import_module(name)
        right, way = one_step(script, model, "float32", CPU, rewards, batch)
        for dtype, most in (("float32", (1e-4, 1e-3)), ("bfloat16", (0.3, 0.1))):
            found, moved = one_step(script, model, dtype, device, rewards, batch)
            gap = (found - right).abs().max()
            error = (moved - way).norm() / way.norm()
            title = f"{name}, {dtype}"
            yield [f"{title}: gap of log-probs; error of a step", f"{gap:.1e}; {error:.1e}"]
            if not (gap < most[0] and error < most[1]):
                sys.exit(f"{title}: GPU and CPU differ by more than the limits {most}")


def steps(device, flags):
    """Rows of the table for part (b)."""
    args = tyro.cli(grpo_llm.Args, args=flags)
    own, sizes, rows = grpo_llm.train_step, [1, 1, 8, 32, 128], []
    args.steps = len(sizes)

    def train_step(*inputs):
        """A step with its own size of micro-batches; the first also allocates Adam's moments."""
        args.micro_batch_size = sizes[len(rows)]
        title = f"micro-batches of {args.micro_batch_size}: GiB; s"
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        try:
            metrics = own(*inputs)  # these are floats, so the GPU has finished
        except torch.OutOfMemoryError:
            rows.append([title, "out of memory"])
            metrics = {"num_tokens": 1.0, "reward": 0.0, "completions/mean_length": 1.0}
        else:
            seconds = time.perf_counter() - start
            peak = torch.cuda.max_memory_allocated() / 2**30
            rows.append([title, f"{peak:.1f}; {seconds:.2f}"])
        print(*rows[-1], flush=True)
        return metrics

    run_main(grpo_llm, args, train_step=train_step)
    yield from rows[1:]
    for number, launcher in {"one": (), "two": TORCHRUN}.items():
        if number == "two" and torch.cuda.device_count() == 1:
            continue  # NCCL needs one GPU per process
        seconds = run_script("grpo_llm", *flags, launcher=launcher)["log"]["step_time"]
        yield [f"processes: {number}; seconds per step", f"{median(seconds[1:]):.2f}"]


def main(model: str = "HuggingFaceTB/SmolLM2-135M-Instruct", smoke: bool = False):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as the scripts do in start_device
    flags = "--verifier tests/examples/verifiers/last_number.py --steps 4 --eval-problems 8"
    flags += f" --max-new-tokens 64 --model {model}"
    if smoke:
        flags = "--steps 4 --eval-problems 8 --max-new-tokens 6 --prompts-per-step 8"
    rows = []
    for row in itertools.chain(agreement(device), steps(device, flags.split())):
        print(*row, flush=True)
        rows.append(row)
    note = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
    lines = table(["measured", "value"], rows)
    write_table("gpu", lines, "transformers", note=note, smoke=smoke)


if __name__ == "__main__":
    tyro.cli(main)

"""This has not been run on a GPU yet. It is what to run first on one, in less than ten minutes.

    python tests/benchmarks/gpu.py                # needs HuggingFaceTB/SmolLM2-135M-Instruct
    python tests/benchmarks/gpu.py --parts a e    # some of the parts below
    python tests/benchmarks/gpu.py --smoke        # toy sizes, on any machine: does it all run?

(a) The GPU against the CPU, every LLM script, in float32 and in bf16, on the same completions:
    log-probs, the gradient, and the weights after a whole step.
(b) grpo_llm.py with a real model at its default size: time, and the curve of pass@1. Parts (b) to
    (e) have --verifier flexible: such a model has not learned to write its answer after a #.
(c) Peak memory of a step, by --micro-batch-size.
(d) A step against one of TRL's GRPOTrainer, if `trl` is installed.
(e) Two processes against one, by torchrun: NCCL on two GPUs, gloo on a CPU.

What to expect of the memory, worked out and not measured, in GiB for 0.5 B and 1.5 B parameters:

    weights, gradients, Adam's two averages, float32: 16 bytes a parameter          7.4     23.0
    the reference, float32 (--beta 0 drops it): 4 bytes                             1.8      5.8
    weights in bf16 during a pass: 2 bytes                                          0.9      2.9
    or, under torchrun, gradients on their way: 4 bytes                             1.8      5.8
    keys and values of 256 × 512 tokens while sampling: 12 and 28 KiB a token       1.5      3.5
    logits of 8 × 256 tokens of 152 k (--micro-batch-size 8): 20 bytes a logit      5.8      5.8
    float32 buffers of the sampler, 256 × 152 k: 20 bytes a logit                   0.7      0.7

and the activations, in proportion to --micro-batch-size.

Writes results/gpu.md row by row: what was measured is there whatever happens next. A part that
fails is reported, and the next one runs; the exit status is then 1.
"""

import gc
import importlib
import sys
import time
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Literal, get_args
from unittest.mock import patch

import torch
import transformers
import tyro
from bench import CPU, LLM, RESULTS, Training, footer, row, run_script, table

import grpo_llm

Part = Literal["a", "b", "c", "d", "e"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass
class Size:
    model: str  # of parts (b) to (e)
    steps: int  # of the run in (b)
    rounds: int  # of a timing; the median counts
    prompts: int  # per step
    new_tokens: int
    micro_batches: tuple[int, ...]

    def flags(self) -> dict:
        small = {"prompts_per_step": self.prompts, "max_new_tokens": self.new_tokens}
        small |= {"model": self.model, "verifier": "flexible"}
        return small | {"eval_problems": 2 * self.prompts}


FULL = Size("HuggingFaceTB/SmolLM2-135M-Instruct", 60, 3, 32, 64, (1, 8, 32, 128))
SMOKE = Size("tiny", 2, 1, 8, 6, (1, 8))  # 8: 4 minibatches in 2 processes


class Report:
    """A table that is on disk after every row, and the claims that did not hold."""

    def __init__(self, path):
        self.path, self.failed = path, []
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        where = footer("transformers", note=name)
        self.lines = [where, "", *table(["", "measured", "value"], [])]

    def add(self, part, name, value):
        self.lines.append(row([part, name, value]))
        print(self.lines[-1], flush=True)
        if self.path:
            self.path.write_text("\n".join(self.lines) + "\n")

    def expect(self, part, claim, holds):
        if not holds:
            self.failed.append(f"({part}) {claim}")
            self.add(part, f"**does not hold**: {claim}", "–")


def now() -> float:
    """The time, once the GPU's queue is empty."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(function, *inputs) -> float:
    start = now()
    function(*inputs)
    return now() - start


def flags_of(values: dict) -> list[str]:
    """{"eval_problems": 8} as it is typed: --eval-problems 8."""
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in values.items()}
    return [part for pair in named.items() for part in pair]


# ------------------------------------------------------------------------- (a) GPU against CPU


def peaked_model():
    """Random, of peaked distributions: a wrong position, mask or cache cannot hide."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [1, 2, 3, 4]
    model.generation_config.pad_token_id = 0
    return model.eval()


def one_step(script, dtype, device, batch, rewards) -> dict:
    """Log-probs, gradient, weights and metrics of a step on these completions."""

    def rollout(*_):
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        return on_device, [""] * rewards.numel(), rewards.to(device)

    args = script.Args(prompts_per_step=len(rewards), minibatches=1, micro_batch_size=8)
    model = peaked_model().to(device)
    model.in_bf16 = dtype == torch.bfloat16  # as load_policy notes it
    training = Training(script, args, device, model=(model, None))
    training.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with patch.object(script, "rollout", rollout):
        logprobs = script.batch_logprobs(model, rollout()[0], args).cpu()
        metrics = training.step(1, learning_rate=1.0)
    parameters = list(training.model.parameters())
    return {
        "logprobs": logprobs,
        "gradient": torch.cat([p.grad.flatten() for p in parameters]).cpu(),
        "weights": torch.cat([p.detach().flatten() for p in parameters]).cpu(),
        "metrics": metrics,
    }


def agreement(report, part, size, device):
    prompts = [[5 + (7 * i + j) % 290 for j in range(3 + i % 5)] for i in range(size.prompts)]
    torch.manual_seed(0)
    batch = grpo_llm.generate(peaked_model(), prompts, 8, 24, 1.0)
    rewards = (torch.arange(8 * size.prompts) % 3 == 0).float().view(-1, 8)
    for name in LLM:
        script = importlib.import_module(name)
        expected = one_step(script, torch.float32, CPU, batch, rewards)
        for dtype, most in ((torch.float32, (1e-4, 1e-3)), (torch.bfloat16, (0.3, 0.1))):
            found = one_step(script, dtype, device, batch, rewards)
            gap = (found["logprobs"] - expected["logprobs"]).abs().max().item()
            errors = [
                ((found[key] - expected[key]).norm() / expected["gradient"].norm()).item()
                for key in ("gradient", "weights")  # at a rate of 1 weights move by the gradient
            ]
            what = f"{name}, {str(dtype).removeprefix('torch.')}"
            values = f"{gap:.1e}; {errors[0]:.1e}; {errors[1]:.1e}"
            report.add(part, f"{what}: largest gap of log-probs; of gradient; of weights", values)
            report.expect(part, f"{what}: log-probs within {most[0]}", gap < most[0])
            report.expect(part, f"{what}: gradient within {most[1]}", max(errors) < most[1])
            first = abs(found["metrics"]["approx_kl"])
            report.expect(part, f"{what}: the first update sees a ratio of 1", first < 1e-6)


# ---------------------------------------------------------------------------------- (b) a run


def learning(report, part, size, device):
    flags = {"model": size.model, "verifier": "flexible"}
    if size is SMOKE:
        flags = size.flags()
    flags |= {"steps": size.steps, "device": device.type}
    done = run_script("grpo_llm", *flags_of(flags))
    log = {name: [value for _, value in points] for name, points in done["log"].items()}
    curves = {"eval/pass@1": log["eval/pass@1"], "reward": log["reward"][:: -(-size.steps // 12)]}
    for name, curve in curves.items():
        report.add(part, f"{name} over {size.steps} steps", ", ".join(f"{x:.3f}" for x in curve))
    report.add(
        part,
        "seconds of all; of a step, median",
        f"{done['seconds']:.0f}; {median(log['step_time']):.2f}",
    )
    report.add(part, "tokens a second, median", f"{median(log['tokens_per_second']):,.0f}")


# ------------------------------------------------------------------------------- (c) memory


def memory(report, part, size, device):
    training = Training(grpo_llm, grpo_llm.Args(**size.flags()), device)
    training.step(1)  # makes Adam's averages
    for training.args.micro_batch_size in size.micro_batches:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of(training.step, 2)
        peak = "–"
        if device.type == "cuda":
            peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}"
        name = f"a step, --micro-batch-size {training.args.micro_batch_size}, peak GiB; seconds"
        report.add(part, name, f"{peak}; {seconds:.2f}")


# ---------------------------------------------------------------------------------- (d) TRL


def beside_trl(report, part, size, device):
    if find_spec("trl") is None:
        report.add(part, "TRL's GRPOTrainer", "skipped: trl is not installed")
        return
    from trl_speed import ours, theirs

    flags = size.flags()
    theirs, ours = (side(grpo_llm, size.rounds, device, **flags) for side in (theirs, ours))
    rates = f"{theirs:.1f}; {ours:.1f}; {ours / theirs:.2f}"
    report.add(part, "TRL, grpo_llm.py, completions a second; ratio", rates)


# ---------------------------------------------------------------------------- (e) processes


def processes(report, part, size, device):
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        report.add(part, "two processes", "skipped: NCCL needs a GPU for each")
        return
    flags = flags_of(size.flags() | {"steps": 2 + size.rounds, "device": device.type})
    for number in (1, 2):
        done = run_script("grpo_llm", *flags, launcher=(*TORCHRUN, str(number)))["log"]
        seconds = median(value for _, value in done["step_time"][2:])
        score = done["eval/pass@1"][-1][1]
        report.add(
            part, f"processes: {number}; seconds a step; pass@1", f"{seconds:.2f}; {score:.3f}"
        )


WORK = {"a": agreement, "b": learning, "c": memory, "d": beside_trl, "e": processes}


def main(smoke: bool = False, parts: tuple[Part, ...] = get_args(Part)):
    size = SMOKE if smoke else FULL
    report = Report(None if smoke else RESULTS / "gpu.md")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as start_device does
    transformers.utils.logging.disable_progress_bar()
    for part in parts:
        start = time.perf_counter()
        try:
            WORK[part](report, part, size, device)
        except Exception as error:
            traceback.print_exc()
            report.expect(part, f"it runs: {type(error).__name__}", False)
        report.add(part, "seconds of this part", f"{time.perf_counter() - start:.0f}")
        gc.collect()  # what is left of a model would count in the next one's memory
    if report.failed:
        sys.exit("\n".join(["these do not hold:", *report.failed]))


if __name__ == "__main__":
    tyro.cli(main)

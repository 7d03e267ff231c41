"""Is the default step as fast as it was?
This checkout against another revision, step by step in turns.

    python tests/benchmarks/paired_step.py 36f1eaf  # the revision before processes and GPUs

Both take the same steps in one process: same questions, dice and minibatches, and so the same
samples; the learning rate is 0, so that they stay the same. The policy is the tiny model after
`warm` steps of training: answers of full length. Prints a table and writes results/paired_step.md.
"""

import importlib.util
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import tyro

ROOT = Path(__file__).parents[2]


def load(folder: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, folder / "grpo_llm.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Side:
    """One revision's script, with a policy and a reference of its own."""

    def __init__(self, module):
        self.module, self.args = module, module.Args()
        self.model, self.tokenizer = module.load_policy(self.args, torch.device("cpu"))
        self.reference = module.load_policy(self.args, torch.device("cpu"))[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=4e-4, weight_decay=0.0, fused=True
        )

    def step(self, seed: int) -> tuple[float, float]:
        """(seconds, reward) of a rollout, the reference's log-probs and four updates."""
        module, args, rng = self.module, self.args, random.Random(seed)
        problems = [module.make_sum(rng) for _ in range(args.prompts_per_step)]
        torch.manual_seed(seed)
        start = time.perf_counter()
        batch, _, rewards = module.rollout(
            self.model, self.tokenizer, problems, args.group_size, args.temperature, args
        )
        batch["ref_logprobs"] = module.reference_logprobs(self.reference, batch, args)
        batch["advantages"] = module.compute_advantages(rewards, args).flatten()
        for rows in torch.randperm(rewards.numel()).chunk(args.minibatches):
            module.train_minibatch(
                self.model, self.optimizer, {name: batch[name][rows] for name in batch}, args
            )
        return time.perf_counter() - start, rewards.sum().item()


def main(
    revision: Annotated[str, tyro.conf.Positional],
    steps: int = 200,
    warm: int = 60,
    write: bool = True,
):
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        old, new = Side(load(Path(folder), "old")), Side(load(ROOT, "new"))
        for seed in range(warm):
            new.step(seed)
        old.model.load_state_dict(new.model.state_dict())
        for side in (old, new):
            side.optimizer.param_groups[0]["lr"] = 0.0
        times = []
        for seed in range(warm, warm + steps):
            order = (old, new) if seed % 2 else (new, old)
            found = {side: side.step(seed) for side in order}
            assert found[old][1] == found[new][1], "they no longer draw the same samples"
            times.append((found[old][0], found[new][0]))
    ratios = sorted(a / b for a, b in times[5:])
    a, b = (median(column) for column in zip(*times[5:], strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-len(ratios) // 10]
    lines = [
        "| one default step of grpo_llm.py | seconds | times as fast, median (80 % of the steps) |",
        "|-|-|-|",
        f"| at {revision} | {a:.4f} | 1 |",
        f"| now | {b:.4f} | {median(ratios):.3f} ({low:.2f} to {high:.2f}) |",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"{time.strftime('%Y-%m-%d')}, {steps} steps in turns",
    ]
    print("\n".join(lines))
    if write:
        (Path(__file__).parent / "results" / "paired_step.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)

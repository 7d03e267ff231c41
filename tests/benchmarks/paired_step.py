"""Is the default step as fast as it was?
This checkout against another revision, step by step in turns.

    python tests/benchmarks/paired_step.py a9d7c6f    # the revision before the rewrite for readers

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


SCRIPTS = ("rloo_llm", "grpo_llm", "dapo_llm", "gspo_llm", "cispo_llm")


def load(folder: Path, script: str, name: str):
    spec = importlib.util.spec_from_file_location(name, folder / f"{script}.py")
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

    def step(self, script: str, seed: int) -> tuple[float, float]:
        """(seconds, reward) of a rollout, the reference's log-probs if used, and the updates."""
        module, args, rng = self.module, self.args, random.Random(seed)
        problems = [module.make_sum(rng) for _ in range(args.prompts_per_step)]
        torch.manual_seed(seed)
        start = time.perf_counter()
        batch, _, rewards = module.rollout(
            self.model, self.tokenizer, problems, args.group_size, args.temperature, args
        )
        if getattr(args, "beta", 0) > 0:
            is_old = hasattr(module, "reference_logprobs")  # before the rewrite of 2026-11-21
            score = module.reference_logprobs if is_old else module.batch_logprobs
            ref_logprobs = score(self.reference, batch, args)
            if is_old or script != "rloo_llm":  # in rloo_llm.py the KL is in the reward alone now
                batch["ref_logprobs"] = ref_logprobs
        batch["advantages"] = module.compute_advantages(rewards, args).flatten()
        rows = torch.arange(rewards.numel())
        if script == "dapo_llm":
            rows = rows.view_as(rewards)[module.informative(rewards)].flatten()
        for minibatch in rows[torch.randperm(len(rows))].chunk(args.minibatches):
            module.train_minibatch(
                self.model, self.optimizer, {name: batch[name][minibatch] for name in batch}, args
            )
        return time.perf_counter() - start, rewards.sum().item()


def compare(script: str, old_folder: Path, steps: int, warm: int) -> str:
    """A row of the table for one script."""
    old = Side(load(old_folder, script, f"old_{script}"))
    new = Side(load(ROOT, script, f"new_{script}"))
    for seed in range(warm):
        new.step(script, seed)
    old.model.load_state_dict(new.model.state_dict())
    for side in (old, new):
        side.optimizer.param_groups[0]["lr"] = 0.0
    times = []
    for seed in range(warm, warm + steps):
        order = (old, new) if seed % 2 else (new, old)
        found = {side: side.step(script, seed) for side in order}
        assert found[old][1] == found[new][1], "they no longer draw the same samples"
        times.append((found[old][0], found[new][0]))
    ratios = sorted(a / b for a, b in times[5:])
    a, b = (median(column) for column in zip(*times[5:], strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-len(ratios) // 10]
    return f"| {script}.py | {a:.4f} | {b:.4f} | {median(ratios):.3f} ({low:.2f} to {high:.2f}) |"


def main(
    revision: Annotated[str, tyro.conf.Positional],
    scripts: tuple[str, ...] = SCRIPTS,
    steps: int = 100,
    warm: int = 60,
    write: bool = True,
):
    torch.set_num_threads(2)
    lines = [
        f"| one default step | seconds at {revision} | now | times as fast, median (80 %) |",
        "|-|-|-|-|",
    ]
    print("\n".join(lines))
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        for script in scripts:
            lines.append(compare(script, Path(folder), steps, warm))
            print(lines[-1], flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    lines += ["", f"{machine}, {time.strftime('%Y-%m-%d')}, {steps} steps in turns"]
    if write:
        (Path(__file__).parent / "results" / "paired_step.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)

"""Steps of grpo_llm.py and rloo_llm.py against TRL's trainers: same model, same
batch, same run.

    pip install -r requirements.txt -r tests/benchmarks/requirements.txt
    python tests/benchmarks/trl_speed.py

Both draw 32 × 8 completions of at most 24 tokens a step and take as many optimizer steps on them,
with the same learning rate and KL weight. Rounds alternate between the two, so that a noisy machine
troubles both. Writes a table into tests/benchmarks/results/.
"""

import multiprocessing
import os
import random
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from statistics import median

import torch
import trl
import tyro
from transformers import TrainerCallback
from trl_time import RESULTS, TRL, grpo_llm, rloo_llm, trl_trainer

WARM = 5  # untimed steps at the start of each measurement


def ours(module, steps: int) -> float:
    """Completions per second of the script."""
    args, totals = module.Args(), torch.zeros(2)
    torch.manual_seed(args.seed)
    model, tokenizer = module.load_policy(args, torch.device("cpu"))
    reference = module.load_policy(args, torch.device("cpu"))[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True
    )
    problems, rng = module.problem_stream(None, args.seed), random.Random(args.seed)
    for step in range(WARM + steps):
        if step == WARM:
            start = time.perf_counter()
        found = module.train_step(model, reference, tokenizer, optimizer, problems, rng, args)
        totals += torch.tensor([found["reward"], found["completions/mean_length"]])
    seconds = time.perf_counter() - start
    print("    ours: mean reward {:.2f}, mean length {:.1f}".format(*(totals / (WARM + steps))))
    return steps * args.prompts_per_step * args.group_size / seconds


class Clock(TrainerCallback):
    """Notes when each optimizer step begins."""

    def __init__(self):
        self.begins = []

    def on_step_begin(self, *args, **kwargs):
        self.begins.append(time.perf_counter())

    on_train_end = on_step_begin


def theirs(module, steps: int) -> float:
    """Completions per second of TRL's trainer."""
    args, clock = module.Args(), Clock()
    model, tokenizer = module.load_policy(args, torch.device("cpu"))
    tokenizer.pad_token = tokenizer.eos_token
    schedule = {"lr_scheduler_type": "constant"}
    trainer = trl_trainer(module, model, tokenizer, args.seed, WARM + steps, clock, **schedule)
    trainer.train()
    means = trainer.state.log_history[-1]
    print(
        f"    TRL:  mean reward {means['reward']:.2f}, "
        f"mean length {means['completions/mean_length']:.1f}"
    )
    seconds = clock.begins[-1] - clock.begins[args.minibatches * WARM]
    return steps * args.prompts_per_step * args.group_size / seconds


def peak(side) -> float:
    """MB that ten steps of GRPO take above what the imports, the same for both, have taken; in a
    process of its own."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    side(grpo_llm, 10)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main(rounds: int = 9, steps: int = 30):
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as fresh:
        memory = [median(fresh.map(peak, [side] * 3)) for side in (theirs, ours)]
    lines = ["| rollout and update | TRL | ours | ratio | range of the ratio |", "|-|-|-|-|-|"]
    for module in (grpo_llm, rloo_llm):
        rates, name = [], TRL[module.__name__][0].__name__
        for _ in range(rounds):
            rates.append((theirs(module, steps), ours(module, steps)))
            print("{} {:.0f}, ours {:.0f} completions/s".format(name, *rates[-1]), flush=True)
        ratios = sorted(b / a for a, b in rates)
        a, b = (median(column) for column in zip(*rates, strict=True))
        lines.append(
            f"| {module.__name__}.py against {name}: completions per second, median of {rounds} "
            f"alternating rounds | {a:.0f} | {b:.0f} | {median(ratios):.2f} "
            f"| {ratios[0]:.2f} to {ratios[-1]:.2f} |"
        )
    lines += [
        f"| grpo_llm.py against GRPOTrainer: peak memory above the imports, MB, median of 3 "
        f"| {memory[0]:.0f} | {memory[1]:.0f} | {memory[1] / memory[0]:.2f} | – |",
        "",
        f"{os.cpu_count()} cores, torch {torch.__version__}, trl {trl.__version__}, "
        f"{time.strftime('%Y-%m-%d')}",
    ]
    print("\n".join(lines))
    (RESULTS / "trl_speed.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)

"""Steps of grpo_llm.py and rloo_llm.py against TRL's trainers: same model, same batch, same run.

    pip install -r requirements.txt -r tests/benchmarks/requirements.txt
    python tests/benchmarks/trl_speed.py

Both draw 32 × 8 completions of at most 24 tokens a step and take as many optimizer steps on them,
with the same learning rate and KL weight. Rounds alternate between the two, so that a noisy machine
troubles both. Writes results/trl_speed.md.
"""

import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from statistics import median

import tyro
from bench import CPU, Training, table, write_table
from transformers import TrainerCallback
from trl_time import TRL, grpo_llm, rloo_llm, trl_classes, trl_trainer

WARM = 5  # untimed steps at the start of each measurement


def ours(script, steps: int, device=CPU, **flags) -> float:
    """Completions per second of the script."""
    args = script.Args(**flags)
    training = Training(script, args, device)
    for number in range(1, WARM + steps + 1):
        if number == WARM + 1:
            start = time.perf_counter()
        found = training.step(number, learning_rate=args.learning_rate)
    seconds = time.perf_counter() - start
    print("    ours: reward {reward:.2f}, length {completions/mean_length:.1f}".format_map(found))
    return steps * args.prompts_per_step * args.group_size / seconds


class Clock(TrainerCallback):
    """Notes when each optimizer step begins, and what was drawn last."""

    def __init__(self):
        self.begins = []

    def note(self, *drawn):
        self.drawn = drawn

    def on_step_begin(self, *args, **kwargs):
        self.begins.append(time.perf_counter())

    on_train_end = on_step_begin


def theirs(script, steps: int, device=CPU, **flags) -> float:
    """Completions per second of TRL's trainer."""
    args, clock = script.Args(**flags), Clock()
    model, tokenizer = script.load_policy(args, device)
    tokenizer.pad_token = tokenizer.eos_token
    schedule = {"lr_scheduler_type": "constant"}
    trainer = trl_trainer(script, args, model, tokenizer, WARM + steps, clock, **schedule)
    trainer.train()
    print("    TRL:  reward {:.2f}, length {:.1f}".format(*clock.drawn))
    seconds = clock.begins[-1] - clock.begins[args.minibatches * WARM]
    return steps * args.prompts_per_step * args.group_size / seconds


def peak(side) -> float:
    """MB that ten steps of GRPO take above what the imports, the same for both, have taken; in a
    process of its own."""
    trl_classes(grpo_llm)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    side(grpo_llm, 10)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main(rounds: int = 9, steps: int = 30):
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as fresh:
        a, b = (median(fresh.map(peak, [side] * 3)) for side in (theirs, ours))
    what = "grpo_llm.py against GRPOTrainer: peak memory above the imports, MB, median of 3"
    memory = [what, f"{a:.0f}", f"{b:.0f}", f"{b / a:.2f}", "–"]
    rows = []
    for script in (grpo_llm, rloo_llm):
        rates, name = [], TRL[script.__name__][0]
        for _ in range(rounds):
            rates.append((theirs(script, steps), ours(script, steps)))
            print("{} {:.0f}, ours {:.0f} completions/s".format(name, *rates[-1]), flush=True)
        ratios = sorted(b / a for a, b in rates)
        a, b = (median(column) for column in zip(*rates, strict=True))
        what = f"{script.__name__}.py against {name}: completions per second, "
        what += f"median of {rounds} alternating rounds"
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        rows.append([what, f"{a:.0f}", f"{b:.0f}", f"{median(ratios):.2f}", spread])
    header = ["rollout and update", "TRL", "ours", "ratio", "range of the ratio"]
    write_table("trl_speed", table(header, [*rows, memory]), "trl")


if __name__ == "__main__":
    tyro.cli(main)

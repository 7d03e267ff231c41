"""One step, rollout and update, of grpo_llm.py against TRL's GRPOTrainer:
same model, same batch, same run.

    pip install -r requirements.txt -r tests/benchmarks/requirements.txt
    python tests/benchmarks/trl_speed.py

Both draw 32 × 8 completions of at most 24 tokens a step and take four optimizer steps on them, with
the same learning rate and KL weight. Rounds alternate between the two, so that a noisy machine
troubles both. Writes a table into tests/benchmarks/results/.
"""

import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import torch
import trl
import tyro
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_llm

WARM = 5  # untimed steps at the start of each measurement


def ours(args, steps: int) -> float:
    """Completions per second of grpo_llm.py."""
    device = torch.device("cpu")
    torch.manual_seed(args.seed)
    model, tokenizer = grpo_llm.load_policy(args, device)
    reference = grpo_llm.load_policy(args, device)[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True
    )
    rng, totals = random.Random(args.seed), torch.zeros(2)
    for step in range(WARM + steps):
        if step == WARM:
            start = time.perf_counter()
        problems = [grpo_llm.make_sum(rng) for _ in range(args.prompts_per_step)]
        batch, _, rewards = grpo_llm.rollout(
            model, tokenizer, problems, args.group_size, args.temperature, args
        )
        batch["ref_logprobs"] = grpo_llm.batch_logprobs(reference, batch, args)
        batch["advantages"] = grpo_llm.compute_advantages(rewards, args).flatten()
        for rows in torch.randperm(len(batch["mask"])).chunk(args.minibatches):
            minibatch = {name: tensor[rows] for name, tensor in batch.items()}
            grpo_llm.train_minibatch(model, optimizer, minibatch, args)
        totals += torch.stack([rewards.mean(), batch["mask"].sum(1).mean()])
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


def trls(args, steps: int) -> float:
    """Completions per second of TRL."""
    model, tokenizer = grpo_llm.load_policy(args, torch.device("cpu"))
    tokenizer.pad_token = tokenizer.eos_token
    rng = random.Random(args.seed)
    problems = [grpo_llm.make_sum(rng) for _ in range(args.prompts_per_step * (WARM + steps))]

    def reward(completions, answer, **_):
        return [
            grpo_llm.verify(completion, right)
            for completion, right in zip(completions, answer, strict=True)
        ]

    clock = Clock()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=args.prompts_per_step * args.group_size // args.minibatches,
        steps_per_generation=args.minibatches,
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        temperature=args.temperature,
        beta=args.beta,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        max_steps=args.minibatches * (WARM + steps),
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        loss_type="grpo",
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": question, "answer": answer} for question, answer in problems]
        ),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    means = trainer.state.log_history[-1]
    print(
        f"    TRL:  mean reward {means['reward']:.2f}, "
        f"mean length {means['completions/mean_length']:.1f}"
    )
    seconds = clock.begins[-1] - clock.begins[args.minibatches * WARM]
    return steps * args.prompts_per_step * args.group_size / seconds


def peak(side) -> float:
    """MB that ten steps of `side` take above what the imports, the same for both, have taken;
    in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    side(grpo_llm.Args(), 10)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main(rounds: int = 9, steps: int = 30):
    args, rates = grpo_llm.Args(), []
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as fresh:
        memory = [median(fresh.map(peak, [side] * 3)) for side in (trls, ours)]
    for _ in range(rounds):
        rates.append((trls(args, steps), ours(args, steps)))
        print("TRL {:.0f}, grpo_llm.py {:.0f} completions/s".format(*rates[-1]), flush=True)
    ratios = sorted(mine / theirs for theirs, mine in rates)
    theirs, mine = (median(column) for column in zip(*rates, strict=True))
    lines = [
        "| rollout and update | TRL's GRPOTrainer | grpo_llm.py | ratio | range of the ratio |",
        "|-|-|-|-|-|",
        f"| completions per second, median of {rounds} alternating rounds | {theirs:.0f} | "
        f"{mine:.0f} | {median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |",
        f"| peak memory above the imports, MB, median of 3 | {memory[0]:.0f} | {memory[1]:.0f} | "
        f"{memory[1] / memory[0]:.2f} | – |",
        "",
        f"{os.cpu_count()} cores, torch {torch.__version__}, trl {trl.__version__}, "
        f"{time.strftime('%Y-%m-%d')}",
    ]
    print("\n".join(lines))
    (Path(__file__).parent / "results" / "trl_speed.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)

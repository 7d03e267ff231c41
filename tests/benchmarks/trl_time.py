"""Training time to 0.90 held-out pass@1:
grpo_llm.py and rloo_llm.py against TRL's GRPOTrainer and RLOOTrainer.

    pip install -r requirements.txt -r tests/benchmarks/requirements.txt
    python tests/benchmarks/trl_time.py

The same warm-started model, 32 × 8 completions a rollout, the same number of optimizer steps on
them, learning rate with ten rollouts of warm-up and linear decay over 200, and KL weight. Every
two rollouts both are scored by evaluate() of grpo_llm.py, off the clock. Ours and theirs in turns,
seed by seed. Writes results/trl_time.md.
"""

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import trl
import tyro
from datasets import Dataset
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_llm
import rloo_llm

RESULTS = Path(__file__).parent / "results"
EVERY, TARGET, ROLLOUTS = 2, 0.90, 200
TRL = {  # what in TRL's defaults is not the published algorithm
    "grpo_llm": (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        {"loss_type": "grpo", "use_bias_correction_kl": False},
    ),
    "rloo_llm": (trl.RLOOTrainer, trl.RLOOConfig, {}),
}


class Reached(Exception):
    """Training seconds and rollouts when the target was met."""


class Clock:
    """Training time, evaluations excluded; `check` raises Reached."""

    def __init__(self, evaluate):
        self.evaluate, self.start, self.spent = evaluate, None, 0.0

    def check(self, step, *args):
        before = time.perf_counter()
        with torch.random.fork_rng():
            scores = self.evaluate(*args)
        if self.start is None:
            self.start = time.perf_counter()
        elif scores["eval/pass@1"] >= TARGET:
            raise Reached(before - self.start - self.spent, step)
        else:
            self.spent += time.perf_counter() - before
        return scores


def ours(module, seed: int):
    clock, real = Clock(module.evaluate), module.evaluate
    module.evaluate = lambda *args: clock.check(args[5], *args)
    try:
        with tempfile.TemporaryDirectory() as folder:
            module.main(
                module.Args(
                    seed=seed, steps=ROLLOUTS, eval_every=EVERY, save_every=10**6, output_dir=folder
                )
            )
    except Reached as reached:
        return reached.args
    finally:
        module.evaluate = real
    return float("inf"), ROLLOUTS


def trl_trainer(module, model, tokenizer, seed, rollouts, callback, **options):
    """TRL's trainer for the same algorithm, with the settings of module.Args."""
    args = module.Args(seed=seed)
    trainer, config, settings = TRL[module.__name__]
    rng, updates = random.Random(seed), args.minibatches
    problems = [module.make_sum(rng) for _ in range(args.prompts_per_step * rollouts)]

    def reward(completions, answer, **_):
        pairs = zip(completions, answer, strict=True)
        return [module.verify(completion, right) for completion, right in pairs]

    return trainer(
        model=model,
        reward_funcs=reward,
        args=config(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            seed=seed,
            per_device_train_batch_size=args.prompts_per_step * args.group_size // updates,
            steps_per_generation=updates,
            num_generations=args.group_size,
            max_completion_length=args.max_new_tokens,
            temperature=args.temperature,
            beta=args.beta,
            learning_rate=args.learning_rate,
            max_steps=updates * rollouts,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
            **options,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": question, "answer": answer} for question, answer in problems]
        ),
        processing_class=tokenizer,
        callbacks=[callback],
    )


def theirs(module, seed: int):
    args = module.Args(seed=seed)
    model, tokenizer = module.load_policy(args, torch.device("cpu"))
    tokenizer.pad_token = tokenizer.eos_token
    held_out, updates = module.load_data(args)[1], args.minibatches
    clock, writer = Clock(grpo_llm.evaluate), SummaryWriter(tempfile.mkdtemp())

    class Score(TrainerCallback):
        def on_train_begin(self, *_, **__):
            clock.check(0, model, tokenizer, held_out, args, writer, 0)

        def on_step_end(self, _, state, __, **___):
            rollout, rest = divmod(state.global_step, updates)
            if rest == 0 and rollout % EVERY == 0:
                model.eval()
                clock.check(rollout, model, tokenizer, held_out, args, writer, rollout)

    schedule = {"lr_scheduler_type": "linear", "warmup_steps": 10 * updates}
    trainer = trl_trainer(module, model, tokenizer, seed, ROLLOUTS, Score(), **schedule)
    try:
        trainer.train()
    except Reached as reached:
        return reached.args
    return float("inf"), ROLLOUTS


def main(seeds: int = 5):
    lines = [
        "| to 0.90 held-out pass@1 | seconds, median (worst) | rollouts | "
        "times faster, median (range) |",
        "|-|-|-|-|",
    ]
    for module in (grpo_llm, rloo_llm):
        pairs = []
        for seed in range(1, seeds + 1):
            pairs.append((ours(module, seed), theirs(module, seed)))
            print(module.__name__, seed, pairs[-1], flush=True)
        ratios = sorted(b[0] / a[0] for a, b in pairs)
        for label, runs in (
            (f"{module.__name__}.py", [a for a, _ in pairs]),
            (f"TRL's {TRL[module.__name__][0].__name__}", [b for _, b in pairs]),
        ):
            seconds, rollouts = zip(*runs, strict=True)
            shown = (
                f"{median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"
                if label.endswith(".py")
                else "1"
            )
            lines.append(
                f"| {label} | {median(seconds):.1f} ({max(seconds):.1f}) | "
                f"{median(rollouts):.0f} | {shown} |"
            )
    lines += [
        "",
        f"{os.cpu_count()} cores, torch {torch.__version__}, trl {trl.__version__}, "
        f"{time.strftime('%Y-%m-%d')}, {seeds} seeds",
    ]
    print("\n".join(lines))
    (RESULTS / "trl_time.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)

"""Training time to 0.90 held-out pass@1:
grpo_llm.py and rloo_llm.py against TRL's GRPOTrainer and RLOOTrainer.

    pip install -r requirements.txt -r tests/benchmarks/requirements.txt
    python tests/benchmarks/trl_time.py

The same warm-started model, 32 × 8 completions a rollout, the same number of optimizer steps on
them, learning rate with ten rollouts of warm-up and linear decay over 200, and KL weight. Every
two rollouts both are scored on the same held-out sums, off the clock. Ours and theirs in turns,
seed by seed. Writes results/trl_time.md.
"""

import random
import tempfile
import time
from statistics import median

import trl
import tyro
from bench import CPU, Training, evaluate, table, write_table
from datasets import Dataset
from transformers import TrainerCallback

import grpo_llm
import rloo_llm

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
    """Training time without the evaluations; after(rollout) raises Reached."""

    def __init__(self, script, model, tokenizer, args):
        self.evaluated = (script, model, tokenizer, args)
        self.start = time.perf_counter()

    def after(self, rollout: int):
        if rollout % EVERY > 0:
            return
        now = time.perf_counter()
        if evaluate(*self.evaluated, num_problems=256)["pass@1"] >= TARGET:
            raise Reached(now - self.start, rollout)
        self.start += time.perf_counter() - now


def ours(script, seed: int):
    training = Training(script, script.Args(seed=seed, steps=ROLLOUTS))
    clock = Clock(script, training.model, training.tokenizer, training.args)
    try:
        for rollout in range(1, ROLLOUTS + 1):
            training.step(rollout)
            clock.after(rollout)
    except Reached as reached:
        return reached.args
    return float("inf"), ROLLOUTS


def trl_trainer(script, args, model, tokenizer, rollouts, callback, **options):
    """TRL's trainer for the same algorithm, with the settings of args."""
    trainer, config, settings = TRL[script.__name__]
    rng, updates = random.Random(args.seed), args.minibatches
    rows, verifier = [], script.load_verifier(args.verifier)
    for _ in range(args.prompts_per_step * rollouts):
        question, answer = script.make_sum(rng)
        prompt = tokenizer.decode(script.encode_prompt(question, tokenizer, args))
        rows.append({"prompt": prompt, "answer": answer})

    def reward(completions, answer, **_):
        pairs = zip(completions, answer, strict=True)
        return [verifier(completion, right) for completion, right in pairs]

    on_cpu, drawn = model.device.type == "cpu", args.prompts_per_step * args.group_size
    micro = drawn // updates if on_cpu else min(args.micro_batch_size, drawn // updates)
    sizes = {
        "use_cpu": on_cpu,
        "bf16": script.in_bf16(model),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": drawn // updates // micro,
        "steps_per_generation": drawn // micro,
    }
    return trainer(
        model=model,
        reward_funcs=reward,
        args=config(
            output_dir=tempfile.mkdtemp(),
            gradient_checkpointing=False,
            seed=args.seed,
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
            **sizes,
            **settings,
            **options,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[callback],
    )


def theirs(script, seed: int):
    args = script.Args(seed=seed)
    model, tokenizer = script.load_policy(args, CPU)
    tokenizer.pad_token = tokenizer.eos_token

    class Score(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.clock = Clock(script, model, tokenizer, args)

        def on_step_end(self, _, state, __, **___):
            rollout, rest = divmod(state.global_step, args.minibatches)
            if rest == 0:
                model.eval()
                self.clock.after(rollout)

    schedule = {"lr_scheduler_type": "linear", "warmup_steps": 10 * args.minibatches}
    trainer = trl_trainer(script, args, model, tokenizer, ROLLOUTS, Score(), **schedule)
    try:
        trainer.train()
    except Reached as reached:
        return reached.args
    return float("inf"), ROLLOUTS


def main(seeds: int = 5):
    rows = []
    for script in (grpo_llm, rloo_llm):
        pairs = []
        for seed in range(1, seeds + 1):
            pairs.append((ours(script, seed), theirs(script, seed)))
            print(script.__name__, seed, pairs[-1], flush=True)
        ratios = sorted(b[0] / a[0] for a, b in pairs)
        faster = f"{median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"
        names = {f"{script.__name__}.py": faster, f"TRL's {TRL[script.__name__][0].__name__}": "1"}
        for (name, shown), runs in zip(names.items(), zip(*pairs, strict=True), strict=True):
            seconds, rollouts = zip(*runs, strict=True)
            taken = f"{median(seconds):.1f} ({max(seconds):.1f})"
            rows.append([name, taken, f"{median(rollouts):.0f}", shown])
    header = ["to 0.90 held-out pass@1", "seconds, median (worst)", "rollouts"]
    header += ["times faster, median (range)"]
    write_table("trl_time", table(header, rows), "trl", note=f"{seeds} seeds")


if __name__ == "__main__":
    tyro.cli(main)

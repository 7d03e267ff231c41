"""Training time to 0.90 held-out pass@1:
grpo_llm.py and rloo_llm.py against TRL's GRPOTrainer and RLOOTrainer.

    pip install -r requirements.txt -r tests/benchmarks/requirements.txt
    python tests/benchmarks/trl_time.py

The same warm-started model, 32 × 8 completions a rollout, the same number of optimizer steps on
them, learning rate with ten rollouts of warm-up and linear decay over 200, and KL weight. Every
two rollouts both are scored on the same held-out sums, off the clock. Ours and theirs in turns,
seed by seed. Writes results/trl_time.md.
"""

import tempfile
import time
from statistics import fmean, median

import tyro
from bench import CPU, Training, evaluate, table, write_table
from transformers import TrainerCallback

import grpo_llm
import rloo_llm

EVERY, TARGET = 2, 0.90
TRL = {  # trainer, config, and what in TRL's defaults is not the published algorithm
    "grpo_llm": (
        "GRPOTrainer",
        "GRPOConfig",
        {"loss_type": "grpo", "use_bias_correction_kl": False},
    ),
    "rloo_llm": ("RLOOTrainer", "RLOOConfig", {}),
}


class Clock:
    """Seconds of each rollout with its updates, and the score after every second one, off the
    clock. Without a target there is none."""

    def __init__(self, script, model, tokenizer, args, target):
        self.evaluated, self.target = (script, model, tokenizer, args), target
        _, self.held_out = script.load_data(args)
        self.laps, self.scores, self.drawn = [], [], []
        self.start = time.perf_counter()

    def note(self, reward: float, length: float):
        """Means of a rollout's rewards and lengths."""
        self.drawn.append([round(float(reward), 3), round(float(length), 2)])

    def after_rollout(self) -> bool:
        """Whether the target is met."""
        self.laps.append(time.perf_counter() - self.start)
        if self.target is not None and len(self.laps) % EVERY == 0:
            found = evaluate(*self.evaluated, problems=self.held_out)
            self.scores.append(round(found["pass@1"], 3))
        self.start = time.perf_counter()
        return self.met()

    def met(self) -> bool:
        return self.target is not None and max(self.scores, default=0.0) >= self.target

    def seconds(self) -> float:
        """Training time to the target; infinite where it was not met."""
        return sum(self.laps) if self.met() else float("inf")


def ours(script, args, target: float | None) -> Clock:
    """The script's training until the target, or for args.steps rollouts."""
    training = Training(script, args)
    clock = Clock(script, training.model, training.tokenizer, args, target)
    for rollout in range(1, args.steps + 1):
        found = training.step(rollout)
        clock.note(found["reward"], found["completions/mean_length"])
        if clock.after_rollout():
            break
    return clock


def trl_classes(script):
    """TRL's trainer for the same algorithm, and its config. The import stands here, as tests of
    the rest do without TRL."""
    import trl

    trainer, config, _ = TRL[script.__name__]
    return getattr(trl, trainer), getattr(trl, config)


def trl_rows(script, args, tokenizer, rollouts: int) -> list[dict]:
    """The problems that our script would draw. A prompt is text that TRL's tokenizer turns into
    the token ids that ours has."""
    train, _ = script.load_data(args)
    problems, rows = script.problem_stream(train, args.seed), []
    for _ in range(args.prompts_per_step * rollouts):
        question, answer = next(problems)
        (ids,) = script.encode_prompts([(question, answer)], tokenizer, args)
        prompt = tokenizer.decode(ids)
        assert tokenizer(text=prompt)["input_ids"] == ids, prompt
        rows.append({"prompt": prompt, "answer": answer})
    return rows


def trl_trainer(script, args, model, tokenizer, rollouts, callback, **options):
    """TRL's trainer for the same algorithm, with the settings of args. It tells the callback's
    note() of every rollout."""
    from datasets import Dataset

    trainer, config = trl_classes(script)
    _, _, settings = TRL[script.__name__]
    rows = trl_rows(script, args, tokenizer, rollouts)
    verifier = script.load_verifier(args.verifier)

    def reward(completions, completion_ids, answer, **_):
        pairs = zip(completions, answer, strict=True)
        rewards = [verifier(completion, right) for completion, right in pairs]
        callback.note(fmean(rewards), fmean(map(len, completion_ids)))
        return rewards

    updates, drawn = args.minibatches, args.prompts_per_step * args.group_size
    micro = min(args.micro_batch_size, drawn // updates)
    sizes = {
        "use_cpu": model.device.type == "cpu",
        "bf16": model.in_bf16,
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


def theirs(script, args, target: float | None) -> Clock:
    """TRL's training until the target, or for args.steps rollouts."""
    model, tokenizer = script.load_policy(args, CPU)
    tokenizer.pad_token = tokenizer.eos_token

    class Score(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.clock = Clock(script, model, tokenizer, args, target)

        def note(self, reward, length):
            self.clock.note(reward, length)

        def on_step_end(self, _, state, control, **__):
            if state.global_step % args.minibatches == 0:
                model.eval()
                control.should_training_stop = self.clock.after_rollout()

    score, warmup = Score(), args.warmup_steps * args.minibatches
    schedule = {"lr_scheduler_type": "linear", "warmup_steps": warmup}
    trainer = trl_trainer(script, args, model, tokenizer, args.steps, score, **schedule)
    trainer.train()
    return score.clock


def main(seeds: int = 5):
    rows = []
    for script in (grpo_llm, rloo_llm):
        pairs = []
        for seed in range(1, seeds + 1):
            args = script.Args(seed=seed)
            clocks = [side(script, args, TARGET) for side in (ours, theirs)]
            pairs.append([(clock.seconds(), len(clock.laps)) for clock in clocks])
            print(script.__name__, seed, pairs[-1], flush=True)
        ratios = sorted(b[0] / a[0] for a, b in pairs)
        faster = f"{median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"
        names = {f"{script.__name__}.py": faster, f"TRL's {TRL[script.__name__][0]}": "1"}
        for (name, shown), runs in zip(names.items(), zip(*pairs, strict=True), strict=True):
            seconds, rollouts = zip(*runs, strict=True)
            taken = f"{median(seconds):.1f} ({max(seconds):.1f})"
            rows.append([name, taken, f"{median(rollouts):.0f}", shown])
    header = ["to 0.90 held-out pass@1", "seconds, median (worst)", "rollouts"]
    header += ["times faster, median (range)"]
    write_table("trl_time", table(header, rows), "trl", note=f"{seeds} seeds")


if __name__ == "__main__":
    tyro.cli(main)

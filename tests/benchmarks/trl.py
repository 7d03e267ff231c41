"""Compare grpo_llm.py and rloo_llm.py with TRL's trainers, on a CPU.

    python tests/benchmarks/trl.py tiny                 # the built-in sums, until 0.60 are right
    python tests/benchmarks/trl.py real --model FOLDER  # one-digit sums, until 0.80 are right
    python tests/benchmarks/trl.py long --model FOLDER --gsm8k train.jsonl   # four rollouts

`tiny` takes minutes, `real` half an hour, `long` hours. FOLDER has SmolLM2-135M-Instruct in Hugging
Face's format. Both sides have the same weights, prompts (token by token), batch, optimizer steps,
KL weight and learning rate. They take turns, and each run is a process of its own. After every
second rollout the clock stops, and the run is scored on held-out questions, the same for both
sides. The table goes into results/trl_….md. With --smoke a run has one seed, two rollouts and toy
sizes, and nothing is written.

The share trained on counts the completions that go through the forward and backward pass. Without a
KL term our scripts leave out completions whose advantage is 0. `long` asks the questions of GSM8K
(openai/grade-school-math) and allows 128 new tokens. Its rewards are arbitrary numbers, so nearly
every completion has an advantage. On a CPU, TRL 1.16 computes the last layer at every position,
those of the prompt included.
"""

import importlib
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import product
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Literal

import torch
import tyro
from bench import CPU, ROOT, Enough, evaluate, own_process, run_main, spread, table, write_table

# Without this folder, in which `trl` is this file, not the package.
PATH = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
WITH_TRL = PathFinder.find_spec("trl", PATH) is not None
EVERY = 2  # rollouts between two evaluations
TRL = {  # the trainer, and settings where TRL's defaults differ from the published algorithm
    "grpo_llm": ("GRPO", {"loss_type": "grpo", "use_bias_correction_kl": False}),
    "rloo_llm": ("RLOO", {}),
}
# Flags of our scripts for real and long.
VERIFIER = str(ROOT / "tests/examples/verifiers/last_number.py")
REAL = {"verifier": VERIFIER, "beta": 0.0, "warmup_steps": 3, "steps": 40}
REAL |= {"prompts_per_step": 8, "minibatches": 2, "max_new_tokens": 16, "learning_rate": 1e-5}
TOY = {"model": "tiny", "max_new_tokens": 4, "prompts_per_step": 4, "group_size": 4}
# The reward depends on the text alone: different completions have different rewards.
ARBITRARY = "import zlib\ndef verify(text, answer):\n    return zlib.crc32(text.encode()) / 2**32\n"
THREADS = os.environ.get("OMP_NUM_THREADS", "")
MICRO = {"tiny": (256, 256), "real": (32, 16), "long": (8, 8)}  # for our scripts, for TRL


@dataclass
class Options:
    what: Annotated[Literal["tiny", "real", "long"], tyro.conf.Positional]  # the task
    model: str = "tiny"  # the folder of the model, for real and long
    gsm8k: str = ""  # a JSONL file of GSM8K's questions, for long
    scripts: tuple[str, ...] = ("grpo_llm", "rloo_llm")  # our scripts to measure
    seeds: tuple[int, ...] = (11, 12, 13)  # one run for each
    rollouts: int = 0  # rollouts of a run, which is then not scored; 0: until the target; long: 4
    smoke: bool = False  # try it at toy size and write nothing


def task(options: Options, folder: Path) -> dict:
    """The flags of all runs. `real` has 65 one-digit sums to train on and 16 held out."""
    if options.what == "tiny":
        return TOY if options.smoke else {}
    form = "{}+{}=" if options.smoke else "What is {} + {}?"
    rows = []
    for a, b in product(range(1, 10), repeat=2):
        rows.append(json.dumps({"question": form.format(a, b), "answer": str(a + b)}) + "\n")
    random.Random(0).shuffle(rows)
    (folder / "train").write_text("".join(rows[16:]))
    (folder / "test").write_text("".join(rows[:16]))
    found = REAL | {"model": options.model}
    found |= {"dataset": str(folder / "train"), "eval_dataset": str(folder / "test")}
    if options.what == "long":
        (folder / "verifier.py").write_text(ARBITRARY)
        found |= {"verifier": str(folder / "verifier.py"), "max_new_tokens": 128}
        found |= {"learning_rate": 1e-6}
    if options.gsm8k:
        found |= {"dataset": options.gsm8k, "eval_dataset": ""}
    return found | (TOY if options.smoke else {})


class Clock:
    """Measures a run: seconds of each rollout with its updates, scores, lengths of completions, and
    how many completions were trained on."""

    def __init__(self, script, model, tokenizer, args, target):
        self.evaluated, self.target = (script, model, tokenizer, args), target
        _, self.held_out = script.load_data(args)
        self.laps, self.scores, self.lengths, self.trained = [], [], [], 0
        self.start = time.perf_counter()

    def after_rollout(self) -> bool:
        """Note the time and return whether the target is met. Without a target, do not evaluate."""
        self.laps.append(time.perf_counter() - self.start)
        if self.target and len(self.laps) % EVERY == 0:
            self.scores.append(evaluate(*self.evaluated, self.held_out))
        self.start = time.perf_counter()
        self.met = bool(self.target) and max(self.scores, default=0.0) >= self.target
        return self.met


def ours(script, args, target, rollouts) -> Clock:
    """Train with our script until the target is met, for at most this many rollouts."""
    own, logprobs_of, clocks = script.train_step, script.token_logprobs, []

    def counted(model, batch, temperature):
        if clocks and torch.is_grad_enabled():
            clocks[0].trained += len(batch["mask"])
        return logprobs_of(model, batch, temperature)

    def train_step(model, reference, tokenizer, *rest):
        if not clocks:
            clocks.append(Clock(script, model, tokenizer, args, target))
        metrics = own(model, reference, tokenizer, *rest)
        clocks[0].lengths.append(metrics["completions/mean_length"])
        if clocks[0].after_rollout() or len(clocks[0].laps) == rollouts:
            raise Enough
        return metrics

    args.device, args.eval_every = "cpu", args.steps
    functions = {"train_step": train_step, "token_logprobs": counted}
    functions["evaluate"] = lambda *_: {"eval/pass@1": 0.0}  # the clock evaluates
    run_main(script, args, **functions)
    return clocks[0]


def trl_rows(script, args, tokenizer, rollouts: int) -> list[dict]:
    """The questions that our script would draw, for TRL's dataset.

    A prompt is text; the tokenizer turns it into the same token ids that our script has.
    """
    train, _ = script.load_data(args)
    problems = []
    for step in range(1, rollouts + 1):
        problems += script.next_problems(train, step, args)
    prompts = script.encode_prompts(problems, tokenizer, args)
    texts = tokenizer.batch_decode(prompts)
    assert tokenizer(text=texts)["input_ids"] == prompts
    pairs = zip(texts, problems, strict=True)
    return [{"prompt": text, "answer": answer} for text, (_, answer) in pairs]


def trl_settings(script, args, model, rollouts: int) -> dict:
    """Our settings under TRL's names. The rate falls to 0 over args.steps, as in our scripts."""
    _, more = TRL[script.__name__]
    updates, drawn = args.minibatches, args.prompts_per_step * args.group_size
    micro = min(args.micro_batch_size, drawn // updates)
    sizes = {"per_device_train_batch_size": micro, "steps_per_generation": drawn // micro}
    sizes |= {"gradient_accumulation_steps": drawn // updates // micro}
    rate = {"learning_rate": args.learning_rate, "lr_scheduler_type": "linear"}
    rate |= {"warmup_steps": args.warmup_steps * updates, "max_steps": args.steps * updates}
    sampling = {"num_generations": args.group_size, "temperature": args.temperature}
    sampling |= {"max_completion_length": args.max_new_tokens, "seed": args.seed}
    machine = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    quiet |= {"logging_steps": 10**6, "output_dir": tempfile.mkdtemp()}
    return more | sizes | rate | sampling | machine | quiet | {"beta": args.beta}


def theirs(script, args, target, rollouts) -> Clock:
    """Train with TRL until the target is met, for at most this many rollouts."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    model, tokenizer = script.load_policy(args, CPU)
    tokenizer.pad_token = tokenizer.eos_token
    clock = Clock(script, model, tokenizer, args, target)
    verifier = script.load_verifier(args.verifier)

    class Note(TrainerCallback):
        def on_train_begin(self, *_, **__):
            clock.start = time.perf_counter()

        def on_step_end(self, _, state, control, **__):
            if state.global_step % args.minibatches == 0:
                model.eval()
                met = clock.after_rollout()
                control.should_training_stop = met or len(clock.laps) == rollouts

    def reward(completions, completion_ids, answer, **_):
        clock.lengths.append(fmean(map(len, completion_ids)))
        return [verifier(*pair) for pair in zip(completions, answer, strict=True)]

    name, _ = TRL[script.__name__]
    trainer = getattr(trl, f"{name}Trainer")(
        model=model,
        reward_funcs=reward,
        args=getattr(trl, f"{name}Config")(**trl_settings(script, args, model, rollouts)),
        train_dataset=Dataset.from_list(trl_rows(script, args, tokenizer, rollouts)),
        processing_class=tokenizer,
        callbacks=[Note()],
    )
    compute_loss = trainer.compute_loss

    def counted(model, inputs, *more, **options):
        clock.trained += len(inputs["completion_ids"])
        return compute_loss(model, inputs, *more, **options)

    trainer.compute_loss = counted
    trainer.train()
    return clock


SIDES = {"ours": ours, "TRL": theirs}

RATE = "completions per second"
COLUMNS = {"seconds": ".1f", "rollouts": ".0f", RATE: ".1f", "share trained on": ".0%"}
COLUMNS |= {"tokens per completion": ".1f", "MB above imports": ".0f"}


def run(name: str, side: str, flags: dict, target: float | None, rollouts: int) -> dict:
    """One run of one side, in this new process."""
    sys.path[:] = PATH
    script = importlib.import_module(name)
    if WITH_TRL:  # both sides have the same imports, so that their memory compares
        importlib.import_module("trl.trainer.grpo_trainer")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    args = script.Args(**flags)
    clock = SIDES[side](script, args, target, rollouts)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    drawn = args.prompts_per_step * args.group_size
    return {
        "seconds": sum(clock.laps) if clock.met or not target else inf,
        "rollouts": len(clock.laps),
        RATE: drawn / median(clock.laps[1:] or clock.laps),
        "share trained on": clock.trained / (drawn * len(clock.laps)),
        "tokens per completion": fmean(clock.lengths),
        "MB above imports": (after - before) / 1024,
    }


def cells(name: str, side: str, runs: dict) -> list[str]:
    """A row of the table. Its ratios compare this side with our script, seed by seed."""
    own, beside = runs[name, "ours"], runs[name, side]
    title = f"TRL's {TRL[name][0]}Trainer" if side == "TRL" else side.replace("ours", f"{name}.py")
    found = [title, len(beside)]
    for key, form in COLUMNS.items():
        found.append(spread([run[key] for run in beside], form))
    pairs = list(zip(own, beside, strict=True))
    found.append(spread([b["seconds"] / a["seconds"] for a, b in pairs]))
    return [*found, spread([a[RATE] / b[RATE] for a, b in pairs])]


def main(options: Options):
    target = {"tiny": 0.60, "real": 0.80, "long": None}[options.what]
    sides = ["ours", "TRL"] if WITH_TRL else ["ours"]
    if options.rollouts:
        target = None
    micro, seeds = MICRO[options.what], options.seeds[:1] if options.smoke else options.seeds
    runs = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        flags = task(options, Path(folder))
        most = options.rollouts or (4 if options.what == "long" else flags.get("steps", 200))
        if options.smoke:
            most = EVERY  # so that a run is scored once
        for seed, name, side in product(seeds, options.scripts, sides):
            chosen = flags | {"seed": seed, "micro_batch_size": micro[side == "TRL"]}
            job = {"name": name, "side": side, "flags": chosen, "target": target}
            runs[name, side].append(own_process(run, **job, rollouts=most))
            print(name, side, seed, runs[name, side][-1], flush=True)
    header = [f"to {target} held out" if target else "", "n", *COLUMNS]
    header += ["seconds: this / ours", "completions per second: ours / this"]
    lines = table(header, [cells(*key, runs) for key in runs])
    note = f"seeds {options.seeds}, micro-batches of {micro[0]} and {micro[1]}, "
    note += f"OMP_NUM_THREADS {THREADS or 'not set'}, float32"
    name = f"trl_{options.what}" + "_rate" * bool(options.rollouts)
    name += f"_{THREADS}_threads" * bool(THREADS)
    write_table(name, lines, "transformers", "trl", note=note, smoke=options.smoke)


if __name__ == "__main__":
    main(tyro.cli(Options))

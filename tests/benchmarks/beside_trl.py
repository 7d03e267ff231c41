"""How fast are grpo_llm.py and rloo_llm.py beside TRL's trainers, on a CPU?

    OMP_NUM_THREADS=1 python tests/benchmarks/beside_trl.py tiny     # 4 minutes
    python tests/benchmarks/beside_trl.py real --model FOLDER        # some minutes
    python tests/benchmarks/beside_trl.py --only-tables              # no run: the tables once more

`tiny` asks the tiny model the default sums, in twelve rollouts and with three seeds. `real` asks
SmolLM2-135M-Instruct, from a folder in Hugging Face's format, the products of tests/examples, in
two rollouts and with one seed. (The kept run asked it one-digit sums.) Both sides have the same
weights, prompts (token by token), batch, optimizer steps, KL weight and learning rate. They take
turns, and each run is a process of its own. The first rollout is not counted. The share trained on
is that of the completions which go through the forward and backward pass: without a KL term our
scripts leave out those whose advantage is 0. On a CPU, TRL 1.16 computes the last layer at every
position, those of the prompt included.
"""

import importlib
import random
import tempfile
import time
from collections import defaultdict
from importlib.util import find_spec
from itertools import product
from statistics import median
from typing import Literal

import torch
import tyro
from bench import (
    ROOT,
    Enough,
    Kept,
    in_processes,
    run_main,
    show,
    table,
    watched,
    with_footer,
)
from tyro.conf import Positional

WITH_TRL = find_spec("trl") is not None
TRL = {  # the trainer, and settings where TRL's defaults differ from the published algorithm
    "grpo_llm": ("GRPO", {"loss_type": "grpo", "use_bias_correction_kl": False}),
    "rloo_llm": ("RLOO", {}),
}
# Our flags for `real`.
REAL = {"task": str(ROOT / "tests/examples/products.py"), "beta": 0.0}
REAL |= {"warmup_steps": 3, "steps": 40, "prompts_per_step": 8, "num_minibatches": 2}
REAL |= {"max_new_tokens": 16, "learning_rate": 1e-5}
TOY = {"model": "tiny", "task": "sums", "max_new_tokens": 4, "prompts_per_step": 4, "group_size": 4}
# Scripts, seeds, rollouts, and micro-batches of our scripts and of TRL.
PLANS = {
    "tiny": (list(TRL), [11, 12, 13], 12, (256, 256)),
    "real": (["grpo_llm"], [11], 2, (32, 16)),
}
RATE = "completions per second"
COLUMNS = {RATE: ".1f", "share trained on": ".0%"}


class Clock:
    """Seconds of each rollout with its updates, and how many completions were trained on."""

    def __init__(self):
        self.laps, self.trained = [], 0
        self.start = time.perf_counter()

    def lap(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.laps.append(time.perf_counter() - self.start)
        self.start = time.perf_counter()
        return len(self.laps)


def ours(script, args, rollouts):
    """So many rollouts by our script."""
    clock = Clock()

    def note_step(*_):
        if clock.lap() == rollouts:
            raise Enough

    def note_pass(_, model, batch, *__):
        if torch.is_grad_enabled():
            clock.trained += len(batch["mask"])

    def evaluate(*_):
        clock.start = time.perf_counter()
        return {"eval/pass@1": 0.0}

    notes = {"train_step": note_step, "token_logprobs": note_pass}
    functions = {name: watched(getattr(script, name), note) for name, note in notes.items()}
    run_main(script, args, evaluate=evaluate, **functions)
    return clock


def trl_rows(script, args, tokenizer, rollouts):
    """The questions that our script would draw, for TRL's dataset.

    A prompt is text; the tokenizer turns it into the same token ids that our script has.
    """
    train, _ = script.load_data(args)
    problems = []
    for step in range(1, rollouts + 1):
        problems += random.Random(f"{args.seed} {step}").sample(train, args.prompts_per_step)
    prompts = script.encode_prompts(problems, tokenizer)
    texts = tokenizer.batch_decode(prompts)
    assert tokenizer(text=texts)["input_ids"] == prompts
    pairs = zip(texts, problems, strict=True)
    return [{"prompt": text, "answer": answer} for text, (_, answer) in pairs]


def trl_settings(script, args):
    """Our settings under TRL's names. The rate falls to 0 over args.steps, as in our scripts."""
    _, more = TRL[script.__name__]
    updates, drawn = args.num_minibatches, args.prompts_per_step * args.group_size
    micro = min(args.micro_batch_size, drawn // updates)
    sizes = {"per_device_train_batch_size": micro, "steps_per_generation": drawn // micro}
    sizes |= {"gradient_accumulation_steps": drawn // updates // micro}
    rate = {"learning_rate": args.learning_rate, "lr_scheduler_type": "linear"}
    rate |= {"warmup_steps": args.warmup_steps * updates, "max_steps": args.steps * updates}
    sampling = {"num_generations": args.group_size, "temperature": args.temperature}
    sampling |= {"max_completion_length": args.max_new_tokens, "seed": args.seed}
    machine = {"use_cpu": args.device == "cpu", "bf16": False, "gradient_checkpointing": False}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    quiet |= {"logging_steps": 10**6, "output_dir": tempfile.mkdtemp()}
    return more | sizes | rate | sampling | machine | quiet | {"beta": args.beta}


def theirs(script, args, rollouts, **options):
    """So many rollouts by TRL, with these options besides trl_settings."""
    import trl
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback

    model, tokenizer = script.load_policy(args, torch.device(args.device))
    tokenizer.pad_token = tokenizer.eos_token
    clock, (_, verify) = Clock(), script.load_task(args.task)

    class Note(TrainerCallback):
        def on_train_begin(self, *_, **__):
            clock.start = time.perf_counter()

        def on_step_end(self, _, state, control, **__):
            if state.global_step % args.num_minibatches == 0:
                control.should_training_stop = clock.lap() == rollouts

    def reward(completions, answer, **_):
        return [verify(*pair) for pair in zip(completions, answer, strict=True)]

    def note_loss(_, model, inputs, *__):
        clock.trained += len(inputs["completion_ids"])

    name, _ = TRL[script.__name__]
    rows = InMemoryTable.from_pylist(trl_rows(script, args, tokenizer, rollouts))
    # Without a fingerprint datasets hashes them, which fails with the small pyarrow that travels to
    # a GPU.
    trainer = getattr(trl, f"{name}Trainer")(
        model=model,
        reward_funcs=reward,
        args=getattr(trl, f"{name}Config")(**trl_settings(script, args) | options),
        train_dataset=Dataset(rows, fingerprint="rows"),
        processing_class=tokenizer,
        callbacks=[Note()],
    )
    trainer.compute_loss = watched(trainer.compute_loss, note_loss)
    trainer.train()
    return clock


SIDES = {"ours": ours, "TRL": theirs} if WITH_TRL else {"ours": ours}


def run(name, side, flags, rollouts):
    """One run of one side, in this new process."""
    script = importlib.import_module(name)
    args = script.Args(**flags)
    args.eval_every = args.steps
    clock = SIDES[side](script, args, rollouts)
    drawn = args.prompts_per_step * args.group_size
    return {
        RATE: drawn / median(clock.laps[1:]),
        "share trained on": clock.trained / (drawn * len(clock.laps)),
    }


def three(values):
    """The median, the lowest and the highest."""
    return [round(value, 4) for value in (median(values), min(values), max(values))]


def measure(runs, what, flags, smoke):
    """Make the runs of a model, our scripts and TRL in turn, and keep a line for each row."""
    scripts, seeds, rollouts, micro = PLANS[what]
    rollouts, seeds = (2, seeds[:1]) if smoke else (rollouts, seeds)
    results = defaultdict(list)
    for seed, name, side in product(seeds, scripts, SIDES):
        more = {"device": "cpu", "micro_batch_size": micro[side == "TRL"], "seed": seed}
        job = {"name": name, "side": side, "flags": flags | more, "rollouts": rollouts}
        ((_, values),) = in_processes(run, [job])
        results[name, side].append(values)
    for (name, side), values in results.items():
        pairs = zip(results[name, "ours"], values, strict=True)
        cells = {key: three([run[key] for run in values]) for key in COLUMNS}
        cells["times"] = three([ours[RATE] / other[RATE] for ours, other in pairs])
        row = f"{what}, {name}, {side}"
        runs.forget(row, [])
        runs.add(row, flags | {"seeds": seeds, "rollouts": rollouts}, cells)


def tables(runs):
    rows = []
    for run in runs.runs:
        model, name, side = run["row"].split(", ")
        title = f"TRL's {TRL[name][0]}Trainer" if side == "TRL" else f"{name}.py"
        cells = [f"{run[key][0]:{form}}" for key, form in COLUMNS.items()]
        middle, least, most = (f"{value:.2f}" for value in run["times"])
        times = middle if least == most else f"{middle} ({least} to {most})"
        rows.append([f"{model}, {title}", *cells, times])
    header = ["model, trainer", *COLUMNS, "times slower"]
    return {"trl": with_footer(table(header, rows), runs.runs)}


def kept(smoke=False):
    return [Kept("beside_trl", "transformers", *["trl"] * WITH_TRL, smoke=smoke)]


def main(
    models: Positional[tuple[Literal["tiny", "real"], ...]] = (),
    model: str = "tiny",
    only_tables: bool = False,
    smoke: bool = False,
):
    """--model is the folder of the real model. With --smoke both run at toy size, with the tiny
    model, and nothing is written."""
    (runs,) = kept(smoke)
    for what in () if only_tables else models or (PLANS if smoke else ()):
        flags = REAL | {"model": model} if what == "real" else {}
        measure(runs, what, flags | (TOY if smoke else {}), smoke)
    show(tables(runs), smoke)


if __name__ == "__main__":
    tyro.cli(main)

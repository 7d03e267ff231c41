"""How fast are grpo_llm.py and rloo_llm.py beside TRL's trainers, on a CPU?

    OMP_NUM_THREADS=1 python tests/benchmarks/beside_trl.py    # 4 minutes
    python tests/benchmarks/beside_trl.py --only-tables        # no run: the table once more

The tiny model learns the default sums, in twelve rollouts and with three seeds. Both sides have the
same weights, prompts (token by token), batch, optimizer steps, KL weight and learning rate. They
take turns, and each run is a process of its own. The first rollout is not counted. On a CPU, TRL
1.16 computes the last layer at every position, those of the prompt included.
"""

import random
import tempfile
from collections import defaultdict
from importlib.util import find_spec
from itertools import product
from statistics import median

import torch
import tyro
from bench import Kept, Laps, in_processes, load, show, table, with_footer
from bench import seconds_of_steps as ours

WITH_TRL = find_spec("trl") is not None
# Where TRL's defaults differ from GRPO's paper.
PAPER = {"loss_type": "grpo", "use_bias_correction_kl": False}
SCRIPTS, SEEDS, ROLLOUTS = ["grpo_llm", "rloo_llm"], [11, 12, 13], 12
SMOKE = {"max_new_tokens": 4, "prompts_per_step": 4, "group_size": 4}
RATE = "completions per second"


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


def trainer_of(script):
    """The name of TRL's trainer."""
    return "RLOOTrainer" if script.__name__ == "rloo_llm" else "GRPOTrainer"


def trl_settings(script, args):
    """Our settings under TRL's names. The rate falls to 0 over args.steps, as in our scripts."""
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
    paper = {} if trainer_of(script) == "RLOOTrainer" else PAPER
    return paper | sizes | rate | sampling | machine | quiet | {"beta": args.beta}


def make_trainer(script, args, model, tokenizer, rows, rewards, options, callbacks=None):
    """TRL's trainer with our settings, except for these options."""
    import trl
    from datasets import Dataset
    from datasets.table import InMemoryTable

    name = trainer_of(script)
    config = getattr(trl, name.replace("Trainer", "Config"))
    tokenizer.pad_token = tokenizer.eos_token
    return getattr(trl, name)(
        model=model,
        reward_funcs=rewards,
        args=config(**trl_settings(script, args) | options),
        # Without a fingerprint datasets hashes the rows, which fails with the small pyarrow that
        # travels to a GPU.
        train_dataset=Dataset(InMemoryTable.from_pylist(rows), fingerprint="rows"),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def theirs(script, args, rollouts, **options):
    """The seconds of so many rollouts by TRL, with these options besides trl_settings."""
    from transformers import TrainerCallback

    model, tokenizer = script.load_policy(args, torch.device(args.device))
    laps, (_, verify) = Laps(), script.load_task(args.task)

    class Note(TrainerCallback):
        def on_train_begin(self, *_, **__):
            laps.begin()

        def on_step_end(self, _, state, control, **__):
            if state.global_step % args.num_minibatches == 0:
                control.should_training_stop = laps.end() == rollouts

    def reward(completions, answer, **_):
        return [verify(*pair) for pair in zip(completions, answer, strict=True)]

    rows = trl_rows(script, args, tokenizer, rollouts)
    inputs = (script, args, model, tokenizer, rows, reward, options)
    make_trainer(*inputs, callbacks=[Note()]).train()
    return laps.seconds


SIDES = {"ours": ours} | ({"TRL": theirs} if WITH_TRL else {})


def run(name, side, flags, rollouts):
    """Completions per second of one side, in this new process."""
    script = load(name)
    args = script.Args(**flags)
    seconds = SIDES[side](script, args, rollouts)
    return args.prompts_per_step * args.group_size / median(seconds[1:])


def three(values):
    """The median, the lowest and the highest."""
    return [round(value, 4) for value in (median(values), min(values), max(values))]


def measure(runs, seeds, rollouts, flags):
    """Make the runs, our scripts and TRL in turn, and keep a line for each row."""
    runs.runs, rates = [], defaultdict(list)
    for seed, name, side in product(seeds, SCRIPTS, SIDES):
        job = {"name": name, "side": side, "flags": flags | {"seed": seed}, "rollouts": rollouts}
        ((_, rate),) = in_processes(run, [job])
        rates[name, side].append(rate)
    for (name, side), values in rates.items():
        pairs = zip(rates[name, "ours"], values, strict=True)
        cells = {RATE: three(values), "times": three([ours / rate for ours, rate in pairs])}
        runs.add(f"{name}, {side}", flags | {"seeds": seeds, "rollouts": rollouts}, cells)


def tables(runs):
    rows = []
    for run in runs.runs:
        name, side = run["row"].split(", ")
        title = f"{name}.py" if side == "ours" else f"TRL's {trainer_of(load(name))}"
        times, least, most = (f"{value:.2f}" for value in run["times"])
        spread = "" if least == most else f" ({least} to {most})"
        rows.append([title, f"{run[RATE][0]:.1f}", times + spread])
    return {"trl": with_footer(table(["trainer", RATE, "relative time"], rows), runs.runs)}


def kept(smoke=False):
    return Kept("beside_trl", "transformers", *["trl"] * WITH_TRL, smoke=smoke)


def main(only_tables: bool = False, smoke: bool = False):
    """With --smoke one seed runs at toy size, and nothing is written."""
    runs = kept(smoke)
    if smoke:
        measure(runs, SEEDS[:1], 2, SMOKE)
    elif not only_tables:
        measure(runs, SEEDS, ROLLOUTS, {})
    show(tables(runs), smoke)


if __name__ == "__main__":
    tyro.cli(main)

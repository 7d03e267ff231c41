"""How fast are grpo_llm.py and rloo_llm.py beside TRL's trainers, on a CPU?

    OMP_NUM_THREADS=1 python tests/benchmarks/beside_trl.py    # 4 minutes

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

import numpy as np
from bench import Kept, clock, in_processes, load, show, table, with_footer
from bench import seconds_of_steps as ours

WITH_TRL = find_spec("trl") is not None
# Where TRL's defaults differ from GRPO's paper.
PAPER = {"loss_type": "grpo", "use_bias_correction_kl": False}
SCRIPTS, SEEDS, ROLLOUTS = ["grpo_llm", "rloo_llm"], [11, 12, 13], 12
RATE = "completions per second"


def trainer_of(script):
    """The name of TRL's trainer."""
    return "RLOOTrainer" if script.__name__ == "rloo_llm" else "GRPOTrainer"


def updates_of(args):
    """Optimizer steps per rollout. RLOO has no such flag."""
    return getattr(args, "num_minibatches", 1)


def trl_settings(script, args):
    """Our settings under TRL's names. The rate falls to 0 over args.steps, as in our scripts."""
    updates, drawn = updates_of(args), args.prompts_per_step * args.group_size
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

    times, rows = [], []
    verify, train, _ = script.load_task(args)
    model, tokenizer = script.load_model(args)
    for step in range(1, rollouts + 1):  # the questions that our script would draw
        problems = random.Random(f"{args.seed} {step}").sample(train, args.prompts_per_step)
        rows += [{"prompt": prompt, "answer": answer} for prompt, answer in problems]

    class Note(TrainerCallback):
        def on_train_begin(self, *_, **__):
            times.append(clock())

        def on_step_end(self, _, state, control, **__):
            if state.global_step % updates_of(args) == 0:
                times.append(clock())
                control.should_training_stop = len(times) > rollouts

    def reward(completions, answer, **_):
        return [verify(*pair) for pair in zip(completions, answer, strict=True)]

    inputs = (script, args, model, tokenizer, rows, reward, options)
    make_trainer(*inputs, callbacks=[Note()]).train()
    return np.diff(times)


SIDES = {"ours": ours} | ({"TRL": theirs} if WITH_TRL else {})


def run(name, side, seed):
    """Completions per second of one side, in this new process."""
    script = load(name)
    args = script.Args(seed=seed)
    seconds = SIDES[side](script, args, ROLLOUTS)
    return args.prompts_per_step * args.group_size / median(seconds[1:])


def three(values):
    """The median, the lowest and the highest."""
    return [round(value, 4) for value in (median(values), min(values), max(values))]


def measure(runs):
    """Make the runs, our scripts and TRL in turn, and keep a line for each row."""
    runs.runs, rates = [], defaultdict(list)
    for seed, name, side in product(SEEDS, SCRIPTS, SIDES):
        ((_, rate),) = in_processes(run, [{"name": name, "side": side, "seed": seed}])
        rates[name, side].append(rate)
    for (name, side), values in rates.items():
        pairs = zip(rates[name, "ours"], values, strict=True)
        cells = {RATE: three(values), "times": three([ours / rate for ours, rate in pairs])}
        runs.add(f"{name}, {side}", {"seeds": SEEDS, "rollouts": ROLLOUTS}, cells)


def tables(runs):
    rows = []
    for run in runs.runs:
        name, side = run["row"].split(", ")
        title = f"{name}.py" if side == "ours" else f"TRL's {trainer_of(load(name))}"
        times, least, most = (f"{value:.2f}" for value in run["times"])
        spread = "" if least == most else f" ({least} to {most})"
        rows.append([title, f"{run[RATE][0]:.1f}", times + spread])
    return {"trl": with_footer(table(["trainer", RATE, "relative time"], rows), runs.runs)}


def main():
    runs = Kept("beside_trl", "transformers", *["trl"] * WITH_TRL)
    measure(runs)
    show(tables(runs))


if __name__ == "__main__":
    main()

"""grpo_llm.py and rloo_llm.py against TRL's trainers with a real, pretrained model.

    python tests/benchmarks/trl_real.py time --model FOLDER
    python tests/benchmarks/trl_real.py long --model FOLDER --gsm8k train.jsonl

FOLDER is SmolLM2-135M-Instruct in Hugging Face's format. Ours and theirs have the same weights,
prompts (token by token), batch, minibatches, learning rate and warm-up; matrix products are in
bfloat16. They take turns, each run in a process of its own, in micro-batches of 32 for ours, and of
the fastest of 8 (TRL's default), 16 and 32 for TRL.

What a CPU does not show: there, TRL 1.16 runs the model's last layer over every position, prompt
and padding too, and on a GPU with Triton over the answers alone (add_fused_lm_head).

time     "What is 5 + 6?": training time to 0.80 held-out pass@1, and seconds of a rollout with its
         updates on the way. 65 sums are trained on; the 16 others are held out, and scored every
         two rollouts, off the clock. (Ours leave out groups whose answers score the same.) Each
         run is kept in results/trl_real.json, and what is there is not run again. Writes
         results/trl_real.md.
long     The questions of GSM8K (grade_school_math/data/train.jsonl of the repository
         openai/grade-school-math on GitHub) and 128 new tokens: seconds and peak memory of a step,
         also of ours where each row reads its own prompt in training. Such a model solves hardly
         any, and our scripts leave out groups without a signal; so that they train on as much as
         TRL, the rewards are arbitrary here. Writes results/trl_real_long.md.

With --smoke the tiny model at toy size, without writing, and without TRL where it is not installed.
"""

import importlib
import json
import multiprocessing
import random
import resource
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median

import torch
import tyro
from bench import RESULTS, table, write_table
from trl_time import TRL, grpo_llm, ours, theirs, trl_classes

SCRIPTS = ("grpo_llm", "rloo_llm")
TARGET = 0.80
WITH_TRL = find_spec("trl") is not None
PACKAGES = ("transformers", "trl")
# Every completion gets another reward, so that each is trained on.
ARBITRARY = """
import zlib
def verify(completion, answer):
    return zlib.crc32(completion.encode()) / 2**32
"""


# ------------------------------------------------------------------------------------------ Task


def write_jsonl(path: Path, pairs) -> str:
    rows = [json.dumps({"question": question, "answer": answer}) for question, answer in pairs]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def write_sums(folder: Path, form: str) -> dict[str, str]:
    """One-digit sums, 65 to train on and 16 held out; returns the flags that name them."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    problems = [(form.format(a=a, b=b), str(a + b)) for a, b in pairs]
    return {
        "dataset": write_jsonl(folder / "train.jsonl", problems[16:]),
        "eval_dataset": write_jsonl(folder / "held_out.jsonl", problems[:16]),
    }


def flags(model: str, smoke: bool, **more) -> dict:
    """What all runs have in common."""
    common = {
        "model": model,
        "dtype": "bfloat16",
        "verifier": "flexible",
        "beta": 0.0,
        "prompts_per_step": 8,
        "minibatches": 2,
        "warmup_steps": 3,
        "max_new_tokens": 16,
    }
    if smoke:
        more |= {"model": "tiny", "group_size": 4, "max_new_tokens": 4, "micro_batch_size": 16}
    return common | more


# ----------------------------------------------------------------------------------------- Sides


def plain_logprobs(model, batch, temperature):
    """token_logprobs where every row reads its own prompt, from its first token to its last."""
    ids, mask = batch["completion_ids"], batch["mask"]
    rows = torch.cat([batch["prompt_ids"], ids], 1)[:, :-1]
    attention_mask = torch.cat([batch["prompt_mask"], mask.long()], 1)[:, :-1]
    with grpo_llm.autocast(model):
        logits = grpo_llm.forward(model, rows, attention_mask, None, logits_to_keep=ids.shape[1])
    logprobs = grpo_llm.policy_logprobs(logits, temperature)
    return logprobs.gather(2, ids[..., None])[..., 0] * mask


def not_shared(script, args, target):
    """Our script with plain_logprobs."""
    script.token_logprobs = plain_logprobs
    return ours(script, args, target)


SIDES = {"ours": ours, "TRL": theirs, "ours, prompts not shared": not_shared}


def peak() -> float:
    """The largest size of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def job(name: str, side: str, args, target: float | None) -> dict:
    """A run, and the MB that it takes above what the imports, the same for all, have taken."""
    script = importlib.import_module(name)
    if WITH_TRL:
        trl_classes(script)
    before = peak()
    clock = SIDES[side](script, args, target)
    return {
        "seconds": clock.seconds(),
        "laps": [round(lap, 3) for lap in clock.laps],
        "scores": clock.scores,
        "drawn": clock.drawn,
        "MB": round(peak() - before),
    }


def in_own_process(work, *arguments):
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as fresh:
        return fresh.submit(work, *arguments).result()


def title(name: str, side: str) -> str:
    """ours → grpo_llm.py; TRL → TRL's GRPOTrainer."""
    return f"TRL's {TRL[name][0]}" if side == "TRL" else side.replace("ours", f"{name}.py")


def finish(name: str, lines: list[str], note: str, smoke: bool):
    """Write the table, or print it."""
    if smoke:
        print(*lines, sep="\n")
    else:
        write_table(name, lines, *PACKAGES, note=note)


# -------------------------------------------------------------------------------------- (a) time


def spread(values: list[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def time_rows(name: str, runs: dict, seeds) -> list[list[str]]:
    """Two rows of the table: ours and TRL's trainer; seeds are compared one by one."""
    rows, laps, seconds = [], {}, {}
    for side in ("ours", "TRL"):
        own = [runs[f"{name}, {side}, seed {seed}"] for seed in seeds]
        seconds[side] = [run["seconds"] for run in own]
        laps[side] = [fmean(run["laps"]) for run in own]
        taken = f"{median(seconds[side]):.0f} ({max(seconds[side]):.0f})"
        rollouts = median(len(run["laps"]) for run in own)
        memory = median(run["MB"] for run in own)
        cells = [taken, f"{rollouts:.0f}", f"{median(laps[side]):.1f}", f"{memory:.0f}"]
        rows.append([title(name, side), *cells])
    for measure in (seconds, laps):
        ratios = [b / a for a, b in zip(measure["ours"], measure["TRL"], strict=True)]
        rows[0].append(spread(ratios))
        rows[1].append("1")
    return rows


def run_time(
    model: str = "",
    seeds: tuple[int, ...] = (11, 12, 13),
    scripts: tuple[str, ...] = SCRIPTS,
    steps: int = 40,
    micro_batch_size: int = 32,
    trl_micro_batch_size: int = 16,
    smoke: bool = False,
):
    """Training time to 0.80 held-out pass@1.

    Args:
        model: a folder in Hugging Face's format
        steps: the learning rate falls to 0 over these; a run ends earlier, when it is at 0.80
    """
    file, runs = RESULTS / "trl_real.json", {}
    sizes = {"ours": micro_batch_size, "TRL": trl_micro_batch_size}
    if smoke:
        seeds, steps = (11,), 2
    elif file.exists():
        runs = json.loads(file.read_text())
    with tempfile.TemporaryDirectory() as folder:
        data = write_sums(Path(folder), "{a}+{b}=" if smoke else "What is {a} + {b}?")
        for seed in seeds:
            for name in scripts:
                for side in ("ours", "TRL") if WITH_TRL else ("ours",):
                    key, chosen = f"{name}, {side}, seed {seed}", {"micro_batch_size": sizes[side]}
                    if key in runs:
                        continue
                    chosen |= data | {"steps": steps, "seed": seed, "learning_rate": 1e-5}
                    args = importlib.import_module(name).Args(**flags(model, smoke, **chosen))
                    runs[key] = in_own_process(job, name, side, args, TARGET)
                    print(key, runs[key], flush=True)
                    if not smoke:
                        file.write_text(json.dumps(runs, indent=1) + "\n")
    if smoke and not WITH_TRL:
        return
    rows = [row for name in scripts for row in time_rows(name, runs, seeds)]
    header = ["to 0.80 held-out pass@1", "seconds, median (worst)", "rollouts"]
    header += ["seconds a rollout", "peak MB above the imports"]
    header += ["times faster, median (range)", "times faster a rollout"]
    note = f"{len(seeds)} seeds, micro-batches of {micro_batch_size} and {trl_micro_batch_size}"
    finish("trl_real", table(header, rows), note, smoke)


# -------------------------------------------------------------------------------------- (b) long


def run_long(
    model: str = "",
    gsm8k: str = "",
    scripts: tuple[str, ...] = SCRIPTS,
    rounds: int = 3,
    steps: int = 3,
    new_tokens: int = 128,
    micro_batch_size: int = 8,
    trl_micro_batch_size: int = 8,
    smoke: bool = False,
):
    """Seconds and memory of a step on GSM8K's questions.

    Args:
        model: a folder in Hugging Face's format
        gsm8k: grade_school_math/data/train.jsonl
        steps: timed ones in each run, after one that is not
    """
    sizes = defaultdict(lambda: micro_batch_size, {"TRL": trl_micro_batch_size})
    sides = list(SIDES)
    if not WITH_TRL:
        sides.remove("TRL")
    if smoke:
        rounds, steps = 1, 1
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        verifier = Path(folder) / "arbitrary.py"
        verifier.write_text(ARBITRARY)
        data = {"dataset": gsm8k, "verifier": str(verifier), "max_new_tokens": new_tokens}
        if smoke:
            data |= write_sums(Path(folder), "{a}+{b}=")
        for seed in range(1, rounds + 1):
            for name in scripts:
                for side in sides:
                    chosen = data | {"micro_batch_size": sizes[side], "seed": seed}
                    chosen |= {"steps": 1 + steps, "learning_rate": 1e-6}
                    args = importlib.import_module(name).Args(**flags(model, smoke, **chosen))
                    run = in_own_process(job, name, side, args, None)
                    found[name, side].append(run)
                    print(name, side, run, flush=True)
    rows = []
    for (name, side), runs in found.items():
        seconds = median(lap for run in runs for lap in run["laps"][1:])
        length = median(length for run in runs for _, length in run["drawn"][1:])
        memory = median(run["MB"] for run in runs)
        cells = [f"{seconds:.1f}", f"{length:.0f}", f"{memory:.0f}", sizes[side]]
        rows.append([title(name, side), *cells])
    header = ["a step of 8 × 8 completions", "seconds, median", "tokens of a completion"]
    header += ["peak MB above the imports", "micro-batch"]
    note = f"{new_tokens} new tokens, {rounds} rounds of {steps} steps"
    finish("trl_real_long", table(header, rows), note, smoke)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"time": run_time, "long": run_long})

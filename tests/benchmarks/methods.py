"""Which script learns best on sums? Eleven methods, ten seeds each, equal numbers of completions.

    nice python tests/benchmarks/methods.py --jobs 2   # makes the missing runs: two to three hours
    nice python tests/benchmarks/methods.py --pass-k   # pass@1 to pass@128: ten minutes
    python tests/benchmarks/methods.py --only-tables   # no run: tables and picture once more

A method is a script with flags. For one more, add it to METHODS: its runs alone are missing. Each
run draws some 30,720 completions: 120 rollouts of 256, or for DAPO, which redraws groups, fewer
rollouts. The learning rate is the best of four on two seeds and 256 sums of their own; then ten
other seeds are scored on 256 other sums, eight completions each. No run trains on any of these
sums.

Declared before the first run: each row is compared with GRPO by its last pass@1, paired by seed, in
a two-sided sign-flip test. With ten comparisons a difference counts if p is below 0.005. With ten
seeds p is at least 0.002.

pass@k is the chance that one of k completions, drawn without replacement from 128, is right: the
mean over 192 sums of 1 − C(wrong, k) / C(128, k). Its control is a second draw of the initial
model.
"""

import functools
import math
import time
import zlib
from itertools import product
from statistics import fmean
from typing import NamedTuple

import torch
import tyro
from bench import (
    CPU,
    RESULTS,
    Kept,
    all_flags,
    best_rate,
    last,
    load,
    run_logged,
    show,
    table,
    train,
    with_footer,
)
from stats import interval, p_value

RATES = (3e-4, 5e-4, 1e-3, 2e-3)
TUNING_SEEDS, SEEDS = (101, 102), range(1, 11)
TUNING_SUMS, SUMS = 1, 0  # the checksum of a sum, modulo 10
HELD_OUT = 256
QUARTERS = 4  # evaluations after the initial one


class Method(NamedTuple):
    script: str  # or a block of VARIANTS.md
    flags: dict = {}
    functions: dict = {}  # they replace functions of the script


NO_CLIP = {"clip_low": 1e6, "clip_high": 1e6}
DR_GRPO = {"scale_rewards": False, "length_norm": "constant", "beta": 0.0}
# Cross-entropy on the right completions alone, those of groups that are all right as well.
IMITATION = {
    "compute_advantages": lambda rewards, args: rewards.clone(),
    "are_equal": lambda rewards: rewards.amax(1) <= 0,
}
METHODS = {
    "RLOO": Method("rloo_llm"),
    "GRPO, one step per rollout": Method("grpo_llm", {"num_minibatches": 1}),
    "GRPO": Method("grpo_llm"),
    "GRPO without its clip": Method("grpo_llm", NO_CLIP),
    "GRPO, β = 0": Method("grpo_llm", {"beta": 0.0}),
    "Dr. GRPO": Method("grpo_llm", DR_GRPO),
    "DAPO": Method("dapo_llm", {"steps": 56}),
    "GSPO": Method("gspo_llm"),
    "CISPO, cap 1.2": Method("cispo_llm"),
    "CISPO, cap 5": Method("cispo_llm", {"clip_high": 4.0}),
    "imitation of right completions": Method("grpo_llm", {}, IMITATION),
}
LEVEL = 0.05 / (len(METHODS) - 1)  # of the test: all but GRPO are compared with it


# -------------------------------------------------------------------------------------------- Runs
def load_data(residue, script, args):
    """In place of the script's own: 256 different sums of this checksum to evaluate on."""
    problems = script.load_problems("train") + script.load_problems("test")
    checksums = {problem: zlib.crc32(problem[0].encode()) % 10 for problem in problems}
    train = [problem for problem in problems if checksums[problem] not in (SUMS, TUNING_SUMS)]
    held_out = [problem for problem in checksums if checksums[problem] == residue]
    return train, held_out[: args.eval_problems]


def arguments(name, rate, seed, small):
    """The script and the arguments of a run."""
    method = METHODS[name]
    script = load(method.script)
    flags = {"eval_problems": HELD_OUT} | method.flags | small
    args = script.Args(learning_rate=rate, seed=seed, **flags)
    args.eval_every = args.steps // QUARTERS
    return script, args


def flags_of(name, rate, seed, small):
    _, args = arguments(name, rate, seed, small)
    return all_flags(args)


def run(name, rate, seed, small):
    """The scores at each evaluation; completions drawn, and the share of tokens that are clipped.
    If a gradient was not finite, the missing scores are 0."""
    torch.set_num_threads(1)
    start = time.process_time()
    script, args = arguments(name, rate, seed, small)
    residue = TUNING_SUMS if seed in TUNING_SEEDS else SUMS
    functions = {"load_data": functools.partial(load_data, residue, script)}
    log, _ = run_logged(script, args, **functions, **METHODS[name].functions)
    values = {}
    for metric in ("eval/pass@1", "eval/pass@8"):
        scores = [round(score, 4) for score in log[metric]]
        values[metric] = scores + [0.0] * (QUARTERS + 1 - len(scores))
    groups = args.steps * args.prompts_per_step + sum(log["discarded_groups"])
    values["drawn"] = round(groups * args.group_size)
    values["clipfrac"] = round(fmean(log["clipfrac"] or [0]), 4)
    return values | {"seconds": round(time.process_time() - start)}


def campaign(runs, names, rates, seeds, at_once, small):
    """Find each method's learning rate, then run it with that rate on the other seeds."""
    for name in names:
        runs.forget(name, [flags_of(name, rate, 0, small) for rate in rates])
    for tuning in (True, False):
        wanted = []
        for seed, name in product(TUNING_SEEDS if tuning else seeds, names):
            for rate in rates if tuning else [rate_of(runs, name)]:
                job = {"name": name, "rate": rate, "seed": seed, "small": small}
                wanted.append((name, flags_of(**job), job))
        runs.make(run, wanted, at_once)


def rate_of(runs, name):
    """The method's best learning rate on the tuning seeds, or None before these runs are made."""
    return best_rate([run for run in runs.of(name) if run["flags"]["seed"] in TUNING_SEEDS])


def reported(runs, name):
    """{seed: run} at the method's best rate, without the tuning seeds."""
    best = rate_of(runs, name)
    at_best = [run for run in runs.of(name) if run["flags"]["learning_rate"] == best]
    by_seed = {run["flags"]["seed"]: run for run in at_best}
    return {seed: by_seed[seed] for seed in sorted(by_seed) if seed not in TUNING_SEEDS}


# ------------------------------------------------------------------------------------------ pass@k
QUESTIONS, DRAWS = 192, 128
PASS_K = {  # the table's title, the script or block, and its rate; at 0 it is not trained
    "initial": ("the initial model", "grpo_llm", 0.0),
    "again": ("the initial model, drawn again", "grpo_llm", 0.0),
    "grpo": ("GRPO", "grpo_llm", 1e-3),
    "pass_at_k": ("pass@k credit", "pass_at_k", 5e-4),
}


def pass_k_arguments(row, seed, small):
    _, name, rate = PASS_K[row]
    script = load(name)
    return script, script.Args(learning_rate=rate, seed=seed, **{"eval_problems": 400} | small)


def run_pass_k(row, seed, small):
    """How many of the completions are right, sum by sum."""
    torch.set_num_threads(1)
    script, args = pass_k_arguments(row, seed, small)
    _, held_out = script.load_data(args)
    questions = list(dict.fromkeys(held_out))[:QUESTIONS]  # short sums recur
    model, tokenizer = script.load_policy(args, CPU)
    if args.learning_rate > 0:
        model = train(script, args)["model"]
    torch.manual_seed(seed)
    right = []
    for start in range(0, len(questions), 16):
        part, draws = questions[start : start + 16], 8 if small else DRAWS
        _, _, rewards = script.rollout(model, tokenizer, part, draws, 1.0, args)
        right += (rewards > 0.5).sum(1).tolist()
    return {"right": right}


def campaign_pass_k(runs, at_once, small):
    wanted = []
    for row, (*_, rate) in PASS_K.items():
        for seed in (1, 2, 3) if rate and not small else [1 if row == "again" else 0]:
            job = {"row": row, "seed": seed, "small": small}
            _, args = pass_k_arguments(**job)
            flags = all_flags(args) | {"held_out": QUESTIONS, "draws": 8 if small else DRAWS}
            wanted.append((row, flags, job))
        runs.forget(row, [flags for name, flags, _ in wanted if name == row])
    runs.make(run_pass_k, wanted, at_once)


def pass_at(k, run):
    """Without bias, because every set of k completions is counted."""
    n = run["flags"]["draws"]
    return fmean(1 - math.comb(n - right, k) / math.comb(n, k) for right in run["right"])


def pass_k_lines(runs):
    ks = [k for k in (1, 8, 32, 128) if k <= min(run["flags"]["draws"] for run in runs.runs)]
    rows = []
    for row, (title, *_) in PASS_K.items():
        if row_runs := runs.of(row):
            means = [fmean(pass_at(k, run) for run in row_runs) for k in ks]
            rows.append([title, len(row_runs), *(f"{mean:.3f}" for mean in means)])
    return with_footer(table(["", "seeds", *(f"pass@{k}" for k in ks)], rows), runs.runs)


# ------------------------------------------------------------------------------ Table and picture
HEADER = ["method", "rate", "pass@1: mean (95 % interval)", "pass@8", "beside GRPO", "p"]
HEADER += ["clipped", "completions"]


def cells(name, runs, grpo):
    """The cells of a row. runs and grpo: {seed: run}."""
    scores = list(map(last, runs.values()))
    low, high = interval(scores)
    row = [name, f"{next(iter(runs.values()))['flags']['learning_rate']:g}"]
    row += [f"{fmean(scores):.3f} ({low:.2f} to {high:.2f})"]
    row += [f"{fmean(last(run, 'eval/pass@8') for run in runs.values()):.2f}"]
    pairs = [last(runs[seed]) - last(grpo[seed]) for seed in runs if seed in grpo]
    compared = name != "GRPO" and pairs
    row += [f"{fmean(pairs):+.3f}", f"{p_value(pairs):.3f}"] if compared else ["–", "–"]
    row += [f"{fmean(run['clipfrac'] for run in runs.values()):.1%}"]
    return [*row, f"{fmean(run['drawn'] for run in runs.values()):,.0f}"]


def shown(runs):
    """{method: {seed: run}} of the methods with two seeds or more, the best mean first."""
    scored = {name: reported(runs, name) for name in METHODS}
    scored = {name: by_seed for name, by_seed in scored.items() if len(by_seed) > 1}
    return dict(sorted(scored.items(), key=lambda item: -fmean(map(last, item[1].values()))))


def methods_lines(runs):
    scored = shown(runs)
    rows = [cells(name, by_seed, scored.get("GRPO", {})) for name, by_seed in scored.items()]
    count = len(METHODS) * (len(RATES) * len(TUNING_SEEDS) + len(SEEDS))
    tuning = len([run for run in runs.runs if run["flags"]["seed"] in TUNING_SEEDS])
    notes = [f"{len(runs.runs)} of {count} runs are made, {tuning} of them to find learning rates."]
    notes += [f"A difference counts if p is below {LEVEL:.2g}."]
    ends = [name for name in scored if rate_of(runs, name) in (RATES[0], RATES[-1])]
    if ends:
        notes += [f"Best at the lowest or the highest rate tried: {'; '.join(ends)}."]
    return with_footer([*table(HEADER, rows), "", *notes], runs.runs)


def draw(runs):
    """A row of dots for each method, hollow if its flags are not the script's defaults."""
    from pictures import dots, figure

    rows = {}
    for name, by_seed in shown(runs).items():
        color = METHODS[name].script.removesuffix("_llm").upper()
        plain = not METHODS[name].flags.keys() - {"steps"} and not METHODS[name].functions
        rows[name] = list(map(last, by_seed.values())), color, plain
    page, (axes,) = figure("Right answers to held-out sums", 4, 1, 1)
    dots(axes, rows)
    axes.set_xlabel("pass@1: a dot is a seed, a bar their mean")
    page.savefig(RESULTS / "methods.png", dpi=150)


def kept(smoke=False):
    return [Kept(name, "transformers", smoke=smoke) for name in ("methods", "pass_k")]


def tables(runs, pass_k):
    blocks = {"methods": methods_lines(runs)}
    return blocks | ({"pass_k": pass_k_lines(pass_k)} if pass_k.runs else {})


def main(jobs: int = 1, pass_k: bool = False, only_tables: bool = False, smoke: bool = False):
    """--jobs runs are made at a time. With --smoke one method makes short runs, and nothing is
    written."""
    names, rates, seeds, small = list(METHODS), RATES, SEEDS, {}
    if smoke:
        names, rates, seeds = ["imitation of right completions"], RATES[:1], SEEDS[:2]
        small = {"steps": 4, "prompts_per_step": 4, "eval_problems": 4}
    runs, counts = kept(smoke)
    if not only_tables and not pass_k:
        campaign(runs, names, rates, seeds, jobs, small)
    if not only_tables and (pass_k or smoke):
        campaign_pass_k(counts, jobs, small)
    show(tables(runs, counts), smoke)
    if shown(runs) and not smoke:
        draw(runs)


if __name__ == "__main__":
    tyro.cli(main)

"""Which script learns best on sums? Eleven methods, ten seeds each, equal numbers of completions.

    nice python tests/benchmarks/methods.py --jobs 2   # makes the missing runs: two to three hours

A method is a script with flags. For one more, add it to METHODS: its runs alone are missing. Each
run draws some 30,720 completions: 120 rollouts of 256, or for DAPO, which redraws groups, fewer
rollouts. The learning rate is the best of four on two seeds and 256 sums of their own; then ten
other seeds are scored on 256 other sums, eight completions each. No run trains on any of these
sums.

Declared before the first run: each row is compared with GRPO by its last pass@1, paired by seed, in
a two-sided sign-flip test. With ten comparisons a difference counts if p is below 0.005. With ten
seeds p is at least 0.002.
"""

import functools
import time
import zlib
from itertools import product
from statistics import fmean
from typing import NamedTuple

import torch
import tyro
from bench import RESULTS, Kept, load, run_counted, show, table, with_footer
from stats import interval, p_value

RATES = (3e-4, 5e-4, 1e-3, 2e-3)
TUNING_SEEDS, SEEDS = (101, 102), range(1, 11)
TUNING_SUMS, SUMS = 1, 0  # the checksum of a sum, modulo 10


class Method(NamedTuple):
    script: str  # or a block of VARIANTS.md
    flags: dict = {}
    functions: dict = {}  # they replace functions of the script


DR_GRPO = {"scale_rewards": False, "length_norm": "constant", "beta": 0.0}
# Cross-entropy on the right completions alone, those of groups that are all right as well.
IMITATION = {"compute_advantages": lambda rewards, args: rewards}
METHODS = {
    "RLOO": Method("rloo_llm"),
    "GRPO, one step per rollout": Method("grpo_llm", {"num_minibatches": 1}),
    "GRPO": Method("grpo_llm"),
    "GRPO without its clip": Method("grpo_llm", {"clip_low": 1e6, "clip_high": 1e6}),
    "GRPO, β = 0": Method("grpo_llm", {"beta": 0.0}),
    "Dr. GRPO": Method("grpo_llm", DR_GRPO),
    "DAPO": Method("dapo_llm", {"steps": 56}),
    "GSPO": Method("gspo_llm"),
    "CISPO, cap 1.2": Method("cispo_llm"),
    "CISPO, cap 5": Method("cispo_llm", {"clip_high": 4.0}),
    "imitation of right completions": Method("grpo_llm", {}, IMITATION),
}
LEVEL = 0.05 / (len(METHODS) - 1)  # of the test: all but GRPO are compared with it


def load_task(residue, script, args):
    """In place of the script's own: 256 different sums of this checksum to evaluate on."""
    problems = script.load_problems("train") + script.load_problems("test")
    checksums = {problem: zlib.crc32(problem[0].encode()) % 10 for problem in problems}
    train = [problem for problem in problems if checksums[problem] not in (SUMS, TUNING_SUMS)]
    held_out = [problem for problem in checksums if checksums[problem] == residue]
    return script.verify, train, held_out[: args.eval_problems]


def flags_of(name, rate, seed):
    """The flags that define a run."""
    return METHODS[name].flags | {"learning_rate": rate, "seed": seed}


def run(name, rate, seed):
    """The scores at each evaluation, completions drawn, and the share of clipped tokens."""
    torch.set_num_threads(1)
    start = time.process_time()
    script = load(METHODS[name].script)
    args = script.Args(**flags_of(name, rate, seed))
    args.eval_every = args.steps // 4
    residue = TUNING_SUMS if seed in TUNING_SEEDS else SUMS
    functions = {"load_task": functools.partial(load_task, residue, script)}
    result = run_counted(script, args, **functions | METHODS[name].functions)
    log, values = result["log"], {"drawn": result["drawn"]}
    for metric in ("eval/pass@1", "eval/pass@8"):
        values[metric] = [round(score, 4) for score in log[metric]]
    values["clipfrac"] = round(fmean(log["clipfrac"] or [0]), 4)
    return values | {"seconds": round(time.process_time() - start)}


def campaign(runs, at_once):
    """Find each method's learning rate, then run it with that rate on the other seeds."""
    for tuning in (True, False):
        wanted = []
        for seed, name in product(TUNING_SEEDS if tuning else SEEDS, METHODS):
            for rate in RATES if tuning else [rate_of(runs, name)]:
                job = {"name": name, "rate": rate, "seed": seed}
                wanted.append((name, flags_of(**job), job))
        runs.make(run, wanted, at_once)


def last(run, metric="eval/pass@1"):
    return run[metric][-1]


def runs_of(runs, name, rate, seeds):
    """{seed: run}, of those that are made."""
    found = {seed: runs.find(name, flags_of(name, rate, seed)) for seed in seeds}
    return {seed: run for seed, run in found.items() if run}


def rate_of(runs, name):
    """The learning rate with the highest mean on the tuning seeds, or None before they are run."""
    tuned = {rate: runs_of(runs, name, rate, TUNING_SEEDS).values() for rate in RATES}
    scores = {rate: fmean(map(last, some)) for rate, some in tuned.items() if some}
    return max(scores, key=scores.get, default=None)


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
    scored = {name: runs_of(runs, name, rate_of(runs, name), SEEDS) for name in METHODS}
    scored = {name: by_seed for name, by_seed in scored.items() if len(by_seed) > 1}
    return dict(sorted(scored.items(), key=lambda item: -fmean(map(last, item[1].values()))))


def tables(runs):
    scored = shown(runs)
    rows = [cells(name, by_seed, scored.get("GRPO", {})) for name, by_seed in scored.items()]
    note = f"A difference counts if p is below {LEVEL:.2g}."
    return {"methods": with_footer([*table(HEADER, rows), "", note], runs.runs)}


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


def main(jobs: int = 1):
    """--jobs runs are made at a time."""
    runs = Kept("methods", "transformers")
    campaign(runs, jobs)
    show(tables(runs))
    draw(runs)


if __name__ == "__main__":
    tyro.cli(main)

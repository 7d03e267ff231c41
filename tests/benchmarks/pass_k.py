"""Does training only sharpen? pass@1 to pass@128, before and after.

    python tests/benchmarks/pass_k.py    # ten runs, ten minutes; after methods.py, which tunes

GRPO and pass@k credit (a block of AFTER.md), each at its best rate of methods.py, answer 192
distinct held-out sums 128 times each. results/pass_k.jsonl keeps a run a line: how many of the 128
are right, sum by sum. pass@k is the chance that one of k of these answers, drawn without
replacement, is right: the mean over the sums of 1 − C(wrong, k) / C(128, k).
"""

import math
from statistics import fmean

import methods
import torch
import tyro
from bench import CPU, RESULTS, table, train, write_table

NAMES, QUESTIONS, DRAWS = ("grpo", "pass_at_k"), 192, 128
KEY = "right"  # of a line: right answers of each sum


def counts(script, model, tokenizer, args, questions, draws):
    """How many of so many answers to each question are right."""
    found = []
    torch.manual_seed(0)
    for start in range(0, len(questions), 16):
        part = questions[start : start + 16]
        _, _, rewards = script.rollout(model, tokenizer, part, draws, 1.0, args)
        found += (rewards > 0.5).sum(1).tolist()
    return found


def run(name, rate, seed, small):
    """A line: the counts of the trained model, or of the first one if the rate is 0."""
    torch.set_num_threads(1)
    script, args = methods.arguments(name, rate, seed, small)
    _, held_out = script.load_data(args)
    questions = methods.distinct(held_out, QUESTIONS)
    model, tokenizer = script.load_policy(args, CPU)
    if rate > 0:
        model = train(script, args)["model"]
    draws = 8 if small else DRAWS
    found = counts(script, model, tokenizer, args, questions, draws)
    return {"arm": name, "rate": rate, "seed": seed, KEY: found, "draws": draws}


def pass_at(k, line):
    """Unbiased, as every set of k answers is counted."""
    n = line["draws"]
    return fmean(1 - math.comb(n - right, k) / math.comb(n, k) for right in line[KEY])


def row(title, lines, first):
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k <= first["draws"]]
    missed = [i for i, right in enumerate(first[KEY]) if right == 0]
    solved = [str(sum(line[KEY][i] > 0 for i in missed)) for line in lines]
    lost = [
        str(sum(a > 0 == b for a, b in zip(first[KEY], line[KEY], strict=True))) for line in lines
    ]
    shown = [f"{fmean(pass_at(k, line) for line in lines):.3f}" for k in ks]
    return [title, len(lines), *shown, f"{' '.join(solved)} of {len(missed)}", " ".join(lost)]


def main(seeds: int = 5, jobs: int = 1, smoke: bool = False):
    """--seeds runs of each method. With --smoke runs are short, and nothing is written."""
    tuned = methods.Runs(RESULTS / "methods.jsonl")
    small = {"steps": 2, "prompts_per_step": 8, "eval_problems": 4} if smoke else {}
    runs = methods.Runs(None if smoke else RESULTS / "pass_k.jsonl")
    wanted = [("grpo", 0.0, 0)]
    for name in NAMES:
        rate = 5e-4 if smoke else tuned.rates(name)[0]
        wanted += [(name, rate, seed) for seed in range(1, 2 if smoke else seeds + 1)]
    runs.make(run, wanted, jobs, small)
    first = runs.known["grpo", 0.0, 0]
    found = [row("the first model", [first], first)]
    for name in NAMES:
        lines = [runs.known[job] for job in wanted if job[0] == name and job[1] > 0]
        found.append(row(methods.ARMS[name].title, lines, first))
    ks = [f"pass@{2**i}" for i in range(len(found[0]) - 4)]
    header = [
        "",
        "seeds",
        *ks,
        "right at least once, of the sums that the first model never solved",
    ]
    header += ["never right, of those that it solved"]
    note = (
        f"{len(first[KEY])} distinct held-out sums, {first['draws']} answers each, means of seeds"
    )
    write_table("pass_k", table(header, found), "transformers", note=note, smoke=smoke)


if __name__ == "__main__":
    tyro.cli(main)

"""All methods in one table, at equal numbers of completions: the scripts and the VARIANTS.

    python tests/benchmarks/methods.py                    # makes the runs that are missing: hours
    python tests/benchmarks/methods.py --arms grpo sapo   # only these; the table shows all so far
    python tests/benchmarks/methods.py --pass-k           # then pass@1 to pass@128: ten minutes
    python tests/benchmarks/methods.py --tables           # no run: tables and picture once more

An arm is a script with its flags, or a block of VARIANTS.md with its defaults. Each run draws about
30,720 completions: DAPO, which redraws, makes 56 steps where the others make 120. Each arm has two
learning rates, neighbours on the grid of 3e-4, 5e-4, 1e-3, 2e-3, to which an earlier trial had
narrowed them. We try both on seeds 101 and 102 and on the questions of this table, and run the
better one on the seeds from 1 on. A run answers 256 distinct held-out sums before training and at
each quarter of it, eight times each. It takes 25 to 40 seconds of one core.

pass@k is the chance that one of k completions, drawn without replacement from 128, is right: the
mean over 192 sums of 1 − C(wrong, k) / C(128, k).
"""

import io
import math
import sys
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
    in_processes,
    load,
    run_main,
    show,
    table,
    train,
    variants,
    watched,
    with_footer,
)
from stats import interval, p_value

LOW, MIDDLE, HIGH = (3e-4, 5e-4), (5e-4, 1e-3), (1e-3, 2e-3)
TUNING_SEEDS = (101, 102)
HELD_OUT, QUARTERS = 256, 4
ONE, FOUR, REDRAWN = "One step per rollout", "Four steps per rollout", "Groups redrawn, fewer steps"
BLOCKS = "Blocks of VARIANTS.md"
GROUPS = [ONE, FOUR, REDRAWN, BLOCKS]
# One needs a teacher, the next are no methods, and with a fresh sampler the last one is GRPO.
SKIPPED = ("opd", "stale", "bf16", "checkpointing", "tis")
QUESTIONS, DRAWS = 192, 128  # of pass@k
PASS_K = {"initial": "the initial model", "grpo": "GRPO", "pass_at_k": "pass@k credit"}


class Arm(NamedTuple):
    title: str
    script: str  # a script, or a block of VARIANTS.md
    flags: dict
    group: str
    rates: tuple[float, float] = MIDDLE


FREE = {"clip_low": 1e6, "clip_high": 1e6}
DR_GRPO = {"scale_rewards": False, "length_norm": "constant", "beta": 0.0}
ARMS = {
    "rloo": Arm("RLOO", "rloo_llm", {}, ONE, HIGH),
    "grpo_1": Arm("GRPO, one step", "grpo_llm", {"minibatches": 1}, ONE),
    "rloo_4": Arm("RLOO, four steps", "rloo_llm", {"minibatches": 4}, FOUR, LOW),
    "grpo": Arm("GRPO", "grpo_llm", {}, FOUR),
    "grpo_free": Arm("GRPO without a clip", "grpo_llm", FREE, FOUR),
    "grpo_beta_0": Arm("GRPO, β = 0", "grpo_llm", {"beta": 0.0}, FOUR),
    "dr_grpo": Arm("Dr. GRPO", "grpo_llm", DR_GRPO, FOUR, LOW),
    "gspo": Arm("GSPO", "gspo_llm", {}, FOUR),
    "cispo": Arm("CISPO, cap 1.2", "cispo_llm", {}, FOUR, LOW),
    "cispo_5": Arm("CISPO, cap 5", "cispo_llm", {"clip_high": 4.0}, FOUR, LOW),
    "dapo_1": Arm("DAPO, no redraw", "dapo_llm", {"max_resample": 1}, FOUR),
    "dapo": Arm("DAPO", "dapo_llm", {"steps": 56}, REDRAWN),
}
ARMS |= {name: Arm(name, name, {}, BLOCKS) for name in variants.BLOCKS if name not in SKIPPED}


# -------------------------------------------------------------------------------------------- Runs
def arguments(name, rate, seed, small):
    script = load(ARMS[name].script)
    flags = {"eval_problems": 400} | ARMS[name].flags | small
    args = script.Args(seed=seed, learning_rate=rate, **flags)
    args.eval_every = args.steps // QUARTERS
    return script, args


def flags_of(name, rate, seed, small):
    _, args = arguments(name, rate, seed, small)
    return all_flags(args) | {"held_out": HELD_OUT}


def distinct(problems, number):
    """The first so many different ones: of 400 held-out sums 285 differ, as short ones recur."""
    return list(dict.fromkeys(problems))[:number]


def run(name, rate, seed, small):
    """The scores at each evaluation, and what was drawn, stepped and clipped until the end. If the
    run has stopped because the loss was not finite, the missing scores are 0."""
    torch.set_num_threads(1)
    script, args = arguments(name, rate, seed, small)
    scores = {"pass@1": [], "pass@8": [], "drawn": []}
    total = dict.fromkeys(["drawn", "steps", "tokens", "clipped"], 0)

    def load_data(args, own=script.load_data):
        training, held_out = own(args)
        return training, distinct(held_out, HELD_OUT)

    def evaluate(*inputs, own=script.evaluate):
        scores["drawn"].append(total["drawn"])
        result = own(*inputs)
        total["drawn"] = scores["drawn"][-1]  # without the completions of the evaluation
        for metric in "pass@1", "pass@8":
            scores[metric].append(round(result[f"eval/{metric}"], 4))
        return result

    def note_rollout(result, *_):
        total["drawn"] += result[2].numel()

    def note_clip(result, logprobs, old_logprobs, advantages, mask, args):
        counted = mask * (advantages != 0).view(len(mask), -1)  # tokens that have a signal
        total["clipped"] += (result[1] * counted).sum().item()
        total["tokens"] += counted.sum().item()

    def note_minibatch(metrics, *_):
        total["steps"] += bool(metrics)

    notes = {"rollout": note_rollout, "surrogate": note_clip, "train_minibatch": note_minibatch}
    functions = {name: watched(getattr(script, name), note) for name, note in notes.items()}
    run_main(script, args, load_data=load_data, evaluate=evaluate, **functions)
    for metric, missing in ("pass@1", 0.0), ("pass@8", 0.0), ("drawn", total["drawn"]):
        scores[metric] += [missing] * (QUARTERS + 1 - len(scores[metric]))
    clipped = round(total["clipped"] / max(total["tokens"], 1), 4)
    return scores | {"steps": total["steps"], "clipped": clipped}


def make(runs, function, wanted, at_once, small):
    """Make the runs that are missing, and keep each one. wanted: [(row, flags, job)]."""
    missing = [(row, flags, job) for row, flags, job in wanted if not runs.find(row, flags)]
    jobs = [job | {"small": small} for *_, job in missing]
    for job, values in in_processes(function, jobs, at_once):
        row, flags, _ = missing[jobs.index(job)]
        runs.add(row, flags, values)


def rates(runs, name):
    """The arm's learning rates that were tried on the tuning seeds, the best mean first."""
    scores = {}
    for run in runs.of(name):
        if run["flags"]["seed"] in TUNING_SEEDS:
            scores.setdefault(run["flags"]["learning_rate"], []).append(run["pass@1"][-1])
    return sorted(scores, key=lambda rate: fmean(scores[rate]), reverse=True)


def reported(runs, name):
    """{seed: run} at the arm's best rate, without the seeds that it was tuned on."""
    best, found = rates(runs, name)[:1], {}
    for run in runs.of(name):
        if [run["flags"]["learning_rate"]] == best and run["flags"]["seed"] not in TUNING_SEEDS:
            found[run["flags"]["seed"]] = run
    return dict(sorted(found.items()))


def campaign(runs, names, seeds, at_once, small):
    """Tune each arm, then run it at its best rate."""
    for name in names:
        both = ARMS[name].rates[: 1 if small else 2]
        runs.forget(name, [flags_of(name, rate, 0, small) for rate in both])
        for some, chosen in (both, TUNING_SEEDS), (None, seeds):
            wanted = []
            for rate, seed in product(some or rates(runs, name)[:1], chosen):
                job = {"name": name, "rate": rate, "seed": seed}
                wanted.append((name, flags_of(*job.values(), small), job))
            make(runs, run, wanted, at_once, small)


# ------------------------------------------------------------------------------------------ pass@k
def run_pass_k(name, rate, seed, small):
    """How many of the completions are right, sum by sum: of the initial model if the rate is 0."""
    torch.set_num_threads(1)
    script, args = arguments(name, rate, seed, small)
    _, held_out = script.load_data(args)
    questions = distinct(held_out, QUESTIONS)
    model, tokenizer = script.load_policy(args, CPU)
    if rate > 0:
        model = train(script, args)["model"]
    torch.manual_seed(0)
    right = []
    for start in range(0, len(questions), 16):
        part, draws = questions[start : start + 16], 8 if small else DRAWS
        _, _, rewards = script.rollout(model, tokenizer, part, draws, 1.0, args)
        right += (rewards > 0.5).sum(1).tolist()
    return {"right": right}


def campaign_pass_k(runs, tuned, seeds, at_once, small):
    jobs = [("initial", {"name": "grpo", "rate": 0.0, "seed": 0})]
    for row in list(PASS_K)[1:]:
        rate = ARMS[row].rates[0] if small else rates(tuned, row)[0]
        jobs += [(row, {"name": row, "rate": rate, "seed": seed}) for seed in seeds]
    wanted, draws = [], 8 if small else DRAWS
    for row, job in jobs:
        flags = flags_of(*job.values(), small) | {"held_out": QUESTIONS, "draws": draws}
        wanted.append((row, flags, job))
    for row in PASS_K:
        runs.forget(row, [flags for name, flags, _ in wanted if name == row])
    make(runs, run_pass_k, wanted, at_once, small)


def pass_at(k, run):
    """Without bias, because every set of k completions is counted."""
    n = run["flags"]["draws"]
    return fmean(1 - math.comb(n - right, k) / math.comb(n, k) for right in run["right"])


def pass_k_lines(runs):
    draws, rows = min(run["flags"]["draws"] for run in runs.runs), []
    ks = [k for k in (1, 8, 32, 128) if k <= draws]
    for row, title in PASS_K.items():
        means = [fmean(pass_at(k, run) for run in runs.of(row)) for k in ks]
        rows.append([title, len(runs.of(row)), *(f"{mean:.3f}" for mean in means)])
    return with_footer(table(["", "seeds", *(f"pass@{k}" for k in ks)], rows), runs.runs)


# ------------------------------------------------------------------------------ Table and picture
HEADER = [
    "method",
    "seeds",
    "pass@1: mean (95 % interval)",
    "pass@8",
    "beside GRPO",
    "p",
    "clipped",
]


def mean_of(runs, key):
    """The mean over runs of a number, or of a list's last number."""
    return fmean(run[key][-1] if isinstance(run[key], list) else run[key] for run in runs)


def differences(runs, others):
    """pass@1 of two arms' runs, {seed: run}, one minus the other, for the seeds of both."""
    seeds = [seed for seed in runs if seed in others and runs is not others]
    return [runs[seed]["pass@1"][-1] - others[seed]["pass@1"][-1] for seed in seeds]


def cells(arm, runs, pairs):
    last = [run["pass@1"][-1] for run in runs]
    low, high = interval(last) if len(last) > 1 else (math.nan, math.nan)
    beside = [f"{fmean(pairs):+.3f}", f"{p_value(pairs):.3f}"] if pairs else ["–", "–"]
    scores = [f"{fmean(last):.3f} ({low:.2f} to {high:.2f})", f"{mean_of(runs, 'pass@8'):.2f}"]
    return [arm.title, len(last), *scores, *beside, f"{mean_of(runs, 'clipped'):.1%}"]


def how_to_read(pairs):
    """Which rows can be told from GRPO at all, and from which p on. A row with too few seeds cannot
    pass, so it does not count among those that might pass by chance (Tarone 1990)."""
    least = [2 / 2 ** len(each) for each in pairs if each]
    if not least:
        return ["No row is compared with GRPO yet."]
    count = next(n for n in range(1, len(least) + 1) if sum(p <= 0.05 / n for p in least) <= n)
    able = sum(p <= 0.05 / count for p in least)
    chance = f"{0.05 * able:.1f}"
    return [
        f"Of the {len(least)} rows beside GRPO, only {able} have enough seeds to pass this test.",
        f"A difference counts if p is below {0.05 / count:.4f}: if these {able} methods were all",
        f"like GRPO, {chance} of them would have a p below 0.05 by chance.",
    ]


def methods_lines(runs):
    """A row for each arm, in its group the best mean first."""
    arms = {name: reported(runs, name) for name in ARMS}
    arms = {name: found for name, found in arms.items() if found}
    grpo = arms.get("grpo", {})
    pairs = {name: differences(found, grpo) for name, found in arms.items()}

    def place(name):
        return GROUPS.index(ARMS[name].group), -mean_of(arms[name].values(), "pass@1"), name

    rows, used = [], []
    for name in sorted(arms, key=place):
        found = list(arms[name].values())
        rows.append(cells(ARMS[name], found, pairs[name]))
        used += found
    return with_footer([*table(HEADER, rows), "", *how_to_read(list(pairs.values()))], used)


def draw(runs):
    """A row of dots for each arm of the scripts, in three groups, as a small PNG."""
    from pictures import dots, figure
    from PIL import Image

    arms = {name: reported(runs, name) for name in ARMS if reported(runs, name)}
    groups = [[name for name in arms if ARMS[name].group == group] for group in GROUPS[:3]]
    heights = {"height_ratios": [len(group) + 0.6 for group in groups]}
    title = "Right answers to held-out sums, with equal numbers of completions"
    page, panels = figure(title, 5.4, 3, 1, sharex=True, gridspec_kw=heights)
    for axes, group, names in zip(panels, GROUPS, groups, strict=False):
        rows = {}
        for name in sorted(names, key=lambda name: mean_of(arms[name].values(), "pass@1")):
            color = ARMS[name].script.removesuffix("_llm").upper()
            values = [run["pass@1"][-1] for run in arms[name].values()]
            rows[ARMS[name].title] = values, color, not ARMS[name].flags.keys() - {"steps"}
        axes.set_title(group)
        dots(axes, rows)
    panels[-1].set_xlabel("pass@1: a dot is a seed, a bar their mean")
    picture = io.BytesIO()
    page.savefig(picture, dpi=200)
    small = Image.open(picture).convert("RGB").quantize(64)
    small.save(RESULTS / "methods.png", optimize=True)


def kept(smoke=False):
    return [Kept(name, "transformers", smoke=smoke) for name in ("methods", "pass_k")]


def tables(runs, pass_k):
    found = {"methods": methods_lines(runs)}
    return found | ({"pass_k": pass_k_lines(pass_k)} if pass_k.runs else {})


def main(
    arms: tuple[str, ...] = (),
    jobs: int = 1,
    seeds: int = 10,
    pass_k: bool = False,
    only_tables: bool = False,
    smoke: bool = False,
):
    """--arms names some of the arms; without it, all. --jobs runs are made at a time, --seeds of
    each arm are reported. With --smoke two arms make short runs, and nothing is written."""
    if unknown := set(arms) - set(ARMS):
        sys.exit(f"--arms: {' '.join(unknown)}: choose from {' '.join(ARMS)}")
    small = {"steps": 4, "prompts_per_step": 8, "eval_problems": 4} if smoke else {}
    runs, counts = kept(smoke)
    chosen = range(1, 2 if smoke else seeds + 1)
    if not only_tables and not pass_k:
        campaign(runs, arms or list(ARMS), chosen, jobs, small)
    if not only_tables and (pass_k or smoke):
        campaign_pass_k(counts, runs, chosen[:3], jobs, small)
    show(tables(runs, counts), smoke)
    if not smoke:
        draw(runs)


if __name__ == "__main__":
    tyro.cli(main)

"""Experiments on the tiny language model: what a step is made of.

baseline, length, difficulty and dynamic; cures.py runs them.
"""

import math
import os
import random
import shutil
import zlib
from contextlib import suppress
from dataclasses import replace
from inspect import getsource
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from bench import COLORS, CPU, GREY, ORANGE, PINK, PURPLE, evaluate, train
from cures_tools import Experiment, band, dots, grid, labels, select, smooth, titles

import dapo_llm
import grpo_llm
import rloo_llm

SEEDS = range(1, 6)


def mean(values):
    """The mean, or None of nothing."""
    return sum(values) / len(values) if values else None


def gradients(model, batch, weights, variants, args):
    """The policy gradient for each of the advantages, as vectors: Σ weights · A · ∇ log π."""
    logprobs = grpo_llm.token_logprobs(model, batch, args.temperature)
    found = []
    for advantages in variants:
        objective = (weights * advantages.flatten()[:, None] * logprobs).sum()
        parts = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
        found.append(torch.cat([part.flatten() for part in parts]))
    return found


# -------------------------------------------------------------------------------------- Baseline

BASELINES = {
    "none": PINK,
    "none, R + 1": PURPLE,
    "mean": ORANGE,
    "leave-one-out": COLORS["RLOO"],
    "z-score": COLORS["GRPO"],
}
AFTER = [0, 10, 30]  # rollouts


def advantages_with(baseline, rewards, of_rloo=rloo_llm.compute_advantages):
    """RLOO's advantages with this baseline, or GRPO's."""
    if baseline == "z-score":
        return grpo_llm.compute_advantages(rewards, grpo_llm.Args())
    if baseline == "none, R + 1":
        return rewards + 1
    return of_rloo(rewards, rloo_llm.Args(baseline=baseline))


def noise_to_signal(samples):
    """E‖g − ḡ‖² / ‖ḡ‖² of gradients g of many rollouts of one policy: it has no scale.

    The mean of n noisy gradients is too long by a share 1/n of their variance: it is taken off.
    """
    samples = torch.stack(samples)
    variance = samples.var(0).sum().item()
    signal = samples.mean(0).square().sum().item() - variance / len(samples)
    return variance / signal if signal > 0 else None


def baseline_noise(after, args, rollouts):
    """The noise of the gradient with each baseline, `after` so many rollouts of RLOO.

    Tokens are divided by a constant: Σ|o_i| varies with the rollout and would add its own noise.
    """
    trained = train(rloo_llm, args, steps=after)
    model, tokenizer = trained["model"], trained["tokenizer"]
    torch.manual_seed(args.seed)
    problems = rloo_llm.problem_stream(None, args.seed)
    samples = {name: [] for name in BASELINES}
    for _ in range(rollouts):
        drawn = [next(problems) for _ in range(args.prompts_per_step)]
        batch, _, rewards = rloo_llm.rollout(model, tokenizer, drawn, args.group_size, 1.0, args)
        variants = [advantages_with(name, rewards) for name in BASELINES]
        weights = batch["mask"] / (len(batch["mask"]) * args.max_new_tokens)
        found = gradients(model, batch, weights, variants, args)
        for name, vector in zip(BASELINES, found, strict=True):
            samples[name].append(vector)
    noise = {f"noise, {name}": noise_to_signal(samples[name]) for name in BASELINES}
    return {"pass@1": trained["pass@1"]} | noise


def run_baseline(seed, after=None, baseline=None, steps=60, rollouts=40, prompts=4, tested=128):
    """Claim: the mean of the others in the group takes noise out of the gradient.

    Changed: what is subtracted from the reward (none, mean of the batch, mean of the others), and
    GRPO's z-score beside them. Measured: with `after`, the noise of the gradient at the policy
    after so many rollouts of RLOO, from the same completions for all; with `baseline`, learning
    curves with it, of 4 questions per rollout, where noise is worst. Without KL penalty. "none,
    R + 1" pays 2 for a right answer and 1 for a wrong one, which does not matter to a baseline.
    """
    args = rloo_llm.Args(seed=seed, steps=steps, beta=0.0, learning_rate=1e-3, eval_problems=tested)
    if after is not None:
        return baseline_noise(after, args, rollouts)

    def advantages(rewards, args):
        return advantages_with(baseline, rewards)

    with patch.object(rloo_llm, "compute_advantages", advantages):
        result = train(rloo_llm, replace(args, prompts_per_step=prompts))
    return {
        "mean reward": mean(result["reward"]),
        "pass@1": result["pass@1"],
        "reward": result["reward"],
    }


def draw_baseline(figure, results):
    left, right = figure.subplots(1, 2)
    for i, (name, color) in enumerate(BASELINES.items()):
        for j, after in enumerate(AFTER):
            values = [run[f"noise, {name}"] for run in select(results, after=after)]
            values = [value for value in values if value is not None]
            if values:
                dots(left, 6 * j + i, values, color)
        runs = select(results, baseline=name)
        if runs:
            curves = [smooth(run["reward"], 5) for run in runs]
            band(right, range(1, len(curves[0]) + 1), curves, color)
    labels(right, BASELINES, 0.98, 0.05, BASELINES)
    left.set_yscale("log")
    left.set_xticks([2, 8, 14], [str(after) for after in AFTER])
    left.set_xlim(-1, 17)
    titles(left, "noise of the gradient", "rollouts before", "variance / squared mean")
    titles(right, "RLOO, 4 questions per rollout", "rollouts", "reward")


# ---------------------------------------------------------------------------------------- Length

LENGTHS = ["GRPO", "GRPO, constant", "Dr. GRPO", "token mean"]
EDGES = [8, 16, 24, 32, 40, 48]


def wandering(question, guess_rate, rng):
    """A demonstration that meanders: each total is written once or more, then comes an answer.

    Whether the answer is guessed has nothing to do with how long the way to it was.
    """
    terms = [int(term) for term in question.split("+")]
    totals = [str(total) for total in accumulate(terms)]
    steps = []
    for total in totals[1:]:
        steps.append(total)
        while rng.random() < 0.6:
            steps.append(total)
    guess = str(sum(rng.randint(0, 9) for _ in terms))
    answer = guess if rng.random() < guess_rate else totals[-1]
    return ",".join(steps) + "#" + answer


def wandering_model(args, steps):
    """The tiny model after a warm start on such demonstrations; kept for the next run."""
    recipe = [getsource(wandering), getsource(grpo_llm.make_tiny_model), torch.__version__, steps]
    key = zlib.crc32(str(recipe).encode())
    folder = Path(torch.hub.get_dir()) / f"policy-gradients-wandering-{key:08x}"
    if not folder.exists():
        mine = folder.with_name(f"{folder.name}-{os.getpid()}")
        with patch.object(grpo_llm, "demonstration", wandering):
            grpo_llm.save_model(*grpo_llm.make_tiny_model(steps), mine)
        with suppress(OSError):  # another worker may have been quicker
            mine.rename(folder)
        shutil.rmtree(mine, ignore_errors=True)
    return grpo_llm.load_policy(replace(args, model=str(folder)), CPU)


def lengths_of(model, tokenizer, args, num_problems):
    """Mean length of right and of wrong answers to held-out sums, and the share of wrong ones.

    All sums are of four numbers: of mixed ones the short are solved first, and the mean would grow.
    """
    rng = random.Random(0)
    problems = []
    while len(problems) < num_problems:
        problem = grpo_llm.make_sum(rng, held_out=True)
        if problem[0].count("+") == 3:
            problems.append(problem)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        batch, _, rewards = grpo_llm.rollout(model, tokenizer, problems, 4, 1.0, args)
    lengths, right = batch["mask"].sum(1), rewards.flatten() > 0
    return {
        "right": mean(lengths[right].tolist()),
        "wrong": mean(lengths[~right].tolist()),
        "wrong share": 1 - right.float().mean().item(),
    }


def weights_by_length(model, tokenizer, args, num_problems):
    """A token's weight in the gradient, weight · |A|, against the mean: by length, right or wrong.

    Of the groups with a signal; None where no answer is of such a length.
    """
    torch.manual_seed(args.seed)
    problems = grpo_llm.problem_stream(None, args.seed)
    drawn = [next(problems) for _ in range(num_problems)]
    batch, _, rewards = grpo_llm.rollout(model, tokenizer, drawn, args.group_size, 1.0, args)
    advantages = grpo_llm.compute_advantages(rewards, args).flatten()
    weights = grpo_llm.token_weights(batch["mask"], args).amax(1) * advantages.abs()
    lengths, right = batch["mask"].sum(1), rewards.flatten() > 0
    average = (weights * lengths).sum() / lengths[advantages != 0].sum()
    found = {}
    for name, side in (("right", right), ("wrong", ~right)):
        parts = []
        for low, high in zip([0, *EDGES], EDGES, strict=False):
            here = side & (advantages != 0) & (lengths > low) & (lengths <= high)
            parts.append(mean((weights[here] / average).tolist()))
        found[f"weight, {name}"] = parts
    return found


def run_length(method, seed, steps=40, warm_start=400, every=4, asked=128, sampled=128):
    """Claim: 1/|o_i| makes each token of a long wrong answer cheap, so wrong answers grow.

    Changed: what a completion's tokens are divided by: its length (GRPO), max_new_tokens (also
    without the std: Dr. GRPO), or all tokens (DAPO's mean). The model begins with a habit of
    repeating its running totals, up to 48 tokens. Measured: weight of a token by length, at the
    start, and the length of right and wrong answers over training.
    """
    flags = {}
    if method in ("GRPO, constant", "Dr. GRPO"):
        flags["length_norm"] = "constant"
    if method == "Dr. GRPO":
        flags["scale_rewards"] = False
    args = grpo_llm.Args(max_new_tokens=48, beta=0.0, steps=steps, seed=seed, **flags)
    args = replace(args, prompts_per_step=16, eval_problems=asked)
    model, tokenizer = wandering_model(args, warm_start)
    points = [{"step": 0} | lengths_of(model, tokenizer, args, asked)]

    def each_step(step, model, metrics):
        if step % every == 0:
            points.append({"step": step} | lengths_of(model, tokenizer, args, asked))

    weigh = dapo_llm.token_weights if method == "token mean" else grpo_llm.token_weights
    with patch.object(grpo_llm, "token_weights", weigh):
        weights = weights_by_length(model, tokenizer, args, sampled)
        result = train(grpo_llm, args, each_step=each_step, model=(model, tokenizer))
    late = points[len(points) // 2 :]
    return {
        "wrong at the start": points[0]["wrong"],
        "right at the start": points[0]["right"],
        "wrong, second half": mean([each["wrong"] for each in late if each["wrong"]]),
        "right, second half": mean([each["right"] for each in late if each["right"]]),
        "share of wrong, second half": mean([each["wrong share"] for each in late]),
        "pass@1": result["pass@1"],
        "steps": [point["step"] for point in points],
        "lengths of right": [point["right"] for point in points],
        "lengths of wrong": [point["wrong"] for point in points],
        "share of wrong": [point["wrong share"] for point in points],
    } | weights


def medians(runs, key):
    """Over the runs, at every point; nan where none has a number."""
    columns = zip(*[run[key] for run in runs], strict=True)
    present = [[value for value in column if value is not None] for column in columns]
    return [median(column) if column else math.nan for column in present]


def draw_length(figure, results):
    left, right = figure.subplots(1, 2)
    centres = [edge - 4 for edge in EDGES]
    for name in ("GRPO", "Dr. GRPO"):
        runs, color = select(results, method=name), COLORS[name]
        if runs:
            left.plot(centres, medians(runs, "weight, right"), "--", color=color)
            left.plot(centres, medians(runs, "weight, wrong"), color=color)
    labels(left, ["GRPO", "Dr. GRPO"], 0.98, 0.85)
    place = {"transform": left.transAxes, "ha": "right", "fontsize": 8}
    left.text(0.98, 0.76, "dashed: of a right answer", color=GREY, **place)
    left.set_ylim(0)
    for i, name in enumerate(LENGTHS):
        for x, side in ((4 * i, "wrong"), (4 * i + 2, "right")):
            values = [run[f"{side}, second half"] for run in select(results, method=name)]
            values = [value for value in values if value is not None]  # no answer of that side
            if values:
                dots(right, x, values, COLORS[name])
    start = median(run["wrong at the start"] for _, run in results)
    right.axhline(start, color=GREY, linewidth=1, linestyle=":")
    right.text(15, start, "start", color=GREY, fontsize=8, va="bottom", ha="center")
    places = [4 * i + shift for i in range(len(LENGTHS)) for shift in (0, 1, 2)]
    names = [each for name in LENGTHS for each in ("wrong", f"\n{name}", "right")]
    right.set_xticks(places, names)
    right.set_xlim(-1, 16)
    titles(left, "A token of a long answer weighs less", "tokens of the answer", "weight / mean")
    titles(right, "Wrong answers hardly grow, right ones shrink", "", "tokens, second half")


# ------------------------------------------------------------------------------------ Difficulty

RATE_BINS = [0.1, 0.3, 0.5, 0.7, 0.9, 1.01]


def questions_gradients(model, tokenizer, args, num_problems, samples):
    """Of each question: right answers in its group, pass rate in other samples, gradient norm."""
    torch.manual_seed(args.seed)
    problems = grpo_llm.problem_stream(None, args.seed)
    drawn = [next(problems) for _ in range(num_problems)]
    more = grpo_llm.rollout(model, tokenizer, drawn, samples, 1.0, args)[2]
    batch, _, rewards = grpo_llm.rollout(model, tokenizer, drawn, args.group_size, 1.0, args)
    advantages = grpo_llm.compute_advantages(rewards, args)
    batch = {name: rows.unflatten(0, rewards.shape) for name, rows in batch.items()}
    norms = []
    for i in range(num_problems):
        group = grpo_llm.take_rows(batch, i)
        weights = grpo_llm.token_weights(group["mask"], args)
        norms.append(gradients(model, group, weights, [advantages[i]], args)[0].norm().item())
    return rewards.sum(1).int().tolist(), more.mean(1).tolist(), norms


def run_difficulty(after, std, seed, num_problems=256, samples=64):
    """Claim: 1/std favours questions that are nearly always or never solved.

    Changed: whether advantages are divided by the group's std. Measured, at the policy `after` so
    many rollouts of GRPO, on the same completions: the norm of each question's gradient, by how
    many of its 8 answers are right, and by its pass rate in 64 other samples.
    """
    args = grpo_llm.Args(seed=seed, steps=200)
    trained = train(grpo_llm, args, steps=after)
    args = replace(args, scale_rewards=std)
    found = questions_gradients(trained["model"], trained["tokenizer"], args, num_problems, samples)
    rows = list(zip(*found, strict=True))
    average = mean([norm for _, _, norm in rows])
    by_count, by_rate, counts = [], [], []
    for wanted in range(args.group_size + 1):
        norms = [norm / average for count, _, norm in rows if count == wanted]
        by_count.append(mean(norms))
    for low, high in zip([0, *RATE_BINS], RATE_BINS, strict=False):
        norms = [norm / average for _, rate, norm in rows if low <= rate < high]
        by_rate.append(mean(norms))
        counts.append(len(norms))
    extreme = [norm for count, _, norm in rows if count in (1, 7)]
    middling = [norm for count, _, norm in rows if count in (3, 4, 5)]
    hard = [norm for _, rate, norm in rows if rate < 0.1 or rate >= 0.9]
    return {
        "norm at 1 or 7 of 8 / at 3 to 5": mean(extreme) / mean(middling) if extreme else None,
        "share of questions below .1 or above .9": len(hard) / num_problems,
        "their share of the gradient": sum(hard) / num_problems / average,
        "pass@1": trained["pass@1"],
        "norm by right answers": by_count,
        "norm by pass rate": by_rate,
        "questions by pass rate": counts,
    }


def draw_difficulty(figure, results):
    left, right = figure.subplots(1, 2)
    panels = ((left, 8, "norm by right answers"), (right, 16, "norm by pass rate"))
    labels(left, ["GRPO", "Dr. GRPO"], 0.7, 0.05)
    for std, color in ((True, COLORS["GRPO"]), (False, COLORS["Dr. GRPO"])):
        for axes, after, key in panels:
            runs = select(results, std=std, after=after)
            if runs:
                middle = medians(runs, key)
                for run in runs:
                    dotted = [math.nan if y is None else y for y in run[key]]
                    axes.plot(range(len(dotted)), dotted, ".", color=color, alpha=0.4)
                axes.plot(range(len(middle)), middle, color=color, linewidth=1.8)
    left.set_ylim(0)
    right.set_ylim(0)
    edges = ["0", *(f"{edge:g}" for edge in RATE_BINS[:-1]), "1"]
    right.set_xticks(range(6), [f"{low}–{high}" for low, high in pairwise(edges)])
    titles(
        left,
        "8 rollouts in, 1/std lifts 1 and 7 of 8",
        "right answers of 8",
        "a question's gradient / mean",
    )
    titles(right, "16 rollouts in, no difference is seen", "pass rate in 64 other samples")


# --------------------------------------------------------------------------------------- Dynamic

DYNAMICS = {
    "DAPO": (dapo_llm, {}),
    "DAPO, one draw": (dapo_llm, {"max_resample": 1}),
    "GRPO": (grpo_llm, {}),
}


def run_dynamic(method, seed, steps=60, prompts=16, every=2):
    """Claim: groups all right or all wrong teach nothing; drawing until enough others are there
    keeps the step full, at the price of samples.

    Changed: DAPO's --max-resample, 10 or 1; GRPO beside it. Measured: the share of groups drawn
    that have a signal, and pass@1 on held-out sums by updates and by completions drawn.
    """
    script, flags = DYNAMICS[method]
    args = script.Args(steps=steps, seed=seed, prompts_per_step=prompts, **flags)
    model, tokenizer = script.load_policy(args, CPU)
    points = [[0, 0, evaluate(script, model, tokenizer, args, 128, 4)["pass@1"]]]
    drawn, most = [], getattr(args, "max_resample", 1)

    def each_step(step, model, metrics):
        draws = min(metrics.get("discarded_groups", 0) // prompts + 1, most)
        drawn.append(draws * prompts * args.group_size)
        if step % every == 0:
            score = evaluate(script, model, tokenizer, args, 128, 4)["pass@1"]
            points.append([step, sum(drawn), score])

    result = train(script, args, each_step=each_step, model=(model, tokenizer))
    signal = [1 - share for share in result["frac_reward_zero_std"]]
    reached = [point for point in points if point[2] >= 0.9]
    return {
        "signal at first": mean(signal[:5]),
        "signal at last": mean(signal[-10:]),
        "pass@1": result["pass@1"],
        "completions": sum(drawn),
        "updates to .9": reached[0][0] * args.minibatches if reached else None,
        "completions to .9": reached[0][1] if reached else None,
        "signal": signal,
        "rollouts": [point[0] for point in points],
        "completions by then": [point[1] for point in points],
        "pass@1 by then": [point[2] for point in points],
    }


def draw_dynamic(figure, results):
    panels = figure.subplots(1, 3)
    labels(panels[2], DYNAMICS, 0.98, 0.05)
    for name in DYNAMICS:
        runs, color = select(results, method=name), COLORS[name]
        if not runs:
            continue
        signal = [smooth(run["signal"], 5) for run in runs]
        band(panels[0], range(1, len(signal[0]) + 1), signal, color)
        scores = [run["pass@1 by then"] for run in runs]
        band(panels[1], runs[0]["rollouts"], scores, color)
        drawn = medians(runs, "completions by then")
        band(panels[2], drawn[1:], [each[1:] for each in scores], color)
    panels[2].set_xscale("log")
    titles(panels[0], "groups with a signal", "rollouts", "share")
    titles(panels[1], "by update", "rollouts", "pass@1")
    titles(panels[2], "by sample", "completions drawn", "pass@1")


EXPERIMENTS = [
    Experiment(
        name="baseline",
        claim="The mean of the group's others as a baseline takes noise out of the gradient.",
        measure="Variance of the gradient over its squared mean, 0, 10 and 30 rollouts into RLOO, "
        "from 40 rollouts of 32 questions; reward over 60 rollouts of 4 questions.",
        run=run_baseline,
        jobs=[*grid(SEEDS, after=AFTER), *grid(SEEDS, baseline=list(BASELINES))],
        smoke=[
            {"seed": 1, "after": 0, "rollouts": 2, "tested": 4},
            {"seed": 1, "baseline": "z-score", "steps": 2, "prompts": 2, "tested": 4},
        ],
        draw=draw_baseline,
    ),
    Experiment(
        name="length",
        claim="1/|o_i| makes tokens of a long answer cheap: wrong answers grow, right ones shrink.",
        measure="Weight of a token in the gradient by the length of its answer, and the length of "
        "right and wrong answers to 128 held-out sums of 4 numbers, over 40 rollouts.",
        run=run_length,
        jobs=grid(SEEDS, method=list(LENGTHS)),
        smoke=[
            {"method": "token mean", "seed": 1, "steps": 2, "warm_start": 4, "every": 1, "asked": 4}
        ],
        draw=draw_length,
    ),
    Experiment(
        name="difficulty",
        claim="1/std R favours questions that are nearly always or never solved.",
        measure="Norm of a question's gradient over the mean of 256 questions, by how many of its "
        "8 answers are right and by its pass rate, 8 and 16 rollouts into GRPO.",
        run=run_difficulty,
        jobs=grid(SEEDS, after=[8, 16], std=[True, False]),
        smoke=[{"after": 1, "std": True, "seed": 1, "num_problems": 8, "samples": 4}],
        draw=draw_difficulty,
    ),
    Experiment(
        name="dynamic",
        claim="Dynamic sampling fills every step with groups that have a signal.",
        measure="Share of groups drawn with a signal; pass@1 on held-out sums by rollout and by "
        "completions drawn; 60 rollouts of 16 questions.",
        run=run_dynamic,
        jobs=grid(SEEDS, method=list(DYNAMICS)),
        smoke=[{"method": "DAPO, one draw", "seed": 1, "steps": 2, "prompts": 2, "every": 1}],
        draw=draw_dynamic,
    ),
]

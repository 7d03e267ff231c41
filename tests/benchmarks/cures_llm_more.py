"""Experiments on what lies around the objective: the KL penalty, the temperature, the group."""

from unittest.mock import patch

import torch
from bench import BLUE, COLORS, CPU, GREY, ORANGE, RED, evaluate, train
from cures_llm_steps import gradients, mean, noise_to_signal
from cures_llm_tokens import first_above, warm_start
from cures_tools import Experiment, band, grid, labels, select, titles

import grpo_llm
import rloo_llm

SEEDS = [1, 2, 3, 4, 5]

# --------------------------------------------------------------------------------------- Hacking

PLACES = {"GRPO": grpo_llm, "RLOO, 4 steps": rloo_llm}
WHERE = {"GRPO": "GRPO, β in the loss", "RLOO, 4 steps": "RLOO, β in the reward"}
BETAS = [0.0, 0.1, 0.3, 1.0]
PRAISE = 0.2  # for a comma


def praise_work(completion, answer):
    """A reward with a hole: 1 for a right answer, and a little for every step that is shown."""
    return grpo_llm.verify(completion, answer) + PRAISE * completion.count(",")


def both_scores(script, policy, reference, tokenizer, problems, args):
    """On held-out sums, 4 answers to each: what the reward says, what is true, how far π has gone.

    The distance is KL(π ‖ π_ref) of an answer, a sum over its tokens.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch, completions, rewards = script.rollout(policy, tokenizer, problems, 4, 1.0, args)
    answers = [answer for _, answer in problems for _ in range(4)]
    right = [grpo_llm.verify(*pair) for pair in zip(completions, answers, strict=True)]
    log_ratio = batch["old_logprobs"] - script.batch_logprobs(reference, batch, args)
    return {
        "proxy": rewards.mean().item(),
        "true": mean(right),
        "KL of an answer": log_ratio.sum(1).mean().item(),
        "tokens": batch["mask"].sum(1).mean().item(),
    }


def run_hacking(method, beta, seed, steps=40, every=5, asked=64, warm=1000):
    """Claim: a reward with a hole is pushed into the hole; KL to the reference holds against it.

    The reward is 1 for a right answer and 0.2 more for every comma, meant as praise for the working
    out. The model meanders: it may say a running total several times. So it can earn more by
    repeating itself, until there is no room for an answer. Changed: β, in the loss (GRPO) and in
    the reward (RLOO, with GRPO's four gradient steps a rollout). Measured on held-out sums over
    training: this reward, the share of right answers, KL to the reference.
    """
    script = PLACES[method]
    args = script.Args(beta=beta, seed=seed, steps=steps, minibatches=4, eval_problems=asked)
    model, tokenizer = warm_start("meander", warm)
    reference, _ = warm_start("meander", warm)
    problems = script.load_data(args)[1]
    points = []

    def measure(step, policy):
        found = both_scores(script, policy, reference, tokenizer, problems, args)
        points.append({"rollouts": step} | found)

    def each_step(step, policy, metrics):
        if step % every == 0:
            measure(step, policy)

    with patch.object(script, "load_verifier", lambda name: praise_work):
        measure(0, model)
        train(script, args, each_step=each_step, model=(model, tokenizer))
    best = max(points, key=lambda point: point["true"])
    last = points[-1]
    return {
        "proxy": last["proxy"],
        "true": last["true"],
        "KL of an answer": last["KL of an answer"],
        "tokens": last["tokens"],
        "best true": best["true"],
        "rollouts to best": best["rollouts"],
    } | {f"{name} by then": [point[name] for point in points] for name in points[0]}


def draw_hacking(figure, results):
    left, right = figure.subplots(1, 2)
    shown = {0.0: RED, 0.3: BLUE}
    for beta, color in shown.items():
        runs = select(results, method="GRPO", beta=beta)
        if runs:
            x = runs[0]["rollouts by then"]
            band(left, x, [run["proxy by then"] for run in runs], color, dashed=True)
            band(left, x, [run["true by then"] for run in runs], color)
    names = {f"GRPO, β {beta:g}": color for beta, color in shown.items()}
    names |= {"dashed: the reward": GREY, "solid: right answers": GREY}
    labels(left, names, 0.02, 0.65, names)
    betas = sorted({settings["beta"] for settings, _ in results})
    for method in WHERE:
        runs = [[run["true"] for run in select(results, method=method, beta=b)] for b in betas]
        if all(runs):
            band(right, range(len(betas)), list(zip(*runs, strict=True)), COLORS[method])
    names = {where: COLORS[method] for method, where in WHERE.items()}
    labels(right, names, 0.98, 0.05, names)
    right.set_xticks(range(len(betas)), [f"{beta:g}" for beta in betas])
    right.set_ylim(0)
    titles(left, "Without KL: reward up, right answers down", "rollouts", "mean over answers")
    titles(right, "A middling β keeps right answers", "β", "share of right answers, at the end")


# ----------------------------------------------------------------------------------- Temperature

TEMPERATURES = [0.3, 0.5, 0.7, 1.0, 1.2, 1.5]
TRAINED_AT = [None, 0.7, 1.0, 1.2]  # None: before training


def scores_at(model, tokenizer, problems, temperature, args):
    """pass@1 and pass@8 of 8 answers to each held-out sum, drawn at this temperature."""
    torch.manual_seed(args.seed)
    rewards = grpo_llm.rollout(model, tokenizer, problems, 8, temperature, args)[2]
    return {"pass@1": rewards.mean().item(), "pass@8": rewards.amax(1).mean().item()}


def run_temperature(trained_at, seed, steps=40, asked=128):
    """Claim: a low temperature makes one answer surer, a high one makes the best of many better.

    Changed: the temperature of sampling on held-out sums, of the tiny model before training
    (trained_at None) and after 40 rollouts of GRPO; and --temperature of that training, which is in
    its rollouts and in its loss. Measured: pass@1 and pass@8 at every temperature of sampling;
    rollouts until half of the answers are right; entropy at the end.
    """
    args = grpo_llm.Args(seed=seed, steps=steps, eval_problems=asked)
    model, tokenizer = grpo_llm.load_policy(args, CPU)
    found = {}
    if trained_at is not None:
        args.temperature = trained_at
        result = train(grpo_llm, args, model=(model, tokenizer))
        found["rollouts to 0.5"] = first_above(result["reward"], 0.5)
        found["entropy at the end"] = mean(result["entropy"][-5:])
    problems = grpo_llm.load_data(args)[1]
    for temperature in TEMPERATURES:
        scores = scores_at(model, tokenizer, problems, temperature, args)
        found |= {f"{name}, T {temperature}": score for name, score in scores.items()}
    return found


def draw_temperature(figure, results):
    left, right = figure.subplots(1, 2, sharey=True)
    colors = {"pass@8": GREY, "pass@1": RED}
    lines = [(left, None, name, False) for name in colors]
    lines += [(right, 1.0, name, False) for name in colors] + [(right, 0.7, "pass@1", True)]
    for axes, trained_at, name, dashed in lines:
        runs = select(results, trained_at=trained_at)
        if runs:
            y = [[run[f"{name}, T {T}"] for T in TEMPERATURES] for run in runs]
            band(axes, TEMPERATURES, y, colors[name], dashed=dashed)
    labels(left, colors, 0.02, 0.8, colors)
    names = colors | {"dashed: trained at T = 0.7": RED}
    labels(right, names, 0.02, 0.05, names)
    left.set_ylim(0, 1.05)
    titles(left, "Before training: heat helps", "temperature of sampling", "held-out sums")
    titles(right, "After training at T = 1: cold is surer", "temperature of sampling")


# ----------------------------------------------------------------------------------------- Group

GROUPS = [2, 4, 8, 16, 32, 64]
COMPLETIONS = 256  # in a rollout


def gradient_noise(model, tokenizer, group_size, rollouts, args):
    """Of GRPO's gradient over so many rollouts of one policy: noise, and groups with a signal."""
    torch.manual_seed(args.seed)
    problems = grpo_llm.problem_stream(None, args.seed)
    samples, signal = [], []
    for _ in range(rollouts):
        drawn = [next(problems) for _ in range(COMPLETIONS // group_size)]
        batch, _, rewards = grpo_llm.rollout(model, tokenizer, drawn, group_size, 1.0, args)
        advantages = grpo_llm.compute_advantages(rewards, args)
        weights = grpo_llm.token_weights(batch["mask"], args)
        samples += gradients(model, batch, weights, [advantages], args)
        signal.append((advantages != 0).any(1).float().mean().item())
    return {"noise": noise_to_signal(samples), "groups with a signal": mean(signal)}


def run_group(seed, after=None, group_size=None, steps=30, rollouts=24, asked=128):
    """Claim: of a fixed number of completions, a group of middling size learns most.

    Changed: the group's size G, with 256 / G questions a rollout. Measured: with `after`, the noise
    of GRPO's gradient at the policy after so many rollouts of GRPO with groups of 8, the same
    policy for all G; with `group_size`, pass@1 on held-out sums while GRPO learns with it.
    """
    args = grpo_llm.Args(seed=seed, steps=steps, eval_problems=asked)
    if after is not None:
        trained = train(grpo_llm, args, steps=after)
        found = {"pass@1": trained["pass@1"]}
        for size in GROUPS:
            numbers = gradient_noise(trained["model"], trained["tokenizer"], size, rollouts, args)
            found |= {f"{name}, G {size}": value for name, value in numbers.items()}
        return found

    args.group_size, args.prompts_per_step = group_size, COMPLETIONS // group_size
    scores = []

    def each_step(step, policy, metrics):
        if step % 2 == 0:
            scores.append(evaluate(grpo_llm, policy, tokenizer, args, asked, 4)["pass@1"])

    model, tokenizer = grpo_llm.load_policy(args, CPU)
    result = train(grpo_llm, args, each_step=each_step, model=(model, tokenizer))
    return {
        "pass@1 after 10": scores[4] if len(scores) > 4 else None,
        "mean pass@1": mean(scores),
        "pass@1 at the end": result["pass@1"],
        "pass@8 at the end": result["pass@8"],
        "pass@1 by then": scores,
    }


def draw_group(figure, results):
    left, right = figure.subplots(1, 2)
    noise = {f"after {after} rollouts": after for after in (0, 10)}
    learning = {"pass@1 at the end": "after 30 rollouts", "pass@1 after 10": "after 10 rollouts"}
    colors = {"after 0 rollouts": GREY, "after 10 rollouts": ORANGE, "after 30 rollouts": RED}
    for name, after in noise.items():
        runs = select(results, after=after)
        y = [[run[f"noise, G {size}"] for size in GROUPS] for run in runs]
        if y and all(value is not None for row in y for value in row):
            band(left, GROUPS, y, colors[name])
    sizes = [size for size in GROUPS if select(results, group_size=size)]
    for column, name in learning.items():
        runs = [[run[column] for run in select(results, group_size=size)] for size in sizes]
        if all(value is not None for row in runs for value in row):
            band(right, sizes, list(zip(*runs, strict=True)), colors[name])
    labels(left, noise, 0.02, 0.8, colors)
    labels(right, list(learning.values()), 0.02, 0.05, colors)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(GROUPS, [str(size) for size in GROUPS])
        axes.minorticks_off()
    left.set_ylim(0)
    right.set_ylim(0.3, 1.03)
    titles(left, "Large groups make more noise", "G, of 256 completions", "variance / squared mean")
    titles(right, "and learn less", "G, of 256 completions", "held-out pass@1")


EXPERIMENTS = [
    Experiment(
        "hacking",
        "A policy finds the hole in its reward; KL to the reference keeps it from there.",
        "A reward that praises commas, beside the share of right answers on 64 held-out sums, "
        "over 40 rollouts, by β in the loss (GRPO) and in the reward (RLOO, 4 steps a rollout).",
        run_hacking,
        grid(SEEDS, method=list(PLACES), beta=BETAS),
        [
            {"method": "GRPO", "beta": 0.0, "seed": 1, "steps": 2, "every": 1, "warm": 2},
            {"method": "RLOO, 4 steps", "beta": 0.1, "seed": 1, "steps": 1, "warm": 2},
        ],
        draw_hacking,
    ),
    Experiment(
        "temperature",
        "A low temperature makes one answer surer, a high one makes the best of many better.",
        "pass@1 and pass@8 on 128 held-out sums by temperature of sampling, before and after 40 "
        "rollouts of GRPO at several temperatures.",
        run_temperature,
        grid(SEEDS, trained_at=TRAINED_AT),
        [
            {"trained_at": None, "seed": 1, "asked": 4},
            {"trained_at": 1.0, "seed": 1, "steps": 2, "asked": 4},
        ],
        draw_temperature,
    ),
    Experiment(
        "group",
        "Of a fixed number of completions, groups of middling size learn most.",
        "By G, with 256 / G questions a rollout: variance of GRPO's gradient over its squared "
        "mean, from 24 rollouts; pass@1 on 128 held-out sums after 10 and 30 rollouts.",
        run_group,
        [*grid(SEEDS, after=[0, 10]), *grid(SEEDS, group_size=GROUPS)],
        [
            {"seed": 1, "after": 0, "rollouts": 2, "asked": 4},
            {"seed": 1, "group_size": 64, "steps": 2, "asked": 4},
        ],
        draw_group,
    ),
]

"""Token ratios and their geometric mean over an answer, while GRPO uses a rollout many times."""

import random
from math import log2
from unittest.mock import patch

import torch
from lab import Contrast, Experiment, mean, train, values
from llm_parts import load, make, start, started
from pictures import SOLID, curves, figure, plain

import grpo_llm
import gspo_llm
import rloo_llm

WIDE = {"clip_low": 1e9, "clip_high": 1e9}
SURROGATES = {
    "GRPO": (grpo_llm, grpo_llm.Args()),
    "GSPO": (gspo_llm, gspo_llm.Args()),
    "GRPO, no clip": (grpo_llm, grpo_llm.Args(**WIDE)),
    "GSPO, no clip": (gspo_llm, gspo_llm.Args(**WIDE)),
    "weight 1": (rloo_llm, rloo_llm.Args()),
}
LENGTHS = {"short": (1, 8), "middle": (8, 16), "long": (16, 99)}  # tokens: from, below
EPOCHS = [1, 4, 16]
TITLES = {"signal": "signal in the gradient", "cosine": "cosine with a fresh one"}


def factors(model, batch, args):
    """log2 of Var(r) of the tokens over Var(s) of the answers, for answers of each length."""
    mask, lengths = batch["mask"], batch["mask"].sum(1)
    log_ratio = grpo_llm.batch_logprobs(model, batch, args) - batch["old_logprobs"]
    s, found = ((log_ratio * mask).sum(1) / lengths).exp(), {}
    for name, (least, above) in LENGTHS.items():
        rows = (lengths >= least) & (lengths < above)
        r = log_ratio[rows][mask[rows] > 0].exp()
        r, means = ((each.var(correction=0).nan_to_num() + 1e-9).log2() for each in (r, s[rows]))
        found[f"factor, {name}"] = (r - means).item()
    return found


def answers(model, tokenizer, name, groups, args):
    """Groups of answers that this policy gives to new questions; none of them is trained on."""
    rng = random.Random(name)
    problems = [grpo_llm.make_sum(rng) for _ in range(groups)]
    batch, _, rewards = grpo_llm.rollout(model, tokenizer, problems, 8, 1.0, args)
    batch["advantages"] = grpo_llm.compute_advantages(rewards, args).flatten()
    return batch | {"old_logprobs": grpo_llm.batch_logprobs(model, batch, args)}


def group_gradients(model, batch, surrogates, args):
    """The gradients of each of these surrogates, one for every four groups of answers."""
    found, size = {name: [] for name in surrogates}, 4 * args.group_size
    for i in range(0, len(batch["mask"]), size):
        group = grpo_llm.take_rows(batch, slice(i, i + size))
        logprobs = grpo_llm.token_logprobs(model, group, args.temperature)
        inputs = [group[name] for name in ("old_logprobs", "advantages", "mask")]
        weights = grpo_llm.token_weights(group["mask"], args)
        for name, (script, bounds) in surrogates.items():
            objective, _ = script.surrogate(logprobs, *inputs, bounds)
            objective = (weights * objective).sum()
            parts = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
            found[name].append(torch.cat([part.flatten() for part in parts]))
    return {name: torch.stack(vectors) for name, vectors in found.items()}


def square_and_noise(vectors):
    """Of the gradient of a rollout of 32 questions, which are eight fours: the square of its mean,
    without the noise of this sample, and its variance."""
    variance = vectors.var(0).sum()
    return vectors.mean(0).square().sum() - variance / len(vectors), variance / 8


def signals(model, batch, now, args):
    """Of each surrogate's gradient of a rollout of 32 questions, on the old answers: the squared
    mean as a share of the mean square (1 without noise, 0 without signal); and the cosine with the
    mean gradient on answers of the current policy, which have a ratio of 1."""
    (true,) = group_gradients(model, now, {"": SURROGATES["weight 1"]}, args).values()
    length = square_and_noise(true)[0].sqrt()
    found = {}
    for name, vectors in group_gradients(model, batch, SURROGATES, args).items():
        square, noise = square_and_noise(vectors)
        found[f"signal, {name}"] = (square / (square + noise + 1e-9)).item()
        along = vectors.mean(0) @ true.mean(0) / length
        found[f"cosine, {name}"] = (along / (square + noise + 1e-9).sqrt()).item()
    return found


def run(seed, network, steps=6, groups=128, warm=make.STEPS):
    """GRPO (β 0), on answers of many lengths. In its last rollout we look after 1, 4 and 16 epochs
    at new answers of the policy before this rollout, and at answers of the policy of that time."""
    args = grpo_llm.Args(beta=0.0, update_epochs=EPOCHS[-1], seed=seed)
    folder, fresh, seen, updates = start(network, warm), {}, [], []
    tokenizer = load(folder)[1]

    def each_step(step, model, metrics):
        if step == steps - 1:
            fresh.update(answers(model, tokenizer, f"fresh {seed}", groups, args))

    def train_minibatch(model, *rest, own=grpo_llm.train_minibatch):
        metrics = own(model, *rest)
        if fresh:
            updates.append(1)
            if len(updates) in [epochs * args.minibatches for epochs in EPOCHS]:
                with torch.random.fork_rng():
                    now = answers(model, tokenizer, f"now {seed} {len(seen)}", 2 * groups, args)
                seen.append(factors(model, fresh, args) | signals(model, fresh, now, args))
        return metrics

    with patch.object(grpo_llm, "train_minibatch", train_minibatch):
        train(grpo_llm, args, steps, each_step, folder)
    found = {f"{name}, by epoch": [each[name] for each in seen] for name in seen[0]}
    return found | {name: mean([each[name] for each in seen]) for name in seen[0]}


JOBS = started()
FACTORS = {length: ({}, f"factor, {length}") for length in LENGTHS}
SIGNALS = {form: ({}, f"signal, {form}") for form in SURROGATES}
COSINES = {form: ({}, f"cosine, {form}") for form in SURROGATES}
GRPO, GSPO, ONE = "GRPO, no clip", "GSPO, no clip", "weight 1"
TESTS = [
    [
        Contrast("long answers: Var(r) / Var(s)", FACTORS["long"], None, log2(9), factor=True),
        Contrast("this, over short answers'", FACTORS["long"], FACTORS["short"], 1, factor=True),
        Contrast("signal without a clip: GSPO − GRPO", SIGNALS[GSPO], SIGNALS[GRPO], 0.05),
        Contrast("signal without a clip: GSPO − weight 1", SIGNALS[GSPO], SIGNALS[ONE], 0.05),
    ],
    [
        Contrast("signal with the clips: GSPO − GRPO", SIGNALS["GSPO"], SIGNALS["GRPO"], 0.05),
        Contrast("cosine without a clip: GSPO − GRPO", COSINES[GSPO], COSINES[GRPO], 0.05),
        Contrast("cosine without a clip: GSPO − weight 1", COSINES[GSPO], COSINES[ONE], 0.05),
    ],
]


def draw(runs):
    title = "Token ratios and their mean over an answer, without a clip"
    page, axes = figure(title, 3.1, 1, 2)
    looks = {"GSPO's s": (GSPO, "GSPO"), "weight 1": (ONE, "RLOO"), "GRPO's r": (GRPO, "GRPO")}
    for panel, (name, title) in zip(axes, TITLES.items(), strict=True):
        lines = {}
        for label, (form, algorithm) in looks.items():
            lines[label] = values(runs, ({}, f"{name}, {form}, by epoch")), algorithm, SOLID
        curves(panel, EPOCHS, lines)
        panel.set(xscale="log", title=title, xlabel="epochs over the rollout")
        plain(panel.xaxis, EPOCHS)
    return page


CLAIM = (
    "Ratios of tokens are mostly noise; the geometric mean over an answer has less, and its "
    "gradient more signal."
)
SOURCE = "[GSPO](https://arxiv.org/abs/2507.18071), sections 3 and 4"
FORMER = "as claimed / opposite / not seen; of interest / too small / open"
EXPERIMENT = Experiment(
    run, JOBS, TESTS, draw, {"steps": 2, "groups": 8, "warm": 30}, CLAIM, SOURCE, FORMER
)

if __name__ == "__main__":
    EXPERIMENT.main()

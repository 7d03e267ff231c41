"""Token ratios and their geometric mean over an answer, while GRPO uses a rollout many times."""

import random
from math import log2
from unittest.mock import patch

import torch
from lab import Contrast, Experiment, mean, train, values
from llm_parts import load, started, warm_start
from pictures import DASHED, DOTTED, SOLID, curves, figure, plain

import grpo_llm
import gspo_llm

WIDE = {"clip_low": 1e9, "clip_high": 1e9}
SURROGATES = {
    "GRPO": (grpo_llm, grpo_llm.Args()),
    "GSPO": (gspo_llm, gspo_llm.Args()),
    "GRPO, no clip": (grpo_llm, grpo_llm.Args(**WIDE)),
    "GSPO, no clip": (gspo_llm, gspo_llm.Args(**WIDE)),
}
LENGTHS = {"short": (1, 8), "middle": (8, 16), "long": (16, 99)}  # tokens: from, below
EPOCHS = [1, 4, 16]


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


def signals(model, batch, args):
    """The squared mean of each surrogate's gradient, as a share of the mean square of the gradient
    of a rollout of 32 questions: 1 without noise, 0 without signal."""
    found = {name: [] for name in SURROGATES}
    for i in range(0, len(batch["mask"]), args.group_size):
        group = grpo_llm.take_rows(batch, slice(i, i + args.group_size))
        logprobs = grpo_llm.token_logprobs(model, group, args.temperature)
        inputs = [group[name] for name in ("old_logprobs", "advantages", "mask")]
        weights = grpo_llm.token_weights(group["mask"], args)
        for name, (script, bounds) in SURROGATES.items():
            objective, _ = script.surrogate(logprobs, *inputs, bounds)
            objective = (weights * objective).sum()
            parts = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
            found[name].append(torch.cat([part.flatten() for part in parts]))
    shares = {}
    for name, vectors in found.items():
        vectors = torch.stack(vectors)
        variance = vectors.var(0).sum()
        square = vectors.mean(0).square().sum() - variance / len(vectors)  # unbiased
        shares[f"signal, {name}"] = (square / (square + variance / 32 + 1e-9)).item()
    return shares


def run(seed, start, steps=6, groups=256, warm=400):
    """GRPO (β 0), on answers of many lengths. In its last rollout we look after 1, 4 and 16 epochs
    at new answers that the policy before this rollout has given: none of them is trained on."""
    args = grpo_llm.Args(beta=0.0, update_epochs=EPOCHS[-1], seed=seed, max_new_tokens=32)
    folder, fresh, seen, updates = warm_start("meander", start, steps=warm), {}, [], []

    def each_step(step, model, metrics):
        if step == steps - 1:
            rng, (_, tokenizer) = random.Random(f"fresh {seed}"), load(folder)
            problems = [grpo_llm.make_sum(rng) for _ in range(groups)]
            batch, _, rewards = grpo_llm.rollout(model, tokenizer, problems, 8, 1.0, args)
            fresh.update(batch, advantages=grpo_llm.compute_advantages(rewards, args).flatten())
            fresh["old_logprobs"] = grpo_llm.batch_logprobs(model, batch, args)

    def train_minibatch(model, *rest, own=grpo_llm.train_minibatch):
        metrics = own(model, *rest)
        if fresh:
            updates.append(1)
            if len(updates) in [epochs * args.minibatches for epochs in EPOCHS]:
                seen.append(factors(model, fresh, args) | signals(model, fresh, args))
        return metrics

    with patch.object(grpo_llm, "train_minibatch", train_minibatch):
        train(grpo_llm, args, steps, each_step, folder)
    found = {f"{name}, by epoch": [each[name] for each in seen] for name in seen[0]}
    return found | {name: mean([each[name] for each in seen]) for name in seen[0]}


JOBS = started(24)
FACTORS = {length: ({}, f"factor, {length}") for length in LENGTHS}
SIGNALS = {form: ({}, f"signal, {form}") for form in SURROGATES}
KEPT, LOST = SIGNALS["GSPO, no clip"], SIGNALS["GRPO, no clip"]
LONG, SHORT = FACTORS["long"], FACTORS["short"]
TESTS = [
    [
        Contrast("long answers: Var(r) / Var(s)", LONG, None, log2(9), factor=True),
        Contrast("this: long over short answers", LONG, SHORT, 1, factor=True),
        Contrast("signal without a clip: GSPO − GRPO", KEPT, LOST, 0.05),
    ],
    [Contrast("signal with the clips: GSPO − GRPO", SIGNALS["GSPO"], SIGNALS["GRPO"], 0.05)],
]


def draw(runs):
    title = "The mean of an answer's ratios varies far less, as a mean does;\n"
    title += "without a clip its gradient repeats itself better"
    page, (factor, signal) = figure(title, 3.3, 1, 2)
    for panel, title in ((factor, "Var(r) over Var(s)"), (signal, "signal in the gradient")):
        panel.set(xscale="log", title=title, xlabel="epochs over the rollout")
    factor.set_yscale("log")
    lines = {}
    for length, dash in zip(LENGTHS, (DOTTED, DASHED, SOLID), strict=True):
        lines[length] = 2 ** values(runs, ({}, f"factor, {length}, by epoch")), "GSPO", dash
    curves(factor, EPOCHS, lines)
    plain(factor.yaxis, [1, 4, 16, 64])
    lines = {}
    for form in SURROGATES:
        dash = DASHED if "no clip" in form else SOLID
        label = form.replace(", ", ",\n")
        lines[label] = values(runs, ({}, f"signal, {form}, by epoch")), form[:4], dash
    curves(signal, EPOCHS, lines)
    for panel in (factor, signal):
        plain(panel.xaxis, EPOCHS)
    return page


EXPERIMENT = Experiment(run, JOBS, TESTS, draw, small={"steps": 2, "groups": 4, "warm": 30})

if __name__ == "__main__":
    EXPERIMENT.main()

"""How many passes over one rollout each kind of ratio bears, on the tiny language model.

passes alone; cures.py runs it.
"""

from statistics import median
from unittest.mock import patch

from bench import COLORS, train
from cures_llm_tokens import first_above, known
from cures_tools import Experiment, band, dots, grid, select, titles

import cispo_llm
import dapo_llm
import grpo_llm
import gspo_llm
import rloo_llm

SEEDS = range(1, 6)
PASSES = [1, 4, 8, 16]
RATE, HIGH_RATE = 4e-4, 1.2e-3  # the scripts' own, and three times as much


def unclipped(logprobs, old_logprobs, advantages, mask, args):
    """For an objective without a clip: no token is clipped."""
    return mask < 0


def clip_alone(logprobs, old_logprobs, advantages, mask, args):
    """RLOO's objective, but for the tokens that GRPO's clip would take: a clip, and no ratio."""
    inputs = (logprobs, old_logprobs, advantages, mask, args)
    return rloo_llm.surrogate(*inputs) * ~dapo_llm.is_clipped(*inputs)  # DAPO's text is GRPO's


NO_CLIP = {"clip_low": 1e9, "clip_high": 1e9}
PLAIN_DAPO = {"max_resample": 1, "overlong_cache": 0}  # its clip, and its mean over all tokens
METHODS = {  # the script, its flags, and the functions put in the place of its own
    "RLOO, 1 step": (rloo_llm, {"minibatches": 1}, {}),
    "RLOO": (rloo_llm, {}, {}),
    "GRPO, no clip": (grpo_llm, NO_CLIP, {}),
    "GRPO": (grpo_llm, {}, {}),
    "DAPO, symmetric": (dapo_llm, PLAIN_DAPO | {"clip_high": 0.2}, {}),
    "DAPO": (dapo_llm, PLAIN_DAPO, {}),
    "GSPO": (gspo_llm, {}, {}),
    "CISPO": (cispo_llm, {}, {}),
    "RLOO in GRPO": (
        grpo_llm,
        {},
        {"surrogate": rloo_llm.surrogate, "is_clipped": unclipped},
    ),
    "GRPO, no ratio": (
        grpo_llm,
        {},
        {"surrogate": clip_alone, "is_clipped": dapo_llm.is_clipped},
    ),
    "DAPO in GRPO": (grpo_llm, {"clip_high": 0.28}, {}),
    "CISPO in GRPO": (
        grpo_llm,
        {},
        {"surrogate": cispo_llm.surrogate, "is_clipped": cispo_llm.is_clipped},
    ),
}
SCRIPTS = list(METHODS)[1:8]
IN_GRPO = list(METHODS)[8:]


def mean(values):
    """The mean, or None of nothing."""
    return sum(values) / len(values) if values else None


def distance(script, model, batch, args):
    """KL(π_old ‖ π) of a token, on the answers trained on; None where no group has a signal."""
    rows = batch["advantages"].nonzero()[:, 0]
    if len(rows) == 0:
        return None
    trained = script.take_rows(batch, rows)
    logprobs = script.batch_logprobs(model, trained, args)
    return script.token_mean(script.kl_k3(trained["old_logprobs"], logprobs), trained).item()


def run_passes(method, passes, seed, learning_rate=RATE, steps=40, prompts=32, tested=128):
    """Claim: a rollout serves many passes if the ratio is kept in bounds.

    Changed: the script, and the passes over each rollout, of four gradient steps each. The same for
    all: β 0, rollouts, and one draw for each; no penalty for length. What still differs besides the
    surrogate: RLOO divides no advantage by std, and RLOO, DAPO and CISPO take the mean over all
    tokens, GRPO and GSPO first over each answer. So "X in GRPO" is grpo_llm with X's surrogate (or
    its clip) and nothing else of X, and "GRPO, no ratio" has the clip without the ratio: each token
    has RLOO's gradient, or none where GRPO's clip would take it. "RLOO, 1 step" is RLOO as it is.
    Measured: pass@1 and pass@8 on held-out sums at the end; KL(π_old ‖ π) of a token after the last
    step on a rollout; tokens clipped; rollouts until half of the answers are right; the entropy of
    the last five rollouts.
    """
    script, flags, changed = METHODS[method]
    options = {"beta": 0.0, "minibatches": 4, "prompts_per_step": prompts} | flags
    args = script.Args(seed=seed, steps=steps, learning_rate=learning_rate, **options)
    args.update_epochs, args.eval_problems = passes, tested
    update, moved = script.update, []

    def update_and_measure(model, optimizer, batch, rng, args):
        logged = update(model, optimizer, batch, rng, args)
        moved.append(distance(script, model, batch, args))
        return logged

    with patch.multiple(script, update=update_and_measure, **changed):
        result = train(script, args)
    return {
        "pass@1": result["pass@1"],
        "pass@8": result["pass@8"],
        "best reward": max(result["reward"]),
        "rollouts to 0.5": first_above(result["reward"], 0.5),
        "KL of a rollout": median(known(moved)) if known(moved) else None,
        "largest KL": max(known(moved), default=None),
        "clipped": mean(known(result.get("clip_ratio", []))),
        "entropy at the end": mean(result["entropy"][-5:]),
        "rollouts": len(result["reward"]),
    }


ALONE = {  # GRPO's script with another surrogate: what stands below its column
    "RLOO in GRPO": "neither\n(RLOO)",
    "GRPO, no clip": "ratio\nalone",
    "CISPO in GRPO": "ratio, cut\n(CISPO)",
    "GRPO, no ratio": "clip\nalone",
    "GRPO": "both\n(GRPO)",
    "DAPO in GRPO": "wider\n(DAPO)",
    "GSPO": "of answers\n(GSPO)",
}


def name_ends(axes, x, ends, gap=0.065):
    """Each line's name beside its end, in its colour; the names at least `gap` apart, below 1."""
    ranked = sorted(ends, key=ends.get)
    places = [ends[name] for name in ranked]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    places[-1:] = [min(place, 1.0) for place in places[-1:]]
    for i in reversed(range(len(places) - 1)):
        places[i] = min(places[i], places[i + 1] - gap)
    for name, y in zip(ranked, places, strict=True):
        axes.text(x, y, name, color=COLORS[name], fontsize=8, va="center")


def draw_passes(figure, results):
    left, right = figure.subplots(1, 2, sharey=True)
    results = [(settings, run) for settings, run in results if "learning_rate" not in settings]
    ends = {}
    for method in SCRIPTS:
        groups = {p: select(results, method=method, passes=p) for p in PASSES}
        groups = {p: [run["pass@1"] for run in runs] for p, runs in groups.items() if runs}
        if groups:
            band(left, list(groups), list(zip(*groups.values(), strict=True)), COLORS[method])
            ends[method] = median(groups[max(groups)])
    name_ends(left, PASSES[-1] + 0.4, ends)
    left.set_xlim(0.6, PASSES[-1] + 0.1)
    left.set_xticks(PASSES)
    left.set_ylim(0, 1.03)
    names = []
    for i, (method, name) in enumerate(ALONE.items()):
        runs = select(results, method=method, passes=PASSES[-1])
        if runs:
            dots(right, i, [run["pass@1"] for run in runs], COLORS[method])
            name += f"\n{median(run['KL of a rollout'] for run in runs):.2g}"
        names.append(name)
    right.set_xticks(range(len(names)), names)
    titles(left, "With no clip, passes ruin the policy", "passes over each rollout", "pass@1")
    titles(right, "16 passes: the clip alone is enough", "KL of a rollout, nats a token")


EXPERIMENTS = [
    Experiment(
        name="passes",
        claim="The clipped ratio lets one rollout serve many passes.",
        measure="pass@1 on 128 held-out sums after 40 rollouts, by passes over each; 16 passes "
        "with the surrogate alone changed.",
        run=run_passes,
        jobs=[
            *grid(SEEDS, method=["RLOO, 1 step"], passes=[1]),
            *grid(SEEDS, method=SCRIPTS, passes=PASSES),
            *grid(SEEDS, method=IN_GRPO, passes=[16]),
            *grid(SEEDS[:3], method=["RLOO, 1 step"], passes=[1], learning_rate=[HIGH_RATE]),
            *grid(SEEDS[:3], method=SCRIPTS + IN_GRPO, passes=[8], learning_rate=[HIGH_RATE]),
        ],
        smoke=[
            {"method": name, "passes": 2, "seed": 1, "steps": 1, "prompts": 4, "tested": 2}
            for name in ("RLOO", "DAPO", "GRPO, no ratio", "CISPO in GRPO")
        ],
        draw=draw_passes,
        size=(10, 3.4),
    ),
]

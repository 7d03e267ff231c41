"""The experiments on which tokens count, how far each may move, and who says what was expected."""

import fcntl
import inspect
import math
import time
import zlib
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import ppo_llm
import torch
from bench import COLORS, CPU, GREY, SKY, evaluate, train
from cures_tools import Experiment, band, dots, grid, labels, select, smooth, titles

import cispo_llm
import dapo_llm
import grpo_llm
import gspo_llm
import rloo_llm

SEEDS = [1, 2, 3, 4, 5]

# ----------------------------------------------------------------------------- Other warm starts

DEMONSTRATION = grpo_llm.demonstration


def guess_more(question, guess_rate, rng, slope):
    """The script's demonstrations, but guesses grow `slope` times as fast, up to 99.9 %."""
    return DEMONSTRATION(question, min(slope * guess_rate, 0.999), rng)


def meander(question, guess_rate, rng):
    """The script's demonstrations, but each running total may be said several times."""
    totals, marker, answer = DEMONSTRATION(question, guess_rate, rng).partition("#")
    said = []
    for total in totals.split(","):
        said.append(total)
        while rng.random() < 0.5 and len(said) < 8:
            said.append(total)
    return ",".join(said) * bool(totals) + marker + answer


STYLES = {
    "guess 0.97": partial(guess_more, slope=0.97 / 0.85),
    "guess 0.999": partial(guess_more, slope=1.2 / 0.85),  # the last sixth of the demonstrations
    "meander": meander,
}


def warm_start(style, steps=1000):
    """The tiny model after other demonstrations, and its tokenizer; made once and kept."""
    if style == "guess 0.85":
        return grpo_llm.load_policy(grpo_llm.Args(), CPU)
    parts = (grpo_llm.make_tiny_model, DEMONSTRATION, grpo_llm.make_sum, guess_more, meander)
    recipe = [inspect.getsource(part) for part in parts]
    key = zlib.crc32(str([style, steps, *recipe, torch.__version__]).encode())
    folder = Path(torch.hub.get_dir()) / f"policy-gradients-cures-{key:08x}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several runs, one makes it
        if not folder.exists():
            with patch.object(grpo_llm, "demonstration", STYLES[style]):
                grpo_llm.save_model(*grpo_llm.make_tiny_model(steps), folder)
    return grpo_llm.load_policy(grpo_llm.Args(model=str(folder)), CPU)


@torch.no_grad()
def share_worked_out(model, tokenizer):
    """The policy's probability, mean over 128 held-out sums, not to begin with the bare answer."""
    sums = grpo_llm.load_data(grpo_llm.Args(eval_problems=128))[1]
    prompts = [f"{question}=" for question, _ in sums]
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    rows = (inputs["input_ids"], inputs["attention_mask"])
    logits = grpo_llm.forward(model, *rows, cache=None, logits_to_keep=1)
    guesses = logits[:, -1].softmax(-1)[:, tokenizer.convert_tokens_to_ids("#")]
    return 1 - guesses.mean().item()


def first_above(values, level):
    """How many rollouts until the mean of three is at this level; None if never."""
    means = smooth(values)
    reached = [i + 1 for i, mean in enumerate(means) if i >= 2 and mean >= level]
    return reached[0] if reached else None


def known(values):
    return [value for value in values if value is not None]


# ----------------------------------------------------------------------------------- Clip-higher

CLIPS = {0.2: COLORS["GRPO"], 0.28: COLORS["DAPO"], 0.5: SKY}


def run_cliphigher(clip_high, seed, minibatches=4, passes=1, steps=24, warm=1000):
    """Claim: a symmetric clip lets likely tokens grow but not rare ones, and entropy collapses.

    Changed: DAPO's --clip-high alone. Guessing is the habit of 97 % at the start. With one pass
    of DAPO's 4 minibatches the clip hardly acts; with 16 it does, with 16 passes more so. Measured
    on held-out sums: the probability of the rare style, pass@8; on the rollouts: entropy and the
    share clipped.
    """
    model, tokenizer = warm_start("guess 0.97", warm)
    args = dapo_llm.Args(clip_high=clip_high, seed=seed, steps=steps)
    args.minibatches, args.update_epochs = minibatches, passes
    worked, best = [share_worked_out(model, tokenizer)], []

    def each_step(step, policy, metrics):
        worked.append(share_worked_out(policy, tokenizer))
        if step % 4 == 0:
            best.append(evaluate(dapo_llm, policy, tokenizer, args, 64)["pass@8"])

    result = train(dapo_llm, args, each_step=each_step, model=(model, tokenizer))
    return {
        "rollouts to style 0.5": first_above(worked[1:], 0.5),
        "rare style after 5": worked[min(5, steps)],
        "clipped": sum(known(result["clip_ratio"])) / steps,
        "entropy at the end": result["entropy"][-1],
        "lowest pass@8": min(best, default=0.0),
        "pass@8": result["pass@8"],
        "pass@1": result["pass@1"],
        "worked out": worked,
        "entropy": result["entropy"],
        "pass@8 so far": best,
    }


def draw_cliphigher(figure, results):
    left, right = figure.subplots(1, 2)
    most = max(settings.get("passes", 1) for settings, _ in results)
    for clip, color in CLIPS.items():
        runs = select(results, clip_high=clip, passes=most)
        if runs:
            x = range(len(runs[0]["worked out"]))
            band(left, x, [run["worked out"] for run in runs], color)
            band(right, x[1:], [run["entropy"] for run in runs], color)
    names = {f"ε_high {clip}": color for clip, color in CLIPS.items()}
    labels(left, names, 0.98, 0.05, names)
    titles(left, "16 passes: the rare style, working it out", "rollouts", "probability")
    titles(right, "A wider clip keeps no more entropy", "rollouts", "nats a token")


# ----------------------------------------------------------------------------------------- Ratio

LENGTHS = [2, 4, 6, 9, 13, 18, 32]  # bounds of the groups of answers, both inclusive and exclusive


def ratio_spread(log_ratio, mask):
    """Of one rollout: how far tokens, whole answers and their means have moved; how many far."""
    whole = log_ratio.sum(1)
    kinds = {"token": log_ratio[mask > 0], "sum": whole, "mean": whole / mask.sum(1)}
    found = {name: values.std() for name, values in kinds.items()}
    for owner, script in (("GRPO's", grpo_llm), ("GSPO's", gspo_llm)):
        args = script.Args()
        low, high = math.log(1 - args.clip_low), math.log(1 + args.clip_high)
        for name, values in kinds.items():
            beyond = (values < low) | (values > high)
            found[f"{name} beyond {owner} bounds"] = beyond.float().mean()
    return {name: value.item() for name, value in found.items()}


def by_length(log_ratio, mask):
    """Mean squares by the length of the answer: of token, sum and mean; None if fewer than 20."""
    lengths, rows = mask.sum(1), []
    for low, high in zip(LENGTHS[:-1], LENGTHS[1:], strict=True):
        inside = (lengths >= low) & (lengths < high)
        if inside.sum() < 20:
            rows.append([None] * 4)
            continue
        chosen, length = log_ratio[inside], lengths[inside]
        token = chosen[mask[inside] > 0].var()
        whole = chosen.sum(1)
        row = [length.mean(), token, whole.var(), (whole / length).var()]
        rows.append([value.item() for value in row])
    return rows


def run_ratio(passes, seed, before=8, measured=8, warm=1000):
    """Claim: token ratios are mostly noise; the mean over a completion varies far less.

    GRPO (β 0) trains a model with answers of many lengths; nothing is changed. Measured in some
    rollouts on the way, after each pass, over all answers that are trained on: the spread of
    log π − log π_old of a token, of its sum over the answer (the answer's probability ratio) and
    of its mean (GSPO's), by length; the shares beyond the bounds of GRPO and of GSPO, as their
    scripts have them; how far tokens of one answer move together, and how far with its advantage.
    """
    model, tokenizer = warm_start("meander", warm)
    args = grpo_llm.Args(beta=0.0, update_epochs=passes, seed=seed, max_new_tokens=32)
    state, spreads, ratios = {"step": 1}, [], []
    update, train_minibatch = grpo_llm.update, grpo_llm.train_minibatch

    def keep_batch(policy, optimizer, batch, rng, args):
        state["batch"] = grpo_llm.take_rows(batch, batch["advantages"].nonzero()[:, 0])
        state["updates"] = 0
        return update(policy, optimizer, batch, rng, args)

    def measure(policy, optimizer, minibatch, args):
        metrics = train_minibatch(policy, optimizer, minibatch, args)
        state["updates"] += 1
        if state["step"] > before and state["updates"] % args.minibatches == 0:
            batch = state["batch"]
            log_ratio = grpo_llm.batch_logprobs(policy, batch, args) - batch["old_logprobs"]
            spreads.append(ratio_spread(log_ratio, batch["mask"]))
            if state["updates"] == passes * args.minibatches:
                kept = {name: batch[name] for name in ("mask", "ended", "advantages")}
                ratios.append(kept | {"log_ratio": log_ratio})
        return metrics

    def each_step(step, policy, metrics):
        state["step"] = step + 1

    with patch.multiple(grpo_llm, update=keep_batch, train_minibatch=measure):
        train(grpo_llm, args, before + measured, each_step, (model, tokenizer))
    advantages = torch.cat([each.pop("advantages") for each in ratios])
    joined = grpo_llm.join(ratios)
    log_ratio, mask = joined["log_ratio"], joined["mask"]
    curves = {n: mean_by_pass([s[n] for s in spreads], passes) for n in spreads[0]}
    last = {name: values[-1] for name, values in curves.items()}
    return last | {
        "correlation of tokens": token_correlation(log_ratio, mask),
        **with_advantage(log_ratio, mask, advantages),
        "by length": by_length(log_ratio, mask),
        **{f"{name}, by pass": values for name, values in curves.items()},
    }


def with_advantage(log_ratio, mask, advantages):
    """The correlation of the log-ratio with the advantage: of tokens, and of answers' means."""
    each = advantages[:, None].expand_as(mask)[mask > 0]
    tokens = torch.stack([log_ratio[mask > 0], each])
    means = torch.stack([log_ratio.sum(1) / mask.sum(1), advantages])
    return {
        "token with A": torch.corrcoef(tokens)[0, 1].item(),
        "mean with A": torch.corrcoef(means)[0, 1].item(),
    }


def mean_by_pass(values, passes):
    """The mean over rollouts after each pass: values in the order of their measurement."""
    return [sum(values[k::passes]) / len(values[k::passes]) for k in range(passes)]


def token_correlation(log_ratio, mask):
    """Between two tokens of one answer: 0 if each moves on its own, 1 if all move together."""
    centred = (log_ratio - log_ratio.sum() / mask.sum()) * mask
    pairs = (centred.sum(1) ** 2 - (centred**2).sum(1)).sum()
    lengths = mask.sum(1)
    number = (lengths * (lengths - 1)).sum()
    return (pairs / number / ((centred**2).sum() / mask.sum())).item()


def draw_ratio(figure, results):
    left, right = figure.subplots(1, 2)
    runs = [result for _, result in results]
    colors = {"whole answer": GREY, "token": COLORS["GRPO"], "mean of answer": COLORS["GSPO"]}
    for column, color in enumerate((colors["token"], GREY, colors["mean of answer"]), 1):
        x, y = [], []
        for i in range(len(LENGTHS) - 1):
            rows = [run["by length"][i] for run in runs if run["by length"][i][0] is not None]
            if len(rows) == len(runs):
                x.append(sum(row[0] for row in rows) / len(rows))
                y.append([max(row[column], 0) ** 0.5 for row in rows])
        if x:
            band(left, x, [list(values) for values in zip(*y, strict=True)], color)
    left.set_yscale("log")
    left.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5], ["0.05", "0.1", "0.2", "0.5", "1", "2", "5"])
    left.minorticks_off()
    labels(left, colors, 0.03, 0.03, colors)
    owners = {"mean": "GSPO", "token": "GRPO"}
    for name, owner in owners.items():
        values = [run[f"{name} beyond {owner}'s bounds, by pass"] for run in runs]
        band(right, range(1, len(values[0]) + 1), values, COLORS[owner])
    names = {"answers beyond GSPO's": COLORS["GSPO"], "tokens beyond GRPO's": COLORS["GRPO"]}
    labels(right, names, 0.98, 0.44, names)
    right.set_ylim(0, 1)
    titles(left, "An answer's mean varies least", "tokens in the answer", "std of the log-ratio")
    titles(right, "But most are beyond GSPO's narrow bounds", "passes over the rollout", "share")


# -------------------------------------------------------------------------------------- Silenced

PROBABILITIES = [0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 1.001]
SILENCED = ["GRPO, no clip", "GRPO", "CISPO", "CISPO, GRPO's clip"]


GRPO_SURROGATE, GRPO_IS_CLIPPED = grpo_llm.surrogate, grpo_llm.is_clipped
GRPO_CLIP = grpo_llm.Args(clip_low=0.2, clip_high=0.2)


def clipped_surrogate(logprobs, old_logprobs, advantages, mask, args):
    """GRPO's, for a script that has no clip_low."""
    return GRPO_SURROGATE(logprobs, old_logprobs, advantages, mask, GRPO_CLIP)


def silencing(kept):
    """GRPO's is_clipped, once per micro-batch, that keeps the old probabilities of the silenced
    tokens, and of all praised ones."""

    def is_clipped(logprobs, old_logprobs, advantages, mask, args):
        clipped = GRPO_IS_CLIPPED(logprobs, old_logprobs, advantages, mask, GRPO_CLIP)
        praised = (advantages[:, None] > 0) & (mask > 0)
        blamed = (advantages[:, None] < 0) & (mask > 0)
        parts = {"up": clipped & praised, "down": clipped & blamed, "praised": praised}
        for name, tokens in parts.items():
            kept[name].append(old_logprobs[tokens].exp())
        return clipped

    return is_clipped


def count(probabilities):
    """How many of these tokens are in each bin of PROBABILITIES."""
    return torch.histogram(probabilities, torch.tensor(PROBABILITIES))[0].tolist()


def run_silenced(method, guess_rate, passes, seed, steps=40, warm=1000):
    """Claim: the clip silences rare tokens that matter most; CISPO keeps their gradient.

    Guessing is nearly complete at the start, and each rollout is passed over several times.
    Changed: the script; and, to tell what does it, GRPO without its clip, and CISPO with GRPO's
    surrogate in place of its own. No KL.
    Measured: rollouts until half of the answers are right; the old probabilities of the tokens
    that the clip silences, against those of all tokens of answers with a positive advantage.
    """
    script = {"G": grpo_llm, "C": cispo_llm}[method[0]]
    args = script.Args(beta=0.0, update_epochs=passes, seed=seed, steps=steps)
    if method == "GRPO, no clip":
        args.clip_low, args.clip_high = 1e9, 1e9
    kept = {"up": [torch.zeros(0)], "down": [torch.zeros(0)], "praised": [torch.zeros(0)]}
    changed = {"surrogate": script.surrogate}
    if method == "CISPO, GRPO's clip":
        changed["surrogate"] = clipped_surrogate
    if method in ("GRPO", "CISPO, GRPO's clip"):
        changed["is_clipped"] = silencing(kept)
    with patch.multiple(script, **changed):
        result = train(script, args, model=warm_start(f"guess {guess_rate}", warm))
    half = first_above(result["reward"], 0.5)
    found = {
        "rollouts to 0.5": half,
        "rollouts to 0.5, or 1 more than all": half or steps + 1,
        "reached": float(half is not None),
        "pass@1": result["pass@1"],
        "reward": result["reward"],
    }
    up, down, praised = (torch.cat(kept[name]) for name in ("up", "down", "praised"))
    if len(up):
        found |= {
            "silenced of praised": len(up) / len(praised),
            "median old probability, silenced": up.median().item(),
            "median old probability, praised": praised.median().item(),
            "silenced below 0.1": (up < 0.1).float().mean().item(),
            "praised below 0.1": (praised < 0.1).float().mean().item(),
            "silenced": count(up),
            "praised": count(praised),
            "silenced of the blamed": count(down),
        }
    return found


def draw_silenced(figure, results):
    left, right = figure.subplots(1, 2)
    rate = max(settings["guess_rate"] for settings, _ in results)
    names = [f"{low:g}–{min(high, 1):g}" for low, high in pairwise(PROBABILITIES)]
    for i in range(len(names)):
        runs = [run for run in select(results, method="GRPO", guess_rate=rate) if "praised" in run]
        values = [run["silenced"][i] / run["praised"][i] for run in runs if run["praised"][i] >= 20]
        if values:
            dots(left, i, values, COLORS["GRPO"])
    left.set_xticks(range(len(names)), names, rotation=30)
    for i, method in enumerate(SILENCED):
        runs = select(results, method=method, guess_rate=rate)
        if runs:
            last = len(runs[0]["reward"])
            never = last * 1.1
            values = [run["rollouts to 0.5"] or never for run in runs]
            dots(right, i, values, COLORS[method])
            right.axhline(last, color=GREY, linewidth=0.5, linestyle=":")
    right.set_xticks(range(len(SILENCED)), [name.replace(", ", ",\n") for name in SILENCED])
    titles(left, "GRPO's clip silences rare praised tokens", "probability before", "share")
    titles(right, f"To half right, from {rate:.1%} guesses", "", "rollouts (above the line: never)")


# ------------------------------------------------------------------------------ Critic or group?


def add_none(model, state, args):
    """In place of a critic: nothing is copied, and nothing trained."""


def expect_nothing(model, batch):
    """V = 0 everywhere, without a pass through a network."""
    return torch.zeros_like(batch["mask"])


def run_critic(method, seed, steps=40):
    """Claim: a critic is not worth its memory where the only reward comes at the end.

    RLOO, GRPO and PPO, four gradient steps a rollout, without KL; the number is PPO's λ. "no
    groups" draws 256 questions once each in place of 32 eight times; "no critic" leaves V at 0, so
    that the mean of the batch is all that is expected, and runs no network for it. Measured: reward
    by rollouts and by seconds of one core in training, held-out pass@1 at the end, bytes of
    weights, gradients and Adam's moments, and how much of the returns' variance the critic
    explains: when half of the answers are right, and at the end.
    """
    name, *rest = method.replace(",", "").split()
    script = {"RLOO": rloo_llm, "GRPO": grpo_llm, "PPO": ppo_llm}[name]
    args = script.Args(beta=0.0, minibatches=4, seed=seed, steps=steps)
    if name == "PPO":
        args.gae_lambda = float(rest[0])
    if "no groups" in method:
        args.prompts_per_step, args.group_size = 256, 1
    changes = nullcontext()
    if "no critic" in method:
        changes = patch.multiple(script, add_critic=add_none, token_values=expect_nothing)
    model, tokenizer = script.load_policy(args, CPU)
    explained, clock = [], [time.process_time()]

    def each_step(step, policy, metrics):
        clock.append(time.process_time())
        explained.append(metrics.get("explained_variance"))

    with changes:
        result = train(script, args, each_step=each_step, model=(model, tokenizer))
    seconds = [now - clock[0] for now in clock[1:]]
    half, most = (first_above(result["reward"], level) for level in (0.5, 0.9))
    found = {
        "pass@1": result["pass@1"],
        "rollouts to 0.5": half,
        "rollouts to 0.9": most,
        "seconds to 0.9": seconds[most - 1] if most else None,
        "seconds a rollout": seconds[-1] / steps,
        "megabytes": 16 * sum(p.numel() for p in model.parameters()) / 1e6,
        "reward": result["reward"],
        "seconds": seconds,
    }
    if hasattr(model, "critic"):
        found["explained at half right"] = sum(explained[half - 3 : half]) / 3 if half else None
        found["explained at the end"] = sum(explained[-10:]) / len(explained[-10:])
        found["explained"] = explained
    return found


CRITICS = ["RLOO, 4 steps", "GRPO", "PPO 1", "PPO 0.95", "PPO 0.95, no groups"]
CRITICS += ["PPO 1, no critic", "PPO 1, no critic, no groups"]


def draw_critic(figure, results):
    """All but RLOO and λ 0.95 with groups, whose lines lie on those of GRPO and λ 1."""
    left, right = figure.subplots(1, 2, sharey=True)
    hidden = ("RLOO, 4 steps", "PPO 0.95")
    shown = [name for name in CRITICS if select(results, method=name) and name not in hidden]
    labels(right, shown, 0.98, 0.05)
    for method in shown:
        runs = select(results, method=method)
        rewards = [smooth(run["reward"]) for run in runs]
        band(left, range(1, len(rewards[0]) + 1), rewards, COLORS[method])
        columns = zip(*(run["seconds"] for run in runs), strict=True)
        seconds = [sum(column) / len(column) for column in columns]
        band(right, seconds, rewards, COLORS[method])
    titles(left, "A critic saves no rollouts", "rollouts", "share of right answers")
    titles(right, "but costs time", "seconds of one core in training", "")


EXPERIMENTS = [
    Experiment(
        "cliphigher",
        "A symmetric clip lets likely tokens grow but not rare ones: ε_high > ε_low.",
        "DAPO, guessing the habit of 97 %: probability of the rare style, entropy, pass@8.",
        run_cliphigher,
        [
            *grid(SEEDS, clip_high=list(CLIPS), minibatches=[16]),
            *grid(SEEDS, clip_high=list(CLIPS), passes=[16], steps=[16]),
        ],
        [{"clip_high": 0.28, "passes": 2, "seed": 1, "steps": 2, "warm": 2}],
        draw_cliphigher,
    ),
    Experiment(
        "ratio",
        "Token ratios are mostly noise; the mean over a completion varies far less.",
        "GRPO, answers of many lengths: spread of log-ratios of tokens, answers and their means.",
        run_ratio,
        grid(SEEDS, passes=[16]),
        [{"passes": 2, "seed": 1, "before": 0, "measured": 1, "warm": 10}],
        draw_ratio,
    ),
    Experiment(
        "silenced",
        "The clip takes the gradient from rare tokens that move fastest; CISPO keeps it.",
        "Guessing nearly complete: rollouts to half right; which tokens GRPO's clip silences.",
        run_silenced,
        grid(SEEDS, method=SILENCED, guess_rate=[0.999], passes=[8]),
        [
            {"method": "GRPO", "guess_rate": 0.85, "passes": 2, "seed": 1, "steps": 1},
            {
                "method": "CISPO, GRPO's clip",
                "guess_rate": 0.85,
                "passes": 2,
                "seed": 1,
                "steps": 1,
            },
        ],
        draw_silenced,
    ),
    Experiment(
        "critic",
        "Where the only reward comes at the end, a critic is not worth its memory.",
        "PPO on the language model against RLOO and GRPO: reward by rollouts, seconds; memory.",
        run_critic,
        grid(SEEDS, method=list(CRITICS)),
        [
            {"method": "PPO 0.95, no groups", "seed": 1, "steps": 2},
            {"method": "PPO 1, no critic", "seed": 1, "steps": 2},
            {"method": "GRPO", "seed": 1, "steps": 2},
        ],
        draw_critic,
    ),
]

"""One rollout, five algorithms: writes a page that shows what each algorithm does to each token.

    python tests/learn/rollout_page.py

The tiny model answers the questions of one training step. Then each algorithm trains a copy of it
on these completions by its own train_minibatch. The page has a slider for the steps, and shows each
token's π_θ, ratio and gradient, the derivative of the whole rollout's J by log π_θ.

The algorithms differ in J alone: they get the same completions, minibatches, number of steps and
learning rate. So there is no KL penalty (β is 0), no warm-up, and DAPO draws no group again.
"""

import copy
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import tyro
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))
import cispo_llm
import dapo_llm
import grpo_llm
import gspo_llm
import rloo_llm

SCRIPTS = [rloo_llm, grpo_llm, dapo_llm, gspo_llm, cispo_llm]


def args_of(script, flags):
    """The algorithm's own defaults, except for these flags, as far as it has them. The slider goes
    to the end of eight epochs."""
    args = script.Args(**{name: x for name, x in flags.items() if hasattr(script.Args, name)})
    args.beta, args.update_epochs = 0.0, flags.get("update_epochs", 8)
    args.num_minibatches = flags.get("num_minibatches", 4)  # also of RLOO, which has no such flag
    return args


def explain(script, args):
    """What the page says of an algorithm. `why` has three reasons for a gradient: the clip does not
    act, it acts and A > 0, it acts and A < 0; the page replaces {s}. `ends` are the ratios beyond
    which the clip acts, if A > 0, and if A < 0."""
    low, high = 1 - getattr(args, "clip_low", 0), 1 + getattr(args, "clip_high", 0)
    right, wrong, act, x, ends = "A\xa0>\xa00", "A\xa0<\xa00", "stopped", "r", [high, low]
    norms = {"response": "this one's", "constant": args.max_new_tokens, "": None}
    norm = norms[getattr(args, "length_norm", "")]
    weights = f"mean length / {norm}" if norm else "1, for all tokens"
    if script is rloo_llm:
        formula, why, ends, curve = "A log π_θ", [" = weight × A"], [None, None], "No clip"
        note = "A is R minus the others' mean. No ratio and no clip: "
        note += "a push stays the same, however far a token moves."
    elif script is cispo_llm:
        capped = f" = weight × {high:g} × A: capped, as r > {high:g}"
        act, ends, curve = "capped", [high, high], "Grey: capped"
        formula, why = f"sg[min(r, {high:g})] A log π_θ", [" = weight × r × A", capped, capped]
        note = f"The ratio weights a token's push, up to {high:g}. "
        note += "A push may fade or be capped, but no token is stopped."
    else:
        curve = "Grey: stopped"
        note = "A is (R − mean) / std. The clip stops a token once r is "
        if script is dapo_llm:
            note = "GRPO with more room upwards. The clip stops a token once r is "
        if script is gspo_llm:
            note = "All tokens stop together, by s, the geometric mean of r: "
            x, ends, curve = "s", [None, None], "The clip acts by s"
        note += f"above {high:g} if {right}, below {low:g} if {wrong}."
        formula, more = f"min({x} A, clip({x}, {low:g}, {high:g}) A)", "; s = {s}" * (x == "s")
        why = [f" = weight × {x} × A{more}", f": clipped, as {x} > {high:g} and {right}{more}"]
        why += [f": clipped, as {x} < {low:g} and {wrong}{more}"]
    texts = {"L": formula, "weights": weights, "note": note, "why": why}
    return texts | {"act": act, "ends": ends, "curve": curve}


def shown_steps(args):
    """After how many steps the page shows the models: after the first four, one by one, then after
    1, 2, 4, 8, … epochs, and at the end."""
    epochs = [2**k for k in range(args.update_epochs.bit_length())] + [args.update_epochs]
    ends = [args.num_minibatches * epoch for epoch in epochs]
    return sorted({*range(min(5, ends[-1])), *ends})


def room(args):
    """How many tokens may be shown: with 120 bytes per token and step, about 430 kB."""
    return 3600 // len(shown_steps(args))


def choose_groups(rewards, lengths, args):
    """As many groups of unequal rewards as there is room for, first those whose rewards differ most
    and whose completions have a medium length: rewards, lengths (P, G) → list of indices."""
    spread, middle = rewards.std(1), lengths.median()
    score = spread / spread.max() - (lengths.mean(1) - middle).abs() / middle
    mixed = [g for g in score.argsort(descending=True).tolist() if spread[g] > 1e-6]
    if not mixed:
        sys.exit("no question has completions of unequal rewards: raise --prompts-per-step")
    fit = (lengths[mixed].sum(1).cumsum(0) <= room(args)).sum()
    return mixed[: max(1, fit)]


def digits(tensor, lengths):
    """Three digits of each row's first numbers: (B, T) → a list of lists."""
    rows = zip(tensor.tolist(), lengths, strict=True)
    return [[float(f"{x:.3g}") if x % 1 else int(x) for x in row[:n]] for row, n in rows]


def look(script, policy, batch, args):
    """What the page shows of these completions after this step: lists, one per completion."""
    with torch.no_grad():
        logprobs = script.token_logprobs(policy, batch, args)
    logprobs.requires_grad_()
    old, advantages, mask = (batch[name] for name in ("old_logprobs", "advantages", "mask"))
    if script is rloo_llm:
        objective, clipped = script.surrogate(logprobs, advantages), torch.zeros_like(mask)
    else:
        objective, clipped = script.surrogate(logprobs, old, advantages, mask, args)
    (gradient,) = torch.autograd.grad((batch["weights"] * objective).sum(), logprobs)
    log_ratio = (logprobs - old).detach()
    s = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp()
    tensors = {"p": logprobs.detach().exp(), "r": log_ratio.exp(), "gradient": gradient}
    tensors |= {"clipped": clipped.int(), "s": s}
    lengths = mask[:, : room(args) // args.group_size].sum(1).int().tolist()
    return {name: digits(tensor, lengths) for name, tensor in tensors.items()}


def train(script, model, batch, rewards, shown, args):
    """Let a copy of the model take this algorithm's steps; returns what the page shows of it."""
    policy = copy.deepcopy(model)
    optimizer = torch.optim.Adam(policy.parameters(), args.learning_rate, fused=True)
    if script is dapo_llm:
        penalty = script.overlong_penalty(batch["mask"].sum(1), batch["ended"], args)
        rewards = rewards + penalty.view_as(rewards)
    batch = batch | {"advantages": script.compute_advantages(rewards, args).flatten()}
    # times the number of tokens, so that their mean is 1
    weights = script.token_weights(batch["mask"], args) * batch["mask"].sum()
    part = {name: tensor[shown] for name, tensor in (batch | {"weights": weights}).items()}
    frames, steps, taken = [look(script, policy, part, args)], shown_steps(args), 0
    rows = torch.arange(rewards.numel(), device=rewards.device).view_as(rewards)
    torch.manual_seed(args.seed)  # so that all algorithms get the same minibatches
    for _ in range(args.update_epochs):
        for groups in torch.randperm(len(rewards)).tensor_split(args.num_minibatches):
            minibatch = {name: tensor[rows[groups].flatten()] for name, tensor in batch.items()}
            script.train_minibatch(policy, optimizer, minibatch, args)
            taken += 1
            if taken in steps:
                frames.append(look(script, policy, part, args))
    page = {"name": script.__name__.removesuffix("_llm").upper()} | explain(script, args)
    for name, tensor in (("A", part["advantages"][:, None]), ("weight", part["weights"])):
        page[name] = digits(tensor, [1] * len(shown))
    return page | {"frames": frames}


def telling_token(algorithms, rows, epoch):
    """Of a question's tokens, except the ends of completions, one that GRPO has clipped after the
    first epoch, if any, and for which the algorithms' π_θ differ most, then or at the end: how
    telling it is, its row and its column. The epoch is the index of its frame."""
    tokens = []
    for i, row in enumerate(rows):
        clipped = algorithms[1]["frames"][epoch]["clipped"][row]
        for t in range(max(1, len(clipped) - 1)):
            ps = [[a["frames"][k]["p"][row][t] for a in algorithms] for k in (epoch, -1)]
            tokens.append((clipped[t] + max(max(values) - min(values) for values in ps), i, t))
    return max(tokens)


def describe(g, problems, batch, rewards, tokenizer, stops, args):
    """A question, its right answer, and its group's rewards and tokens; ■ stands for the end."""
    completions = []
    for i in range(g * args.group_size, (g + 1) * args.group_size):
        n = int(batch["mask"][i].sum())
        ids = batch["completion_ids"][i, :n].tolist()[: room(args) // args.group_size]
        tokens = ["■" if token in stops else tokenizer.decode([token]) for token in ids]
        completions.append(
            {"R": rewards.flatten()[i].item(), "tokens": tokens, "more": n - len(ids)}
        )
    question, right = map(str, problems[g])
    return {"question": question, "right": right, "completions": completions}


def make_page(**flags):
    """All that the page shows, with these flags instead of the defaults."""
    args = args_of(grpo_llm, flags)
    verify, train_problems, _ = grpo_llm.load_task(args)
    model, tokenizer = grpo_llm.load_model(args)
    problems = random.Random(f"{args.seed} 1").sample(train_problems, args.prompts_per_step)
    torch.manual_seed(args.seed)
    size, stops = args.group_size, model.generation_config.eos_token_id
    batch, rewards, _ = grpo_llm.rollout(model, tokenizer, verify, problems, size, args)
    groups = choose_groups(rewards, batch["mask"].sum(1).view_as(rewards), args)
    shown = torch.arange(rewards.numel(), device=rewards.device).view_as(rewards)[groups].flatten()
    page = {"seed": args.seed, "questions": len(problems), "steps": shown_steps(args)}
    page["epoch"] = page["steps"].index(args.num_minibatches)  # the frame that ends the first epoch
    page["groups"] = [describe(g, problems, batch, rewards, tokenizer, stops, args) for g in groups]
    page["algorithms"] = []
    for script in SCRIPTS:
        args = args_of(script, flags)
        page["algorithms"].append(train(script, model, batch, rewards, shown, args))
    rows = torch.arange(len(shown)).view(len(groups), size).tolist()
    picks = [telling_token(page["algorithms"], group, page["epoch"]) for group in rows]
    return page | {"picks": [pick[1:] for pick in picks], "first": picks.index(max(picks))}


def main(picture: str = "", output_dir: str = "runs") -> Path:
    """--picture FILE.png: also draw the page's main part after an epoch, by headless Chromium."""
    page = make_page()
    data = json.dumps(page).replace("<", "\\u003c")  # so that no token ends the script
    path = Path(output_dir, f"rollout_page__{time.time_ns()}.html").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(Path(__file__).with_suffix(".html").read_text().replace("/*DATA*/null", data))
    if picture:
        command = ["chromium-headless-shell", "--headless", "--no-sandbox", "--hide-scrollbars"]
        command += ["--window-size=830,590", "--force-device-scale-factor=2"]
        command += [f"--screenshot={picture}", f"{path.as_uri()}#{page['epoch']}-picture"]
        subprocess.run(command, check=True, timeout=100)
        few = Image.open(picture).convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE)
        few.save(picture, optimize=True)
    print(f"Open this file in a browser:\n{path}")
    return path


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # for terminals without UTF-8
    tyro.cli(main)

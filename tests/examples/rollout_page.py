"""One rollout, five algorithms: writes a page that shows what each algorithm does to each token.

    python tests/examples/rollout_page.py                         # the tiny model and its sums
    python tests/examples/rollout_page.py --model … --dataset …   # most flags of grpo_llm.py

The model answers the questions of one training step. Then each algorithm trains a copy of the model
on these answers with its own train_minibatch, for --update-epochs epochs of --minibatches steps.
The page has a slider for the epochs. It shows each token's π_θ, its ratio and its gradient, the
derivative of J by log π_θ, where J is that of the whole rollout. All come from the scripts' own
functions and from autograd.

The algorithms differ in J alone: they get the same answers, minibatches, number of steps and
learning rate. So there is no KL penalty (β is 0), no warm-up, and DAPO draws no group again. A flag
that is not given has each algorithm's own default. The flags of evaluation have no effect.
"""

import copy
import json
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))
import cispo_llm
import dapo_llm
import grpo_llm
import gspo_llm
import rloo_llm

SCRIPTS = [rloo_llm, grpo_llm, dapo_llm, gspo_llm, cispo_llm]
TEMPLATE = Path(__file__).with_suffix(".html")
ROOM = 4500  # tokens × epochs on a page: 100 bytes each, so that it stays below 500 kB
BROWSERS = "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"


@dataclass
class Args(grpo_llm.Args):
    update_epochs: int = 8  # epochs: passes over the rollout, which the page's slider shows
    picture: str = ""  # FILE.png: also draw the page after the last epoch, by headless Chromium


def own_args(script, args):
    """The flags that were given, and this algorithm's own defaults for the others."""
    defaults, known = vars(Args()), {field.name for field in fields(script.Args)}
    given = {k: v for k, v in vars(args).items() if k in known and v != defaults[k]}
    same = {"beta": 0.0, "minibatches": args.minibatches, "update_epochs": args.update_epochs}
    return script.Args(**given | same)


def room(args):
    """The number of tokens that fit on the page."""
    return ROOM // (args.update_epochs + 1)


def explain(script, args):
    """L_it in one line, and why a gradient is what it is: free, clipped with A > 0 and with A < 0.
    The page puts the token's numbers in place of {r} and {s}."""
    low, high = 1 - getattr(args, "clip_low", 0), 1 + getattr(args, "clip_high", 0)
    if script is rloo_llm:
        return "A log π_θ", ["weight × A: r does not count"]
    if script is cispo_llm:
        capped = f"weight × {high:g} × A: r = {{r}} is capped at {high:g}"
        return f"min(r, {high:g}) A log π_θ", ["weight × r × A", capped, capped]
    x, note = ("s", ": s = {s}") if script is gspo_llm else ("r", "")
    clipped = [f"clipped: {x} = {{{x}}} > {high:g} and A > 0"]
    clipped.append(f"clipped: {x} = {{{x}}} < {low:g} and A < 0")
    formula = f"min({x} A, clip({x}, {low:g}, {high:g}) A)"
    return formula, [f"weight × {x} × A{note}", *clipped]


def choose_groups(rewards, lengths, args):
    """As many groups of unequal rewards as fit, first those of answers of medium length: rewards,
    lengths (P, G) → list of indices."""
    unusual = (lengths.mean(1) - lengths.median()).abs()
    equal = grpo_llm.are_equal(rewards).tolist()
    mixed = [g for g in unusual.argsort().tolist() if not equal[g]]
    if not mixed:
        grpo_llm.stop("no question has answers of unequal rewards: raise --prompts-per-step")
    fit = (lengths[mixed].sum(1).cumsum(0) <= room(args)).sum()
    return sorted(mixed[: max(1, fit)])


def look(script, policy, batch, args):
    """What the page shows of these answers at this epoch: lists, a row per answer."""
    logprobs = script.batch_logprobs(policy, batch, args).requires_grad_()
    old, advantages, mask = (batch[name] for name in ("old_logprobs", "advantages", "mask"))
    objective, clipped = script.surrogate(logprobs, old, advantages, mask, args)
    (gradient,) = torch.autograd.grad((batch["weights"] * objective).sum(), logprobs)
    log_ratio = (logprobs - old).detach()
    s = (log_ratio.sum(1) / mask.sum(1)).exp()
    tensors = {"p": logprobs.detach().exp(), "r": log_ratio.exp(), "gradient": gradient}
    tensors |= {"clipped": clipped.int(), "s": s[:, None]}
    shown = mask[:, : room(args) // args.group_size].sum(1).int().tolist()
    return {name: digits(tensor, shown) for name, tensor in tensors.items()}


def digits(tensor, lengths):
    """Three digits of each number, and of each row so many numbers: (B, T) → lists."""
    rows = zip(tensor.tolist(), lengths, strict=True)
    return [[float(f"{x:.3g}") if x % 1 else int(x) for x in row[:n]] for row, n in rows]


def train(script, model, batch, rewards, shown, args):
    """A copy of the model takes this algorithm's steps; returns what the page shows of it."""
    own, policy = own_args(script, args), copy.deepcopy(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=own.learning_rate, weight_decay=0.0)
    if script is dapo_llm:
        penalty = script.overlong_penalty(batch["mask"].sum(1), batch["ended"], own)
        rewards = rewards + penalty.view_as(rewards)
    advantages = script.compute_advantages(rewards, own)
    advantages[script.are_equal(rewards)] = 0
    batch = batch | {"advantages": advantages.flatten()}
    # times the number of tokens, so that the mean weight is 1
    weights = script.token_weights(batch["mask"], own) * batch["mask"].sum()
    part = script.take_rows(batch | {"weights": weights}, shown)
    frames = [look(script, policy, part, own)]
    rows = torch.arange(rewards.numel(), device=rewards.device).view_as(rewards)
    torch.manual_seed(args.seed)  # so that all algorithms get the same minibatches
    for _ in range(own.update_epochs):
        for groups in torch.randperm(len(rewards)).tensor_split(own.minibatches):
            minibatch = script.take_rows(batch, rows[groups].flatten())
            script.train_minibatch(policy, optimizer, minibatch, own)
        frames.append(look(script, policy, part, own))
    name, (formula, why) = script.__name__, explain(script, own)
    page = {"name": name.removesuffix("_llm").upper(), "L": formula, "why": why, "frames": frames}
    (page["A"],), (page["weight"],) = (
        digits(tensor[None], [len(shown)]) for tensor in (part["advantages"], part["weights"][:, 0])
    )
    return page


def most_disputed(algorithms):
    """Row and column of the token on whose final probability the algorithms differ most."""
    last = [algorithm["frames"][-1]["p"] for algorithm in algorithms]
    spread = {}
    for i, row in enumerate(last[0]):
        for t in range(len(row)):
            values = [p[i][t] for p in last]
            spread[i, t] = max(values) - min(values)
    return max(spread, key=spread.get)


def describe(g, problems, batch, rewards, tokenizer, model, args):
    """A question, its right answer, and its group's rewards and tokens; ■ stands for the end."""
    stops, answers = model.generation_config.eos_token_id or [], []
    for i in range(g * args.group_size, (g + 1) * args.group_size):
        n = int(batch["mask"][i].sum())
        ids = batch["completion_ids"][i, :n].tolist()[: room(args) // args.group_size]
        tokens = ["■" if token in stops else tokenizer.decode([token]) for token in ids]
        answers.append({"R": rewards.flatten()[i].item(), "tokens": tokens, "cut": n - len(ids)})
    return {"question": problems[g][0], "answer": str(problems[g][1]), "answers": answers}


def main(args: Args) -> Path:
    grpo_llm.check_args(args)
    device = grpo_llm.start_device(args)
    problems, _ = grpo_llm.load_data(args)
    model, tokenizer = grpo_llm.load_policy(args, device)
    grpo_llm.check_prompts(problems, model, tokenizer, args)
    problems = grpo_llm.next_problems(problems, 1, args)
    torch.manual_seed(args.seed)
    batch, _, rewards = grpo_llm.rollout(
        model, tokenizer, problems, args.group_size, args.temperature, args
    )
    batch["old_logprobs"] = grpo_llm.batch_logprobs(model, batch, args)
    lengths = batch["mask"].sum(1).view_as(rewards)
    groups = choose_groups(rewards, lengths, args)
    rows = torch.arange(rewards.numel(), device=device).view_as(rewards)[groups].flatten()
    page = {
        "command": shlex.join(["python", *sys.argv]),
        "seed": args.seed,
        "steps": args.minibatches,
        "questions": len(problems),
        "groups": [describe(g, problems, batch, rewards, tokenizer, model, args) for g in groups],
        "algorithms": [train(script, model, batch, rewards, rows, args) for script in SCRIPTS],
    }
    page["pick"] = most_disputed(page["algorithms"])
    path = Path(args.output_dir, f"rollout_page__{args.seed}__{time.time_ns()}.html").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(page).replace("<", "\\u003c")  # so that no token can end the script
    path.write_text(TEMPLATE.read_text().replace("/*DATA*/null", data))
    if args.picture:
        browse(
            path, f"--screenshot={args.picture}", "--window-size=1280,800", epoch=args.update_epochs
        )
    print(path)
    return path


def browse(path, *flags, epoch=0):
    """Open a page in headless Chromium, at this epoch; returns the process, which has ended."""
    browser = next(filter(shutil.which, BROWSERS), None)
    if browser is None:
        grpo_llm.stop("no browser: apt-get install chromium-headless-shell")
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--enable-logging=stderr", *flags]
    address = f"{path.as_uri()}#{epoch}"
    return subprocess.run([browser, *flags, address], capture_output=True, text=True, check=True)


if __name__ == "__main__":
    main(tyro.cli(Args))

"""Losses and gradients of the scripts, beside those of TRL's and Stable-Baselines3's own code.

    pip install -r requirements.txt -r tests/benchmarks/requirements.txt
    python tests/benchmarks/parity.py    # a minute; status 1 if a difference is too large

A language-model script takes its own train_step on one batch of toy data: two passes of two
minibatches. Behind each the weights are moved a little, so that ratios leave 1 and clips act. TRL's
trainer gets the same completions and rewards. It computes advantages and log π_old by its own code,
and then its own loss at the same weights as the script. parity_sb3.py compares classic scripts.
For variants, tests/test_variants.py has numbers that came from the libraries' code.

All is in float64 except TRL's rewards and last layer, which are in float32. Losses are compared
by their absolute difference, all else by the largest difference over the largest value.
"""

import copy
import sys
import tempfile
import warnings
from unittest.mock import patch

import parity_sb3
import torch
import transformers
import tyro
from bench import CPU, ROOT, Kept, show, table, with_footer
from beside_trl import make_trainer, trainer_of
from parity_sb3 import Row, flat, parsed, relative
from torch import nn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

LIMIT = 1e-6
GROUPS, GROUP_SIZE, PARTS = 6, 4, 2  # of the rollout; minibatches of each of the two passes
HEADER = ["ours", "theirs", "loss", "gradient or values", "clipped"]


# -------------------------------------------------------------------------------- Language models
CASES = {  # a script with its flags: TRL's settings where they are not those of beside_trl.py
    # TRL's mean is over completions, ours over tokens (factor). Its loss has a ratio of whole
    # completions instead of log π, so only gradients at ratio 1 are equal.
    "rloo_llm --beta 0.1 --num-minibatches 1 --update-epochs 1": {},
    "grpo_llm --beta 0.1": {},
    "grpo_llm --no-scale-rewards --length-norm constant --beta 0": {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
    },
    # TRL's mean is over the rollout's tokens, ours over the minibatch's (factor); its penalty for
    # length falls to −1, ours to −0.5 (reward_weights).
    "dapo_llm --max-resample 1": {
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "reward_weights": [1.0, 0.5],
    },
    "gspo_llm": {
        "importance_sampling_level": "sequence",
        "epsilon": 0.01,
        "epsilon_high": 0.013,
    },
    "cispo_llm": {"loss_type": "cispo", "epsilon_high": 1.2},  # the cap; its mean is as DAPO's
}


def make_model(folder):
    """A GPT-2 of two layers with random weights, as it has no step in float32: Llama's norms and
    rotary angles have, and would round by 1e-6. The tokenizer is the tiny model's."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tests/tiny_model")
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64, "n_layer": 2, "n_embd": 32}
    rates = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(1)
    config = GPT2Config(n_head=2, initializer_range=0.2, **sizes, **rates, **ends)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def toy(script, args, model, tokenizer):
    """The model's completions of a few sums, as a batch, and rewards, which are made up and equal
    in the first group. The sums are equally long, as TRL would give padded prompts other
    positions."""
    train, _ = script.load_data(args)
    problems = [problem for problem in train if len(problem[0]) == 8][:GROUPS]
    torch.manual_seed(5)
    batch, texts, _ = script.rollout(model, tokenizer, problems, GROUP_SIZE, 1.0, args)
    batch["mask"] = batch["mask"].double()
    batch["row"] = torch.arange(len(texts))
    rewards = torch.tensor([0.0, 0.25, 1.0])[torch.randint(3, (GROUPS, GROUP_SIZE))].float()
    rewards[0] = 1.0
    return problems, batch, texts, rewards


@torch.no_grad()
def move(model, seed):
    """Add noise to the weights, so that the model is not the one that wrote the completions."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight += 0.15 * weight.std() * torch.randn(weight.shape, generator=generator)


def our_steps(script, args, model, reference, tokenizer, data):
    """The script's own train_step. Of each minibatch: its rows, the weights before the step, loss,
    gradient, and the share of tokens that are clipped."""
    problems, batch, texts, rewards = data
    steps, original = [], script.train_minibatch

    def train_minibatch(model, optimizer, minibatch, args):
        rows, before = minibatch["row"].clone(), flat(model.parameters())
        metrics = original(model, optimizer, minibatch, args)
        gradient = flat([weight.grad for weight in model.parameters()])
        steps.append((rows, before, metrics["loss"], gradient, metrics["clipfrac"]))
        move(model, len(steps))
        return metrics

    def rollout(*_):
        return dict(batch), texts, rewards.clone()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with patch.multiple(script, train_minibatch=train_minibatch, rollout=rollout):
        script.train_step(model, reference, tokenizer, optimizer, problems, 1, args)
    return steps


def trl_trainer(script, args, settings, model, reference, tokenizer, data):
    """TRL's trainer, with the same completions and rewards in place of its own generation."""
    from trl.rewards import get_soft_overlong_punishment

    problems, batch, texts, rewards = data

    def lists(name, mask):
        rows = zip(batch[name], batch[mask], strict=True)
        return [row[real > 0].tolist() for row, real in rows]

    def reward(**_):
        return rewards.flatten().tolist()

    functions = [reward]
    if hasattr(args, "overlong_cache"):
        cache = round(args.overlong_cache * args.max_new_tokens)
        functions.append(get_soft_overlong_punishment(args.max_new_tokens, cache))
    rows = [{"prompt": question} for question, _ in problems]
    settings = {"num_iterations": 2} | settings
    trainer = make_trainer(script, args, model, tokenizer, rows, functions, settings)
    ids, completions = lists("prompt_ids", "prompt_mask"), lists("completion_ids", "mask")
    generated = ids, completions, None, texts, None, {}, None, None
    if script.__name__ == "rloo_llm":
        generated = ids, completions, texts
    trainer._generate = lambda _: generated
    trainer.current_gradient_accumulation_steps = 1
    if trainer.ref_model:
        weights = flat(reference.parameters())
        nn.utils.vector_to_parameters(weights, trainer.ref_model.double().parameters())
    return trainer


def beside_trl(command, settings, folder, smoke):
    """A row of the table."""
    torch.set_default_dtype(torch.float32)
    sizes = {"prompts_per_step": GROUPS, "group_size": GROUP_SIZE, "max_new_tokens": 15}
    sizes |= {"num_minibatches": PARTS, "update_epochs": 2, "max_grad_norm": 1e30}
    sizes |= {"micro_batch_size": GROUPS * GROUP_SIZE // PARTS}
    script, args = parsed(command, model=folder, device="cpu", **sizes)
    model, tokenizer = script.load_policy(args, CPU)
    data = toy(script, args, model, tokenizer)
    torch.set_default_dtype(torch.float64)
    model, reference = model.double(), copy.deepcopy(model).double()
    move(reference, 0)
    start = flat(model.parameters())
    steps = our_steps(script, args, model, reference, tokenizer, data)
    title = ", ".join([trainer_of(script), *(f"{name} {settings[name]}" for name in settings)])
    row = Row(command, title)
    row.clipped.append(sum(step[-1] for step in steps) / len(steps))
    if smoke:
        return row
    nn.utils.vector_to_parameters(start, model.train().parameters())
    trainer = trl_trainer(script, args, settings, model, reference, tokenizer, data)
    prompts = [{"prompt": question} for question, _ in data[0] for _ in range(GROUP_SIZE)]
    scored = trainer._generate_and_score_completions(prompts)
    for rows, before, loss, gradient, _ in steps:
        nn.utils.vector_to_parameters(before, model.parameters())
        model.zero_grad()
        inputs = {k: value[rows] if value.dim() else value for k, value in scored.items()}
        theirs = trainer.compute_loss(model, inputs)
        theirs.backward()
        factor, lengths = 1.0, data[1]["mask"].sum(1)  # our weight of a token over TRL's
        if script.__name__ == "rloo_llm":
            factor = len(rows) / lengths[rows].sum()
        elif settings.get("loss_type") in ("dapo", "cispo"):
            factor = lengths.sum() / PARTS / lengths[rows].sum()
        expected = factor * flat([weight.grad for weight in model.parameters()])
        row.values.append(relative(gradient, expected))
        if script.__name__ != "rloo_llm":
            row.losses.append(abs(loss - factor * theirs.item()))
    return row


def tables(runs):
    keys = "row", "theirs", "loss", "values", "clipped"
    rows = [[run[key] for key in keys] for run in runs.runs]
    count = sum(run["n"] for run in runs.runs)
    limit = f"{count} comparisons; none may differ by more than {LIMIT:.0e}."
    return {"parity": with_footer([*table(HEADER, rows), "", limit], runs.runs)}


def kept(smoke=False):
    packages = [] if smoke else ["trl", "gymnasium", "stable-baselines3", "sb3-contrib"]
    return Kept("parity", "transformers", *packages, smoke=smoke)


def main(smoke: bool = False):
    """With --smoke the language-model scripts run without TRL, and nothing is written."""
    runs = kept(smoke)
    warnings.simplefilter("ignore")
    transformers.logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        for command, settings in CASES.items():
            rows.append(beside_trl(command, settings, folder, smoke))
    torch.set_default_dtype(torch.float64)
    if not smoke:
        rows += parity_sb3.rows()
        for row in rows:  # NaN is not within the limit, either
            if not (row.values and all(value <= LIMIT for value in row.losses + row.values)):
                sys.exit(f"above the limit of {LIMIT:.0e}, or not compared: {row.ours}")
    runs.runs = []
    for row in rows:
        runs.add(row.ours, {}, row.cells())
    show(tables(runs), smoke)


if __name__ == "__main__":
    tyro.cli(main)

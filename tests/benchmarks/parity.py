"""Losses and gradients of the scripts, beside those of TRL's and Stable-Baselines3's own code.

    pip install -r requirements.txt -r tests/benchmarks/requirements.txt
    python tests/benchmarks/parity.py    # a minute; status 1 if a difference is too large

Main of a language-model script makes one training step on a batch of toy data: two epochs of two
minibatches, or in RLOO one step. Behind each the weights are moved a little, so that ratios leave 1
and clips act. TRL's trainer gets the same completions and rewards. It computes advantages and log
π_old by its own code, and then its own loss at the same weights as the script. parity_sb3.py
compares classic scripts.

All is in float64 except TRL's rewards and last layer. Losses are compared by their absolute
difference, all else by the largest difference over the largest value.
"""

import sys
import tempfile
import warnings
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import patch

import parity_sb3
import torch
import transformers
from bench import ROOT, Kept, run_main, show, table, with_footer
from parity_sb3 import flat, parsed, relative
from torch.nn.utils import vector_to_parameters
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

LIMIT = 1e-6
GROUPS, GROUP_SIZE, PARTS = 6, 4, 2  # of the rollout; minibatches of each of the two epochs
CASES = {  # a script with its flags: TRL's settings besides those of trl_trainer
    # TRL's mean is over completions, ours over tokens (factor). Its loss has a ratio of whole
    # completions instead of log π, so only gradients at ratio 1 are equal.
    "rloo_llm --beta 0.1": {},
    "grpo_llm --beta 0.1": {},
    "grpo_llm --no-scale-rewards --length-norm constant --beta 0": {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
    },
    # TRL's mean is over the rollout's tokens, ours over the minibatch's (factor); its penalty for
    # length falls to −1, ours to −0.5 (reward_weights).
    "dapo_llm --max-rollouts 1": {
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "reward_weights": [1.0, 0.5],
    },
    "gspo_llm": {"importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.013},
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
    sums = [problem for problem in script.load_problems("train") if len(problem[0]) == 8][:GROUPS]
    torch.manual_seed(5)
    batch, _, _ = script.rollout(model, tokenizer, script.verify, sums, GROUP_SIZE, args)
    batch["old_logprobs"] = script.token_logprobs(model, batch, args).detach()  # in float64
    batch["row"] = torch.arange(GROUPS * GROUP_SIZE)
    rewards = torch.tensor([0.0, 0.25, 1.0])[torch.randint(3, (GROUPS, GROUP_SIZE))]
    rewards[0] = 1.0
    if script.__name__ == "dapo_llm":  # on equal rewards it makes no step, whatever the lengths
        rewards[:, 0] = 0.5
    return sums, batch, rewards


@torch.no_grad()
def move(model, seed):
    """Add noise to the weights, so that the model is not the one that wrote the completions."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight += 0.15 * weight.std() * torch.randn(weight.shape, generator=generator)


def ours(command, folder):
    """Our side: script, arguments, model with its weights at the start, reference, tokenizer, data;
    and the steps. Of each minibatch these have its rows, the weights before the step, the loss, its
    gradient, and the share of tokens that are clipped."""
    sizes = {"prompts_per_step": GROUPS, "group_size": GROUP_SIZE, "max_new_tokens": 15, "steps": 1}
    sizes |= {"num_minibatches": PARTS, "update_epochs": 2, "max_grad_norm": 1e30}
    sizes |= {"micro_batch_size": GROUPS * GROUP_SIZE // PARTS, "learning_rate": 1e-30}
    script, args = parsed(command, model=folder, device="cpu", **sizes)
    model, tokenizer = script.load_model(args)
    model, reference = model.double(), deepcopy(model).double()
    move(reference, 0)
    start, steps, original = flat(model.parameters()), [], script.train_minibatch

    def train_minibatch(model, optimizer, minibatch, args):
        rows, before = minibatch["row"], flat(model.parameters())
        logs = original(model, optimizer, minibatch, args)
        gradient = flat([weight.grad for weight in model.parameters()])
        steps.append((rows, before, logs["loss"].item(), gradient, float(logs.get("clipfrac", 0))))
        move(model, len(steps))
        return logs

    with patch.object(torch.Tensor, "float", torch.Tensor.double):  # our logits are not rounded
        problems, batch, rewards = data = toy(script, args, model, tokenizer)
        functions = {
            "load_task": lambda args: (None, problems, []),
            "load_model": lambda args: (model, tokenizer),
            "copy": SimpleNamespace(deepcopy=lambda model: reference),
            "evaluate": lambda *inputs: {"eval/pass@1": 0.0},
            "rollout": lambda *inputs: (dict(batch), rewards.clone(), []),
            "train_minibatch": train_minibatch,
        }
        run_main(script, args, **functions)
    vector_to_parameters(start, model.train().parameters())
    return script, args, model, reference, tokenizer, data, steps


def trainer_of(script):
    """The name of TRL's trainer."""
    return "RLOOTrainer" if script.__name__ == "rloo_llm" else "GRPOTrainer"


def trl_trainer(settings, script, args, model, reference, tokenizer, data):
    """TRL's trainer, with the same completions and rewards in place of its own generation."""
    import trl
    from datasets import Dataset
    from trl.rewards import get_soft_overlong_punishment

    problems, batch, rewards = data
    micro, drawn = args.micro_batch_size, GROUPS * GROUP_SIZE
    ours = {"num_generations": GROUP_SIZE, "temperature": args.temperature, "beta": args.beta}
    ours |= {"per_device_train_batch_size": micro, "steps_per_generation": drawn // micro}
    ours |= {"num_iterations": 2, "max_completion_length": args.max_new_tokens}
    if trainer_of(script) == "GRPOTrainer":  # its defaults differ from GRPO's paper
        ours |= {"loss_type": "grpo", "use_bias_correction_kl": False}
    machine = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    machine |= {"report_to": "none", "output_dir": tempfile.mkdtemp()}

    def lists(name, mask):
        rows = zip(batch[name], batch[mask], strict=True)
        return [row[real > 0].tolist() for row, real in rows]

    functions = [lambda **_: rewards.flatten().tolist()]
    if hasattr(args, "overlong_tokens"):
        functions.append(get_soft_overlong_punishment(args.max_new_tokens, args.overlong_tokens))
    tokenizer.pad_token = tokenizer.eos_token
    name = trainer_of(script)
    config = getattr(trl, name.replace("Trainer", "Config"))(**ours | machine | settings)
    rows = Dataset.from_list([{"prompt": question} for question, _ in problems])
    trainer = getattr(trl, name)(model, functions, config, rows, processing_class=tokenizer)
    ids, completions = lists("prompt_ids", "prompt_mask"), lists("completion_ids", "mask")
    texts = tokenizer.batch_decode(completions)
    generated = ids, completions, None, texts, None, {}, None, None
    if script.__name__ == "rloo_llm":
        generated = ids, completions, texts
    trainer._generate = lambda _: generated
    trainer.current_gradient_accumulation_steps = 1
    if trainer.ref_model:
        vector_to_parameters(flat(reference.parameters()), trainer.ref_model.double().parameters())
    return trainer


def beside_trl(command, settings, folder):
    """Of a row: ours, theirs, differences of losses and gradients, share of clipped tokens."""
    *inputs, steps = ours(command, folder)
    script, args, model, reference, tokenizer, data = inputs
    losses, values = [], []
    trainer = trl_trainer(settings, *inputs)
    prompts = [{"prompt": question} for question, _ in data[0] for _ in range(GROUP_SIZE)]
    scored = trainer._generate_and_score_completions(prompts)
    for rows, before, loss, gradient, _ in steps:
        vector_to_parameters(before, model.parameters())
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
        values.append(relative(gradient, expected))
        if script.__name__ != "rloo_llm":
            losses.append(abs(loss - factor * theirs.item()))
    title = ", ".join([trainer_of(script), *(f"{k} {v}" for k, v in settings.items())])
    return command, title, losses, values, [sum(step[-1] for step in steps) / len(steps)]


def tables(runs):
    keys = "row", "theirs", "loss", "values", "clipped"
    rows = [[run[key] for key in keys] for run in runs.runs]
    lines = table(["ours", "theirs", "loss", "gradient or values", "clipped"], rows)
    count = sum(run["n"] for run in runs.runs)
    limit = f"{count} comparisons; none may differ by more than {LIMIT:.0e}."
    return {"parity": with_footer([*lines, "", limit], runs.runs)}


def main():
    warnings.simplefilter("ignore")
    transformers.logging.disable_progress_bar()
    torch.set_default_dtype(torch.float64)
    runs = Kept("parity", "transformers", "trl", "gymnasium", "stable-baselines3", "sb3-contrib")
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        rows = [beside_trl(command, settings, folder) for command, settings in CASES.items()]
    runs.runs = []
    for ours, theirs, losses, values, clipped in [*rows, *parity_sb3.rows()]:
        if not all(value <= LIMIT for value in losses + values):  # NaN is not within it, either
            sys.exit(f"above the limit of {LIMIT:.0e}: {ours}")
        cells = {"theirs": theirs, "n": len(losses + values)}
        cells |= {"loss": f"{max(losses):.0e}" if losses else "–", "values": f"{max(values):.0e}"}
        runs.add(ours, {}, cells | {"clipped": f"{max(clipped):.0%}" if clipped else "–"})
    show(tables(runs))


if __name__ == "__main__":
    main()

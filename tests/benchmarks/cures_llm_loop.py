"""The training loop that the experiments on a language model share: main's, without its files."""

import copy
import inspect
import math
import random

import torch


def evaluate(script, model, tokenizer, args, num_problems=128, k=8):
    """Scores on the first held-out sums, from k samples each at temperature 1.

    pass@1: share of right samples; pass@k: of sums with one or more. The dice are the same at
    every call, but the caller's are left as they were.
    """
    rng = random.Random(0)
    problems = [script.make_sum(rng, held_out=True) for _ in range(num_problems)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch, _, rewards = script.rollout(model, tokenizer, problems, k, 1.0, args)
    return {
        "pass@1": rewards.mean().item(),
        f"pass@{k}": rewards.amax(1).mean().item(),
        "entropy": script.token_mean(batch["entropy"], batch).item(),
        "mean_length": batch["mask"].sum(1).mean().item(),
    }


def is_finite(model):
    return all(parameter.isfinite().all() for parameter in model.parameters())


def train(script, args, steps=None, each_step=None, model=None):
    """Train as script.main does, and evaluate at the end.

    `steps` stops a run early, on the schedule of args.steps. `model` is (model, tokenizer), to
    begin with them rather than args.model; the model is trained in place. After every step, each
    counted from 1, `each_step(step, model, metrics)` is called.

    Returns the model, the tokenizer, a list per metric with a number per step (None where the step
    did not report it), and pass@1 and pass@8 at the end. Where main would stop because a metric is
    not finite, the lists end early; a policy with weights that are not finite scores 0.
    """
    policy, tokenizer = model or script.load_policy(args, torch.device("cpu"))
    takes_reference = "reference" in inspect.signature(script.train_step).parameters
    reference = None
    if takes_reference and args.beta > 0:
        reference = copy.deepcopy(policy).requires_grad_(False)
    references = [reference] if takes_reference else []
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)
    problems = script.problem_stream(None, args.seed)

    history = []
    last = args.steps if steps is None else steps
    for step in range(1, last + 1):
        rng = random.Random(f"{args.seed} {step}")
        torch.manual_seed(rng.getrandbits(32))
        optimizer.param_groups[0]["lr"] = script.learning_rate_at(step, args)
        metrics = script.train_step(policy, *references, tokenizer, optimizer, problems, rng, args)
        metrics = {name: float(value) for name, value in metrics.items()}
        if not all(map(math.isfinite, metrics.values())):
            break
        history.append(metrics)
        if each_step:
            each_step(step, policy, metrics)

    names = list(dict.fromkeys(name for metrics in history for name in metrics))
    result = {name: [metrics.get(name) for metrics in history] for name in names}
    result |= {"pass@1": 0.0, "pass@8": 0.0}
    if is_finite(policy):
        scores = evaluate(script, policy, tokenizer, args, args.eval_problems)
        result |= {name: scores[name] for name in ("pass@1", "pass@8")}
    return result | {"model": policy, "tokenizer": tokenizer}

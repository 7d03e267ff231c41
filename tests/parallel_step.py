"""Run by test_llm_parallel.py, alone or under torchrun: a step and an evaluation of each method, on
samples that do not depend on who draws."""

import itertools
import random
import sys
import zlib

import torch
import torch.distributed as dist
from conftest import LLM_SCRIPTS, Characters, random_model, script, with_critic

# Five, which two processes cannot share evenly.
PROBLEMS = [("1+2", "3"), ("1+2+3+4", "10"), ("9+9", "18"), ("5+5+5", "15"), ("2+2", "4")]


def asked_alone(module):
    """The module's generate() with dice that depend on the question alone, not on the process."""
    real = module.generate

    def generate(model, prompts, num_samples, max_new_tokens, temperature):
        parts = []
        for prompt in prompts:
            torch.manual_seed(zlib.crc32(bytes(prompt)))
            parts.append(real(model, [prompt], num_samples, max_new_tokens, temperature))
        return module.join(parts)

    return generate


def verify(completion, answer):
    return float(completion == "#1")


def credit(module, model, batch, rewards, args):
    """The advantages of completions; or, with a critic, of tokens, and what it learns from."""
    if not hasattr(model, "critic"):
        return {"advantages": module.compute_advantages(rewards, args).flatten()}
    values, mask = module.batch_values(model, batch, args), batch["mask"]
    shaped = module.at_last_token(rewards.flatten(), mask)
    advantages = module.compute_advantages(shaped, values, mask, args)
    return {"advantages": advantages, "returns": values + advantages}


def trained(name):
    """Weights and what was measured: of minibatches of any rows, on the first of which one of two
    processes has nothing to do; then of a step of two passes in two minibatches, of three groups
    and two; and the scores on one problem, which one of two processes has to itself."""
    module = script(name)
    model, reference = random_model("qwen2").double(), random_model("qwen2", seed=1).double()
    model = with_critic(name, model)
    shape = {"prompts_per_step": 5, "group_size": 4, "minibatches": 2, "update_epochs": 2}
    args = module.Args(max_new_tokens=9, model="some", micro_batch_size=3, beta=0.1, **shape)
    batch, completions, rewards = module.rollout(model, Characters(), PROBLEMS, 4, 1.0, args)
    batch["ref_logprobs"] = module.batch_logprobs(reference, batch, args)
    batch |= credit(module, model, batch, rewards, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    order = torch.tensor(random.Random(0).sample(range(20), 20))
    stats = [
        module.train_minibatch(model, optimizer, module.take_rows(batch, rows), args)
        for rows in order.split([1, 7, 12])
    ]
    given = (model, reference, Characters(), optimizer, itertools.cycle(PROBLEMS))
    metrics, group = module.train_step(*given, random.Random(0), args)
    scores = module.evaluate(model, Characters(), PROBLEMS[:1], args, None, 0)
    return {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "stats": [*stats, {name: float(value) for name, value in metrics.items()}],
        "lengths": batch["mask"].sum(1),
        "texts": [*completions, group],
        "rewards": rewards,
        "scores": scores,
    }


def main(out: str):
    torch.set_num_threads(1)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    results = {}
    for name in LLM_SCRIPTS:
        module = script(name)
        module.generate, module.verify = asked_alone(module), verify
        results[name] = trained(name)
    torch.save(results, f"{out}-{rank}-of-{world}.pt")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        dist.init_process_group("gloo")
    main(sys.argv[1])

"""Run by test_llm_parallel.py, alone or under torchrun:
one step of each method on samples that do not depend on who draws."""

import random
import sys
import zlib

import torch
import torch.distributed as dist
from conftest import LLM_SCRIPTS, Characters, random_model, script

# Five, which two processes cannot share evenly.
PROBLEMS = [("1+2=", "3"), ("1+2+3+4=", "10"), ("9+9=", "18"), ("5+5+5=", "15"), ("2+2=", "4")]


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


def main(out: str):
    torch.set_num_threads(1)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    results = {}
    for name in LLM_SCRIPTS:
        module = script(name)
        module.generate, module.verify = asked_alone(module), verify
        model, reference = random_model("qwen2").double(), random_model("qwen2", seed=1).double()
        args = module.Args(max_new_tokens=9, model="some", micro_batch_size=3)
        if hasattr(args, "beta"):
            args.beta = 0.1
        batch, completions, rewards = module.rollout(model, Characters(), PROBLEMS, 4, 1.0, args)
        if hasattr(args, "beta") and name != "rloo_llm":
            batch["ref_logprobs"] = module.batch_logprobs(reference, batch, args)
        batch["advantages"] = module.compute_advantages(rewards, args).flatten()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        order = random.Random(0).sample(range(20), 20)
        # 1: one of two processes has nothing to do
        stats = [
            module.train_minibatch(model, optimizer, {k: v[rows] for k, v in batch.items()}, args)
            for rows in torch.tensor(order).split([1, 7, 12])
        ]
        results[name] = {
            "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
            "stats": stats,
            "lengths": batch["mask"].sum(1),
            "texts": completions,
            "rewards": rewards,
        }
    torch.save(results, f"{out}-{rank}-of-{world}.pt")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        dist.init_process_group("gloo")
    main(sys.argv[1])

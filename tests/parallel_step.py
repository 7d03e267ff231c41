"""Run by test_llm_parallel.py, alone or in two processes: steps and an evaluation of each script,
on samples that do not depend on who draws.

    python parallel_step.py OUT SCRIPT…"""

import os
import sys

import torch
import torch.distributed as dist
from conftest import Characters, batch_of, random_model, script, with_critic

# The second of two processes has every other one; DAPO keeps three.
PROBLEMS = [("1+2", "live"), ("1+2+3+4", "live"), ("9+9", "live"), ("5+5+5", "dead")]
# Here it has no group with a signal, and of these nobody has one.
LONELY = [(question, "live" if i % 2 == 0 else "dead") for i, (question, _) in enumerate(PROBLEMS)]
DEAD = [(question, "dead") for question, _ in PROBLEMS]


def verify(completion, answer):
    return float(completion == "#1") if answer == "live" else 0.5


def generate(model, prompts, num_samples, *_):
    """In place of the module's: completions that follow from the question alone."""
    parts = []
    for prompt in prompts:
        lengths = [1 + sum(prompt) * n % 9 for n in range(1, num_samples + 1)]
        parts.append(batch_of(model, [prompt], lengths))
    return script("dapo_llm").join(parts)


def trained(name):
    """Weights and metrics after two epochs with a KL; where one of two processes has nothing to do;
    and where neither has. And scores on three problems, and on one."""
    module, results = script(name), {}
    module.generate = generate
    module.next_problems = lambda problems, *_: problems[module.RANK :: module.WORLD]
    module.load_verifier = lambda name: verify
    cases = {"all": (PROBLEMS, {"beta": 0.1}), "lonely": (LONELY, {"beta": 0.0})}
    cases |= {"dead": (DEAD, {"beta": 0.0})}
    if name == "rloo_llm":
        cases["mean"] = (PROBLEMS, {"beta": 0.0, "baseline": "mean"})
    for case, (problems, flags) in cases.items():
        flags |= {"max_resample": 1} if name == "dapo_llm" else {}
        shape = {"prompts_per_step": 4, "group_size": 4, "minibatches": 1, "update_epochs": 2}
        shape |= {"max_new_tokens": 9, "micro_batch_size": 3, "verifier": "some.py"}
        args = module.Args(model="some", **shape, **flags)
        model, reference = random_model("qwen2").double(), random_model("qwen2", seed=1).double()
        model = with_critic(name, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        stats = module.train_step(model, reference, Characters(), optimizer, problems, 0, args)
        if name == "dapo_llm":  # logged as of one process
            stats["discarded_groups"] *= module.WORLD
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        results[case] = {"weights": weights, "stats": stats}
    module.log = lambda *_: None
    results["scores"] = [
        module.evaluate(model, Characters(), PROBLEMS[:n], args, None, 0) for n in (3, 1)
    ]
    return results


def main(out, *names):
    torch.set_num_threads(1)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    results = {name: trained(name) for name in names}
    torch.save(results, f"{out}-{rank}-of-{world}.pt")


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    main(*sys.argv[1:])

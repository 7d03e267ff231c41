"""Run by test_llm_parallel.py, alone or in two processes: steps and an evaluation of each script,
on samples that do not depend on who draws.

    python parallel_step.py OUT SCRIPT…"""

import os
import random
import sys
import zlib

import torch
import torch.distributed as dist
from conftest import Characters, draws, random_model, script, with_critic
from torch.nn.utils.rnn import pad_sequence

# The second of two processes has every other one; DAPO keeps three.
PROBLEMS = [("1+2", "live"), ("1+2+3+4", "live"), ("9+9", "live"), ("5+5+5", "dead")]
# Here it has no group with a signal, and of these nobody has one.
LONELY = [(question, "live" if i % 2 == 0 else "dead") for i, (question, _) in enumerate(PROBLEMS)]
DEAD = [(question, "dead") for question, _ in PROBLEMS]


def verify(completion, answer):
    return float(completion == "#1") if answer == "live" else 0.5


def asked_alone(module, lengths):
    """The module's generate() with dice that depend on the question alone, not on the process."""
    real = module.generate

    def generate(model, prompts, *rest):
        parts, joined = [], {}
        for prompt in prompts:
            torch.manual_seed(zlib.crc32(bytes(prompt)))
            parts.append(real(model, [prompt], *rest))
        for name in parts[0]:
            rows = [row for part in parts for row in part[name]]
            side = "left" if name.startswith("prompt") else "right"
            one = rows[0].dim() == 0
            joined[name] = torch.stack(rows) if one else pad_sequence(rows, True, 0.0, side)
        lengths.extend(joined["mask"].sum(1).tolist())
        return joined

    return generate


def trained(name, own):
    """Weights and metrics after two epochs with a KL; where one of two processes has nothing to do;
    and where neither has. And scores on three problems, and on one. `own` gives a process its share
    of problems."""
    module, results, lengths = script(name), {}, []
    module.generate = asked_alone(module, lengths)
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
        given = (model, reference, Characters(), optimizer, draws(own(problems), 4 // module.WORLD))
        stats = module.train_step(*given, random.Random(0), args)
        if name == "dapo_llm":  # logged as of one process
            stats["discarded_groups"] *= module.WORLD
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        results[case] = {"weights": weights, "stats": stats}
    results["lengths"] = len(set(lengths))
    module.log = lambda *_: None
    results["scores"] = [
        module.evaluate(model, Characters(), PROBLEMS[:n], args, None, 0) for n in (3, 1)
    ]
    return results


def main(out, *names):
    torch.set_num_threads(1)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    results = {name: trained(name, lambda problems: problems[rank::world]) for name in names}
    torch.save(results, f"{out}-{rank}-of-{world}.pt")


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    main(*sys.argv[1:])

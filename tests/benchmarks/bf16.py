"""Does bfloat16 hide small steps, and does spreading the weights inside their bf16 cells help?

    python tests/benchmarks/bf16.py      # makes the runs that are missing

SmolLM2 learns to write dates (see real_model.py), 25 rollouts, on eight seeds, in three ways: in
float32; in bf16; and in bf16 after `spread`. results/bf16.json keeps every run.
"""

import json
from itertools import product

import torch
import tyro
from bench import RESULTS, own_process, revision, run_main, table, write_table
from real_model import TASKS, model_folder, task_files

import grpo_llm

WAYS = ("bfloat16", "bfloat16, spread", "float32")
SEEDS = range(1, 9)


@torch.no_grad()
def spread(model):
    """Move each weight of a matrix product, which is a bf16 number, to a random place among the
    float32 numbers that bf16 rounds to it. Then a small step moves some of them over an edge."""
    generator = torch.Generator().manual_seed(0)
    embedding = model.get_input_embeddings().weight  # tied: as embedding it is not rounded
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer.weight is not embedding:
            offset = torch.randint(-32767, 32768, layer.weight.shape, generator=generator)
            moved = (layer.weight.view(torch.int32) + offset.int()).view(torch.float32)
            layer.weight.copy_(moved.where(layer.weight != 0, layer.weight))
    return model


def run(way: str, seed: int, steps: int = 25) -> dict:
    torch.set_num_threads(1)
    chosen = TASKS["dates"]
    train, test = map(str, task_files("dates"))
    flags = {"prompts_per_step": 8, "minibatches": 2, "micro_batch_size": 32, "beta": 0.0}
    flags |= {"warmup_steps": 3, "eval_problems": 48, "eval_every": steps, "max_new_tokens": 24}
    flags |= {"dataset": train, "eval_dataset": test, "device": "cpu", "steps": steps}
    flags |= {"verifier": chosen.verifier, "prompt": chosen.prompt, "seed": seed}
    flags |= {"model": str(model_folder()), "learning_rate": 2e-5, "dtype": way.partition(",")[0]}
    rewards, train_step, load_policy = [], grpo_llm.train_step, grpo_llm.load_policy

    def watched(*given):
        metrics = train_step(*given)
        rewards.append(metrics["reward"])
        return metrics

    def load(*given):
        model, tokenizer = load_policy(*given)
        return spread(model) if "spread" in way else model, tokenizer

    found = run_main(grpo_llm, grpo_llm.Args(**flags), load_policy=load, train_step=watched)
    scores = {name: found[f"eval/{name}"] for name in ("pass@1_initial", "pass@1", "pass@1_greedy")}
    return scores | {"reward": rewards, "revision": revision()}


def main(smoke: bool = False):
    path = RESULTS / "bf16.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for seed, way in product(SEEDS, WAYS):
        name = f"{way}, seed {seed}"
        if not smoke and name not in known:
            known[name] = own_process(run, way=way, seed=seed)
            path.write_text(json.dumps(known, indent=0) + "\n")
    rows = []
    for way in WAYS:
        ends = [
            known[f"{way}, seed {seed}"]["pass@1"]
            for seed in SEEDS
            if f"{way}, seed {seed}" in known
        ]
        rows.append([way, " ".join(f"{score:.2f}" for score in ends) or "–"])
    note = "pass@1 on held-out dates after 25 rollouts, each seed; SmolLM2 rounded to bf16"
    write_table("bf16", table(["", "pass@1"], rows), "transformers", note=note, smoke=smoke)


if __name__ == "__main__":
    tyro.cli(main)

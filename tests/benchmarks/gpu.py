"""Is a GPU right, and how fast is a training step on it?

    python tests/benchmarks/gpu.py                      # an NVIDIA card; up to 10 minutes
    timeout 240 python tests/benchmarks/gpu.py right    # or step: one part

right compares log-probs and gradient of all five scripts with the CPU's. step measures a training
step at the default flags and with others. A measurement is printed and kept at once. If one fails,
the exit status is 1.

No hub is needed: the large model is a random one of Qwen2.5-0.5B's shape, with the tiny model's
tokenizer. Its prompts have 56 to 170 tokens, so they are padded, as in a real run.
"""

import copy
import gc
import importlib
import random
import sys
import traceback
from collections import defaultdict
from functools import partial
from unittest.mock import patch

import bench
import torch
import transformers
from torch.nn.utils import parameters_to_vector

import grpo_llm

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPE = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864}
SHAPE |= {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
# Of a rollout: groups, completions of each, tokens of the longest prompt (170 is about the longest
# of 32 of GSM8K's questions), tokens of a completion.
GROUPS, SAMPLES, LONGEST, NEW = 32, 8, 170, 256


def settings(**more):
    """Args of grpo_llm.py for a large model: the defaults, except at toy size."""
    sizes = {"max_new_tokens": NEW, "prompts_per_step": GROUPS, "group_size": SAMPLES}
    return grpo_llm.Args(device=DEVICE, **sizes, **more)


def random_qwen(device=DEVICE, **more):
    """A random model of Qwen2.5-0.5B's shape. A factor makes its distributions less flat, nearer to
    a trained model's. It hardly ever draws the stop token."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen2", **SHAPE | more, tie_word_embeddings=True)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.model.norm.weight.data.fill_(6.0)
    return model


def problems_of(count):
    """Pairs of prompt and answer. Each digit is a token, and the first prompt has full length."""
    rng = random.Random(1)
    lengths = [LONGEST, *(rng.randint(LONGEST // 3, LONGEST) for _ in range(count - 1))]
    return [("".join(rng.choices("0123456789", k=length)), "") for length in lengths]


def reward(completion, answer):
    """By chance, as the tokenizer does not know most of the tokens that are drawn."""
    return float(random.random() < 0.5)


# In place of the script's own functions.
TASK = {"load_task": lambda args: (reward, problems_of(4 * GROUPS), [])}
# Within this context load_model loads a random_qwen, which has no folder.
LARGE = patch.object(
    transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: random_qwen()
)


def gradient_of(script, model, batch, rewards, device, bf16):
    """Log-probs and the gradient, on the CPU."""
    model = copy.deepcopy(model).to(device)
    args = script.Args(micro_batch_size=16, beta=0.0, max_grad_norm=1e30, bf16=bf16)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    with torch.no_grad():
        batch["old_logprobs"] = script.token_logprobs(model, batch, args)
    batch["advantages"] = script.compute_advantages(rewards, args).flatten().to(device)
    script.train_minibatch(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, args)
    gradient = parameters_to_vector(parameter.grad for parameter in model.parameters())
    return batch["old_logprobs"].cpu(), gradient.cpu()


def compare(kind, name, model, batch, rewards):
    """The GPU in this precision against the CPU in float32. The scripts have tf32, or --bf16."""
    torch.backends.cuda.matmul.fp32_precision = "ieee" if kind == "float32" else "tf32"
    inputs = importlib.import_module(name), model, batch, rewards
    expected, expected_gradient = gradient_of(*inputs, "cpu", False)
    logprobs, gradient = gradient_of(*inputs, DEVICE, kind == "bf16")
    gap = (logprobs - expected).abs().max().item()
    error = ((gradient - expected_gradient).norm() / expected_gradient.norm()).item()
    return {"logprob_gap_max": gap, "gradient_error": error}


def right():
    """Completions are drawn on the CPU, so that they are the same everywhere."""
    model, tokenizer = grpo_llm.load_model(grpo_llm.Args())
    large, rewards = (
        random_qwen("cpu", num_hidden_layers=2),
        (torch.arange(64) % 3 == 0).float().view(8, 8),
    )
    large.generation_config = model.generation_config
    prompts = [list(range(1, 4 + i)) for i in range(8)]
    batch = grpo_llm.generate(model, prompts, 8, grpo_llm.Args(max_new_tokens=24))
    longer = tokenizer([prompt for prompt, _ in problems_of(8)])["input_ids"]
    completions = grpo_llm.generate(large, longer, 2, grpo_llm.Args(max_new_tokens=16))
    for kind in ("float32", "tf32", "bf16"):
        for name in bench.LLM:
            yield f"tiny, {name}, {kind}", partial(compare, kind, name, model, batch, rewards)
        inputs = ("grpo_llm", large, completions, rewards[:, :2])
        yield f"2 layers of Qwen, grpo_llm, {kind}", partial(compare, kind, *inputs)


def speed(spent):
    """Of a step of so many seconds. GB are the process's."""
    values = {"s": spent, "completions_per_s": GROUPS * SAMPLES / spent}
    return values | ({"reserved_GB": torch.cuda.memory_reserved() / 1e9} if GPU else {})


def our_step(**flags):
    """The second training step of grpo_llm.py, and its parts."""
    seconds = defaultdict(float)

    def timed(name, function, *inputs):
        start = bench.clock()
        result = function(*inputs)
        seconds[name] += bench.clock() - start
        return result

    def rollout(*inputs, original=grpo_llm.rollout):
        seconds.clear()  # the first step is to warm up
        return timed("rollout_s", original, *inputs)

    train = partial(timed, "train_minibatch_s", grpo_llm.train_minibatch)
    functions = {"rollout": rollout, "train_minibatch": train} | TASK
    with LARGE:
        _, spent = bench.seconds_of_steps(grpo_llm, settings(**flags), 2, **functions)
    return speed(spent) | seconds


def step():
    yield "as it is", our_step
    yield "16 rows per pass", partial(our_step, micro_batch_size=16)
    yield "16 rows, bf16", partial(our_step, micro_batch_size=16, bf16=True)


CHECKS = {"logprob_gap_max": "log-probs: largest difference, nats"}
CHECKS |= {"gradient_error": "gradient: relative difference"}
COLUMNS = {"s": "seconds", "rollout_s": "rollout", "train_minibatch_s": "training"}
COLUMNS |= {"completions_per_s": "completions per second", "reserved_GB": "GB"}


def tables(runs):
    """The largest error of each kind, and a row for each step."""
    checks = [run for run in runs.runs if "gradient_error" in run]
    steps = [run for run in runs.runs if "s" in run]
    errors = []
    for kind in sorted({run["row"].split(", ")[-1] for run in checks}):
        some = [run for run in checks if run["row"].endswith(kind)]
        errors.append([kind, *(f"{max(run[key] for run in some):.3g}" for key in CHECKS)])
    rows = [[run["row"], *(f"{run[k]:.3g}" if k in run else "–" for k in COLUMNS)] for run in steps]
    errors = bench.table(["GPU beside CPU", *CHECKS.values()], errors)
    rows = bench.table(["", *COLUMNS.values()], rows)
    return {
        "gpu_right": bench.with_footer(errors, checks),
        "gpu_step": bench.with_footer(rows, steps),
    }


def main():
    if not GPU:
        sys.exit("There is no CUDA GPU here.")
    transformers.utils.logging.disable_progress_bar()
    runs, failed = bench.Kept("gpu", "transformers"), False
    chosen = [part for part in (right, step) if part.__name__ in sys.argv]
    for row, function in (item for part in chosen or (right, step) for item in part()):
        gc.collect()
        torch.cuda.empty_cache()
        try:
            values = function()
            runs.runs = [run for run in runs.runs if run["row"] != row]
            runs.add(row, {}, {k: float(f"{value:.4g}") for k, value in values.items()})
        except Exception:
            traceback.print_exc()
            failed = True
    bench.show(tables(runs))
    sys.exit(failed)


if __name__ == "__main__":
    main()

"""Is a training step faster than it was in another revision, by how much, and how sure is that?

    python tests/benchmarks/paired_timings.py --checkout FOLDER [--script dapo_llm]
    … --model FOLDER --prompt-tokens 150 --max-new-tokens 124    # a prompt of so many words

The checkout is of that revision. The two sides take turns, so that a slow minute of the machine
slows both. The table is printed. With --smoke all sizes are tiny.
"""

import importlib
import json
import tempfile
from pathlib import Path
from statistics import median

import bench
import tyro
from bench import ROOT, run_script, table, train

HEADER = ["", "there, s", "here, s", "there / here: median", "lowest", "highest", "n"]


def trained_tiny_model(script: str, steps: int, folder: Path) -> list:
    """Flags of 20 steps from our weights after 60, when completions have their full length."""
    module = importlib.import_module(script)
    trained = train(module, module.Args(steps=steps, eval_problems=1))
    trained["model"].save_pretrained(folder)
    trained["tokenizer"].save_pretrained(folder)
    return ["--model", folder, "--steps", 20, "--micro-batch-size", 256]


def real_model(model: Path, prompt_tokens: int, max_new_tokens: int, folder: Path) -> list:
    """Flags of 3 steps of 16 completions in float32, each of which gets an advantage: its reward is
    the checksum of its text."""
    (folder / "arbitrary.py").write_text(
        "import zlib\ndef verify(text, answer):\n    return zlib.crc32(text.encode()) / 2**32\n"
    )
    words = " the" * (prompt_tokens - 40)  # some 40 tokens are the chat template's
    rows = [json.dumps({"question": f"{i}{words}", "answer": "1"}) for i in range(40)]
    (folder / "questions.jsonl").write_text("\n".join(rows))
    flags = ["--model", model, "--beta", 0, "--steps", 3]
    flags += ["--dataset", folder / "questions.jsonl", "--verifier", folder / "arbitrary.py"]
    flags += ["--prompts-per-step", 2, "--minibatches", 2, "--max-new-tokens", max_new_tokens]
    return flags


def main(
    checkout: Path,
    script: str = "grpo_llm",
    rounds: int = 10,
    model: Path | None = None,
    prompt_tokens: int = 150,
    max_new_tokens: int = 124,
    smoke: bool = False,
):
    """Compare medians of step times. The learning rate is 0, so both sides keep their weights and
    draw nearly the same completions."""
    folder = Path(tempfile.mkdtemp())
    if model:
        flags = real_model(model, prompt_tokens, max_new_tokens, folder)
    else:
        flags = trained_tiny_model(script, 1 if smoke else 60, folder)
    flags += ["--device", "cpu", "--learning-rate", 0, "--eval-problems", 1]
    lengths = []

    def seconds(root):
        log = run_script(script, *flags, root=root)["log"]
        lengths.append(sum(log["completions/mean_length"]))
        assert 0.95 < lengths[-1] / lengths[0] < 1.05, "the two sides drew other lengths"
        return median(log["step_time"])

    pairs = []
    for number in range(1 if smoke else rounds + 1):
        if number % 2:  # each side goes first in every second round
            pairs.append((seconds(checkout), seconds(ROOT)))
        else:
            pairs.append((seconds(ROOT), seconds(checkout))[::-1])
    pairs = pairs[1:] or pairs  # the first round is a warm-up and does not count
    ratios = [a / b for a, b in pairs]
    sizes = f", {model.name}, {prompt_tokens} + {max_new_tokens}" if model else ""
    cells = [f"{script}{sizes}, {bench.revision(checkout)}"]
    cells += [f"{median(side):.4g}" for side in zip(*pairs, strict=True)]
    cells += [f"{of(ratios):.3f}" for of in (median, min, max)]
    print(*table(HEADER, [[*cells, len(pairs)]]), sep="\n")


if __name__ == "__main__":
    tyro.cli(main)

"""Is a training step faster than it was in another revision, by how much, and how sure is that?

    python tests/benchmarks/paired_timings.py --checkout FOLDER [--script dapo_llm]

FOLDER is a git checkout of that revision. The two sides take turns, so that a slow minute of the
machine slows both. The table goes into results/paired_timings.md. With --smoke all sizes are tiny
and nothing is written.
"""

import importlib
import os
import tempfile
from pathlib import Path
from statistics import median

import bench
import tyro
from bench import ROOT, run_script, table, train, write_table

HEADER = ["", "there, s", "here, s", "there / here: median", "lowest", "highest", "n"]


def main(checkout: Path, script: str = "grpo_llm", rounds: int = 10, smoke: bool = False):
    """Compare medians of runs of 20 steps.

    Both sides have our weights after 60 steps, when completions have reached their full length. The
    learning rate is 0, so both keep these weights and should draw the same completions.
    """
    module = importlib.import_module(script)
    warm, steps = (1, 2) if smoke else (60, 20)
    trained = train(module, module.Args(steps=warm, eval_problems=1))
    folder = Path(tempfile.mkdtemp(), "trained")
    trained["model"].save_pretrained(folder)
    trained["tokenizer"].save_pretrained(folder)
    flags = ["--model", folder, "--device", "cpu", "--learning-rate", 0, "--steps", steps]
    flags += ["--micro-batch-size", 256, "--eval-problems", 1]  # 256, as with the tiny model
    rewards = []

    def seconds(root):
        log = run_script(script, *flags, root=root)["log"]
        rewards.append(log["reward"])
        gaps = [abs(a - b) for a, b in zip(rewards[0], log["reward"], strict=True)]
        assert max(gaps) < 0.02, "the two sides drew different completions"
        return median(log["step_time"])

    pairs = []
    for number in range(1 if smoke else rounds + 1):
        if number % 2:  # each side goes first in every second round
            pairs.append((seconds(checkout), seconds(ROOT)))
        else:
            pairs.append((seconds(ROOT), seconds(checkout))[::-1])
    pairs = pairs[1:] or pairs  # the first round is a warm-up and does not count
    ratios = [a / b for a, b in pairs]
    cells = [f"{script}, {bench.revision(checkout)}"]
    cells += [f"{median(side):.4g}" for side in zip(*pairs, strict=True)]
    cells += [f"{of(ratios):.3f}" for of in (median, min, max)]
    note = f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    lines = table(HEADER, [[*cells, len(pairs)]])
    write_table("paired_timings", lines, "transformers", note=note, smoke=smoke)


if __name__ == "__main__":
    tyro.cli(main)

"""What the nine files do when you run them: README's picture and blocks, and the lesson's log.

    python tests/benchmarks/first_run.py    # about a quarter of an hour on one core

Each script runs as a user starts it, with three seeds. README's completions and output, and the
table of the log in GRPO.md, are those of grpo_llm.py with the default seed.
"""

import json
import re
import resource
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np
from bench import RESULTS, ROOT, SCRIPTS, write_block
from pictures import WORDS, figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

README, LESSON = ROOT / "README.md", ROOT / "tests/learn/GRPO.md"
PICTURE = RESULTS / "nine.png"
SEEDS = 1, 2, 3
LOG = {  # a name in the log: what to look for
    "reward": "should rise",
    "eval/pass@1": "share right on new questions; if flat while `reward` rises, it learns by heart",
    "frac_reward_zero_std": "groups whose A are all 0; near 1, questions are too hard or easy",
    "approx_kl": "distance from π_old per token; falls with the learning rate; above 0.05, cut it",
    "clipfrac": "tokens stopped by the clip; above 0.1, the steps are too large",
    "completions/clipped_ratio": "not the clip: completions cut off at `--max-new-tokens`",
    "entropy": "mean −log π of the tokens; if near 0 early, completions are alike",
    "kl": "distance from π_ref per token; above 2, the initial model would hardly write this",
}


def run(script, seed, *flags):
    """Run a script: its log, {name: (steps, values)}, CPU seconds, what it prints, completions."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory() as folder:
        command = [sys.executable, f"{script}.py", "--seed", str(seed), "--output-dir", folder]
        options = {"cwd": ROOT, "check": True, "stdout": subprocess.PIPE, "text": True}
        printed = subprocess.run([*command, *flags], **options).stdout
        (events,) = Path(folder).glob("*/events*")
        log = EventAccumulator(str(events), {"scalars": 0}).Reload()
        scalars = {name: log.Scalars(name) for name in log.Tags()["scalars"]}
        files = Path(folder).glob("*/completions.jsonl")
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    curves = {k: ([e.step for e in v], [e.value for e in v]) for k, v in scalars.items()}
    print(f"{script}, seed {seed}: {seconds:.0f} CPU seconds", flush=True)
    return curves, seconds, printed, rows


# --------------------------------------------------------------------------------------- Blocks
def completions(rows):
    """A table: first and last evaluation of the first question of five terms or more."""
    questions = defaultdict(lambda: defaultdict(list))  # prompt → step → completions
    for row in rows:
        questions[row["prompt"]][row["step"]].append(row)
    prompt, steps = next(item for item in questions.items() if item[0].count("+") >= 4)
    lines = [f"| step | eight completions of `{prompt}` | right |", "|-|-|-|"]
    for step in (min(steps), max(steps)):
        drawn = steps[step][:8]
        texts = " ".join(
            f"`{row['completion']}`" + "\u00a0✓" * bool(row["reward"]) for row in drawn
        )
        lines.append(f"| {step} | {texts} | {sum(row['reward'] for row in drawn):.0f}/8 |")
    return lines


def shortened(printed):
    """From the line after the flags to the first step, and from the last step on."""
    lines = [re.sub(r"in /\S*/", "in …/runs/", line) for line in printed.splitlines()]
    scores = [i for i, line in enumerate(lines) if ": eval/" in line]
    first, last = scores[0], scores[-1]
    kept = lines[1 : first + 4] + ["…"] + lines[last - 1 :]
    return ["```text", *kept, "```"]


def number(value):
    """Two significant digits, never 1e-05."""
    return np.format_float_positional(value, 2, unique=False, fractional=False, trim="-")


def log_lines(curves):
    """The lesson's table: means over the first and the last tenth of the steps, but of pass@1 the
    first and the last evaluation."""
    lines = ["| log | first → last | look for |", "|-|-|-|"]
    for name, text in LOG.items():
        _, values = curves[name]
        tenth = max(1, len(values) // 10)
        first, last = fmean(values[:tenth]), fmean(values[-tenth:])
        lines.append(f"| `{name}` | {number(first)} → {number(last)} | {text} |")
    return lines


# -------------------------------------------------------------------------------------- Picture
def draw(results):
    """results: {script: [(curves, CPU seconds) of each seed]}. Rewards are means of ten steps."""
    page, panels = figure("All nine learn", 3.6, 2, 5)
    page.set_size_inches(9, 3.6)
    panels[4].axis("off")  # four classic scripts above five others
    legend = "↑ CartPole: mean return\n   (at most 500), by time step\n\n"
    legend += "↓ sums: share of right\n   completions, by training step"
    panels[4].text(-0.1, 0.5, legend, fontsize=WORDS, va="center", color="#59636e")
    panels = [*panels[:4], *panels[5:]]
    for panel, (script, runs) in zip(panels, results.items(), strict=True):
        classic = not script.endswith("_llm")
        for curves, _ in runs:
            steps, values = curves["charts/episodic_return" if classic else "reward"]
            if not classic:
                steps, values = steps[9:], np.convolve(values, np.full(10, 0.1), "valid")
            panel.plot(steps, values, color="#218bff" if classic else "#2da44e", linewidth=1.4)
        seconds = fmean(seconds for _, seconds in runs)
        panel.set_title(f"{script}, {seconds:.0f} s", fontsize=WORDS)
        panel.set_ylim(0, 500 if classic else 1)
        panel.set_xlim(0)
        panel.tick_params(labelsize=WORDS - 1, labelleft=script in ("reinforce", "rloo_llm"))
        if classic:
            panel.set_xticks([0, 100_000, 200_000], ["0", "100k", "200k"])
    page.savefig(PICTURE, dpi=200)


def main():
    results = {}
    for script in SCRIPTS:
        runs = [run(script, seed) for seed in SEEDS]
        results[script] = [(curves, seconds) for curves, seconds, *_ in runs]
        if script == "grpo_llm":
            curves, _, printed, rows = runs[0]
            write_block(README, "completions", completions(rows))
            write_block(README, "run", shortened(printed))
            write_block(LESSON, "lesson-log", log_lines(curves))
    draw(results)


if __name__ == "__main__":
    main()

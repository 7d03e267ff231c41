"""README's first run: what `python grpo_llm.py` prints, and how its answers to one sum change.

python tests/benchmarks/first_run.py    # a minute or two; writes README's block `run`
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from blocks import write_block  # noqa: E402

README = ROOT / "README.md"


def answers(rows):
    """A Markdown table: at each evaluation the eight completions of one question, the first one of
    five terms or more that goes from one right completion to seven or eight."""
    questions = defaultdict(lambda: defaultdict(list))  # prompt → step → completions
    for row in rows:
        questions[row["prompt"]][row["step"]].append(row)
    for prompt, steps in questions.items():
        first, *_, last = [sum(row["reward"] for row in steps[step][:8]) for step in steps]
        if prompt.count("+") >= 4 and first == 1 and last >= 7:
            break
    lines = [f"| step | eight completions of `{prompt}`, a sum not trained on | right |", "|-|-|-|"]
    for step, drawn in steps.items():
        texts = " ".join(f"`{row['completion']}`" for row in drawn[:8])
        lines.append(f"| {step} | {texts} | {sum(row['reward'] for row in drawn[:8]):.0f} of 8 |")
    return lines


def printed_lines(printed):
    """The first and last scores, the last question shown, and the last line, shortened."""
    scores = re.findall(r"^step .+$", printed, re.M)
    shown = printed[printed.index(scores[-1]) :].splitlines()
    shown = [scores[0], *shown[:4], shown[-1]]
    shown = [re.sub(r", eval/clipped_ratio.*", ", …", line) for line in shown]
    return [re.sub(r"in /.*/", "in …/runs/", line) for line in shown]


def main():
    with TemporaryDirectory() as folder:
        command = [sys.executable, "grpo_llm.py", "--output-dir", folder]
        run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        (file,) = Path(folder).glob("*/completions.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    lines = ["```text", *printed_lines(run.stdout), "```", "", *answers(rows)]
    write_block(README, "run", lines)


if __name__ == "__main__":
    main()

"""What came after GRPO and its three children: `python tests/after.py sapo` applies the block of
that name in AFTER.md to its parent, writes sapo_llm.py beside it, and prints what to do next."""

import re
import subprocess
import sys

from lineage import ROOT

PAGE = (ROOT / "tests/AFTER.md").read_text()
BLOCK = re.compile(r"^```diff\n(--- (\w+\.py)\n\+\+\+ (\w+)_llm\.py\n.+?)^```$", re.S | re.M)
BLOCKS = {name: (parent, block) for block, parent, name in BLOCK.findall(PAGE)}


def applied(name, folder=ROOT):
    """The method's script: its parent in this folder, changed by its block."""
    parent, block = BLOCKS[name]
    # -F0: a hunk that fits only in part is refused. -r-, -o-: write no file, print the result.
    command = ["patch", "-F0", "-r-", "-o-", folder / parent]
    done = subprocess.run(command, input=block, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: AFTER.md: the block of {name} no longer fits {parent}\n{done.stderr}")
    return done.stdout


def main(name):
    script = f"{name}_llm.py"
    (ROOT / script).write_text(applied(name))
    print(f"{script} is written. What it changes:\n\ndiff -U2 -p {BLOCKS[name][0]} {script}\n")
    print("A run to try:\n\n" + re.search(rf"python {script}[^`\n]*", PAGE)[0])


if __name__ == "__main__":
    if sys.argv[1:] == [] or sys.argv[1] not in BLOCKS:
        sys.exit(f"{__doc__}\n\nThe methods: {' '.join(BLOCKS)}")
    main(sys.argv[1])

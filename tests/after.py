"""Applies blocks of AFTER.md to a script, and writes the result beside it:

python tests/after.py dppo                  after_dppo.py, from grpo_llm.py
python tests/after.py dppo icepop           after_dppo_icepop.py: one block after the other
python tests/after.py gspo_llm bf16         after_gspo_llm_bf16.py, from gspo_llm.py
python tests/after.py --block after_mine    prints what your after_mine.py changes as a block"""

import difflib
import re
import sys

from lineage import ROOT

PAGE = (ROOT / "tests/AFTER.md").read_text()
BLOCK = re.compile(r"^```diff\n(--- \S+\n\+\+\+ after_(\w+)\.py\n.+?)^```$", re.S | re.M)
BLOCKS = {name: text for text, name in BLOCK.findall(PAGE)}


def hunks(name):
    """Of each hunk of a block: the function it is in, and the lines before and after."""
    for place, body in re.findall(r"^@@ (.+)\n((?:[-+ ].*\n)+)", BLOCKS[name], re.M):
        lines = body.splitlines(keepends=True)
        old, new = ([line[1:] for line in lines if line[0] != sign] for sign in "+-")
        yield place, "".join(old), "".join(new)


def applied(*names, script="grpo_llm"):
    """The text of the script with these blocks. The lines that a hunk replaces must be there, and
    only once, or it might change the wrong ones."""
    text = (ROOT / f"{script}.py").read_text()
    for name in names:
        for number, (place, old, new) in enumerate(hunks(name), start=1):
            if f"\n{text}".count(f"\n{old}") != 1:
                before = "".join(f" with {each}" for each in names[: names.index(name)])
                sys.exit(
                    f"{name} does not fit {script}.py{before}: its hunk {number}, in {place}, looks"
                    f" for these lines, which are not there, or not once:\n\n{old}"
                )
            text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
    note = (
        f"# {script}.py with {' and '.join(names)} of tests/AFTER.md. Docstrings are the parent's."
    )
    return f"{note}\n{text}"


def write(*names, script="grpo_llm"):
    """Write the script with these blocks; returns its path. It lies in the repository's root, as it
    looks for tests/tiny_model, and git ignores after_*.py."""
    parts = names if script == "grpo_llm" else (script, *names)
    path = ROOT / f"after_{'_'.join(parts)}.py"
    path.write_text(applied(*names, script=script))
    return path


def block(script, parent="grpo_llm"):
    """What a script changes in its parent, as a block for the page."""
    old, new = ((ROOT / f"{name}.py").read_text().splitlines() for name in (parent, script))
    if new[0].startswith("# "):
        new = new[1:]  # the line that says which blocks it has
    lines = difflib.unified_diff(old, new, f"{parent}.py", f"{script}.py", "", "", 1, "")
    heads = [i for i, line in enumerate(old) if re.match("def |class ", line)]
    shown = []
    for line in lines:
        if match := re.match(r"@@ -(\d+)", line):
            above = [i for i in heads if i <= int(match[1])]
            line = f"@@ {old[above[-1]] if above else 'imports'}"
        shown.append(line.rstrip() or " ")
    return "\n".join(shown)


def main(arguments):
    if arguments[:1] == ["--block"] and len(arguments) == 2:
        return print(block(arguments[1].removesuffix(".py")))
    names = [name.removesuffix(".py") for name in arguments]
    script = names.pop(0) if names and names[0] not in BLOCKS else "grpo_llm"
    unknown = [name for name in names if name not in BLOCKS]
    if not names or unknown or not (ROOT / f"{script}.py").exists():
        sys.exit(f"{__doc__}\n\nThe blocks: {' '.join(BLOCKS)}")
    path = write(*names, script=script)
    print(f"{path.name} is written. What it changes:\n\ndiff -U2 -p {script}.py {path.name}\n")
    tried = re.search(rf"python {path.name}[^`\n]*", PAGE)
    print(f"A run to try:\n\n{tried[0] if tried else f'python {path.name} --steps 40'}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Applies blocks of AFTER.md to a script, and writes the result beside it:

python tests/learn/after.py dppo                  after_dppo.py, from grpo_llm.py
python tests/learn/after.py dppo icepop           after_dppo_icepop.py: one block after the other
python tests/learn/after.py gspo_llm bf16         after_gspo_llm_bf16.py, from gspo_llm.py
python tests/learn/after.py after_mine tis        after_after_mine_tis.py, from a script of your own
python tests/learn/after.py --block after_mine    prints what it changes as a block, with context"""

import difflib
import itertools
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from scripts import ROOT

PAGE = (ROOT / "tests/learn/AFTER.md").read_text()
BLOCK = re.compile(r"^```diff\n(--- \S+\n\+\+\+ after_(\w+)\.py\n.+?)^```$", re.S | re.M)
BLOCKS = {name: text for text, name in BLOCK.findall(PAGE)}
APART = re.findall(r"^\| ([\w ]+) \| ([\w ]+) \| ([^|]+) \|$", PAGE, re.M)  # names, names, why not
NOTE = re.compile(
    r"# (\w+)\.py with (.+) of tests/learn/AFTER\.md\. Docstrings are the parent's\.\n"
)


def hunks(name):
    """Of each hunk of a block: the function it is in, and the lines before and after."""
    for place, body in re.findall(r"^@@ (.+)\n((?:[-+ ].*\n)+)", BLOCKS.get(name, ""), re.M):
        lines = body.splitlines(keepends=True)
        old, new = ([line[1:] for line in lines if line[0] != sign] for sign in "+-")
        yield place, "".join(old), "".join(new)


def reasons(one, other):
    """Why these two, blocks or a script and a block, make no sense together, as far as we know."""
    yield from (why for a, b, why in APART if one in a.split() and other in b.split())
    removed, added = ("".join(hunk[i] for hunk in hunks(one)) for i in (1, 2))
    for function in (hunk[0].removeprefix("def ").partition("(")[0] for hunk in hunks(other)):
        if f"{function}(" in removed and f"{function}(" not in added:
            yield f"{one} takes out the call of {function}, which {other} changes"


def applied(*names, script="grpo_llm"):
    """The text of the script with these blocks. The lines that a hunk replaces must be there, and
    only once, or it might change the wrong ones."""
    text, parent, blocks = (ROOT / f"{script}.py").read_text(), script, names
    if note := NOTE.match(text):  # the script has blocks already
        text, parent, blocks = text[note.end() :], note[1], (*note[2].split(" and "), *names)
    for one, other in itertools.permutations([parent, *blocks], 2):
        for why in reasons(one, other):
            sys.exit(f"{one} and {other} make no sense together: {why}")
    for name in names:
        for number, (place, old, new) in enumerate(hunks(name), start=1):
            if f"\n{text}".count(f"\n{old}") != 1:
                before = "".join(f" with {each}" for each in names[: names.index(name)])
                sys.exit(
                    f"{name} does not fit {script}.py{before}: its hunk {number}, in {place}, looks"
                    f" for these lines, which are not there, or not once:\n\n{old}"
                )
            text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
    has = " and ".join(blocks)
    return f"# {parent}.py with {has} of tests/learn/AFTER.md. Docstrings are the parent's.\n{text}"


def write(*names, script="grpo_llm"):
    """Write the script with these blocks; returns its path. It lies in the repository's root, as it
    looks for tests/tiny_model, and git ignores after_*.py."""
    parts = names if script == "grpo_llm" else (script, *names)
    path = ROOT / f"after_{'_'.join(parts)}.py"
    if path.exists() and not NOTE.match(path.read_text()):
        sys.exit(f"{path.name} is a script of your own: rename it, or it would be overwritten")
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
    names = [name.removesuffix(".py") for name in arguments]
    if names[:1] == ["--block"] and len(names) in (2, 3):
        if gone := [name for name in names[1:] if not (ROOT / f"{name}.py").exists()]:
            sys.exit(f"--block: there is no {gone[0]}.py in the repository's folder")
        return print(block(*names[1:]))
    script = names.pop(0) if names and names[0] not in BLOCKS else "grpo_llm"
    if not names or {*names} - {*BLOCKS} or not (ROOT / f"{script}.py").exists():
        sys.exit(f"{__doc__}\n\nThe blocks: {' '.join(BLOCKS)}")
    path = write(*names, script=script)
    print(f"{path.name} is written. To see its changes:\n\ndiff -U2 -p {script}.py {path.name}\n")
    flags = {"--steps": 40}  # then those of each block's own run; where two differ, the later one's
    for name in NOTE.match(path.read_text())[2].split(" and "):
        tried = re.search(rf"`python after_{name}\.py([^`]*)`", PAGE)
        flags |= re.findall(r"(--\S+) (\S+)", tried[1] if tried else "")
    print("A run to try:\n\npython", path.name, *itertools.chain(*flags.items()))


if __name__ == "__main__":
    main(sys.argv[1:])

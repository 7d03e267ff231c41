"""Carry an edit from one script to all others of its family.

    python tests/carry.py grpo_llm.py                 # what changed since the last commit
    python tests/carry.py grpo_llm.py --base REV      # since that revision

It is merged into each sister by `git merge-file`, which marks conflicts in the file. What
tests/lineage.py names as an algorithm's own is left alone, and so is the module's docstring. Last
comes what the lineage test finds now; the exit status is 1 if that is anything.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from lineage import FAMILIES, ROOT, complaints, conflicts, family_of, parts, shared, texts


def as_in(sister, theirs, script, text):
    """The text of the script with all that it does not share as the sister has it."""
    for name, part in parts(text).items():
        if not shared(name, script, sister):
            before, _, after = text.partition(part)
            text = before + theirs[name] + after if name in theirs else before + after.lstrip("\n")
    return text


def merge(sister, script, base, edited):
    """Put into the sister what the edit has changed of what both share."""
    path = ROOT / f"{sister}.py"
    theirs = parts(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder, "base"), Path(folder, "edited")
        old.write_text(as_in(sister, theirs, script, base))
        new.write_text(as_in(sister, theirs, script, edited))
        labels = ["-L", f"{sister}.py", "-L", "base", "-L", f"{script}.py"]
        subprocess.run(["git", "merge-file", "-q", *labels, path, old, new])
    was, now = parts(base), parts(edited)
    for name in sorted(was.keys() & now.keys() & theirs.keys() - {"__doc__"}):
        if was[name] != now[name] and not shared(name, script, sister):
            print(
                f"{sister}.py: `{name}` is its own, and left alone: look whether it needs it, too"
            )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script")
    parser.add_argument("--base", default="HEAD", metavar="REV")
    args = parser.parse_args()
    script = Path(args.script).stem
    family = family_of(script)
    found = conflicts(texts(family))  # of an earlier merge: to be mended before the next
    if not found:
        command = ["git", "show", f"{args.base}:./{script}.py"]
        base = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for sister in FAMILIES[family]:
            if sister != script:
                merge(sister, script, base, (ROOT / f"{script}.py").read_text())
        found = complaints(family)
    print("\n\n".join(found) or "the lineage test finds nothing")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

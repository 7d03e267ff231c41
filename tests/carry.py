"""Carry an edit from one script to all others of its family.

    python tests/carry.py grpo_llm.py                 # what changed since the last commit
    python tests/carry.py grpo_llm.py --base REV      # since that revision

It is merged into each sister by `git merge-file`, which marks conflicts in the file. Left alone are
the module's docstring and what tests/lineage.py names as an algorithm's own; with --own the latter
is merged as well. Last comes what the lineage test finds now; the exit status is 1 if that is
anything.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from lineage import FAMILIES, PATHS, ROOT, complaints, conflicts, family_of, parts, shared, texts


def as_in(theirs, text, carried):
    """The text with every part that is not carried as the sister has it."""
    for name, part in parts(text).items():
        if name not in carried:
            before, _, after = text.partition(part)
            text = before + theirs[name] + after if name in theirs else before + after.lstrip("\n")
    return text


def merge(sister, script, base, edited, own):
    """Put into the sister what the edit has changed."""
    path = ROOT / PATHS[sister]
    was, now, theirs = parts(base), parts(edited), parts(path.read_text())
    carried = {name for name in {**was, **now} if shared(name, script, sister)}
    if own:
        carried |= theirs.keys() - {"__doc__"}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, "base"), Path(folder, "edited")]
        files[0].write_text(as_in(theirs, base, carried))
        files[1].write_text(as_in(theirs, edited, carried))
        labels = ["-L", f"{sister}.py", "-L", "base", "-L", f"{script}.py"]
        subprocess.run(["git", "merge-file", "-q", *labels, path, *files])
    for name in sorted(theirs.keys() - carried - {"__doc__"}):
        if was.get(name) != now.get(name):
            print(f"{sister}.py: `{name}` is its own and left alone: does it need this, too?")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script")
    parser.add_argument("--base", default="HEAD", metavar="REV")
    parser.add_argument("--own", action="store_true")
    args = parser.parse_args()
    script = Path(args.script).stem
    family = family_of(script)
    found = conflicts(texts(family))  # of an earlier merge: to be mended before the next
    if not found:
        command = ["git", "show", f"{args.base}:./{PATHS[script]}"]
        base = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if base.returncode:
            sys.exit(
                f"{PATHS[script]} is not in {args.base}: commit it first, or give another --base"
            )
        edited = (ROOT / PATHS[script]).read_text()
        for sister in FAMILIES[family]:
            if sister != script:
                merge(sister, script, base.stdout, edited, args.own)
        found = complaints(texts(family))
    print("\n\n".join(found) or "the lineage test finds nothing")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

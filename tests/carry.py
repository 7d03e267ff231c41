"""Carry an edit from one script to all others of its family.

    python tests/carry.py grpo_llm.py                 # what has changed since the last commit
    python tests/carry.py grpo_llm.py --base REV      # since that revision

The text below the marker comment is copied. Above it, and in ppo_llm.py throughout, each function,
flag and import that has changed is merged. The docstring stays. So does a part whose merge
conflicts: it is the sister's own. The command also writes the numbers of lines in README.md.
"""

import ast
import difflib
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import tyro
from lineage import CLASSIC, FAMILY, LLM, MARKER, PATHS, ROOT, parts, source

output = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)


def merge(*texts):
    """Theirs, base and edited as one text, or None where they conflict."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(number)) for number in range(3)]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        done = output(["git", "merge-file", "-p", *files])
    return done.stdout if done.returncode == 0 else None


def carry(sister, *texts):
    """Their text with the edit in it, from theirs, base and edited."""
    theirs, base, edited = map(parts, texts)
    names, before = list(theirs), "__doc__"
    for name in dict.fromkeys([*edited, *base]):
        was, now = base.get(name, ""), edited.get(name, "")
        if was != now and name != "__doc__" and (name in theirs or not was):
            text = merge(theirs.get(name, ""), was, now)
            if text is None:
                print(f"{PATHS[sister]}: `{name}` is its own and stays. Does it need this, too?")
                text = theirs[name]
            elif name not in theirs:  # it stands behind the same part as in the edited script
                names.insert(names.index(before) + 1, name)
            theirs[name] = text
        before = name if name in theirs else before
    return "".join(theirs[name] for name in names)


def changed(child):
    """The number of lines in the diff to the parent, and in brackets those of code."""
    if not FAMILY[child]:
        return "–"
    diff = output(["diff", PATHS[FAMILY[child]], PATHS[child]]).stdout
    texts = [
        re.sub('""".*?"""', "pass", source(name), flags=re.S) for name in (FAMILY[child], child)
    ]
    code = [ast.unparse(ast.parse(text)).splitlines() for text in texts]  # it omits comments
    of_code = sum(line[0] in "+-" for line in difflib.ndiff(*code))
    return f"{len(re.findall('^[<>]', diff, re.M))} ({of_code})"


def write_counts():
    """README's numbers of lines: two cells of each row of the map, and where a function ends."""

    def row(match):
        counts = iter([str(source(match[1]).count("\n")), changed(match[1])])
        return re.sub(r"(?<=\| )(\d+|\d+ \(\d+\)|–)(?= \|)", lambda _: next(counts), match[0])

    def end(match):
        before, own, _ = source(match[2]).partition(parts(source(match[2]))[match[3]])
        return match[1] + str((before + own).count("\n"))

    page = ROOT / "README.md"
    text = re.sub(r"^\| \[(\w+)\.py\].*", row, page.read_text(), flags=re.M)
    page.write_text(re.sub(r"(\[(\w+)\.py\].*`(\w+)`, line )\d+", end, text))


def main(script: tyro.conf.Positional[Path], base: str = "HEAD"):
    name = script.stem
    shown = output(["git", "show", f"{base}:./{PATHS.get(name, script)}"])
    if name not in FAMILY or shown.returncode:
        sys.exit(f"{script} is not in {base}, or has no row in FAMILY of tests/lineage.py")
    carried = []
    for sister in LLM if name in LLM else CLASSIC:
        texts, tail = [source(sister), shown.stdout, source(name)], ""
        if "ppo_llm" not in (name, sister):
            tail = texts[2][texts[2].index(MARKER) :]
            texts = [text.partition(MARKER)[0] for text in texts]
        text, before = carry(sister, *texts) + tail, source(sister)
        (ROOT / PATHS[sister]).write_text(text)
        if text != before:
            carried.append(PATHS[sister])
    print("carried to:", ", ".join(carried) or "no other script, as nothing was to be carried")
    write_counts()


if __name__ == "__main__":
    tyro.cli(main)

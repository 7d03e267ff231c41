"""Writes README's numbers of lines: of each diff to the parent, and where a function ends.

Run it after an edit: python tests/counts.py
"""

import ast
import difflib
import re
import subprocess

from lineage import FAMILY, PATHS, ROOT, parts, source


def code(script):
    """Its statements, one a line, without comments and docstrings."""
    text = re.sub('""".*?"""', "pass", source(script), flags=re.S)
    return ast.unparse(ast.parse(text)).splitlines()


def changed(child):
    """The number of lines in the diff to the parent, and in brackets those of code."""
    parent = FAMILY[child]
    if not parent:
        return "–"
    command = ["diff", PATHS[parent], PATHS[child]]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    of_code = sum(line[0] in "+-" for line in difflib.ndiff(code(parent), code(child)))
    return f"{len(re.findall('^[<>]', diff, re.M))} ({of_code})"


def counted(page):
    """The page with the numbers as they are now: in the graph and the table of the algorithms, and
    the lines where a function ends."""

    def edge(match):
        return match[1] + changed(match[3]).split("(")[1].rstrip(")") + match[2] + match[3]

    def row(match):
        return f"{match[1]} {changed(match[2])} |"

    def end(match):
        before, own, _ = source(match[2]).partition(parts(source(match[2]))[match[3]])
        return match[1] + str((before + own).count("\n"))

    page = re.sub(r"( -- )\d+( --> )(\w+)", edge, page)
    page = re.sub(r"^(\| \[(\w+)\.py\].*? \| .*? \|) .*? \|", row, page, flags=re.M)
    return re.sub(r"(\[(\w+)\.py\]\S* to the end of `(\w+)`, line )\d+", end, page)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(counted(readme.read_text()))

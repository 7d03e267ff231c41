"""Writes README's numbers of lines: of each diff to the parent, and where a function ends. Run it
after an edit."""

import re
import subprocess

from learn.code_diff import code_diff
from lineage import FAMILY, PATHS, ROOT, parts, source


def changed(child):
    """The number of lines in the diff to the parent, and in brackets those of code."""
    parent = FAMILY[child]
    if not parent:
        return "–"
    command = ["diff", PATHS[parent], PATHS[child]]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    of_code = len(re.findall("^[+-]", code_diff(parent, child), re.M))
    return f"{len(re.findall('^[<>]', diff, re.M))} ({of_code})"


def lines_of_code(text):
    """How many lines are neither blank nor comment nor docstring."""
    lines = re.sub('""".*?"""', "", text, flags=re.S).splitlines()
    return sum(line.strip()[:1] not in ("", "#") for line in lines)


def counted(page):
    """The page with the numbers as they are now: in the graph and the table of the algorithms, the
    lines where a function ends, and how many lines are GRPO's before the shared part."""

    def edge(match):
        return match[1] + changed(match[3]).split("(")[1].rstrip(")") + match[2] + match[3]

    def row(match):
        return f"{match[1]} {changed(match[2])} |"

    def end(match):
        before, own, _ = source(match[2]).partition(parts(source(match[2]))[match[3]])
        return match[1] + str((before + own).count("\n"))

    page = re.sub(r"( -- )\d+( --> )(\w+)", edge, page)
    page = re.sub(r"^(\| \[(\w+)\.py\].*? \| .*? \|) .*? \|", row, page, flags=re.M)
    own = source("grpo_llm").partition("\n# From here on")[0]
    told = f"{own.count(chr(10))} lines, {lines_of_code(own)} of them code"
    page = re.sub(r"\d+ lines, \d+ of them code", told, page)
    return re.sub(r"(\[(\w+)\.py\]\S* to the end of `(\w+)`, line )\d+", end, page)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(counted(readme.read_text()))

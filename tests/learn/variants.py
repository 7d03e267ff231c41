"""Apply blocks of VARIANTS.md to a script, one after the other, and write the result beside it:

python tests/learn/variants.py dppo               variant_dppo.py, from grpo_llm.py
python tests/learn/variants.py stale tis          variant_stale_tis.py: first stale, then tis
python tests/learn/variants.py gspo_llm stale     variant_gspo_llm_stale.py, from gspo_llm.py
python tests/learn/variants.py variant_mine tis   variant_mine_tis.py, from a script of your own"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests/learn/VARIANTS.md").read_text()
BLOCK = re.compile(r"^```diff\n--- \S+\n\+\+\+ variant_(\w+)\.py\n(.+?)^```$", re.S | re.M)
BLOCKS = dict(BLOCK.findall(PAGE))


def hunks(name):
    """Yield for each hunk of a block: the place it names, its lines before and after the change,
    and the lines that it adds."""
    for place, body in re.findall(r"^@@ (.+)\n((?:[-+ ].*\n)+)", BLOCKS[name], re.M):
        lines = body.splitlines(keepends=True)
        before, after, added = (
            "".join(line[1:] for line in lines if line[0] in signs) for signs in ("- ", "+ ", "+")
        )
        yield place, before, after, added


def applied(*names, script="grpo_llm"):
    """The script's text with these blocks. The lines that a hunk looks for must be in the text, and
    only once, because otherwise it might change the wrong ones."""
    text = "\n" + (ROOT / f"{script}.py").read_text()
    title = f"{script}.py"
    for name in names:
        if any(added and f"\n{added}" in text for *_, added in hunks(name)):
            sys.exit(f"{name} is in {title} already")
        for place, before, after, _ in hunks(name):
            if text.count(f"\n{before}") != 1:
                first = before.splitlines()[0].strip()
                sys.exit(f"{name} does not fit {title}: it looks for `{first}` in {place}")
            text = text.replace(f"\n{before}", f"\n{after}")
        title += f" with {name}"
    return text[1:]


def main(arguments):
    """Write the script with these blocks. It lies in the repository's folder, as it looks for
    tests/tiny_model, and git ignores variant_*.py."""
    names = [argument.removesuffix(".py") for argument in arguments]
    script = names.pop(0) if names and names[0] not in BLOCKS else "grpo_llm"
    if not names or not BLOCKS.keys() >= {*names}:
        sys.exit(f"{__doc__}\n\nThe blocks: {' '.join(BLOCKS)}")
    start = [] if script == "grpo_llm" else [script.removeprefix("variant_")]
    path = ROOT / f"variant_{'_'.join([*start, *names])}.py"
    text = applied(*names, script=script)
    if path.exists() and path.read_text() != text:
        sys.exit(f"{path.name} has other text, so it is not overwritten: rename or delete it")
    path.write_text(text)
    print(f"{path.name} is written. See its changes: diff -U2 {script}.py {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])

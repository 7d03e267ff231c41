"""The pages: links, commands, flags, quoted lines and examples."""

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from conftest import ROOT, script
from launch import Launched
from scripts import PATHS, code_diff, source

README, WALK, EXAMPLES = "README.md", "tests/learn/WALK.md", "tests/examples/README.md"
FOLDERS = (ROOT.glob("*.md"), ROOT.glob(".github/*.md"), ROOT.glob("tests/**/*.md"))
FILES = sorted(page for pages in FOLDERS for page in pages if ".pytest_cache" not in page.parts)
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in FILES}
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.S | re.M)
STEPS = re.findall(r"^`diff (\S+) (\S+)`(.*?)(?=^## |\Z)", PAGES[WALK], re.S | re.M)
HUNK = re.compile(r"^```diff\n(.*?)^```$", re.S | re.M)
HUNKS = [(*pair, hunk) for *pair, text in STEPS for hunk in HUNK.findall(text)]


def test_the_output_shown_has_the_form_of_a_runs_output(short_run, capsys):
    """Its lines are those of a short run, except for the numbers."""
    (shown,) = [text for kind, text in FENCED.findall(PAGES[README]) if kind == "text"]
    grpo = script("grpo_llm")
    grpo.main(grpo.Args(**short_run))
    number = re.compile(r"(?:[-+,#\d.]+|(?<=in )\S+|'.*')")
    printed = number.sub("…", capsys.readouterr().out)
    cut = [number.sub("…", line.removesuffix(", …")) for line in shown.splitlines()]
    assert [line for line in cut if line not in printed] == []


@pytest.mark.parametrize("name", [name for name in PAGES if ">>> " in PAGES[name]])
def test_the_examples_computed_are_right(name):
    """A page's examples share their names."""
    shown = "".join(text for kind, text in FENCED.findall(PAGES[name]) if kind == "pycon")
    parsed = doctest.DocTestParser().get_doctest(shown, {}, name, None, 0)
    assert parsed.examples and doctest.DocTestRunner().run(parsed).failed == 0


def test_readme_shows_all_that_gspo_changes_in_the_code_of_grpo():
    """In surrogate, whole; the rest are three defaults."""
    (shown,) = HUNK.findall(PAGES[README])
    code = re.sub("  # .*", "", source("gspo_llm"))
    assert re.sub("^[+ ]", "", shown.partition("\n")[2], flags=re.M) in code
    changes = re.findall(r"^[+-].*", code_diff("grpo_llm", "gspo_llm"), re.M)
    defaults = [line for line in changes if line not in shown.splitlines()]
    assert {line[1:].split(":")[0].strip() for line in defaults} == {
        "clip_low",
        "clip_high",
        "beta",
    }


@pytest.mark.parametrize("parent,child,hunk", HUNKS)
def test_hunks_are_lines_of_the_real_diff(parent, child, hunk):
    command = ["diff", "-U0", parent, child]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    lines = iter(diff.split("\n"))
    quoted = [line for line in hunk.splitlines() if line[:2] != "@@"]  # a function's name
    assert [line for line in quoted if line not in lines] == []


def test_lines_quoted_without_a_diff_are_those_of_a_script():
    quotes = re.findall(r"^```python\n(.*?)^```$", PAGES[WALK], re.S | re.M)
    scripts = [(ROOT / path).read_text() for path in PATHS.values()]
    assert quotes and all(any(quote in text for text in scripts) for quote in quotes)


FOREIGN = {"nproc-per-node", "with-requirements", "logdir", "help", "backup-if-mismatch"}
FOREIGN |= {"json-lines", "ensure-ascii", "bug", "flag"}  # --flag: any
FLAGS_READ = [README, EXAMPLES, ".github/CONTRIBUTING.md"]
FLAGS_READ += [name for name in PAGES if name.startswith("tests/learn/")]


def test_every_flag_named_is_in_the_help_of_a_script():
    """Or it is a field that a block on the page adds to Args. The terminal knows ASCII alone."""
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    helps = [Launched(path, "--help", environment=ascii_only) for path in PATHS.values()]
    assert [process.wait() for process in helps] == [0] * len(helps)
    flag = r"(?<![\w-])--(?:no-)?([a-z][a-z-]+)"
    flags = set(re.findall(flag, "".join(process.stdout for process in helps))) | FOREIGN
    unknown = []
    for name in FLAGS_READ:
        added = re.findall(r"^\+    (\w+): ", PAGES[name], re.M)
        words = set(re.findall(flag, PAGES[name]))
        unknown += [(name, word) for word in words - flags if word.replace("-", "_") not in added]
    assert unknown == [], "no script has this flag"


def anchors(page):
    """What `page.md#…` may name: GitHub's names of the titles, and each <a id="…">."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", PAGES[page]), re.M)
    slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    return {*slugs, *re.findall('<a id="(.+?)">', PAGES[page])}


# A placeholder, or a script that a reader makes.
ANY_NAME = r"(?:\w+/)*(?:NAME|variant_\w+|clock|my_envs|json)\.py"


@pytest.mark.parametrize("name", PAGES)
def test_every_link_and_every_script_named_leads_somewhere(name):
    """A script's path of two parts or more starts at the root or below tests/."""
    page, dead = ROOT / name, []
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", FENCED.sub("", PAGES[name]))
    for link in map("".join, links):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not path.exists() or anchor and anchor not in anchors(str(path.relative_to(ROOT))):
            dead.append(link)
    for path in re.findall(r"(?<![\w/.}:])(?:\w+/)*\w+\.py\b", PAGES[name]):
        places = [ROOT / path, *(ROOT / "tests").rglob(path)]
        if not re.fullmatch(ANY_NAME, path) and not any(place.exists() for place in places):
            dead.append(path)
    assert dead == []


def commands(page):
    """The page's commands for a shell, each in one line, without comments."""
    texts = re.findall(r"^```sh\n(.*?)^```$", PAGES[page], re.S | re.M)
    lines = re.sub(r"(?m)(^| +)#.*", "", "".join(texts)).replace("\\\n", "").splitlines()
    return [line for line in dict.fromkeys(lines) if line]


SET_UP = ("export ", "git clone", "uv run", "python3 -m venv", "python -m pytest")
TRAINING = [line for line in commands(README) + commands(EXAMPLES) if not line.startswith(SET_UP)]
TRIED = re.findall(r"`(python (?:\w+/)*\w+\.py[^`]*)`", PAGES[WALK])


@pytest.mark.parametrize("command", [*TRAINING, *TRIED])
def test_every_command_has_flags_that_the_script_takes(command):
    """test_every_command_runs (slow) runs the commands."""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    module = script(Path(words[at]).stem)
    if hasattr(module, "Args"):
        tyro.cli(module.Args, args=words[at + 1 :])


LLM_SMOKE = "--steps 2 --prompts-per-step 8 --group-size 4 --eval-problems 4"
LLM_SMOKE += " --max-new-tokens 6 --eval-every 1"
SMOKE = {"grpo_llm.py": LLM_SMOKE, "ppo.py": "--total-timesteps 4096"}


@pytest.mark.slow
def test_every_command_runs(pretrained, tmp_path):
    """Those of README and the examples' page in their order, each as a user starts it, at toy size.
    A small local model stands in for the hub's models."""
    assert "&& pip install -r requirements.txt && python grpo_llm.py" in "".join(commands(README))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    for command in TRAINING:
        command = re.sub(r"(?:Qwen|HuggingFaceTB)/\S+", pretrained, command)
        command = command.replace("--steps 12", "--steps 2")
        file = next(word for word in command.split() if word in SMOKE)
        command = command.replace(file, f"{file} {SMOKE[file]} --output-dir {tmp_path}")
        subprocess.run(command, env=environment, shell=True, cwd=ROOT, check=True)

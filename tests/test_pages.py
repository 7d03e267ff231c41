"""Commands, flags, file names, quoted lines and numbers of README, the walk and other pages."""

import doctest
import functools
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
from scripts import FAMILY, PATHS, code_diff

README, WALK = ROOT / "README.md", ROOT / "tests/learn/WALK.md"
EXAMPLES, RESULTS = ROOT / "tests/examples/README.md", ROOT / "tests/benchmarks/results"
OTHERS = ("EXERCISES", "ANSWERS", "QUESTIONS", "CURVES")
OTHERS = (*(f"tests/learn/{name}.md" for name in OTHERS), ".github/CONTRIBUTING.md")
READ = (README, WALK, EXAMPLES, *(ROOT / name for name in OTHERS))
PAGES = {page: page.read_text() for page in READ}
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", "".join(PAGES.values()), re.S | re.M)
THEORY = ROOT / "tests/learn/THEORY.md"
PAGES[THEORY] = THEORY.read_text()  # its examples run in test_theory.py
STEPS = re.findall(r"^`diff (\S+) (\S+)`(.*?)(?=^## |\Z)", PAGES[WALK], re.S | re.M)
HUNK = re.compile(r"^```diff\n(.*?)^```$", re.S | re.M)
HUNKS = [(*pair, hunk) for *pair, text in STEPS for hunk in HUNK.findall(text)]


def cells(name: str) -> dict[str, dict[str, str]]:
    """{first cell of the row: {column: cell}} of a table in results/."""
    lines = (RESULTS / f"{name}.md").read_text().splitlines()
    split = [line.strip("|").split("|") for line in lines if line[:1] == "|"]
    header, _, *rows = [list(map(str.strip, line)) for line in split]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


SHOWN = "untrained, 128 tokens, three answered questions in the prompt"
WAYS = ("untrained, 128 tokens", SHOWN, "GRPO")


def test_the_real_model_s_numbers_are_those_measured():
    """Of the trained model the median of the seeds; then each seed's score on the dates."""
    found, expected = cells("real_model"), []
    for task in ("products", "dates"):
        row = []
        for way in WAYS:
            scores = found[f"{task}, {way}"]
            columns = ("pass@1: before → after (worst seed)", "pass@8")
            row.append(", ".join(scores[name].split(" → ")[-1].split(" (")[0] for name in columns))
        expected.append((found[f"{task}, GRPO"]["seeds"], " | ".join(row)))
    shown = re.findall(r"^\| \*.+?\* \((\d) seeds\) \| (.+) \|$", PAGES[README], re.M)
    assert shown == expected
    sampled = [found[f"{task}, GRPO"][columns[0]] for task in ("products", "dates")]
    worst = [re.search(r"\((.+)\)", each)[1] for each in sampled]
    assert "The worst seed ends at {} and {}".format(*worst) in PAGES[README]


def test_tables_and_graph_of_the_algorithms_have_every_script():
    rows = re.findall(r"^\| \[(\w+)\.py\]\((.+?)\)", PAGES[README], re.M)
    assert dict(rows) == PATHS
    map_of_all = PAGES[WALK].partition("## The map")[2]
    assert all(f"| {name} |" in map_of_all for name in PATHS)
    graph = PAGES[README].partition("```mermaid")[2].partition("```")[0]
    edges = re.findall(r"(?=\b(\w+) -- \d+ --> (\w+))", graph)
    expected = {(parent, child) for child, parent in FAMILY.items() if parent}
    assert {*edges, ("grpo_llm", "ppo_llm")} == expected  # ppo_llm is an example


def test_tables_are_those_measured():
    """RESULTS.md has every table of results/ with its footer, except those that it links to."""
    page = (RESULTS.parent / "RESULTS.md").read_text()
    tables = [path for path in RESULTS.glob("*.md") if f"results/{path.name}" not in page]
    assert [path for path in tables if path.read_text() not in page] == []


def test_the_output_shown_has_the_form_of_a_runs_output(short_run, capsys):
    """Its lines are those of a short run, except for the numbers."""
    (shown,) = [text for kind, text in BLOCKS if kind == "text"]
    grpo = script("grpo_llm")
    grpo.main(grpo.Args(**short_run))
    form = functools.partial(re.sub, r"(?:[-+,#\d.]+|(?<=in )\S+|'.*')", "…")
    printed = "\n".join(map(form, capsys.readouterr().out.splitlines()))
    cut = [form(line.removesuffix(", …")) for line in shown.splitlines()]
    assert [line for line in cut if line not in printed] == []


def test_the_examples_computed_are_right():
    shown = "".join(text for kind, text in BLOCKS if kind == "pycon")
    parsed = doctest.DocTestParser().get_doctest(shown, {}, "README", None, 0)
    assert doctest.DocTestRunner().run(parsed).failed == 0


def test_readme_shows_all_that_gspo_changes_in_the_code_of_grpo():
    """Each line that goes or comes, and the lines around them word for word."""
    (shown,) = HUNK.findall(PAGES[README])
    told = [line for line in shown.splitlines() if line[:2] != "@@"]  # a function's name
    lines = code_diff("grpo_llm", "gspo_llm").splitlines()[1:]  # without the first one's place
    left = iter(lines)
    assert [line for line in told if line not in left] == []
    assert [line for line in lines if line[0] in "+-" and line not in told] == []


@pytest.mark.parametrize("parent,child,hunk", HUNKS)
def test_hunks_are_lines_of_the_real_diff(parent, child, hunk):
    """Word for word, and in its order."""
    command = ["diff", "-U0", parent, child]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    lines = iter(diff.split("\n"))
    told = [line for line in hunk.splitlines() if line[:2] != "@@"]  # a function's name
    assert [line for line in told if line not in lines] == []


def test_every_pair_of_neighbours_has_its_hunk():
    pairs = {(f"{parent}.py", f"{child}.py") for child, parent in FAMILY.items() if parent}
    assert {pair[:2] for pair in HUNKS} == pairs - {("grpo_llm.py", "ppo_llm.py")}
    quotes = re.findall(r"^```python\n(.*?)^```$", PAGES[WALK], re.S | re.M)
    scripts = [path.read_text() for path in ROOT.glob("*.py")]
    assert quotes and all(any(quote in text for text in scripts) for quote in quotes)


def test_every_flag_named_is_in_the_help_of_a_script():
    """`others` are flags of other programs."""
    others = {"nproc-per-node", "logdir", "help", "extra-index-url", "index", "word-diff"}
    others |= {"backup-if-mismatch", "bug", "log", "flag", "gif", "arms", "block"}  # --flag: any
    others |= {"cause", "solution", "pictures", "only", "seeds"}
    asked = [Launched(path, "--help") for path in sorted(PATHS.values())]
    assert [process.wait() for process in asked] == [0] * len(asked)
    flag = r"--(?:no-)?([a-z][a-z-]+)"
    taken = set(re.findall(flag, "".join(process.stdout for process in asked)))
    assert set(re.findall(flag, "".join(PAGES.values()))) - others <= taken


def test_every_file_named_exists():
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([\w./]+)[)#]|src=\"([\w./]+)\"", text):
            assert (page.parent / "".join(link)).exists(), link
        for target, anchor in re.findall(r"\]\(([\w./]*\.md)?#([\w-]+)\)", text):
            linked = ((page.parent / target) if target else page).read_text().lower()
            titles = re.findall(r"^#+ (.+)$", linked, re.M)
            slugs = [re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles]
            assert anchor in slugs or f'<a id="{anchor}">' in linked, (page.name, anchor)
        paths = set(re.findall(r"(?<![\w/.}])(?:\w+/)*\w+\.py\b", text)) - {"new_llm.py"}
        for path in paths:  # new_llm.py is an algorithm to be added
            assert (ROOT / path).exists() or list((ROOT / "tests").rglob(path)), path


def commands(page):
    """Those typed in a shell, each in one line, without comments."""
    texts = re.findall(r"^```sh\n(.*?)^```$", PAGES[page], re.S | re.M)
    lines = "".join(texts).replace("\\\n", "").splitlines()
    return [line for line in dict.fromkeys(lines) if line and line[:1] != "#"]


EXPORT, INSTALL, TEST, *ON_README = commands(README)
TRAINING = [*ON_README, *commands(EXAMPLES)]
READERS = ("train.jsonl", "test.jsonl")  # the reader's own files
TRIED = re.findall(r"`(python (?:\w+/)*\w+\.py[^`]*)`", PAGES[WALK])


@pytest.mark.parametrize("command", [*TRAINING, *TRIED])
def test_every_command_has_flags_that_the_script_takes(command):
    """The script's own Args parse the flags. test_every_command_runs (slow) runs the commands."""
    words = [__file__ if word in READERS else word for word in shlex.split(command)]
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    module = script(Path(words[at]).stem)
    tyro.cli(module.Args, args=words[at + 1 :])


def test_the_page_shows_the_code_of_exact_text():
    code = (ROOT / "tests/examples/verifiers/exact_text.py").read_text().split('"""\n\n')[1]
    assert ("python", code) in BLOCKS


LLM_SMOKE = "--steps 2 --prompts-per-step 8 --group-size 4 --eval-problems 4"
LLM_SMOKE += " --max-new-tokens 6 --eval-every 1"
SMOKE = {"grpo_llm.py": LLM_SMOKE, "ppo.py": "--total-timesteps 4096"}
EARLIER = "runs/…/agent.pt"  # what the command before has made


@pytest.mark.slow
def test_every_command_runs(pretrained, gsm_file, tmp_path):
    """Those of README and the examples' page in their order, each as a user starts it, at toy size.
    A small local model stands in for the hub's models, and a small file for GSM8K's."""
    assert INSTALL.endswith("&& pip install -r requirements.txt && python grpo_llm.py")
    assert EXPORT.startswith("export ") and TEST == "python -m pytest -q tests"
    other = tmp_path / "other.jsonl"  # its questions would not be trained on
    other.write_text('{"question": "What is 1 + 1?", "answer": "2"}\n')
    stand_ins = dict(zip(READERS, (gsm_file, str(other)), strict=True))
    stand_ins["--steps 25"] = "--steps 2"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    for command in ["python grpo_llm.py", *TRAINING]:
        command = re.sub(r"(?:Qwen|HuggingFaceTB)/\S+", pretrained, command)
        for known, stand_in in stand_ins.items():
            command = command.replace(known, stand_in)
        if EARLIER in command:
            (made,) = tmp_path.glob("*__ppo__*/agent.pt")
            command = command.replace(EARLIER, str(made))
        file = next(word for word in command.split() if word.endswith(".py"))
        command = command.replace(file, f"{file} {SMOKE[file]} --output-dir {tmp_path}")
        options = {"shell": True, "cwd": ROOT, "capture_output": True, "text": True}
        done = subprocess.run(command, env=environment, **options)
        assert done.returncode == 0, command + done.stderr[-9000:]  # torchrun adds much

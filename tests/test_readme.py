"""Commands, flags, file names, quoted lines and numbers in README and tests/examples/README.md."""

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
from lineage import FAMILY, PATHS

README, EXAMPLES = ROOT / "README.md", ROOT / "tests/examples/README.md"
PAGES = {page: page.read_text() for page in (README, EXAMPLES)}
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", "".join(PAGES.values()), re.S | re.M)
HUNKS = re.findall(r"^`diff (\S+) (\S+)`:.*?\n```diff\n(.*?)^```$", PAGES[README], re.S | re.M)


# -------------------------------------------------------------------------------------- Numbers

RESULTS = ROOT / "tests/benchmarks/results"
SHOWN = "untrained, 24 tokens, three answered questions in the prompt"
WAYS = ("untrained, 128 tokens", SHOWN, "GRPO")


def cells(name: str) -> dict[str, dict[str, str]]:
    """{first cell of the row: {column: cell}} of a table in results/."""
    lines = (RESULTS / f"{name}.md").read_text().splitlines()
    split = [line.strip("|").split("|") for line in lines if line[:1] == "|"]
    header, _, *rows = [list(map(str.strip, line)) for line in split]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_numbers_in_sentences_are_those_measured():
    """If a number has changed, read its sentence again before you change the number."""
    seeds, cartpole = cells("classic_seeds"), cells("classic_cartpole")
    (solved,) = {row["solved"] for row in seeds.values()}
    seconds = sorted(float(row["seconds to 475, median"]) for row in seeds.values())
    faster = sorted(float(cartpole[name]["times faster"]) for name in list(cartpole)[1:])
    sums = cells("llm_compare")["grpo_llm"]
    start, end = float(sums["pass@1 before"]), float(sums["after"])
    said = [
        f"on {solved} seeds by all four, in {seconds[0]:.0f} to {seconds[-1]:.0f} s",
        f"{start:.0%} → {end:.0%} in {sums['seconds']} s",
        f"in a {faster[0]:.0f}th to a {faster[-1]:.0f}th of Stable-Baselines3's time",
    ]
    table = (RESULTS / "classic_shapes.md").read_text()
    equal = re.findall(r"^\| ours: .* ([\d.]+) \|$", table, re.M)
    said.append(f"take {min(equal)} to {max(equal)} times as many environment steps")
    rates = {}
    for name in ("tiny_1_threads", "tiny_2_threads", "real", "long"):
        ratio = cells(f"trl_{name}")["TRL's GRPOTrainer"]["completions per second: ours / this"]
        rates[name] = f"{float(ratio.split()[0]):.1f}"
    said.append(f"{rates['tiny_2_threads']} to {rates['tiny_1_threads']} with the tiny model")
    said.append(f"{rates['real']} with SmolLM2 and short answers")
    said.append(f"{rates['long']} with GSM8K's questions")
    text = " ".join(PAGES[README].replace(" %", "%").split())
    assert [each for each in said if each not in text] == []


def test_the_map_has_every_script_and_the_walk_says_verdicts():
    """The verdict of each claim that README links is the one on its page."""
    rows = re.findall(r"^\| \[(\w+)\.py\]\((.+?)\)", PAGES[README], re.M)
    assert dict(rows) == PATHS
    page = (ROOT / "tests/experiments/EXPERIMENTS.md").read_text()
    verdicts = dict(re.findall(r"\]\(#(\w+)\) \| (.+) \|", page))
    text = " ".join(PAGES[README].split())  # a link may break a line
    links = re.findall(r": ([\w ]+)\]\(tests/experiments/EXPERIMENTS\.md#(\w+)\)", text)
    assert len(links) > 10 and all(verdicts[name] == verdict for verdict, name in links)


def test_tables_are_those_measured():
    """README's table of the pretrained model has the measured cells. RESULTS.md has every table of
    results/ with its footer, except those that it links to."""
    found, expected = cells("real_model"), []
    for task in ("products", "dates"):
        untrained, shown, trained = (found[f"{task}, {way}"] for way in WAYS)
        row = [f"{trained['seeds']} × {trained['questions']}"]
        for name in ("held out, sampled: before → after (worst)", "greedy"):
            after = trained[name].split(" → ")[1]
            row.append(f"{untrained[name]}, {shown[name]} → {after}")
        expected.append(" | ".join([*row, trained["minutes on one core"]]))
    assert re.findall(r"^\| \*.+?\* \| (.+) \|$", PAGES[README], re.M) == expected
    page = (RESULTS.parent / "RESULTS.md").read_text()
    linked_only = ("classic_seeds", "learning", "real_model", "bf16")
    tables = [path for path in RESULTS.glob("*.md") if path.stem not in linked_only]
    assert [path for path in tables if path.read_text() not in page] == []


def test_the_output_shown_has_the_form_of_a_runs_output(short_run, capsys):
    """Its lines are those of a short run, except for the numbers. Its scores are those measured."""
    (shown,) = [text for kind, text in BLOCKS if kind == "text"]
    grpo = script("grpo_llm")
    grpo.main(grpo.Args(**short_run))
    form = functools.partial(re.sub, r"(?:[-+,#\d.]+|(?<=in )\S+|'.*')", "…")
    printed = "\n".join(map(form, capsys.readouterr().out.splitlines()))
    cut = [form(line.removesuffix(", …")) for line in shown.splitlines()]
    assert [line for line in cut if line not in printed] == []
    sums = cells("llm_compare")["grpo_llm"]
    start, end = map(float, re.findall(r"eval/pass@1 ([\d.]+)", shown))
    assert start == float(sums["pass@1 before"])
    assert end == pytest.approx(float(sums["after"]), 0.01)


def test_the_examples_computed_are_right():
    shown = "".join(text for kind, text in BLOCKS if kind == "pycon")
    parsed = doctest.DocTestParser().get_doctest(shown, {}, "README", None, 0)
    assert doctest.DocTestRunner().run(parsed).failed == 0


# ------------------------------------------------------------------------ Lines, flags, commands


@pytest.mark.parametrize("parent,child,hunk", HUNKS)
def test_hunks_are_lines_of_the_real_diff(parent, child, hunk):
    """Word for word, and in its order."""
    command = ["diff", "-U0", parent, child]
    diff = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    lines = iter(diff.split("\n"))
    assert [line for line in hunk.splitlines() if line not in lines] == []


def test_every_pair_of_neighbours_has_its_hunk():
    pairs = {(f"{parent}.py", f"{child}.py") for child, parent in FAMILY.items() if parent}
    assert {pair[:2] for pair in HUNKS} == pairs - {("grpo_llm.py", "ppo_llm.py")}
    (quote,) = [text for kind, text in BLOCKS if kind == "python" and "def " not in text]
    assert quote in (ROOT / "rloo_llm.py").read_text()


def test_every_flag_named_is_in_the_help_of_a_script():
    """`others` are flags of other programs."""
    others = {"nproc-per-node", "logdir", "help", "extra-index-url", "index", "word-diff"}
    asked = [Launched(path, "--help") for path in sorted(PATHS.values())]
    assert [process.wait() for process in asked] == [0] * len(asked)
    flag = r"--(?:no-)?([a-z][a-z-]+)"
    taken = set(re.findall(flag, "".join(process.stdout for process in asked)))
    assert set(re.findall(flag, "".join(PAGES.values()))) - others <= taken


def test_every_file_named_exists():
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([\w./]+)[)#]|src=\"([\w./]+)\"", text):
            assert (page.parent / "".join(link)).exists(), link
        for path in re.findall(r"(?<![\w/.])(?:\w+/)*\w+\.py\b", text):
            assert (ROOT / path).exists() or list(EXAMPLES.parent.rglob(path)), path


SHELL = [text.replace("\\\n", "") for kind, text in BLOCKS if not kind]  # one command per line
LINES_TYPED = [line for text in SHELL for line in text.splitlines() if line[:1] != "#"]
COMMANDS = list(dict.fromkeys(LINES_TYPED))


@pytest.mark.parametrize("command", [line for line in COMMANDS if ".py" in line])
def test_every_command_has_flags_that_the_script_takes(command):
    """The script's own Args parse the flags. test_every_command_runs (slow) runs the commands."""
    words = shlex.split(command.rpartition("&& ")[2])
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    module = script(words[at].removesuffix(".py"))
    tyro.cli(module.Args, args=words[at + 1 :])


def test_the_page_shows_the_code_of_exact_text():
    code = (ROOT / "tests/examples/verifiers/exact_text.py").read_text().split('"""\n\n\n')[1]
    assert ("python", code) in BLOCKS


LLM_SMOKE = "--steps 2 --prompts-per-step 8 --group-size 4 --eval-problems 4"
LLM_SMOKE += " --max-new-tokens 6 --eval-every 1"
SMOKE = {"grpo_llm.py": LLM_SMOKE, "ppo.py": "--total-timesteps 4096"}
EARLIER = {"runs/…/step-000050": "grpo_llm__*/step-000001", "runs/…/agent.pt": "ppo__*/agent.pt"}


@pytest.mark.slow
def test_every_command_runs(pretrained, gsm_file, tmp_path):
    """Run the commands of both pages from top to bottom, each as a user starts it, at toy size.

    A small local model stands in for the hub's models, and small files for GSM8K's.
    """
    first, second, *rest = COMMANDS
    assert first.endswith("&& pip install -r requirements.txt && python grpo_llm.py")
    assert second == "python -m pytest -q tests"
    test_file = tmp_path / "test.jsonl"
    test_file.write_text('{"question": "What is 2 + 2?", "answer": "2 + 2 = 4\\n#### 4"}\n')
    stand_ins = {
        "train.jsonl": gsm_file,
        "test.jsonl": str(test_file),
        "--nproc-per-node 8": "--standalone --nproc-per-node 2",
        "--steps 25": "--steps 2",
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    for command in ["python grpo_llm.py", *rest]:
        command = re.sub(r"(?:Qwen|HuggingFaceTB)/\S+", pretrained, command)
        for known, stand_in in stand_ins.items():
            command = command.replace(known, stand_in)
        for known, made in EARLIER.items():
            if known in command:  # an earlier command made it; the newest is torchrun's
                found = sorted(tmp_path.glob(made), key=os.path.getmtime)
                command = command.replace(known, str(found[-2:][0]))
        file = next(word for word in command.split() if word.endswith(".py"))
        command = command.replace(file, f"{file} {SMOKE[file]} --output-dir {tmp_path}")
        options = {"shell": True, "cwd": ROOT, "capture_output": True, "text": True}
        done = subprocess.run(command, env=environment, **options)
        assert done.returncode == 0, command + done.stderr[-9000:]  # torchrun adds much

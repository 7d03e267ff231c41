"""The exercises: their command fails without the body and with a likely mistake (slow). The bugs to
find: each fits its script, and the test that its row names sees it (slow)."""

import os
import re
import shlex
import shutil
import sys
from functools import partial

import bugs
import exercise
import pytest
import tyro
from conftest import ROOT, script
from exercise import blanked
from launch import Launched, is_ours
from scripts import PATHS, parts, source

ROWS = re.findall(r"^\| `(\w+)` in (\w+)\.py.*? \| `(tests/.+?)` \|", exercise.PAGE, re.M)
BUGS = range(1, len(bugs.BUGS) + 1)
# Exercise: what the solution has, and what a learner might write.
MISTAKES = {
    "rloo_llm compute_advantages": ("(rewards.shape[1] - 1)", "rewards.shape[1]"),
    "grpo_llm compute_advantages": ("if args.scale_rewards:", "if True:"),
    "grpo_llm token_weights": ("= args.max_new_tokens", "= mask.shape[1]"),
    "grpo_llm surrogate": ("ratio = log_ratio.exp()", "ratio = log_ratio.exp().detach()"),
    "grpo_llm kl_k3": ("d.expm1() - d", "d.square() / 2"),
    "gspo_llm surrogate": ("/ lengths * mask", "/ mask.shape[1] * mask"),
    "cispo_llm surrogate": (".exp().detach()", ".exp()"),
    "reinforce compute_advantages": ('["done"] & ~rollout["terminated"]', '["done"]'),
    "actor_critic compute_advantages": ('~rollout["terminated"]', '~rollout["done"]'),
    "ppo compute_advantages": (' * ~rollout["done"][t]', ""),
    "ppo surrogate": ("torch.minimum", "torch.maximum"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), ROOT / "README.md"]:
        shutil.copy(path, folder)
    return folder


def pytest_there(folder, command):
    """In a process of its own: run these tests of the copy."""
    os.chdir(folder)
    sys.path[:] = [path for path in sys.path if not is_ours(path)]
    sys.exit(pytest.main(["-qx", "-p", "no:cacheprovider", *shlex.split(command)]))


def run(command, copy):
    """1 if a test has failed, 0 if all have passed."""
    return Launched(partial(pytest_there, copy, command)).wait()


@pytest.mark.slow
@pytest.mark.parametrize("function,file,command", ROWS, ids=[" ".join(row[1::-1]) for row in ROWS])
def test_a_command_tells_right_from_wrong(function, file, command, copy):
    solution, path = source(file), copy / PATHS[file]
    body = parts(solution)[function]

    def passes(text):
        path.write_text(text)
        return run(command, copy) == 0

    assert passes(solution)
    assert not passes(blanked(solution, function))
    right, wrong = MISTAKES[f"{file} {function}"]
    assert right in body and not passes(solution.replace(body, body.replace(right, wrong)))
    path.write_text(solution)


@pytest.mark.parametrize("number", BUGS)
def test_a_bug_is_planted_and_its_row_fits(number, tmp_path, monkeypatch, capsys):
    """The script has the text to replace once, and takes the flags of the row's command."""
    name, *_ = list(bugs.BUGS.values())[number - 1]
    monkeypatch.setattr(bugs, "ROOT", tmp_path)
    (tmp_path / PATHS[name]).write_text(source(name))
    exercise.plant(number)
    compile((tmp_path / PATHS[name]).read_text(), name, "exec")
    command = re.search(rf"    python {name}.py (.*)", capsys.readouterr().out)[1]
    tyro.cli(script(name).Args, args=shlex.split(command))


@pytest.mark.slow
@pytest.mark.parametrize("number", BUGS)
def test_the_test_that_a_row_names_sees_the_bug(number, copy):
    path, text = bugs.planted(number, copy)
    right = path.read_text()
    path.write_text(text)
    assert run(exercise.CASES[number - 1][-1], copy) == 1
    path.write_text(right)

"""CURVES.md: the page names all that the scripts log, and its tables are those of the kept runs."""

import re

import curves
from curves import ALL, SEEDS, Run
from scripts import LLM_SCRIPTS, SCRIPTS

PAGE = curves.PAGE.read_text()
NAMES = set(re.findall(r"^\| `([\w/@]+)`", PAGE, re.M))
TOY = "--steps 2 --prompts-per-step 4 --group-size 4 --eval-problems 4 --max-new-tokens 12"
SHORT = dict.fromkeys(SCRIPTS, "--total-timesteps 4500") | dict.fromkeys(LLM_SCRIPTS, TOY)
SHORT["reinforce"] = SHORT["actor_critic"] = "--total-timesteps 1500 --num-envs 2"


def test_the_page_names_all_that_the_scripts_log_and_nothing_else():
    logged = set()
    for name in SCRIPTS:
        logged |= curves.run(Run(script=name), 1, SHORT[name]).keys()
    assert logged - {"step", "right", "eval/right"} == NAMES


def test_the_page_has_the_tables_of_the_runs(tmp_path):
    """If this fails: python tests/learn/curves.py --pictures"""
    copy = tmp_path / "CURVES.md"
    copy.write_text(PAGE)
    curves.write_tables(copy, curves.load_runs())
    assert copy.read_text() == PAGE


def test_the_kept_runs_have_the_flags_and_defaults_of_today():
    """If this fails: python tests/learn/curves.py, which makes them again"""
    flags = {(name, seed): vars(curves.parsed(ALL[name], seed)) for name in ALL for seed in SEEDS}
    assert {who: run["flags"] for who, run in curves.load_runs().items()} == flags

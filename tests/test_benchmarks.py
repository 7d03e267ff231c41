"""The benchmarks: their tables, their arithmetic; and (slow) each of them at toy size."""

import bench
import beside_trl
import classic
import gpu
import methods
import parity
import pytest
import real_model
import torch
from conftest import ROOT
from launch import Launched

TESTS = ROOT / "tests"
PAGE = (TESTS / "benchmarks/RESULTS.md").read_text()

# Name, command after `python tests/`, and parts that the output must hold, with … between them.
SMOKE = [
    ("classic", "--smoke", "| environment | reinforce | … | CartPole-v1 | … , 1: 0 at inf | "),
    ("methods", "--smoke", "| imitation of right completions | 0.0003 |"),
    ("parity", "--smoke", "| rloo_llm --beta 0.1 --num-minibatches 1 … | cispo_llm |"),
    ("beside_trl", "--smoke", "| grpo_llm.py | … | rloo_llm.py |"),
    (
        "real_model",
        "--smoke --model PRETRAINED --scripts rloo_llm dapo_llm --seeds 1 --steps 3",
        "| dates, RLOO | 3 | 1 | … | dates, DAPO | 1 | 1 |",
    ),
    ("gpu", "--smoke", '"gradient_error" … "16 rows, graph"'),
]
SMOKE = [(name, f"benchmarks/{name}.py {flags}", expected) for name, flags, expected in SMOKE]
SMOKE += [(name, f"learn/{name}.py /dev/null", "") for name in ("clip", "weights")]


@pytest.mark.slow
@pytest.mark.parametrize("name,command,expected", SMOKE, ids=[row[0] for row in SMOKE])
def test_it_runs_at_smoke_size(name, command, expected, pretrained):
    """If TRL is not installed, our side runs alone."""
    words = f"tests/{command}".replace("PRETRAINED", pretrained).split()
    process = Launched(*words)
    assert process.wait(600) == 0, process.stderr[-3000:]
    assert all(part in process.stdout for part in expected.split(" … ")), process.stdout


@pytest.mark.parametrize("module", [methods, real_model, classic, parity, beside_trl, gpu])
def test_the_tables_are_those_of_the_runs_kept(module):
    for name, lines in module.tables(module.kept()).items():
        text = "\n".join(lines)
        assert f"<!-- {name} -->\n{text}\n<!-- end -->" in PAGE, name


def test_scores_are_of_sums_that_no_run_trains_on_and_no_rate_is_chosen_by():
    script = bench.load("grpo_llm")
    args = script.Args(eval_problems=10_000)
    train, tuning = methods.load_data(methods.TUNING_SUMS, script, args)
    _, scored = methods.load_data(methods.SUMS, script, args)
    assert min(len(tuning), len(scored)) >= methods.HELD_OUT and len(set(scored)) == len(scored)
    assert not {*train} & {*tuning} and not {*train} & {*scored} and not {*tuning} & {*scored}


def test_the_rate_is_that_of_the_tuning_seeds():
    """The rate that is best on other seeds is not taken."""
    runs = bench.Kept("methods", smoke=True)
    for seed, scores in {101: (0.2, 0.3), 102: (0.6, 0.4), 1: (0.5, 0.9), 2: (0.5, 0.9)}.items():
        for rate, score in zip((1e-3, 2e-3), scores, strict=True):
            flags = methods.flags_of("GRPO", rate, seed)
            runs.add("GRPO", flags, {"eval/pass@1": [0.0, score]})
    assert methods.rate_of(runs, "GRPO") == 1e-3


def test_a_run_ends_once_its_last_100_episodes_reach_475():
    """With rewards times two. Fewer episodes do not count, nor do any before the last 100."""
    rollout, solved = {"mask": torch.ones(5, 2)}, []
    returns = [[1000.0] * 99, [0.0] * 10, [1000.0] * 94, [1000.0], [1000.0]]
    rollouts = classic.until_solved(lambda: ((rollout, part) for part in returns), 2, solved)
    assert [part for _, part in rollouts()] == returns[:3] and solved == [40]

"""The benchmarks: their tables, which runs they keep, their arithmetic; and (slow) each of them at
toy size."""

import runpy

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
    (
        "methods",
        "--smoke",
        "| imitation of right completions | 0.0003 | … | the initial model, drawn again | 1 |",
    ),
    ("parity", "--smoke", "| rloo_llm --beta 0.1 --num-minibatches 1 … | cispo_llm |"),
    ("beside_trl", "--smoke", "| grpo_llm.py | … | rloo_llm.py |"),
    (
        "real_model",
        "--smoke --model PRETRAINED",
        "| products, GRPO | 2e-05 | 1 | … | dates, DAPO | … right answer",
    ),
    ("gpu", "--smoke", '"gradient_error" … "16 rows, graph"'),
]
SMOKE = [(name, f"benchmarks/{name}.py {flags}", expected) for name, flags, expected in SMOKE]
SMOKE += [("weights", "learn/weights.py /dev/null", "")]


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
    for name, lines in module.tables(*module.kept()).items():
        text = "\n".join(lines)
        assert f"<!-- {name} -->\n{text}\n<!-- end -->" in PAGE, name


def test_a_changed_default_reuses_no_run(tmp_path, monkeypatch):
    """Of methods.py's runs in a file, none is found after a change of a default that its command
    does not name; and the runs from before the change are not mixed with new ones."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    new_jobs = []

    def in_processes(function, jobs, at_once):
        new_jobs.extend(jobs)
        return [(job, {"eval/pass@1": [job["rate"]]}) for job in jobs]

    monkeypatch.setattr(bench, "in_processes", in_processes)

    def campaign():
        """How many runs are made now, and how many are then kept."""
        new_jobs.clear()
        runs = bench.Kept("methods")
        methods.campaign(runs, ["GRPO"], [0.1, 0.2], [1, 2, 3], 1, {})
        return len(new_jobs), len(runs.runs)

    assert campaign() == (7, 7)  # two rates on two seeds, then three seeds
    assert [job["rate"] for job in new_jobs[4:]] == [0.2] * 3
    assert campaign() == (0, 7)
    monkeypatch.setitem(methods.METHODS, "GRPO", methods.Method("grpo_llm", {"clip_low": 0.3}))
    assert campaign() == (7, 7)


def test_scores_are_of_sums_that_no_run_trains_on_and_no_rate_is_chosen_by():
    script = bench.load("grpo_llm")
    args = script.Args(eval_problems=10_000)
    train, tuning = methods.load_data(methods.TUNING_SUMS, script, args)
    _, scored = methods.load_data(methods.SUMS, script, args)
    assert min(len(tuning), len(scored)) >= methods.HELD_OUT and len(set(scored)) == len(scored)
    assert not {*train} & {*tuning} and not {*train} & {*scored} and not {*tuning} & {*scored}


def test_the_rate_is_that_of_the_tuning_seeds():
    """The rate that is best on other seeds is not taken, and tuning seeds are not reported."""
    runs = bench.Kept("methods", smoke=True)
    for seed, scores in {101: (0.2, 0.3), 102: (0.6, 0.4), 1: (0.5, 0.9), 2: (0.5, 0.9)}.items():
        for rate, score in zip((1e-3, 2e-3), scores, strict=True):
            flags = {"seed": seed, "learning_rate": rate}
            runs.add("GRPO", flags, {"eval/pass@1": [0.0, score]})
    assert [bench.last(run) for run in methods.reported(runs, "GRPO").values()] == [0.5, 0.5]


def test_the_file_and_not_its_folder_is_a_flag():
    args = bench.load("grpo_llm").Args(output_dir="/a/b", model="/a/SmolLM2")
    flags = bench.all_flags(args)
    assert flags["model"] == "SmolLM2" and "output_dir" not in flags and flags["seed"] == args.seed


def test_pass_at_k_is_that_of_all_draws():
    """Of 4 completions 1 is right: it is among 2 of them in 3 of 6 draws."""
    assert methods.pass_at(2, {"flags": {"draws": 4}, "right": [1, 4, 0]}) == (0.5 + 1 + 0) / 3


def test_a_run_ends_once_its_last_100_episodes_reach_475():
    """With rewards times two. Fewer episodes do not count, nor do any before the last 100."""
    rollout, solved = {"mask": torch.ones(5, 2)}, []
    returns = [[1000.0] * 99, [0.0] * 10, [1000.0] * 94, [1000.0], [1000.0]]
    rollouts = classic.until_solved(lambda: ((rollout, part) for part in returns), 2, solved)
    assert [part for _, part in rollouts()] == returns[:3] and solved == [40]


def problems_of(path):
    module = runpy.run_path(path)
    return [module["load_problems"](split) for split in ("train", "test")]


@pytest.mark.parametrize("task", real_model.QUESTIONS)
def test_rates_are_not_chosen_by_the_questions_that_score(task, tmp_path, monkeypatch):
    """Runs that choose a rate train on none of the questions that score them, either."""
    monkeypatch.setattr(real_model, "CACHE", tmp_path)
    train, test = problems_of(real_model.task_file(task))
    tuning_train, tuning_test = problems_of(real_model.task_file(task, tuning=True))
    assert len(test) == real_model.QUESTIONS[task] and tuning_test == train[: len(tuning_test)]
    assert tuning_train == train[len(tuning_test) :] and len(tuning_train) > len(tuning_test) > 30
    _, shots_test = problems_of(real_model.task_file(task, shots=3))
    shown = "".join(f"{prompt}\n{answer}\n\n" for prompt, answer in train[:3])
    assert shots_test == [(shown + prompt, answer) for prompt, answer in test]


def test_completions_drawn_include_discarded_groups():
    """Four steps of two groups; at step 3 one more group is drawn and discarded."""
    flags = {"steps": 4, "prompts_per_step": 2, "group_size": 8}
    log = {"discarded_groups": [0, 0, 1, 0]}
    assert real_model.drawn({"flags": flags, "log": log}) == 72
    assert real_model.drawn({"flags": flags, "log": {}}) == 64

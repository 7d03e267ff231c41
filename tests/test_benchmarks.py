"""The benchmarks: what they write into the pages, and the figures; all at toy size under --slow."""

import ast
import json
import re
import runpy
import subprocess
import sys
from datetime import datetime
from math import inf, prod

import bench
import classic_compare
import cures
import cures_llm_tokens
import draw
import pytest
import real_model
import torch
import trl_real
from conftest import CLASSIC_SCRIPTS, LLM_SCRIPTS, ROOT, random_model
from cures_findings import FINDINGS, VERDICTS, fill
from launch import run

FOLDER = ROOT / "tests/benchmarks"
PARTS_OF_TRL_REAL = {
    "time": "rloo_llm, ours, seed 11",
    "long": "| rloo_llm.py, prompts not shared |",
}
README = (FOLDER / "README.md").read_text()


# ---------------------------------------------------------------------------------------- Pages


def test_nothing_quoted_is_stale(capfd):
    """Neither in README nor in the pages here: quotes.py, without --check, writes them anew."""
    pytest.importorskip("cogapp")
    import quotes

    with pytest.raises(SystemExit) as ended:
        quotes.main(check=True)
    assert ended.value.code == 0, capfd.readouterr().out


def test_findings_are_filled_in_from_the_place_named():
    rows = {"clip, on": {"seeds": 3, "a / b": (1, 2.25, 4)}, "": {"share": (0, 0.5, 1)}}
    text = "{clip, on / a / b :.1f} of {clip, on / a / b / low :.0f}, {/ share / high :.0%}"
    assert fill(text, rows) == "2.2 of 1, 100 %"
    with pytest.raises(KeyError):
        fill("{clip, off / a / b :.1f}", rows)


def test_every_experiment_has_numbers_a_figure_and_a_finding():
    for ending in ("json", "png"):
        found = {
            path.stem.removeprefix("cures_") for path in FOLDER.glob(f"results/cures_*.{ending}")
        }
        assert found == FINDINGS.keys() == VERDICTS.keys() == cures.EXPERIMENTS.keys()
    shown = re.findall(r"results/cures_(\w+)\.png", (FOLDER / "EXPERIMENTS.md").read_text())
    assert shown == list(VERDICTS), "each once, in the order of the lineage"


def test_the_index_names_every_script_and_result():
    files = [*FOLDER.glob("*.py"), *FOLDER.glob("results/*")]
    named = set(re.findall(r"[\w*]+\.(?:py|md|json|png)", README)) | {"README.md"}
    assert [path.name for path in files if not any(map(path.match, named))] == []
    assert all((FOLDER / link).exists() for link in re.findall(r"\]\(([\w.]+)\)", README))


def test_scripts_are_found_in_the_order_of_the_lineage():
    assert sorted([*bench.LLM, "ppo_llm"]) == sorted(LLM_SCRIPTS)
    assert sorted(bench.CLASSIC) == sorted(CLASSIC_SCRIPTS)
    assert bench.CLASSIC[:2] == ["reinforce", "actor_critic"]
    assert [bench.label(name) for name in bench.LLM][:2] == ["RLOO", "GRPO"]


def test_a_table_is_read_back_as_it_was_written():
    lines = bench.table(["a", "", "b"], [["x", "y", 1.5], ["", "–", 2]])
    assert lines == ["| a | | b |", "|-|-|-|", "| x | y | 1.5 |", "| | – | 2 |"]


def test_cartpoles_table_compares_medians_and_says_never():
    """Two of three seeds solved: the worst is not."""

    def run(seconds, steps):
        return {"solved_seconds": seconds, "solved_step": steps}

    solved, half = [run(2.0, 800), run(1.0, 900), run(3.0, 700)], [run(9.0, 7000), run(None, None)]
    runs = dict.fromkeys(bench.CLASSIC, solved)
    runs |= {"A2C": solved, "TRPO": [*half, run(8.0, 6000)], "PPO": half[1:]}
    lines = classic_compare.cartpole_table(runs)
    assert lines[4:] == [
        "| trpo | 2.00 (3.00) | 800 | 9.00 (never) | 7,000 | 4.5 |",
        "| ppo | 2.00 (3.00) | 800 | never (never) | never | inf |",
    ]


# -------------------------------------------------------------------------------------- Figures


@pytest.mark.parametrize("name", draw.figures())
def test_a_figure_is_the_one_committed(name, tmp_path):
    """Where it is another, `python tests/benchmarks/draw.py` was forgotten."""
    matplotlib = pytest.importorskip("matplotlib")
    draw.main((name,), tmp_path)
    folders = (tmp_path, bench.RESULTS)
    drawn, committed = (matplotlib.image.imread(path / f"{name}.png") for path in folders)
    assert drawn.shape == committed.shape
    if f"matplotlib=={matplotlib.__version__}" in (FOLDER / "requirements.txt").read_text():
        other = abs(drawn - committed).max(2) > 0.1
        assert other.mean() < 2e-4, "share of pixels of another colour"


def test_a_script_that_no_benchmark_has_run_is_in_no_figure(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(draw, "LLM", [*draw.LLM, "new_llm"])
    draw.main(("real_model", "curves_llm"), tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 2


# ---------------------------------------------------------------------------------------- Runs


def test_where_there_is_no_critic_none_is_run():
    """Else its seconds and bytes would be counted for those methods that have none."""
    found = {
        method: cures_llm_tokens.run_critic(method, seed=1, steps=1)
        for method in ("GRPO", "PPO 1, no critic", "PPO 1")
    }
    bytes_of = {method: result["megabytes"] for method, result in found.items()}
    assert bytes_of["GRPO"] == bytes_of["PPO 1, no critic"] < 0.51 * bytes_of["PPO 1"]
    assert "explained" not in found["PPO 1, no critic"]
    assert abs(found["PPO 1"]["explained"][0]) < 1e-6, "at first it says 0"
    rewards = {method: result["reward"] for method, result in found.items()}
    assert rewards["GRPO"] == rewards["PPO 1"], "the same first rollout"


def test_data_are_those_that_their_script_makes():
    """And right; and no two sums have the same numbers, or one held out could be trained on."""
    made = runpy.run_path(str(FOLDER / "data/make.py"))
    sums, dates = made["sums"](), made["dates"]()
    for name, problems in {"sums": sums, "dates": dates}.items():
        assert made["jsonl"](problems) == (FOLDER / f"data/{name}.jsonl").read_text()
    seen = set()
    for question, answer in sums:
        a, b = map(int, re.fullmatch(r"What is (\d\d) \+ (\d\d)\?", question).groups())
        assert answer == str(a + b)
        seen.add((min(a, b), max(a, b)))
    assert len(seen) == len(sums)
    for question, answer in dates:
        assert datetime.strptime(question, "%d %B %Y").date().isoformat() == answer
    assert len(dict(dates)) == len(dates)


def test_no_question_of_a_real_models_task_is_held_out_and_trained_on(tmp_path, monkeypatch):
    """Nor one with the same numbers; the answers are right."""
    monkeypatch.setattr(real_model, "CACHE", tmp_path)
    right = {"sums": sum, "largest": max, "products": prod}
    for name, answer in right.items():
        sides = []
        for path in real_model.task_files(name):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            numbers = [[int(word) for word in re.findall(r"\d+", row["question"])] for row in rows]
            assert [str(answer(each)) for each in numbers] == [row["answer"] for row in rows]
            sides.append({tuple(sorted(each)) for each in numbers})
        train, held_out = sides
        assert len(held_out) == real_model.TASKS[name].held_out and len(train) > 40
        assert not train & held_out


def test_rollouts_until_a_share_is_right():
    """Of the last three, and so not before the third."""
    assert real_model.rollouts_to(0.8, [1.0, 1.0, 0.1, 0.9, 0.9, 0.7]) == 6
    assert real_model.rollouts_to(0.8, [0.9, 0.9]) == real_model.rollouts_to(0.8, [0.5] * 9) == inf


@pytest.mark.slow
def test_a_real_model_at_smoke_size(pretrained):
    """A toy in its place: the command, the log, and a group before and after."""
    flags = ["--smoke", "--model", pretrained, "--only", "largest"]
    shown = run("tests/benchmarks/real_model.py", *flags).stdout
    assert shown.count("| largest, GRPO | 1 | ") == 1 and shown.count("right answer") == 2


def test_benchmarks_import_no_test():
    tests = {path.stem for path in (ROOT / "tests").glob("*.py")}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in tests, path
            if isinstance(node, ast.Import):
                assert not tests & {each.name for each in node.names}, path


def test_gpu_benchmark_at_smoke_size():
    shown = run("tests/benchmarks/gpu.py", "--smoke", "--parts", "a").stdout
    assert all(f"| a | {name}, bfloat16" in shown for name in bench.LLM)


def test_both_passes_over_a_shared_prompt_agree_at_smoke_size():
    """It fails where log-probs or gradients differ."""
    flags = ["--smoke", "--dtype", "bfloat16"]
    assert run("tests/benchmarks/shared_prefix.py", *flags).stdout.count("| 9 + 16 |") == 1


def test_a_prompt_read_by_each_row_gives_the_same_log_probs():
    """What trl_real.py compares the shared prompt with; of prompts of unequal length."""
    model = random_model("llama")
    batch = trl_real.grpo_llm.generate(model, [[3, 4], [5, 6, 7, 8]], 2, 6, 1.0)
    shared = trl_real.grpo_llm.token_logprobs(model, batch, 0.7)
    torch.testing.assert_close(trl_real.plain_logprobs(model, batch, 0.7), shared)


@pytest.mark.slow
@pytest.mark.parametrize("part, row", PARTS_OF_TRL_REAL.items())
def test_the_side_of_our_own_in_trl_real_at_smoke_size(part, row):
    """TRL's is left out where it is not installed. A real command, as it starts processes."""
    command = [sys.executable, "tests/benchmarks/trl_real.py", part, "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert row in done.stdout, done.stderr


@pytest.mark.slow
def test_precision_at_smoke_size():
    """In bf16 as in float32 the first ratios are 1, and without a signal nothing moves."""
    shown = run("tests/benchmarks/precision.py", "--smoke").stdout
    assert "before the first update | 0.0e+00 | 0.0e+00 |" in shown
    assert "without a signal | 0 |" in shown


@pytest.mark.slow
def test_gpu_benchmark_at_smoke_size_with_runs_and_torchrun():
    assert (
        "processes: 2"
        in run("tests/benchmarks/gpu.py", "--smoke", "--parts", "b", "c", "d", "e").stdout
    )


@pytest.mark.slow
def test_paired_step_draws_the_same_samples():
    flags = ["--scripts", "grpo_llm", "dapo_llm", "--steps", "6", "--warm", "1", "--no-write"]
    assert run("tests/benchmarks/paired_step.py", "HEAD", *flags).stdout.count("| 6 of 6 |") == 2


@pytest.mark.slow
def test_cures_at_smoke_size():
    """All of them; the figures too, where matplotlib is installed."""
    done = run("tests/benchmarks/cures.py", "--smoke")
    assert all(f"\n{name}: " in f"\n{done.stdout}" for name in FINDINGS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIC_SCRIPTS)
def test_the_parts_of_a_classic_run_make_the_whole(name):
    """classic_speed.py counts no part twice: they are not nested, and fill most of the run."""
    job = {"script": name, "shape": {"num_envs": 4}, "steps": 4000}
    command = [sys.executable, "tests/benchmarks/classic_speed.py", "--job", json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    parts = found["acting"] + found["environment"] + found["update"]
    assert 0.5 * found["all"] < parts < found["all"]
    assert 4000 <= found["steps a second"] * found["all"] < 8000

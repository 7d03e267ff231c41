"""The pages and data of benchmarks and experiments; and (slow) each of them at toy size."""

import json
import re
import runpy
from datetime import datetime
from math import prod

import gpu_speed
import memory
import pytest
import real_model
from conftest import ROOT
from launch import run
from test_experiments import NAMES

TESTS = ROOT / "tests"
BENCHMARKS, EXAMPLES = TESTS / "benchmarks", TESTS / "examples"

KEPT_NOWHERE = "--output /dev/null"
# Name, command after `python tests/`, and parts that the output must hold, with … between them.
SMOKE = [
    ("classic", "cartpole --smoke", "| trpo | 0 of 1 | … | ppo | 0 of 1 |"),
    ("learning", "--smoke", "| CartPole-v1 | 1 | reinforce | … | FrozenLake-v1 | 1 | ppo |"),
    ("observations", "--smoke", "| CartPole-v1 | reinforce | 1 | … | CartPole-v1 | ppo | 1 |"),
    ("methods", "--smoke", "| GRPO | `grpo_llm.py --learning-rate … | sapo | `after_sapo.py --"),
    ("pass_k", "--smoke", "| the first model | 1 | … | GRPO | 1 | … | pass_at_k | 1 |"),
    ("parity", "--smoke", "| rloo_llm --beta 0.1 | … | sequence_mask --max-drift 0.1 "),
    ("trl", "tiny --smoke", "| grpo_llm.py | 1 | … | rloo_llm.py | 1 |"),
    ("trl", "long --smoke --scripts rloo_llm", "| rloo_llm.py | 1 |"),
    ("memory", "--smoke", "| Qwen2.5-0.5B | 4 | … | Llama-3.2-1B | 4 |"),
    ("real_model", "--smoke --model PRETRAINED", "| products, GRPO | 1 | … right answer"),
    ("gpu", f"--smoke {KEPT_NOWHERE} --skip tiny compiling", '"ranks", … "done", "ok": true}'),
    ("gpu", f"--smoke {KEPT_NOWHERE} --only tiny", '"cispo_llm.py, … "done", "ok": true}'),
    ("gpu", f"--smoke {KEPT_NOWHERE} --only compiling", '"static", … "done", "ok": true}'),
]
SMOKE = [(name, f"benchmarks/{name}.py {flags}", expected) for name, flags, expected in SMOKE]
SMOKE += [(name, f"experiments/{name}.py --smoke", name) for name in NAMES]
SMOKE += [("weights", "learn/weights.py /dev/null", "")]


@pytest.mark.slow
@pytest.mark.parametrize("name,command,expected", SMOKE, ids=[row[0] for row in SMOKE])
def test_it_runs_at_smoke_size(name, command, expected, pretrained):
    """If TRL or Stable-Baselines3 is not installed, our side runs alone."""
    words = f"tests/{command}".replace("PRETRAINED", pretrained).split()
    shown = run(*words).stdout
    assert all(part in shown for part in expected.split(" … ")), shown


@pytest.mark.slow
@pytest.mark.parametrize("rows", gpu_speed.PREDICTED)
def test_gpu_py_quotes_memory_py(rows):
    _, peak = memory.micro_batch("qwen2", memory.QWEN, rows, False)
    assert gpu_speed.PREDICTED[rows] == pytest.approx(peak, abs=0.05)


def test_the_index_names_every_script_and_result():
    index = (TESTS / "README.md").read_text()
    files = [*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("results/*")]
    named = set(re.findall(r"[\w*]+\.(?:py|md|jsonl?|png)", index))
    assert [path.name for path in files if not any(map(path.match, named))] == []
    assert all((TESTS / link).exists() for link in re.findall(r"\]\(([\w./]+)\)", index))


def test_make_py_makes_the_data_files():
    """The answers are right. No two sums have the same two numbers, because one of the two could be
    held out and the other trained on."""
    made = runpy.run_path(str(EXAMPLES / "data/make.py"))
    sums, dates = made["sums"](), made["dates"]()
    for name, problems in {"sums": sums, "dates": dates}.items():
        assert made["jsonl"](problems) == (EXAMPLES / f"data/{name}.jsonl").read_text()
    numbers = [tuple(sorted(map(int, re.findall(r"\d+", question)))) for question, _ in sums]
    assert [str(a + b) for a, b in numbers] == [answer for _, answer in sums]
    assert len(set(numbers)) == len(sums)
    for question, answer in dates:
        assert datetime.strptime(question, "%d %B %Y").date().isoformat() == answer
    assert len(dict(dates)) == len(dates)


def test_real_model_trains_on_no_held_out_product(tmp_path, monkeypatch):
    """The factors do not occur in the other order either. The answers are right."""
    monkeypatch.setattr(real_model, "CACHE", tmp_path)
    sides = []
    for path in real_model.task_files("products"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        numbers = [[int(word) for word in re.findall(r"\d+", row["question"])] for row in rows]
        assert [str(prod(each)) for each in numbers] == [row["answer"] for row in rows]
        sides.append({tuple(sorted(each)) for each in numbers})
    train, held_out = sides
    assert len(held_out) == 40 and len(train) > 40 and not train & held_out

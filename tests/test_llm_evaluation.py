"""What a run shows: scores, a group of completions, lines in a log; --steps 0 evaluates."""

import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import Characters, calls_of, random_model, scalars, script
from launch import flags, run

grpo = script("grpo_llm")
SCORES = ["pass@1", "pass@8", "mean_length", "clipped_ratio"]


def squares(completion, answer):
    """Rewards of any size and sign."""
    return len(completion) ** 2 / -7


def test_scores_are_means_of_any_reward(short_run, monkeypatch, capsys):
    """pass@1 is of all samples, pass@8 of each problem's best. --steps 0 prints and logs every
    score, and trains and saves nothing."""
    monkeypatch.setattr(grpo, "load_verifier", lambda _: squares)
    rollouts = calls_of(monkeypatch, grpo, "rollout")
    result = grpo.main(grpo.Args(**short_run | {"steps": 0, "temperature": 1.5}))
    assert {given[3:5] for given, _ in rollouts} == {(8, 1.5)}
    values = [squares(text, "") for _, (_, texts, _) in rollouts for text in texts]
    assert len(set(values)) > 5
    assert result["eval/pass@1"] == pytest.approx(sum(values) / 64)
    best = [max(values[i : i + 8]) for i in range(0, 64, 8)]
    assert result["eval/pass@8"] == pytest.approx(sum(best) / 8)
    assert result["eval/pass@1_initial"] == result["eval/pass@1"]
    said = capsys.readouterr().out
    for name in SCORES:
        score = result[f"eval/{name}"]
        assert f"eval/{name} {score:.3f}" in said
        assert scalars(result["folder"], f"eval/{name}") == [pytest.approx(score)]
    assert not list(Path(result["folder"]).glob("step-*"))


@pytest.mark.parametrize("world", [1, 2])
def test_an_evaluation_has_as_many_rows_as_training(world, monkeypatch):
    """In each process: if it had fewer, several GPUs would take as long as one."""
    monkeypatch.setattr(grpo, "WORLD", world)
    monkeypatch.setattr(grpo, "sum_over_processes", lambda tensor: tensor)
    monkeypatch.setattr(grpo, "load_verifier", lambda _: squares)
    rollouts = calls_of(monkeypatch, grpo, "rollout")
    problems = [(f"{i}+{i}", str(2 * i)) for i in range(8 * world)]
    args = grpo.Args(prompts_per_step=4, group_size=10, minibatches=1, max_new_tokens=3)
    grpo.evaluate(random_model(), Characters(), problems, args, Mock(), 0)
    assert [len(given[2]) for given, _ in rollouts] == [5, 3]


def test_console(short_run):
    """A run prints its flags, each evaluation, each tenth step, the result and its folder, and no
    bar in a file. This terminal knows ASCII alone, so no arrow. A notebook or a cluster may have
    set RANK, which counts only beside WORLD_SIZE."""
    own = short_run | {"steps": 10, "eval_every": 5}
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "RANK": "3"}
    done = run("grpo_llm.py", *flags(own), environment=environment)
    chosen, *lines = done.stdout.splitlines()
    (folder,) = Path(short_run["output_dir"]).iterdir()
    assert chosen == str(grpo.Args(**own))
    steps = [line.partition(": eval/")[0] for line in lines if ": eval/" in line]
    assert steps == ["step 0", "step 5", "step 10"]
    numbers = r"reward \d\.\d{3}, length \d+\.\d, \d+\.\d\d s"
    assert len([line for line in lines if re.fullmatch(f"step 10: {numbers}", line)]) == 1
    assert (
        sum(re.fullmatch(r"    '[0-9+]+=', right answer '\d+'", line) is not None for line in lines)
        == 3
    )
    assert sum(re.match(r" {6}reward \d\.\d\d: ", line) is not None for line in lines) == 6
    found = re.fullmatch(r"pass@1 (\S+) \? (\S+); \d+ s; model and logs in (.*)", lines[-1])
    logged = scalars(folder, "eval/pass@1")
    assert found[3] == str(folder) and len(logged) == 3
    assert [found[1], found[2]] == [f"{logged[0]:.3f}", f"{logged[-1]:.3f}"]
    assert "it/s" not in done.stderr and "%|" not in done.stderr


SHOWN = "    '<1+1", "      reward 1.50: '#10", "      reward -0.50: '#13"
HOSTILE = "\x1b[2J\x1b]0;title\x07\r\n\t\x00\u202e\x9b31m\ud800\u2028"


@pytest.mark.parametrize("more,shown", [("", ""), (HOSTILE, ""), ("x" * 10_000, "x" * 390)])
def test_what_is_shown_of_an_evaluation(more, shown, monkeypatch, capsys):
    """Of the group whose rewards differ most, the prompt as the model sees it, the right answer,
    the best and the worst completion: at most 400 characters of each, and none that moves, colours
    or rings a terminal."""
    completions = [f"#{i}{more}" for i in range(24)]
    rewards = torch.zeros(3, 8)
    rewards[1, 2], rewards[1, 5], rewards[2, 0] = 1.5, -0.5, 1.0
    ones = torch.ones(24, 1)
    batch = {"mask": ones, "sampled_logprobs": -ones, "ended": ones[:, 0] > 0}
    monkeypatch.setattr(grpo, "rollout", lambda *_: (batch, completions, rewards))
    monkeypatch.setattr(grpo, "encode_prompts", lambda problems, *_: [f"<{problems[0][0]}>"])
    problems = [(f"1+{i}{more}", f"{1 + i}{more}") for i in range(3)]
    grpo.evaluate(Mock(device="cpu"), Mock(decode=str), problems, grpo.Args(), Mock(), 3)
    lines = capsys.readouterr().out.split("\n")
    assert all(line.isprintable() and len(line) < 850 for line in lines) and len(lines) == 5
    for line, begins in zip(lines[1:], SHOWN, strict=False):
        assert line.startswith(begins + shown)
    assert lines[0].startswith("step 3: ") and (shown or ", right answer '2" in lines[1])

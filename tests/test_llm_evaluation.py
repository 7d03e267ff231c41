"""What a run shows: scores, a group of completions, and what is wrong; --steps 0 evaluates."""

import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import calls_of, scalars, script
from launch import flags, run

grpo = script("grpo_llm")
SCORES = ["pass@1", "pass@8", "pass@1_greedy", "mean_length", "clipped_ratio"]
SCORES += ["frac_reward_zero_std"]
ROW = re.compile(r" {6}reward (\S+), advantage (\S+): (.*)")


def test_scores_are_means_of_any_reward(short_run, monkeypatch, capsys):
    """pass@1 is of all samples, pass@8 of each problem's best, and greedy of another rollout. No
    more questions at a time than in a step, or an evaluation would need more memory than training.
    --steps 0 prints and logs every score, and trains and saves nothing."""

    def verify(completion, answer):
        return len(completion) ** 2 / -7

    monkeypatch.setattr(grpo, "load_verifier", lambda _: verify)
    rollouts = calls_of(monkeypatch, grpo, "rollout")
    own = {"steps": 0, "temperature": 1.5, "prompts_per_step": 4, "group_size": 10}
    result = grpo.main(grpo.Args(**short_run | own))
    shapes = [(len(given[2]), *given[3:5]) for given, _ in rollouts]
    assert shapes == [(5, 8, 1.5), (5, 1, 0.0), (3, 8, 1.5), (3, 1, 0.0)]
    values = [[verify(text, "") for text in texts] for _, (_, texts, _) in rollouts]
    sampled, greedy = sum(values[::2], []), sum(values[1::2], [])
    assert len(set(sampled)) > 5
    assert result["eval/pass@1"] == pytest.approx(sum(sampled) / 64)
    best = [max(sampled[i : i + 8]) for i in range(0, 64, 8)]
    assert result["eval/pass@8"] == pytest.approx(sum(best) / 8)
    assert result["eval/pass@1_greedy"] == pytest.approx(sum(greedy) / 8)
    assert result["eval/pass@1_initial"] == result["eval/pass@1"]
    said = capsys.readouterr().out
    for name in SCORES:
        score = result[f"eval/{name}"]
        assert f"eval/{name} {score:.3f}" in said
        assert scalars(result["folder"], f"eval/{name}") == [pytest.approx(score)]
    assert not list(Path(result["folder"]).glob("step-*"))


def test_console(short_run):
    """A run prints its flags, its device, a prompt, each evaluation, each tenth step, the result
    and its folder, and no bar in a file. This terminal knows ASCII alone, so no arrow."""
    ascii = {"environment": os.environ | {"PYTHONIOENCODING": "ascii"}}
    done = run("grpo_llm.py", *flags(short_run | {"steps": 10, "eval_every": 5}), **ascii)
    chosen, device, prompt, *lines = done.stdout.splitlines()
    (folder,) = Path(short_run["output_dir"]).iterdir()
    args = grpo.Args(**short_run | {"steps": 10, "eval_every": 5, "dtype": "float32"})
    train, _ = grpo.load_data(args)
    assert chosen == str(args) and device == "on cpu"
    assert prompt == f"a prompt as the model sees it: '{train[0][0]}='"
    steps = [line.partition(": eval/")[0] for line in lines if ": eval/" in line]
    assert steps == ["step 0", "step 5", "step 10"]
    numbers = r"reward \d\.\d{3}, length \d+\.\d, rate 5\.0e-04"
    assert len([line for line in lines if re.fullmatch(f"step 10: {numbers}", line)]) == 1
    assert sum(", right answer '" in line for line in lines) == 3
    assert sum(ROW.fullmatch(line) is not None for line in lines) == 6
    found = re.fullmatch(r"pass@1 (\S+) \? (\S+); \d+ s; model and logs in (.*)", lines[-1])
    logged = scalars(folder, "eval/pass@1")
    assert found[3] == str(folder) and len(logged) == 3
    assert [found[1], found[2]] == [f"{logged[0]:.3f}", f"{logged[-1]:.3f}"]
    assert "it/s" not in done.stderr and "%|" not in done.stderr


def printed_by_evaluate(completions, rewards, problems, monkeypatch, capsys):
    """What evaluate prints below its scores, of these rollouts."""
    ones = torch.ones(len(completions), 1)
    batch = {"mask": ones, "sampled_logprobs": -ones, "ended": ones[:, 0] > 0}
    monkeypatch.setattr(grpo, "rollout", lambda *_: (batch, completions, rewards))
    model = torch.nn.Linear(1, 1)
    model.device = torch.device("cpu")
    grpo.evaluate(model, None, problems, grpo.Args(), Mock(), 3)
    return capsys.readouterr().out


def test_the_group_shown_is_of_the_evaluation(monkeypatch, capsys):
    """Of the group whose rewards differ most, the best and the worst completion are shown."""
    completions = [f"#{i}" for i in range(24)]
    rewards = torch.zeros(3, 8)
    rewards[1, 2], rewards[1, 5], rewards[2, 0] = 1.5, -0.5, 1.0
    problems = [("1+1", "2"), ("1+2", "3"), ("1+3", "4")]
    out = printed_by_evaluate(completions, rewards, problems, monkeypatch, capsys)
    assert "eval/mean_length 1.000" in out
    advantages = grpo.compute_advantages(rewards, grpo.Args())[1]
    assert out.splitlines()[1:4] == [
        "    '1+2', right answer '3'",
        f"      reward 1.50, advantage {advantages[2]:+.2f}: '#10'",
        f"      reward -0.50, advantage {advantages[5]:+.2f}: '#13'",
    ]


def test_long_and_hostile_texts_do_not_break_the_terminal(monkeypatch, capsys):
    """Colours, carriage returns, line ends, the bell, a surrogate, text from right to left."""
    hostile = "\x1b[2J\x1b]0;title\x07\r\n\t\x00\u202e\x9b31m\ud800\u2028"
    rewards = torch.tensor([[1.0] + [0.0] * 7])
    texts = [hostile] + ["x" * 10_000] * 7
    problem = (hostile + "x" * 10_000, "3" * 10_000)
    out = printed_by_evaluate(texts, rewards, [problem], monkeypatch, capsys)
    assert len(out.splitlines()) == 4 and len(out) < 2000
    assert all(line.isprintable() for line in out.split("\n"))


@pytest.mark.parametrize("value", [0.0, 1.0, 10.0])
def test_a_hint_where_no_rewards_differ(value, monkeypatch, capsys):
    """Of any size: 10 may be the worst mark or the best."""
    rewards, problems = torch.full((2, 8), value), [("1+2", "3"), ("2+2", "4")]
    out = printed_by_evaluate(["3"] * 16, rewards, problems, monkeypatch, capsys)
    assert "no rewards differ" in out.splitlines()[1]
    rewards[1, 3] += 0.1
    out = printed_by_evaluate(["3"] * 16, rewards, problems, monkeypatch, capsys)
    assert "no rewards differ" not in out

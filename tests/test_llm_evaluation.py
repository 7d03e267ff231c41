"""What a run shows: scores, a group of completions, and what is wrong; --steps 0 evaluates."""

import io
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import calls_of, equal, last_checkpoint, scalars, script, weights
from launch import flags, run

grpo = script("grpo_llm")
SCORES = ["pass@1", "pass@8", "pass@1_greedy", "mean_length", "clipped_ratio"]
SCORES += ["frac_reward_zero_std"]
ROW = re.compile(r" {6}reward (\S+), advantage (\S+): (.*)")


def test_zero_steps_print_every_score_and_change_nothing(short_run, tmp_path, capsys, monkeypatch):
    """Of a model that a run has saved, with the scores that this run measured."""
    trained = grpo.main(grpo.Args(**short_run))
    model, before = str(last_checkpoint(trained["folder"])), weights(trained["folder"])
    loaded = calls_of(monkeypatch, grpo, "load_policy")
    capsys.readouterr()
    own = {"model": model, "steps": 0, "micro_batch_size": 128}
    found = grpo.main(grpo.Args(**short_run | own | {"output_dir": str(tmp_path / "new")}))
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("step 0: ")]
    for name in SCORES:
        assert f"eval/{name} {trained[f'eval/{name}']:.3f}" in line
        assert found[f"eval/{name}"] == trained[f"eval/{name}"]
        assert scalars(found["folder"], f"eval/{name}") == [pytest.approx(found[f"eval/{name}"])]
    assert found["eval/pass@1_initial"] == found["eval/pass@1"]
    ((_, (policy, _)),) = loaded  # no reference
    assert equal(policy.state_dict(), before) and equal(weights(trained["folder"]), before)
    assert not list(Path(found["folder"]).glob("step-*"))


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
    assert sum(line.startswith("step 10: reward ") for line in lines) == 1
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


def test_scores_are_means_of_any_reward(short_run, monkeypatch):
    """pass@1 is of all samples, pass@8 of each problem's best, and greedy of another rollout."""

    def verify(completion, answer):
        return len(completion) ** 2 / -7

    monkeypatch.setattr(grpo, "load_verifier", lambda _: verify)
    rollouts = calls_of(monkeypatch, grpo, "rollout")
    args = grpo.Args(
        **short_run | {"steps": 0, "temperature": 1.5, "prompts_per_step": 8, "group_size": 8}
    )
    result = grpo.main(args)
    (sampled, (_, completions, rewards)), (most_likely, (_, greedy, _)) = rollouts
    assert sampled[3:5] == (8, 1.5) and most_likely[3:5] == (1, 0.0)
    values = [[len(completions[8 * i + j]) ** 2 / -7 for j in range(8)] for i in range(8)]
    assert rewards.unique().numel() > 5
    assert result["eval/pass@1"] == pytest.approx(sum(map(sum, values)) / 64)
    assert result["eval/pass@8"] == pytest.approx(sum(map(max, values)) / 8)
    expected = sum(len(text) ** 2 / -7 for text in greedy) / 8
    assert result["eval/pass@1_greedy"] == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 1.0, 10.0])
def test_a_hint_where_no_rewards_differ(value, monkeypatch, capsys):
    """Of any size: 10 may be the worst mark or the best."""
    rewards, problems = torch.full((2, 8), value), [("1+2", "3"), ("2+2", "4")]
    out = printed_by_evaluate(["3"] * 16, rewards, problems, monkeypatch, capsys)
    assert "no rewards differ" in out.splitlines()[1]
    rewards[1, 3] += 0.1
    out = printed_by_evaluate(["3"] * 16, rewards, problems, monkeypatch, capsys)
    assert "no rewards differ" not in out


def test_a_step_shows_reward_length_and_rate(monkeypatch, capsys):
    """In the bar, and every tenth step in a line where there is no terminal."""
    metrics = {"reward": 0.25, "completions/mean_length": 7.5, "learning_rate": 4e-4}
    shown = "reward 0.250, length 7.5, rate 4.0e-04"
    for no_terminal, line in ((True, f"step 10: {shown}\n"), (False, "")):
        with grpo.tqdm(range(3), file=io.StringIO(), disable=no_terminal) as bar:
            for step in (9, 10, 11):
                grpo.log(Mock(), metrics, step, bar)
            assert bar.postfix == shown and capsys.readouterr().out == line

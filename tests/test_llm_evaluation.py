"""What a run shows: scores, a group of completions, and what is wrong; --steps 0 evaluates."""

import html
import re
from pathlib import Path

import pytest
import torch
from conftest import LLM_SCRIPTS, equal, last_checkpoint, scalars, script, weights
from launch import flags, run
from tensorboard import plugin_util
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

grpo = script("grpo_llm")
SCORES = ["pass@1", "pass@8", "pass@1_greedy", "mean_length", "clipped_ratio"]
SCORES += ["frac_reward_zero_std", "pass@1_lenient"]


def shown_groups(text):
    """Of what a run has printed: a list of (reward, advantage, completion) for each group."""
    groups = re.findall(r" {4}a group of this step: .*\n((?: {6}reward .*\n)+)", text)
    line = re.compile(r" {6}reward (\S+), advantage (\S+): (.*)")
    return [[line.fullmatch(row).groups() for row in group.splitlines()] for group in groups]


# --------------------------------------------------------------------------------------- --steps 0


def test_zero_steps_print_every_score_and_change_nothing(quick, tmp_path, capsys, monkeypatch):
    """Of a model that a run has saved, with the scores that this run measured."""
    trained = grpo.main(grpo.Args(**quick))
    model, before = str(last_checkpoint(trained["folder"])), weights(trained["folder"])
    loaded, load = [], grpo.load_policy
    monkeypatch.setattr(grpo, "load_policy", lambda *a: loaded.append(load(*a)) or loaded[-1])
    capsys.readouterr()
    own = {"model": model, "steps": 0, "micro_batch_size": 128}
    found = grpo.main(grpo.Args(**quick | own | {"output_dir": str(tmp_path / "new")}))
    lines = capsys.readouterr().out.splitlines()
    held_out = [line for line in lines if line.startswith("step 0: held-out ")]
    (line,) = held_out
    for name in SCORES:
        assert f"{name} {trained[f'eval/{name}']:.3f}" in line
        assert found[f"eval/{name}"] == trained[f"eval/{name}"]
        assert scalars(found["folder"], f"eval/{name}") == [pytest.approx(found[f"eval/{name}"])]
    assert found["eval/pass@1_initial"] == found["eval/pass@1"]
    first, *samples = lines[lines.index(line) + 1 :]
    question, answer = re.fullmatch(
        r" {4}a held-out group: '(.*)', right answer '(.*)'", first
    ).groups()
    assert (question, answer) in grpo.load_data(grpo.Args(**quick))[1]
    for sample in samples:
        reward, completion = re.fullmatch(r" {6}reward (\d\.\d\d): '(.*)'", sample).groups()
        assert float(reward) == grpo.verify(completion, answer)
    assert len(samples) == 4
    ((policy, _),) = loaded  # no reference
    assert equal(policy.state_dict(), before) and equal(weights(trained["folder"]), before)
    assert not list(Path(found["folder"]).glob("step-*"))


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_zero_steps_of_each_script_take_no_step(name, quick, monkeypatch):
    module = script(name)
    monkeypatch.setattr(module, "train_step", None)
    result = module.main(module.Args(**quick | {"steps": 0, "beta": 0.1}))
    assert result["eval/pass@1"] == result["eval/pass@1_initial"] > 0


# -------------------------------------------------------------------------------------- the console


def test_console(quick):
    """The folder, the flags one a line, a line for each evaluation, a group for each but the first,
    no bar in a log file, and the result."""
    done = run("grpo_llm.py", *flags(quick | {"steps": 2, "eval_every": 1}))
    first, *lines = done.stdout.splitlines()
    args = vars(grpo.Args(**quick | {"eval_every": 1}))
    assert lines[: len(args)] == [f"    {name}: {value}" for name, value in args.items()]
    (folder,) = Path(quick["output_dir"]).iterdir()
    assert first == f"run in {folder}"
    steps = [line.partition(":")[0] for line in lines if ": held-out " in line]
    assert steps == ["step 0", "step 1", "step 2"]
    assert len(shown_groups(done.stdout)) == 2 and len(done.stdout.split("a group of")) == 3
    found = re.fullmatch(r"pass@1 (\S+) → (\S+); \d+ s; model and logs in (.*)", lines[-1])
    logged = scalars(folder, "eval/pass@1")
    assert found[3] == str(folder) and len(logged) == 3
    assert [found[1], found[2]] == [f"{logged[0]:.3f}", f"{logged[-1]:.3f}"]
    assert "it/s" not in done.stderr and "%|" not in done.stderr


# ---------------------------------------------------------------------------------------- the group


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_the_group_shown_is_of_the_last_step(name, quick, monkeypatch, capsys):
    """Question, right answer, and up to four completions, each with its own reward and advantage,
    here and in TensorBoard: of the rollout that the step was made on."""
    module = script(name)
    whitened, whiten = [], getattr(module, "whiten", None)
    own = {"steps": 2, "eval_every": 1, "prompts_per_step": 8, "group_size": 6, "beta": 0.0}
    if name == "dapo_llm":
        own |= {"overlong_cache": 0, "max_resample": 1}
    args = module.Args(**quick | own)
    rollouts, real = [], module.rollout

    def rollout(model, tokenizer, problems, num_samples, temperature, args):
        found = real(model, tokenizer, problems, num_samples, temperature, args)
        if num_samples == 6:
            rollouts.append((problems, *found[1:]))
        return found

    def verify(completion, answer):
        return 0.25 * len(completion) / len(answer)

    def advantages_of(rewards, group):
        """PPO's are means over the tokens."""
        if whiten is None:
            return module.compute_advantages(rewards, args)[group].tolist()
        advantages, mask = whitened.pop(0)
        rows = zip(advantages.tolist(), mask.sum(1).int().tolist(), strict=True)
        means = [sum(row[:length]) / length for row, length in rows]
        return means[group * 6 : group * 6 + 6]

    def keep(advantages, mask):
        whitened.append((whiten(advantages, mask), mask))
        return whitened[-1][0]

    monkeypatch.setattr(module, "rollout", rollout)
    monkeypatch.setattr(module, "verify", verify)
    monkeypatch.setattr(module, "whiten", keep, raising=False)
    result = module.main(args)
    out = capsys.readouterr().out
    for shown, (problems, completions, rewards) in zip(shown_groups(out), rollouts, strict=True):
        group = int(rewards.std(1).argmax())
        texts = completions[group * 6 : group * 6 + 6]
        ranked = sorted(rewards[group].tolist(), reverse=True)
        advantages = advantages_of(rewards, group)
        expected = {
            (f"{reward:.2f}", f"{advantage:+.2f}", repr(text))
            for reward, advantage, text in zip(
                rewards[group].tolist(), advantages, texts, strict=True
            )
        }
        question, answer = problems[group]
        assert f"\n    a group of this step: {question!r}, right answer {answer!r}\n" in out
        assert len(shown) == 4 and {*shown} <= expected
        assert [row[0] for row in shown] == [f"{r:.2f}" for r in ranked[:2] + ranked[-2:]]
    events = EventAccumulator(result["folder"], size_guidance={"tensors": 0})
    events.Reload()
    logged = events.Tensors("group/text_summary")
    assert [event.step for event in logged] == [1, 2]
    for event in logged:
        assert f"\n{event.tensor_proto.string_val[0].decode()}\n" in out


def test_tensorboard_shows_the_group_as_it_stands():
    """It reads text as Markdown: no star may make italics, and no line join another."""
    rewards = torch.tensor([[1.0, 0.0]])
    text = grpo.describe_group([("2*3*4", "24")], ["*a* _b_ <b>", "# 5"], rewards, rewards)
    shown = html.unescape(plugin_util.markdown_to_safe_html(text))
    assert shown.startswith("<pre><code>") and shown.count("<") == 5
    for part in ("'2*3*4', right answer '24'\n", ": '*a* _b_ <b>'\n", ": '# 5'\n"):
        assert part in shown


@pytest.mark.parametrize("size", [2, 3])
def test_a_small_group_is_shown_whole_and_once(size):
    completions = [f"#{i}" for i in range(2 * size)]
    rewards = torch.stack([torch.zeros(size), torch.arange(size) / 2.0])
    problems = [("1+1", "2"), ("1+2", "3")]
    text = grpo.describe_group(problems, completions, rewards, rewards - 0.5)
    first, *lines = text.splitlines()
    assert first == "    a group of this step: '1+2', right answer '3'"
    assert lines == [
        f"      reward {i / 2:.2f}, advantage {i / 2 - 0.5:+.2f}: '#{size + i}'"
        for i in reversed(range(size))
    ]


def test_long_and_hostile_completions_do_not_break_the_terminal():
    """Colours, carriage returns, line ends, the bell, a surrogate, text from right to left."""
    hostile = "\x1b[2J\x1b]0;title\x07\r\n\t\x00\u202e\x9b31m\ud800\u2028"
    completions = [hostile, "x" * 10_000, "", "#3"]
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.0]])
    text = grpo.describe_group([(hostile, hostile)], completions, rewards, rewards)
    assert len(text.splitlines()) == 5 and len(text) < 1000
    assert all(line.isprintable() for line in text.split("\n"))


# ----------------------------------------------------------------------------------------- scores


def test_scores_are_means_of_any_reward(quick, monkeypatch):
    """pass@1: of all samples, drawn at the policy's temperature; pass@8: of each problem's best;
    greedy: of another rollout."""
    rollouts, real = [], grpo.rollout
    monkeypatch.setattr(grpo, "verify", lambda completion, answer: len(completion) ** 2 / -7)
    monkeypatch.setattr(
        grpo, "rollout", lambda *a: rollouts.append((a, real(*a))) or rollouts[-1][1]
    )
    result = grpo.main(grpo.Args(**quick | {"steps": 0, "temperature": 1.5}))
    (sampled, (_, completions, rewards)), (most_likely, (_, greedy, _)) = rollouts
    assert sampled[3:5] == (8, 1.5) and most_likely[3:5] == (1, 0.0)
    values = [[len(completions[8 * i + j]) ** 2 / -7 for j in range(8)] for i in range(8)]
    assert rewards.unique().numel() > 5
    assert result["eval/pass@1"] == pytest.approx(sum(map(sum, values)) / 64)
    assert result["eval/pass@8"] == pytest.approx(sum(map(max, values)) / 8)
    expected = sum(len(text) ** 2 / -7 for text in greedy) / 8
    assert result["eval/pass@1_greedy"] == pytest.approx(expected)


@pytest.mark.parametrize("verifier,lenient", [("strict", True), ("flexible", True), (None, False)])
def test_lenient_is_scored_where_answers_are_numbers(verifier, lenient, quick, tmp_path):
    """By the flexible verifier, whichever the run has."""
    if verifier is None:
        verifier = str(tmp_path / "own.py")
        Path(verifier).write_text("def verify(completion, answer):\n    return 1.0\n")
    result = grpo.main(grpo.Args(**quick | {"steps": 0, "verifier": verifier}))
    assert ("eval/pass@1_lenient" in result) == lenient
    if verifier == "flexible":
        assert result["eval/pass@1_lenient"] == pytest.approx(result["eval/pass@1"])


# --------------------------------------------------------------------------------- what is wrong

FORM, HARD, CUT, SAME = "--verifier flexible", "--dataset", "--max-new-tokens", "--temperature"


def test_a_run_says_what_is_wrong(quick, monkeypatch, capsys):
    """One line after each evaluation, that names the flag: the numbers are right, but never after
    a `#`."""
    monkeypatch.setattr(grpo, "verify", lambda completion, answer: 0.0)
    grpo.main(grpo.Args(**quick | {"steps": 1}))
    _, *evaluations = capsys.readouterr().out.split(": held-out ")
    assert [FORM in text and text.count(": try ") == 1 for text in evaluations] == [True, True]


def test_a_good_run_is_not_told_what_to_try(quick, capsys):
    """The tiny model on the sums, as it starts and as it goes on."""
    result = grpo.main(grpo.Args(**quick | {"steps": 3, "eval_every": 1, "eval_problems": 32}))
    out = capsys.readouterr().out
    assert out.count(": held-out ") == 4 and "try" not in out.replace(result["folder"], "")


def test_hints_come_in_order_and_one_at_a_time():
    """Four faults at once, mended one after the other."""
    scores = {"pass@1": 0.0, "pass@8": 0.0, "pass@1_lenient": 0.0}
    scores |= {"clipped_ratio": 0.51, "frac_reward_zero_std": 1.0}
    mended = [{"pass@1_lenient": 0.01}, {"pass@1_lenient": 0.0}, {"clipped_ratio": 0.5}]
    mended += [{"pass@8": 0.5, "pass@1": 0.5, "pass@1_lenient": 0.71}, {"pass@1_lenient": 0.69}]
    mended += [{"pass@1": 0.9, "pass@8": 0.9}]
    hints = []
    for change in mended:
        scores |= change
        hints.append(grpo.diagnose({f"eval/{name}": value for name, value in scores.items()}))
    for hint, flag in zip(hints, [FORM, CUT, HARD, FORM, SAME], strict=False):
        assert flag in hint and "\n" not in hint and hint.count(": try ") == 1
    assert hints[5] == ""


def test_hints_without_lenient():
    """A verifier of the reader's own."""
    scores = {"eval/pass@1": 0.0, "eval/pass@8": 0.0}
    scores |= {"eval/clipped_ratio": 0.0, "eval/frac_reward_zero_std": 0.9}
    assert HARD in grpo.diagnose(scores) and not grpo.diagnose(scores | {"eval/pass@8": 0.1})
    below = {"eval/pass@1": -0.75, "eval/pass@8": -0.1}  # rewards of which 0 is the best
    assert not grpo.diagnose(scores | below)

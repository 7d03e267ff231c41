"""tests/learn/rollout_page.py: its numbers are the oracles', and a browser draws what they say."""

import html
import json
import math
import re
import shutil

import pytest
import rollout_page
import torch
import tyro
from conftest import ROOT, calls_of, refused
from launch import flags
from oracles import clipped_tokens, oracle, row_by_row, tokens

SMALL = flags({"group_size": 4, "update_epochs": 2, "num_minibatches": 2, "learning_rate": 3e-3})
HOSTILE = ["</script>", "<img src=x onerror=null.x>", "&lt;b&gt;", "<!--<script>", "\u2028`${1}"]


def close(shown, expected):
    """Up to the three digits of the page."""
    return math.isclose(shown, expected, rel_tol=6e-3, abs_tol=1e-6)


@pytest.fixture(scope="module")
def rollout():
    """A page; the inputs of train for each algorithm; and for each frame its script, completions
    and flags, log π by plain passes, and how many steps had been taken."""
    looks, look = [], rollout_page.look
    with pytest.MonkeyPatch.context() as patch:
        trainings = calls_of(patch, rollout_page, "train")
        scripts = rollout_page.SCRIPTS
        steps = {script: calls_of(patch, script, "train_minibatch") for script in scripts}

        def watched(script, policy, batch, args):
            with torch.no_grad():
                logprobs = row_by_row(policy, batch)
            looks.append((script, batch, args, logprobs, len(steps[script])))
            return look(script, policy, batch, args)

        patch.setattr(rollout_page, "look", watched)
        page = rollout_page.make_page(SMALL)
    return page, [inputs for inputs, _ in trainings], looks


def test_numbers_are_those_of_plain_loops(rollout):
    """Advantages and weights of completions; and each token's numbers after each step."""
    page, trainings, looks = rollout
    clips = set()
    for algorithm, inputs in zip(page["algorithms"], trainings, strict=True):
        script, _, whole, rewards, shown, args = inputs
        name, lengths = script.__name__, whole["mask"].sum(1).int().tolist()
        frames = [look for look in looks if look[0] is script]
        assert algorithm["name"] + "_LLM" == name.upper()
        assert [steps for *_, steps in frames] == page["steps"] == [0, 1, 2, 3, 4]
        if name == "dapo_llm":
            penalty = script.overlong_penalty(whole["mask"].sum(1), whole["ended"], args)
            rewards = rewards + penalty.view_as(rewards)
        A = [a for group in rewards.tolist() for a in oracle(name).advantages(group, args)]
        weights = [oracle(name).share(n, lengths, args) * sum(lengths) for n in lengths]
        for k, i in enumerate(shown.tolist()):
            assert close(algorithm["A"][k][0], A[i])
            assert close(algorithm["weight"][k][0], weights[i])
        for (_, batch, _, logprobs, _), frame in zip(frames, algorithm["frames"], strict=True):
            inputs = logprobs, batch["old_logprobs"], batch["advantages"], batch["mask"]
            clipped = clipped_tokens(name, *inputs, args)
            for k, t, (r, s, logprob, a) in tokens(*inputs):
                _, slope = oracle(name).token(r, s, logprob, a, args)
                gradient = weights[shown[k]] * slope
                expected = {"p": math.exp(logprob), "r": r, "gradient": gradient}
                assert all(close(frame[key][k][t], value) for key, value in expected.items()), name
                assert frame["clipped"][k][t] == clipped[k, t]
                assert close(frame["s"][k][0], s)
                clips.add((name, bool(clipped[k, t])))
        assert {r for row in algorithm["frames"][0]["r"] for r in row} == {1}
    assert {("grpo_llm", True), ("gspo_llm", True), ("cispo_llm", True)} < clips


SCRIPT = """<pre id=report></pre><script>
    const all = (where, what) => [...where.querySelectorAll(what)], views = [];
    const see = () => views.push({
        time: $("time").textContent, group: +$("group").value,
        panels: all($("panels"), "section").map(panel => ({
            tokens: all(panel, ".token").map(token => token.textContent),
            signs: all(panel, ".token").map(token => token.className),
            counted: parseInt(panel.querySelector(".scale").textContent.split("· ")[1]),
            lines: all(panel, "[stroke-dasharray]").length,
        })),
    });
    see();
    $("frame").value = 4; $("frame").dispatchEvent(new Event("input"));
    for (let i = 0; i < 2; i++) dispatchEvent(new KeyboardEvent("keydown", { key: "n" }));
    all($("panels"), ".token")[1].click();
    dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" })); see();
    $("report").textContent = JSON.stringify(views);
</script>"""
BOUNDS = {"GRPO": (0.8, 1.2), "DAPO": (0.8, 1.28), "CISPO": (1.2,)}  # of r


def check_view(view, page, group, step, row, column):
    """What is drawn is what the numbers after this step say: of the question's completions, the
    picked token and its curve, which has lines at r's bounds, if π_old times them is below 1."""
    assert view["time"] == f"{step} of 4 (epoch {math.ceil(step / 2)})" and view["group"] == group
    rows = range(4 * group, 4 * group + 4)
    completions = [completion["tokens"] for completion in page["groups"][group]["completions"]]
    picked = sum(map(len, completions[:row])) + column
    for panel, algorithm in zip(view["panels"], page["algorithms"], strict=True):
        assert panel["tokens"] == [token.replace("\n", "↵") for token in sum(completions, [])]
        start, frame = algorithm["frames"][0], algorithm["frames"][step]
        gradients, clipped = (
            sum((frame[key][i] for i in rows), []) for key in ("gradient", "clipped")
        )
        largest = max(abs(x) for i in rows for x in start["gradient"][i])
        assert panel["counted"] == sum(clipped)
        bounds = BOUNDS.get(algorithm["name"], ())
        assert panel["lines"] == sum(start["p"][rows[row]][column] * x <= 1 for x in bounds)
        for i, signs in enumerate(map(str.split, panel["signs"])):
            direction = "up" if gradients[i] > 0 else "down"
            assert (direction in signs) == (abs(gradients[i]) > 0.005 * largest)
            assert ("clipped" in signs, "picked" in signs) == (clipped[i], i == picked)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(rollout_page.BROWSER), reason="needs a browser")
def test_slider_click_and_keys_change_what_is_drawn(rollout, tmp_path, monkeypatch):
    """In a browser; and the text of a model is hostile, but shown as text."""
    page = json.loads(json.dumps(rollout[0]))
    for group in page["groups"]:
        group["question"] = group["right"] = page["command"] = "".join(HOSTILE)
        for completion in group["completions"]:
            completion["tokens"][: len(HOSTILE)] = HOSTILE[: len(completion["tokens"])]
    monkeypatch.setattr(rollout_page, "make_page", lambda words: page)
    path = rollout_page.main(["--output-dir", str(tmp_path)])
    assert path.stat().st_size < 500_000
    path.write_text(path.read_text() + SCRIPT)
    done = rollout_page.browse(path.as_uri(), "--dump-dom")
    assert "CONSOLE" not in done.stderr
    report = re.search('id="report">(.*?)</pre>', done.stdout, re.S)[1]
    before, after = json.loads(html.unescape(report))
    first = page["first"]
    check_view(before, page, first, 0, *page["picks"][first])
    check_view(after, page, (first + 2) % len(page["groups"]), 3, 0, 1)


def test_a_token_that_grpo_clips_is_picked_and_not_a_completion_s_end():
    def algorithm(*ps):
        return {"frames": [{"p": [list(ps)] * 2, "clipped": [[0, 0, 1], [0, 1, 1]]}] * 2}

    two = [algorithm(0.5, 0.5, 0.1), algorithm(0.9, 0.6, 1.0)]
    assert rollout_page.telling_token(two, [0, 1], 1)[1:] == (1, 1)
    assert rollout_page.telling_token(two, [0], 1)[1:] == (0, 0)


def test_steps_shown_have_the_end_of_the_first_epoch_and_the_last_step():
    for epochs, minibatches, steps in [(3, 5, [0, 1, 2, 3, 4, 5, 10, 15]), (1, 1, [0, 1])]:
        args = rollout_page.Args(update_epochs=epochs, num_minibatches=minibatches)
        assert rollout_page.shown_steps(args) == steps


def test_each_completion_ends_as_it_has_ended(rollout):
    """With ■ for the stop token, unless it was cut off at its last token or by the page."""
    page, [(_, _, batch, _, shown, _), *_], _ = rollout
    ends = [
        completion["tokens"][-1] for group in page["groups"] for completion in group["completions"]
    ]
    expected = batch["ended"][shown].tolist()
    assert [end == "■" for end in ends] == expected and any(expected)


def test_a_page_without_a_difference_or_of_another_model_is_refused():
    """A task whose rewards are all equal; --resume, which would show the initial model."""
    task = str(ROOT / "tests/learn/exercise.py")
    assert "unequal rewards" in refused(rollout_page.make_page, [*SMALL, "--task", task])
    assert "by --model" in refused(rollout_page.make_page, ["--resume", "step-000050"])


def test_a_flag_that_was_typed_holds_also_at_a_default_of_the_tiny_model():
    """Without it the rate is 1e-6, a file's completion has 256 tokens, DAPO's clip is at 0.28."""
    typed = {"learning_rate": 5e-4, "max_new_tokens": 32, "clip_high": 0.2}
    words = flags({"model": "some/model", "task": __file__, "picture": "page.png"} | typed)
    args = tyro.cli(rollout_page.Args, args=words)
    for script in rollout_page.SCRIPTS:
        flags_read = vars(rollout_page.args_of(script, words, args))
        assert flags_read.items() >= {x for x in typed.items() if x[0] in flags_read}, script
    assert rollout_page.args_of(rollout_page.dapo_llm, [], args).clip_high == 0.28


def test_the_page_asks_no_server():
    template = (ROOT / "tests/learn/rollout_page.html").read_text()
    assert "default-src 'none'" in template and not re.search(r"\bsrc=|href=|innerHTML", template)

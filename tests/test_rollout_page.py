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
def made():
    """A page; the calls of train that made it; and for each frame its script, answers and flags,
    log π by plain passes, and how many steps had been taken."""
    looks, look = [], rollout_page.look
    with pytest.MonkeyPatch.context() as patch:
        trainings = calls_of(patch, rollout_page, "train")
        steps = {each: calls_of(patch, each, "train_minibatch") for each in rollout_page.SCRIPTS}

        def watched(script, policy, batch, args):
            with torch.no_grad():
                logprobs = row_by_row(policy, batch)
            looks.append((script, batch, args, logprobs, len(steps[script])))
            return look(script, policy, batch, args)

        patch.setattr(rollout_page, "look", watched)
        page = rollout_page.make_page(SMALL)
    return page, trainings, looks


def test_numbers_are_those_of_plain_loops(made):
    """Advantages and weights of answers; and each token's numbers after each step."""
    page, trainings, looks = made
    seen = set()
    for algorithm, (inputs, _) in zip(page["algorithms"], trainings, strict=True):
        script, _, whole, rewards, shown, _ = inputs
        name = script.__name__
        frames = [look for look in looks if look[0] is script]
        assert algorithm["name"] + "_LLM" == name.upper()
        assert [steps for *_, steps in frames] == page["steps"] == [0, 1, 2, 3, 4]
        args, lengths = frames[0][2], whole["mask"].sum(1).int().tolist()
        if name == "dapo_llm":
            penalty = script.overlong_penalty(whole["mask"].sum(1), whole["ended"], args)
            rewards = rewards + penalty.view_as(rewards)
        A = [a for group in rewards.tolist() for a in oracle(name).advantages(group, args)]
        weights = [oracle(name).share(each, lengths, args) * sum(lengths) for each in lengths]
        for k, i in enumerate(shown.tolist()):
            assert close(algorithm["A"][k][0], A[i])
            assert close(algorithm["weight"][k][0], weights[i])
        for (_, batch, _, logprobs, _), frame in zip(frames, algorithm["frames"], strict=True):
            old, advantages, mask = (batch[key] for key in ("old_logprobs", "advantages", "mask"))
            clipped = clipped_tokens(name, logprobs, old, advantages, mask, args)
            for k, t, (r, s, logprob, a) in tokens(logprobs, old, advantages, mask):
                _, slope = oracle(name).token(r, s, logprob, a, args)
                gradient = weights[shown[k]] * slope
                expected = {"p": math.exp(logprob), "r": r, "gradient": gradient}
                assert all(close(frame[key][k][t], value) for key, value in expected.items()), name
                assert frame["clipped"][k][t] == clipped[k, t]
                assert close(frame["s"][k][0], s)
                seen.add((name, bool(clipped[k, t])))
        assert {r for row in algorithm["frames"][0]["r"] for r in row} == {1}
    assert {("grpo_llm", True), ("gspo_llm", True), ("cispo_llm", True)} < seen


REPORT = "<pre id=report></pre><script>$('report').textContent = JSON.stringify(%s)</script>"
SCRIPT = """(() => {
    const all = (where, what) => [...where.querySelectorAll(what)];
    const see = () => ({
        time: $("time").textContent, group: +$("group").value,
        panels: all($("panels"), "section").map(panel => ({
            tokens: all(panel, ".token").map(token => token.textContent),
            signs: all(panel, ".token").map(token => token.className),
            picked: all(panel, ".token").findIndex(token => token.matches(".picked")),
            counted: parseInt(panel.querySelector(".scale").textContent.split("· ")[1]),
            lines: all(panel, "[stroke-dasharray]").length,
        })),
        images: document.images.length,
    });
    const views = [see()], token = $("panels").querySelector(".token:not(.picked)");
    $("frame").value = 4; $("frame").dispatchEvent(new Event("input")); views.push(see());
    all($("panels"), ".token")[1].click(); views.push(see());
    dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" })); views.push(see());
    dispatchEvent(new KeyboardEvent("keydown", { key: "n" })); views.push(see());
    return views;
})()"""


def check_view(view, page, group, step, row, column):
    """What is drawn is what the numbers after this step say: of the question's answers, the picked
    token and its curve, which has lines where r's bounds are, if π_old times them is below 1."""
    assert view["time"] == f"{step} of 4 (epoch {math.ceil(step / 2)})" and view["images"] == 0
    assert view["group"] == group
    answers, first = page["groups"][group]["answers"], group * 4
    for panel, algorithm in zip(view["panels"], page["algorithms"], strict=True):
        shown = [token.replace("\n", "↵") for answer in answers for token in answer["tokens"]]
        assert panel["tokens"] == shown
        assert panel["picked"] == sum(len(a["tokens"]) for a in answers[:row]) + column
        frame, start = algorithm["frames"][step], algorithm["frames"][0]
        largest = max(abs(x) for line in start["gradient"][first : first + 4] for x in line)
        numbers, acts = (sum(frame[key][first : first + 4], []) for key in ("gradient", "clipped"))
        assert panel["counted"] == sum(acts)
        bounds = {"GRPO": {0.8, 1.2}, "DAPO": {0.8, 1.28}, "CISPO": {1.2}}
        bounds = bounds.get(algorithm["name"], set())
        old = start["p"][first + row][column]
        assert panel["lines"] == sum(old * bound <= 1 for bound in bounds)
        for x, act, name in zip(numbers, acts, panel["signs"], strict=True):
            assert (("up" if x > 0 else "down") in name.split()) == (abs(x) > 0.005 * largest)
            assert ("clipped" in name.split()) == bool(act)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(rollout_page.BROWSER), reason="needs a browser")
def test_slider_click_and_keys_change_what_is_drawn(made, tmp_path, monkeypatch):
    """In a browser; and the text of a model is hostile, but shown as text."""
    page = json.loads(json.dumps(made[0]))
    for group in page["groups"]:
        group["question"] = group["right"] = "".join(HOSTILE)
        for answer in group["answers"]:
            answer["tokens"][: len(HOSTILE)] = HOSTILE[: len(answer["tokens"])]
    page["command"] = "python rollout_page.py --prompt '{question}</script><b>'"
    monkeypatch.setattr(rollout_page, "make_page", lambda words: page)
    path = rollout_page.main(["--output-dir", str(tmp_path)])
    assert path.stat().st_size < 500_000
    path.write_text(path.read_text() + REPORT % SCRIPT)
    done = rollout_page.browse(path.as_uri(), "--dump-dom")
    assert "CONSOLE" not in done.stderr
    report = re.search('id="report">(.*?)</pre>', done.stdout, re.S)[1]
    views = json.loads(html.unescape(report))
    group, count = page["first"], len(page["groups"])
    for view, step in zip(views[:2], (0, 4), strict=True):
        check_view(view, page, group, step, *page["picks"][group])
    check_view(views[2], page, group, 4, 0, 1)
    check_view(views[3], page, group, 3, 0, 1)
    group = (group + 1) % count
    check_view(views[4], page, group, 3, *page["picks"][group])


def test_a_token_that_grpo_clips_is_picked_and_not_an_answer_s_end():
    def algorithm(*ps):
        return {"frames": [{"p": [list(ps)] * 2, "clipped": [[0, 0, 1], [0, 1, 1]]}] * 2}

    two = [algorithm(0.5, 0.5, 0.1), algorithm(0.9, 0.6, 1.0)]
    assert rollout_page.telling_token(two, [0, 1], 1)[1:] == (1, 1)
    assert rollout_page.telling_token(two, [0], 1)[1:] == (0, 0)


def test_steps_shown_have_the_end_of_the_first_epoch_and_the_last_step():
    for epochs, minibatches, steps in [(3, 5, [0, 1, 2, 3, 4, 5, 10, 15]), (1, 1, [0, 1])]:
        args = rollout_page.Args(update_epochs=epochs, num_minibatches=minibatches)
        assert rollout_page.shown_steps(args) == steps


def test_each_answer_ends_as_it_has_ended(made):
    """With ■ for the stop token, unless it was cut off at its last token or by the page."""
    page, trainings, _ = made
    (_, _, batch, _, shown, _), _ = trainings[0]
    ends = [answer["tokens"][-1] for group in page["groups"] for answer in group["answers"]]
    expected = [batch["ended"][row].item() for row in shown.tolist()]
    assert [end == "■" for end in ends] == expected and any(expected)


def test_a_page_without_a_difference_or_of_another_model_is_refused():
    """A task whose rewards are all equal; --resume, which would show the initial model."""
    task = str(ROOT / "tests/learn/exercise.py")
    assert "unequal rewards" in refused(rollout_page.make_page, [*SMALL, "--task", task])
    assert "by --model" in refused(rollout_page.make_page, ["--resume", "step-000050"])


def test_a_flag_that_was_typed_holds_also_at_a_default_of_the_tiny_model():
    """Without it the rate is 1e-6, an answer of a file has 256 tokens, DAPO's clip is at 0.28."""
    typed = {"learning_rate": 5e-4, "max_new_tokens": 32, "clip_high": 0.2}
    words = flags({"model": "some/model", "task": __file__, "picture": "page.png"} | typed)
    args = tyro.cli(rollout_page.Args, args=words)
    for script in rollout_page.SCRIPTS:
        own_args = vars(rollout_page.own_args(script, words, args))
        assert {name: own_args.get(name, typed[name]) for name in typed} == typed, script
    defaults = [rollout_page.own_args(script, [], args) for script in rollout_page.SCRIPTS[1:]]
    assert [own_args.clip_high for own_args in defaults] == [0.2, 0.28, 0.013, 0.2]


def test_the_page_asks_no_server():
    template = (ROOT / "tests/learn/rollout_page.html").read_text()
    assert "default-src 'none'" in template and not re.search(r"\bsrc=|href=|innerHTML", template)

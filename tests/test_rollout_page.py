"""The numbers of tests/examples/rollout_page.py are those of the oracles' plain loops, at the epoch
they stand for; in a browser the slider, the keys and a click change what is drawn, as the numbers
say, without an error; and text of a model is shown as text."""

import html
import json
import math
import re
import shutil

import pytest
import torch
from conftest import ROOT
from oracles import clipped_tokens, oracle, row_by_row, tokens

import rollout_page

SMALL = {"group_size": 4, "update_epochs": 2, "minibatches": 2, "learning_rate": 3e-3}
HOSTILE = ["</script>", "<img src=x onerror=null.x>", "&lt;b&gt;", "<!--<script>", "\u2028`${1}"]


def close(found, expected):
    """Up to the three digits of the page."""
    return math.isclose(found, expected, rel_tol=6e-3, abs_tol=1e-6)


@pytest.fixture(scope="module")
def made():
    """A page, and what it was made of: a list of calls of train, and one of calls of look, with
    log π by plain passes and with the number of steps that had been taken."""
    trainings, looks, steps = [], [], []
    with pytest.MonkeyPatch.context() as patch:
        train, look = rollout_page.train, rollout_page.look

        def watched_look(script, policy, batch, args):
            with torch.no_grad():
                logprobs = row_by_row(policy, batch)
            frame = look(script, policy, batch, args)
            looks.append((script.__name__, batch, args, logprobs, len(steps), frame))
            return frame

        def watched_train(script, *others):
            step = script.train_minibatch
            counted = lambda *args: (steps.append(1), step(*args))  # noqa: E731
            patch.setattr(script, "train_minibatch", counted)
            steps.clear()
            trainings.append((script.__name__, *others[1:4]))
            return train(script, *others)

        patch.setattr(rollout_page, "train", watched_train)
        patch.setattr(rollout_page, "look", watched_look)
        page = rollout_page.make_page(rollout_page.Args(**SMALL))
    return page, trainings, looks


def test_numbers_are_those_of_plain_loops(made):
    page, trainings, looks = made
    seen = set()
    for name, batch, args, logprobs, _, frame in looks:
        whole = next(rollout for script, rollout, _, _ in trainings if script == name)
        lengths = whole["mask"].sum(1).int().tolist()
        old, advantages, mask = (batch[key] for key in ("old_logprobs", "advantages", "mask"))
        clipped = clipped_tokens(name, logprobs, old, advantages, mask, args)
        for i, t, (r, s, logprob, A) in tokens(logprobs, old, advantages, mask):
            length = int(mask[i].sum())
            weight = oracle(name).share(length, lengths, args) * sum(lengths)
            _, slope = oracle(name).token(r, s, logprob, A, args)
            expected = {"p": math.exp(logprob), "r": r, "gradient": weight * slope}
            assert all(close(frame[key][i][t], value) for key, value in expected.items()), name
            assert frame["clipped"][i][t] == clipped[i, t] and close(frame["s"][i][0], s)
            seen.add((name, bool(clipped[i, t])))
    assert {("grpo_llm", True), ("gspo_llm", True), ("cispo_llm", True)} < seen
    assert [algorithm["name"] + "_LLM" for algorithm in page["algorithms"]] == [
        name.upper() for name, *_ in trainings
    ]


def test_advantages_and_weights_are_those_of_plain_loops(made):
    page, trainings, looks = made
    for algorithm, (name, batch, rewards, shown) in zip(page["algorithms"], trainings, strict=True):
        args = next(args for script, _, args, *_ in looks if script == name)
        lengths = batch["mask"].sum(1).int().tolist()
        if name == "dapo_llm":
            given = batch["mask"].sum(1), batch["ended"], args
            rewards = rewards + rollout_page.dapo_llm.overlong_penalty(*given).view_as(rewards)
        A = [a for group in rewards.tolist() for a in oracle(name).advantages(group, args)]
        for k, i in enumerate(shown.tolist()):
            weight = oracle(name).share(lengths[i], lengths, args) * sum(lengths)
            assert close(algorithm["A"][k][0], A[i]) and close(algorithm["weight"][k][0], weight)


def test_each_frame_stands_at_its_epoch(made):
    page, _, looks = made
    for algorithm in page["algorithms"]:
        name = algorithm["name"].lower() + "_llm"
        frames = [(steps, frame) for script, *_, steps, frame in looks if script == name]
        assert frames == list(zip([0, 2, 4], algorithm["frames"], strict=True))
        assert {r for row in frames[0][1]["r"] for r in row} == {1}


def drive(page, tmp_path, monkeypatch, script):
    """Write this page, append a script to it, open it in a browser; returns the script's report."""
    monkeypatch.setattr(rollout_page, "make_page", lambda args: page)
    path = rollout_page.main(rollout_page.Args(output_dir=str(tmp_path)))
    assert path.stat().st_size < 500_000
    report = "<pre id=report></pre><script>$('report').textContent = JSON.stringify(%s)</script>"
    path.write_text(path.read_text() + report % script)
    done = rollout_page.browse(path, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    return json.loads(html.unescape(re.search('id="report">(.*?)</pre>', done.stdout, re.S)[1]))


SCRIPT = """(() => {
    const all = (where, what) => [...where.querySelectorAll(what)];
    const see = () => ({
        time: $("time").textContent,
        panels: all($("panels"), "section").map(panel => ({
            tokens: all(panel, ".token").map(token => token.textContent),
            signs: all(panel, ".token").map(token => token.className),
            picked: all(panel, ".token").findIndex(token => token.matches(".picked")),
        })),
        images: document.images.length,
    });
    const views = [see()], token = $("panels").querySelector(".token:not(.picked)");
    $("epoch").value = 2; $("epoch").dispatchEvent(new Event("input")); views.push(see());
    all($("panels"), ".token")[1].click(); views.push(see());
    dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" })); views.push(see());
    return views;
})()"""


def check_view(view, page, epoch, row, column):
    """What is drawn is what the numbers of this epoch say."""
    assert view["time"].startswith(f"{epoch} of 2 ({2 * epoch} steps)") and view["images"] == 0
    answers = page["groups"][0]["answers"]
    for panel, algorithm in zip(view["panels"], page["algorithms"], strict=True):
        shown = [token.replace("\n", "↵") for answer in answers for token in answer["tokens"]]
        assert panel["tokens"] == shown
        assert panel["picked"] == sum(len(a["tokens"]) for a in answers[:row]) + column
        frame, start = algorithm["frames"][epoch], algorithm["frames"][0]["gradient"]
        largest = max(abs(x) for line in start[: len(answers)] for x in line)
        numbers, acts = (sum(frame[key][: len(answers)], []) for key in ("gradient", "clipped"))
        for x, act, name in zip(numbers, acts, panel["signs"], strict=True):
            assert (("up" if x > 0 else "down") in name.split()) == (abs(x) > 0.005 * largest)
            assert ("clipped" in name.split()) == bool(act)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, rollout_page.BROWSERS)), reason="needs a browser")
def test_slider_click_and_keys_change_what_is_drawn(made, tmp_path, monkeypatch):
    """In a browser; and the text of a model is hostile, but shown as text."""
    page = json.loads(json.dumps(made[0]))
    for group in page["groups"]:
        group["question"] = group["right"] = "".join(HOSTILE)
        for answer in group["answers"]:
            answer["tokens"][: len(HOSTILE)] = HOSTILE[: len(answer["tokens"])]
    page["command"] = "python rollout_page.py --prompt '{question}</script><b>'"
    views = drive(page, tmp_path, monkeypatch, SCRIPT)
    places = [page["pick"]] * 2 + [(0, 1)] * 2
    for view, epoch, place in zip(views, (0, 2, 2, 1), places, strict=True):
        check_view(view, page, epoch, *place)


def test_without_a_difference_the_page_says_so(tmp_path, refused):
    (tmp_path / "all_right.py").write_text("def verify(text, answer): return 1")
    args = rollout_page.Args(**SMALL, verifier=str(tmp_path / "all_right.py"))
    assert "no question has answers of unequal rewards" in refused(rollout_page.main, args)


def test_the_page_asks_no_server():
    template = (ROOT / "tests/examples/rollout_page.html").read_text()
    assert "default-src 'none'" in template and not re.search(r"\bsrc=|href=|innerHTML", template)

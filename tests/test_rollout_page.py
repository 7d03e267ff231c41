"""tests/learn/rollout_page.py: the numbers of its page are the oracles'."""

import json
import math
import re

import pytest
import rollout_page
import torch
from conftest import calls_of
from oracles import ORACLES, expected, row_by_row

SMALL = {"group_size": 4, "update_epochs": 2, "num_minibatches": 2, "learning_rate": 3e-3}
SMALL |= {"max_new_tokens": 14}  # so few that DAPO penalizes some completions


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
        page = rollout_page.make_page(**SMALL)
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
            assert len(penalty[shown].unique()) > 1
            rewards = rewards + penalty.view_as(rewards)
        A = [a for group in rewards.tolist() for a in ORACLES[name].advantages(group, args)]
        weights = [ORACLES[name].share(n, lengths, args) * sum(lengths) for n in lengths]
        for k, i in enumerate(shown.tolist()):
            assert close(algorithm["A"][k][0], A[i])
            assert close(algorithm["weight"][k][0], weights[i])
        for (_, batch, _, logprobs, _), frame in zip(frames, algorithm["frames"], strict=True):
            old, advantages, mask = (batch[key] for key in ("old_logprobs", "advantages", "mask"))
            right = expected(name, logprobs, old, advantages, mask, args)
            right |= {"p": logprobs.exp(), "gradient": batch["weights"] * right["slope"]}
            for k, t in mask.nonzero().tolist():
                assert all(
                    close(frame[key][k][t], right[key][k, t].item())
                    for key in ("p", "r", "gradient")
                ), name
                assert frame["clipped"][k][t] == right["clipped"][k, t]
                assert close(frame["s"][k][0], right["s"][k, t].item())
                clips.add((name, bool(frame["clipped"][k][t])))
        assert {r for row in algorithm["frames"][0]["r"] for r in row} == {1}
    assert {("grpo_llm", True), ("gspo_llm", True), ("cispo_llm", True)} < clips


def test_a_models_text_stays_text(tmp_path, monkeypatch):
    """What a model wrote ends no script, and is never put into the page as HTML."""
    page = {"question": "</script><img><!--<script>"}
    monkeypatch.setattr(rollout_page, "make_page", lambda: page)
    text = rollout_page.main(output_dir=str(tmp_path)).read_text()
    (data,) = re.findall(r"<script>\nconst page = (.*);\n", text)
    assert json.loads(data) == page and "<" not in data
    assert "default-src 'none'" in text and not re.search(r"\bsrc=|href=|innerHTML", text)

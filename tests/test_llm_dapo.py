"""What DAPO alone has: the overlong penalty and dynamic sampling."""

from itertools import count

import pytest
import torch
from conftest import calls_of, equal, script, set_task, weights

dapo = script("dapo_llm")


def test_overlong_penalty_by_hand():
    args = dapo.Args(max_new_tokens=40)  # the penalty begins a fifth before
    lengths = torch.tensor([1.0, 32, 33, 36, 40, 20])
    ended = torch.tensor([True, True, True, True, True, False])
    expected = torch.tensor([0, 0, -1 / 16, -0.25, -0.5, -0.5])
    torch.testing.assert_close(dapo.overlong_penalty(lengths, ended, args), expected)
    args = dapo.Args(max_new_tokens=40, overlong_tokens=0)  # no penalty at all
    assert not dapo.overlong_penalty(lengths, ended, args).any()


def test_joined_batches_have_one_width():
    """Padded on the left of the prompt, on the right of the completion."""
    parts = []
    for n in (1, 2):
        part = {"prompt_mask": torch.ones(1, 1 + n), "mask": torch.ones(1, n)}
        parts.append(part | {"ended": torch.tensor([n == 1])})
    joined = {name: tensor.tolist() for name, tensor in dapo.join(parts).items()}
    assert joined["prompt_mask"] == [[0, 1, 1], [1, 1, 1]]
    assert joined["mask"] == [[1, 0], [1, 1]] and joined["ended"] == [True, False]


FLAGS = {"group_size": 6, "num_minibatches": 1, "overlong_tokens": 32, "steps": 1}


def test_equal_rewards_move_nothing_though_their_lengths_differ(short_run, monkeypatch):
    """The overlong penalty differs within a group and must not count as a signal."""
    set_task(monkeypatch, dapo, lambda *_: 0.7)
    penalties = calls_of(monkeypatch, dapo, "overlong_penalty")
    args = dapo.Args(**short_run | FLAGS, max_rollouts=2)
    result = dapo.main(args)
    ((_, penalty),) = penalties
    assert penalty.view(8, 6).std(1).any(), "it begins with the first token"
    assert equal(weights(result["folder"]), dapo.load_model(args)[0].state_dict())


def test_it_trains_on_unequal_groups_alone_and_scores_no_others(short_run, monkeypatch):
    """It draws until it has enough, each time a sample of the problems. The advantages are those of
    the rewards with the penalty. The fifth such group is one too many."""
    unequal, verified = [1, 2, 6, 9, 10], count()
    set_task(monkeypatch, dapo, lambda *_: (n := next(verified)) // 6 in unequal and n % 2)
    monkeypatch.setattr(dapo, "evaluate", lambda *_: {"eval/pass@1": 0.0})
    updates, rollouts, passes = (
        calls_of(monkeypatch, dapo, name)
        for name in ("train_minibatch", "rollout", "token_logprobs")
    )
    args = dapo.Args(**short_run | FLAGS, beta=0.1)
    dapo.main(args)
    lengths = [batch["mask"].sum(1) for _, (batch, _, _) in rollouts]
    ended = [batch["ended"] for _, (batch, _, _) in rollouts]
    penalty = dapo.overlong_penalty(torch.cat(lengths), torch.cat(ended), args).view(12, 6)
    rewards = torch.cat([rewards for _, (_, rewards, _) in rollouts]) + penalty
    expected = dapo.compute_advantages(rewards[unequal[:4]], args).flatten()
    (((_, _, batch, _), _),) = updates
    assert sorted(batch["advantages"].tolist()) == pytest.approx(sorted(expected.tolist()))
    assert sum(len(batch["mask"]) for (_, batch, _), _ in passes) == 2 * 24, "by π_ref and π_θ"
    first, second, third = (problems for (_, _, _, problems, *_), _ in rollouts)
    assert first != second != third

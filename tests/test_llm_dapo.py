"""What DAPO alone has: the overlong penalty and dynamic sampling."""

from itertools import count

import pytest
import torch
from conftest import calls_of, equal, random_model, script
from test_llm_epochs import LENGTHS, TEXTS, take_step

dapo = script("dapo_llm")


def test_overlong_penalty_by_hand():
    args = dapo.Args(max_new_tokens=40)  # the penalty begins a fifth before
    lengths = torch.tensor([1.0, 32, 33, 36, 40, 20])
    ended = torch.tensor([True, True, True, True, True, False])
    expected = torch.tensor([0, 0, -1 / 16, -0.25, -0.5, -0.5])
    torch.testing.assert_close(dapo.overlong_penalty(lengths, ended, args), expected)
    args = dapo.Args(max_new_tokens=40, overlong_cache=0)  # no penalty at all
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


def train_step(monkeypatch, verify, **flags):
    """One step of four groups of six, whose completions have these LENGTHS; the model, and what the
    step logs."""
    model = random_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flags = {"beta": 0.0, "G": 6, "max_new_tokens": 9} | flags
    return model, take_step("dapo_llm", monkeypatch, verify, model, None, optimizer, **flags)


def test_dead_groups_move_nothing_though_their_lengths_differ(monkeypatch):
    """The overlong penalty differs within each group and must not count as a signal."""
    penalties, before = calls_of(monkeypatch, dapo, "overlong_penalty"), random_model().state_dict()
    flags = {"max_resample": 2, "overlong_cache": 1.0}
    model, metrics = train_step(monkeypatch, lambda *_: 0.7, **flags)
    ((_, penalty),) = penalties
    assert penalty.view(8, 6).std(1).all()
    assert equal(model.state_dict(), before) and metrics["discarded_groups"] == 8
    assert metrics["reward"] == pytest.approx(0.7) and not {"loss", "grad_norm"} & set(metrics)


def test_it_trains_on_informative_groups_alone_and_counts_what_it_discards(monkeypatch):
    """It draws until it has enough, each time a sample of the problems. The advantages are those of
    the rewards with the penalty. The fifth live group is one too many."""
    steps, right = calls_of(monkeypatch, dapo, "train_minibatch"), [1, 2, 6, 9, 10]
    draws = calls_of(monkeypatch, dapo, "rollout")
    flags, scored = {"num_minibatches": 1, "max_resample": 50, "overlong_cache": 1.0}, count()

    def verify(completion, answer):
        return float(next(scored) // 6 in right and len(completion) % 2 == 0)

    _, metrics = train_step(monkeypatch, verify, **flags)
    live = right[:4]  # of the third draw, the first two
    lengths, texts = (torch.tensor(of * 3).view(12, 6)[live] for of in (LENGTHS, TEXTS))
    rewards = 1.0 * (texts % 2 == 0)
    args = dapo.Args(max_new_tokens=9, overlong_cache=1.0)
    penalty = dapo.overlong_penalty(lengths.flatten(), lengths.flatten() < 9, args)
    expected = dapo.compute_advantages(rewards + penalty.view(4, 6), args).flatten()
    (((_, _, batch, _), _),) = steps
    assert sorted(batch["advantages"].tolist()) == pytest.approx(sorted(expected.tolist()))
    assert metrics["discarded_groups"] == 8
    first, second, third = (problems for (_, _, problems, *_), _ in draws)
    assert sorted(first) == sorted(second) == sorted(third) and first != second != third

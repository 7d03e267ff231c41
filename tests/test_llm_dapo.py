"""What DAPO alone has: the overlong penalty and dynamic sampling."""

from types import SimpleNamespace

import pytest
import torch
from conftest import calls_of, equal, random_model, script
from test_llm_epochs import LENGTHS, take_step

dapo = script("dapo_llm")


def test_overlong_penalty_by_hand():
    args = dapo.Args(max_new_tokens=40)  # the penalty begins a fifth before
    lengths = torch.tensor([1.0, 32, 33, 36, 40, 20])
    ended = torch.tensor([True, True, True, True, True, False])
    expected = torch.tensor([0, 0, -1 / 16, -0.25, -0.5, -0.5])
    torch.testing.assert_close(dapo.overlong_penalty(lengths, ended, args), expected)
    args = dapo.Args(max_new_tokens=40, overlong_cache=0)  # no penalty at all
    assert not dapo.overlong_penalty(lengths, ended, args).any()


def test_the_clip_is_higher_above_than_below():
    ratios = torch.tensor([[0.79, 0.81, 1.27, 1.29]])
    for advantage, expected in ((1.0, [0, 0, 0, 1]), (-1.0, [1, 0, 0, 0])):
        given = (ratios.log(), torch.zeros(1, 4), torch.tensor([advantage]), torch.ones(1, 4))
        assert dapo.surrogate(*given, dapo.Args())[1].tolist() == [expected]


def scripted(monkeypatch, rewards):
    """rollout() replaced: hands out these groups, two at a time, with tensors of growing width."""
    stream, calls = iter(rewards), []

    def rollout(model, tokenizer, problems, num_samples, temperature, args):
        S, T = 3 + len(calls), 2 + len(calls)
        calls.append(problems)
        B = len(problems) * num_samples
        mark = torch.full((B, T), float(len(calls)))
        batch = {
            "prompt_ids": torch.full((B, S), 7),
            "prompt_mask": torch.ones(B, S).long(),
            "completion_ids": mark.long(),
            "mask": torch.ones(B, T),
            "sampled_logprobs": -mark,
            "ended": torch.ones(B).bool(),
        }
        return batch, None, torch.tensor([next(stream) for _ in problems])

    monkeypatch.setattr(dapo, "rollout", rollout)
    return calls


DEAD, WRONG, ALIVE = [0.1] * 3, [-1.0] * 3, [2.0, 2.0, 0.5]  # any numbers
MODEL = SimpleNamespace(device=torch.device("cpu"))


TRAIN = [(f"1+{i}", "2") for i in range(1000)]


def test_refill_until_enough_groups_have_signal(monkeypatch, capsys):
    calls = scripted(monkeypatch, [DEAD, ALIVE, WRONG, DEAD, ALIVE, ALIVE, ALIVE, ALIVE])
    args = dapo.Args(prompts_per_step=2, group_size=3, max_resample=10)
    batch, rewards, kept = dapo.dynamic_rollout(MODEL, None, TRAIN, 6, args)
    assert calls == [dapo.next_problems(TRAIN, 6, args, draw) for draw in range(3)]
    assert len({question for problems in calls for question, _ in problems}) == 6
    assert kept.tolist() == [1, 4] and rewards[kept].tolist() == [ALIVE, ALIVE]
    assert len(rewards) == 6 and not capsys.readouterr().out
    assert batch["mask"].shape == (18, 4) and batch["prompt_mask"].shape == (18, 5)
    # the first draw was narrower: padded on the left of the prompt, on the right of the completion
    assert batch["prompt_mask"][0].tolist() == [0, 0, 1, 1, 1]
    assert batch["mask"][0].tolist() == [1, 1, 0, 0] and len(batch["ended"]) == 18
    assert batch["sampled_logprobs"][:, 0].tolist() == [-1.0] * 6 + [-2.0] * 6 + [-3.0] * 6


@pytest.mark.parametrize("last,kept", [(DEAD, []), (ALIVE, [7])])
def test_the_cap_is_named_when_it_binds(monkeypatch, capsys, last, kept):
    calls = scripted(monkeypatch, [DEAD, WRONG] * 3 + [DEAD, last])
    args = dapo.Args(prompts_per_step=2, group_size=3, max_resample=4)
    _, rewards, found = dapo.dynamic_rollout(MODEL, None, TRAIN, 6, args)
    assert len(calls) == 4 and len(rewards) == 8 and found.tolist() == kept
    said = capsys.readouterr().out
    assert f"only {len(kept)} groups differ" in said and "--max-resample" in said


def train_step(monkeypatch, verify, **flags):
    """One step of four groups of six, of whose completions we know the lengths; the model, and what
    the step logs."""
    model = random_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flags = {"beta": 0.0, "G": 6, "max_new_tokens": 9} | flags
    return model, take_step("dapo_llm", monkeypatch, verify, model, None, optimizer, **flags)


def some_draws(right):
    """A verifier: of the groups drawn, these have a right completion, of an even length."""
    seen = []

    def verify(completion, answer):
        seen.append(completion)
        return float((len(seen) - 1) // 6 in right and len(completion) % 2 == 0)

    return verify


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
    """Their advantages are those of the rewards with the penalty. The sixth is one too many."""
    steps, right = calls_of(monkeypatch, dapo, "train_minibatch"), [1, 2, 6, 9, 10]
    flags = {"minibatches": 1, "max_resample": 50, "overlong_cache": 1.0}
    _, metrics = train_step(monkeypatch, some_draws(right), **flags)
    lengths = torch.tensor(LENGTHS * 3).view(12, 6)[right[:4]]  # of the third draw, the first two
    rewards = 1.0 * (lengths % 2 == 0)
    args = dapo.Args(max_new_tokens=9, overlong_cache=1.0)
    penalty = dapo.overlong_penalty(lengths.flatten(), lengths.flatten() < 9, args)
    expected = dapo.compute_advantages(rewards + penalty.view(4, 6), args).flatten()
    (((_, _, batch, _), _),) = steps
    assert sorted(batch["advantages"].tolist()) == pytest.approx(sorted(expected.tolist()))
    assert metrics["discarded_groups"] == 8 and metrics["num_tokens"] == 3 * sum(LENGTHS)

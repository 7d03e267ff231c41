"""What DAPO alone has: the overlong penalty and dynamic sampling."""

import random
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from conftest import Characters, draws, equal, random_model, script, spy

dapo = script("dapo_llm")


def test_overlong_penalty_by_hand():
    args = dapo.Args(max_new_tokens=40)  # the penalty begins a fifth before
    lengths = torch.tensor([1.0, 32, 33, 36, 40, 40])
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
            "old_logprobs": -mark,
            "ended": torch.ones(B).bool(),
        }
        return batch, None, torch.tensor([next(stream) for _ in problems])

    monkeypatch.setattr(dapo, "rollout", rollout)
    return calls


DEAD, WRONG, ALIVE = [0.1, 0.1, 0.1], [-1.0, -1.0, -1.0], [2.0, 2.0, 0.5]  # any numbers
MODEL = SimpleNamespace(device=torch.device("cpu"))


def problems():
    return iter([(f"1+{i}", "2") for i in range(1000)])


def test_refill_until_enough_groups_have_signal(monkeypatch, capsys):
    calls = scripted(monkeypatch, [DEAD, ALIVE, WRONG, DEAD, ALIVE, ALIVE, ALIVE, ALIVE])
    args = dapo.Args(prompts_per_step=2, group_size=3, max_resample=10)
    batch, rewards, kept = dapo.dynamic_rollout(MODEL, None, draws(problems(), 2), args)
    assert calls == [list(islice(problems(), i, i + 2)) for i in (0, 2, 4)]
    assert kept.tolist() == [1, 4] and rewards[kept].tolist() == [ALIVE, ALIVE]
    assert len(rewards) == 6 and not capsys.readouterr().out
    assert batch["mask"].shape == (18, 4) and batch["prompt_mask"].shape == (18, 5)
    # the first draw was narrower: padded on the left of the prompt, on the right of the completion
    assert batch["prompt_mask"][0].tolist() == [0, 0, 1, 1, 1]
    assert batch["mask"][0].tolist() == [1, 1, 0, 0] and len(batch["ended"]) == 18
    assert batch["old_logprobs"][:, 0].tolist() == [-1.0] * 6 + [-2.0] * 6 + [-3.0] * 6


@pytest.mark.parametrize("last,kept", [(DEAD, []), (ALIVE, [7])])
def test_the_cap_is_named_when_it_binds(monkeypatch, capsys, last, kept):
    calls = scripted(monkeypatch, [DEAD, WRONG] * 3 + [DEAD, last])
    args = dapo.Args(prompts_per_step=2, group_size=3, max_resample=4)
    _, rewards, found = dapo.dynamic_rollout(MODEL, None, draws(problems(), 2), args)
    assert len(calls) == 4 and len(rewards) == 8 and found.tolist() == kept
    said = capsys.readouterr().out
    assert f"only {len(kept)} groups differ" in said and "--max-resample" in said


def train_step(model, reference=None, rate=0.0, **flags):
    """One step on a model's own samples; what it logs."""
    args = dapo.Args(prompts_per_step=4, group_size=4, **flags)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    torch.manual_seed(0)
    rng, tokenizer = random.Random(0), Characters()
    return dapo.train_step(model, reference, tokenizer, optimizer, draws(problems(), 4), rng, args)


def test_dead_groups_move_nothing_though_their_lengths_differ(monkeypatch):
    """The overlong penalty differs within each group and must not count as a signal."""
    monkeypatch.setattr(dapo, "load_verifier", lambda name: lambda *_: 0.7)
    model, penalties = random_model(), spy(monkeypatch, dapo, "overlong_penalty")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {"max_resample": 2, "max_new_tokens": 6, "overlong_cache": 1.0}
    metrics = train_step(model, rate=0.1, **flags)
    ((_, penalty),) = penalties
    assert penalty.view(8, 4).std(1).any(), "the penalty told none of them apart"
    assert equal(model.state_dict(), before) and metrics["discarded_groups"] == 8
    assert metrics["reward"] == pytest.approx(0.7) and not {"loss", "grad_norm"} & set(metrics)


def test_it_trains_on_informative_groups_alone_and_counts_what_it_discards(monkeypatch):
    """Their advantages are those of the rewards with the penalty."""
    steps = spy(monkeypatch, dapo, "train_minibatch")
    drawn, penalties = spy(monkeypatch, dapo, "rollout"), spy(monkeypatch, dapo, "overlong_penalty")
    coin = random.Random(0)
    monkeypatch.setattr(dapo, "load_verifier", lambda _: lambda *_: float(coin.random() < 0.05))
    metrics = train_step(random_model(), minibatches=1, max_resample=50, overlong_cache=1.0)
    rewards = torch.cat([rewards for _, (_, _, rewards) in drawn])
    ((_, penalty),) = penalties
    shaped = (rewards + penalty.view_as(rewards))[rewards.std(1) > 0][:4]
    expected = dapo.compute_advantages(shaped, dapo.Args()).flatten()
    (((_, _, batch, _), _),) = steps
    assert sorted(batch["advantages"].tolist()) == pytest.approx(sorted(expected.tolist()))
    assert len(expected) == 16 and penalty.unique().numel() > 5
    assert metrics["discarded_groups"] == 4 * len(drawn) - 4 > 0
    assert metrics["num_tokens"] == sum(int(each["mask"].sum()) for _, (each, _, _) in drawn)


def test_the_kl_of_beta_is_of_the_kept_groups_alone(monkeypatch):
    """With --beta the KL is GRPO's, and the reference does not read what is discarded."""
    reads, coin = spy(monkeypatch, dapo, "batch_logprobs"), random.Random(0)
    monkeypatch.setattr(dapo, "load_verifier", lambda _: lambda *_: float(coin.random() < 0.1))
    metrics = train_step(random_model(), random_model(seed=1), beta=0.1)
    assert metrics["discarded_groups"] > 0 and metrics["kl"] > 0.1
    assert [len(logprobs) for _, logprobs in reads] == [16]

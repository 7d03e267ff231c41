"""main's training step: which rows each minibatch has and what they hold, what is logged, at which
rate; the guard against a wrong sampler; and what DAPO alone has."""

from itertools import count

import pytest
import torch
from conftest import LLM_SCRIPTS, calls_of, equal, refused, scalars, script, set_task, weights

grpo, dapo = script("grpo_llm"), script("dapo_llm")


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_epochs_over_a_rollout(name, short_run, monkeypatch):
    """Groups stay whole, and each is used once per epoch, in an order of its own. All else stays as
    the rollout left it: log π_old, at which the first ratios are 1; log π_ref, of the initial model
    in each step; and the advantages, of the rewards. RLOO's have the KL in them, the others' not.
    What is logged is the mean."""
    module, rewarded = script(name), count()
    generate = module.generate

    def numbered(*inputs):
        batch = generate(*inputs)
        return batch | {"row": torch.arange(len(batch["mask"]))}

    set_task(monkeypatch, module, lambda *_: next(rewarded) % 2)
    monkeypatch.setattr(module, "generate", numbered)
    updates, rollouts = (calls_of(monkeypatch, module, f) for f in ("train_minibatch", "rollout"))
    flags = short_run | {"num_minibatches": 4, "update_epochs": 3, "beta": 0.1, "temperature": 0.7}
    flags |= {"prompts_per_step": 12, "group_size": 2, "micro_batch_size": 5, "warmup_steps": 1}
    flags |= {"overlong_tokens": 0, "learning_rate": 5e-3}
    args = module.Args(**{k: v for k, v in flags.items() if hasattr(module.Args, k)})
    folder, (initial, _) = module.main(args)["folder"], module.load_model(args)
    first, second = [output for inputs, output in rollouts if inputs[4] == 2]  # of two steps
    for i, (batch, rewards, _) in enumerate((first, second)):
        calls = updates[len(updates) // 2 * i :][: len(updates) // 2]
        batches, logs = [inputs[2] for inputs, _ in calls], [output for _, output in calls]
        batch = batch | {"ref_logprobs": module.token_logprobs(initial, batch, args).detach()}
        kl = batch["old_logprobs"] - batch["ref_logprobs"]
        assert (kl.abs().max() > 1e-3) == (i == 1), "the model has moved, the reference has not"
        if name == "rloo_llm":
            rewards, kl = rewards - 0.1 * kl.sum(1).view_as(rewards), kl[batch["mask"] > 0]
            assert scalars(folder, "kl")[i] == pytest.approx(kl.mean().item(), abs=1e-6)
            assert len(batches) == 1 and (rewards.diff().std() > 1e-2) == (i == 1)
        else:
            assert logs[0]["approx_kl"] < 1e-8 < logs[-1]["approx_kl"] and logs[0]["clipfrac"] == 0
            rows = torch.stack([part["row"] for part in batches]).view(3, 12, 2)
            assert (rows[:, :, 0] % 2 == 0).all() and (rows[:, :, 1] == rows[:, :, 0] + 1).all()
            orders = rows[:, :, 0].tolist()
            assert all(sorted(order) == list(range(0, 24, 2)) for order in orders)
            assert orders[0] != orders[1] != orders[2] != sorted(orders[2])  # of 12! orders
        batch["advantages"] = module.compute_advantages(rewards, args).flatten()
        for part in batches:
            for key in part.keys() - {"prompt_ids", "prompt_mask"}:
                right = batch[key][part["row"]]
                torch.testing.assert_close(part[key], right, rtol=0, atol=1e-4, msg=key)
        means = {key: sum(log[key].item() for log in logs) / len(logs) for key in logs[0]}
        means["completions/mean_length"] = batch["mask"].sum(1).mean().item()
        for key, mean in means.items():
            assert scalars(folder, key)[i] == pytest.approx(mean, rel=1e-4)


def test_rates_by_hand(short_run, monkeypatch):
    """Up to the peak in the warm-up, and down towards 0."""
    set_task(monkeypatch, grpo, lambda *_: 0.0)
    used = []

    def train_minibatch(model, optimizer, batch, args):
        used.append(optimizer.param_groups[0]["lr"])
        return {"approx_kl": torch.tensor(0.0)}

    monkeypatch.setattr(grpo, "train_minibatch", train_minibatch)
    flags = {"steps": 5, "warmup_steps": 2, "learning_rate": 4e-4, "beta": 0.0}
    grpo.main(grpo.Args(**short_run | flags, num_minibatches=1))
    assert used == pytest.approx([2e-4, 4e-4, 3e-4, 2e-4, 1e-4])


def test_a_sampler_that_is_not_exact_ends_the_run(short_run, monkeypatch, tmp_path):
    """In one line at the first step, before a checkpoint."""
    set_task(monkeypatch, grpo, lambda completion, _: len(completion))
    generate = grpo.generate

    def noisy(*inputs):
        batch = generate(*inputs)
        noise = 0.05 - 0.1 * (torch.arange(batch["mask"].shape[1]) % 2)  # in nats
        return batch | {"old_logprobs": batch["old_logprobs"] + noise * batch["mask"]}

    monkeypatch.setattr(grpo, "generate", noisy)
    assert "--model tiny" in refused(grpo.main, grpo.Args(**short_run))
    assert not list(tmp_path.glob("runs/*/step-*"))


# ------------------------------------------------------------------------------------------ DAPO


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([1.0, 32, 33, 36, 40, 20])
    ended = torch.tensor([True, True, True, True, True, False])
    args = dapo.Args(max_new_tokens=40)  # the penalty begins a fifth before
    expected = torch.tensor([0, 0, -1 / 16, -0.25, -0.5, -0.5])
    torch.testing.assert_close(dapo.overlong_penalty(lengths, ended, args), expected)
    args = dapo.Args(max_new_tokens=40, overlong_tokens=0)  # no penalty at all
    assert not dapo.overlong_penalty(lengths, ended, args).any()


def test_joined_batches_have_one_width():
    """Padded on the left of the prompt, on the right of the completion."""
    ones = torch.ones(2, 3)
    parts = [
        {"prompt_mask": ones[:1, n:], "mask": ones[:1, n:], "ended": ones[0, n:2]} for n in (0, 1)
    ]
    joined = {name: tensor.tolist() for name, tensor in dapo.join(parts).items()}
    assert joined["prompt_mask"] == [[1, 1, 1], [0, 1, 1]]
    assert joined["mask"] == [[1, 1, 1], [1, 1, 0]] and joined["ended"] == [1, 1, 1]


# The overlong penalty begins with the first token.
FLAGS = {"group_size": 6, "num_minibatches": 1, "overlong_tokens": 32, "steps": 1}


def test_equal_rewards_move_nothing_though_their_lengths_differ(short_run, monkeypatch):
    """The overlong penalty differs within a group and must not count as a signal."""
    set_task(monkeypatch, dapo, lambda *_: 0.7)
    penalties = calls_of(monkeypatch, dapo, "overlong_penalty")
    args = dapo.Args(**short_run | FLAGS, max_rollouts=2)
    folder, ((_, penalty),) = dapo.main(args)["folder"], penalties
    assert penalty.view(8, 6).std(1).any()
    assert equal(weights(folder), dapo.load_model(args)[0].state_dict())


def test_it_trains_on_unequal_groups_alone_and_scores_no_others(short_run, monkeypatch):
    """It draws until it has enough, each time a sample of the problems. The advantages are those of
    the rewards with the penalty. The fifth such group is one too many."""
    unequal, verified = [1, 2, 6, 9, 10], count()
    set_task(monkeypatch, dapo, lambda *_: (n := next(verified)) // 6 in unequal and n % 2)
    monkeypatch.setattr(dapo, "evaluate", lambda *_: {"eval/pass@1": 0.0})
    names = "train_minibatch", "rollout", "token_logprobs"
    updates, rollouts, passes = (calls_of(monkeypatch, dapo, name) for name in names)
    args = dapo.Args(**short_run | FLAGS, beta=0.1)
    dapo.main(args)
    lengths, ended, rewards = (
        torch.cat([of(batch, rewards) for _, (batch, rewards, _) in rollouts])
        for of in (lambda b, _: b["mask"].sum(1), lambda b, _: b["ended"], lambda _, r: r)
    )
    rewards = rewards + dapo.overlong_penalty(lengths, ended, args).view(12, 6)
    expected = dapo.compute_advantages(rewards[unequal[:4]], args).flatten()
    (((_, _, batch, _), _),) = updates
    assert sorted(batch["advantages"].tolist()) == pytest.approx(sorted(expected.tolist()))
    assert sum(len(batch["mask"]) for (_, batch, _), _ in passes) == 2 * 24, "by π_ref and π_θ"
    first, second, third = (problems for (_, _, _, problems, *_), _ in rollouts)
    assert first != second != third

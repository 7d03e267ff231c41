"""main's training step: which rows each minibatch has and what they hold, what is logged, at which
rate; and the guard against a sampler that is wrong."""

from itertools import count

import pytest
import torch
from conftest import LLM_SCRIPTS, calls_of, refused, scalars, script, set_task

grpo = script("grpo_llm")


def watched_run(name, monkeypatch, verify, flags):
    """A run with those of these flags that the script has: its result, and of each step the batch,
    the rewards, and the calls of train_minibatch. A column more of the batch numbers its rows."""
    module = script(name)
    generate, steps = module.generate, []
    set_task(monkeypatch, module, verify)
    updates, rollouts = (calls_of(monkeypatch, module, f) for f in ("train_minibatch", "rollout"))

    def numbered(model, prompts, num_samples, args):
        batch = generate(model, prompts, num_samples, args)
        return batch | {"row": torch.arange(len(batch["mask"]))}

    monkeypatch.setattr(module, "generate", numbered)
    args = module.Args(**{k: v for k, v in flags.items() if hasattr(module.Args, k)})
    result = module.main(args)
    drawn = [output for inputs, output in rollouts if inputs[4] == args.group_size]
    share = len(updates) // len(drawn)
    for i, (batch, rewards, _) in enumerate(drawn):
        steps.append((batch, rewards, updates[i * share : (i + 1) * share]))
    return result, steps, args


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_epochs_over_a_rollout(name, short_run, monkeypatch):
    """Groups stay whole, and each is used once per epoch, in an order of its own. All else stays as
    the rollout left it: log π_old, at which the first ratios are 1; log π_ref, of the initial model
    in each step; and the advantages, of the rewards. RLOO's have the KL in them, the others' not.
    What is logged is the mean."""
    module, rewarded = script(name), count()
    flags = {"num_minibatches": 4, "update_epochs": 3, "beta": 0.1, "temperature": 0.7}
    flags |= {"prompts_per_step": 12, "group_size": 2, "micro_batch_size": 5, "warmup_steps": 0}
    flags |= {"overlong_tokens": 0}  # of DAPO
    inputs = monkeypatch, lambda *_: next(rewarded), short_run | flags
    result, steps, args = watched_run(name, *inputs)
    initial, _ = module.load_model(args)
    for i, (batch, rewards, updates) in enumerate(steps):
        batches, logs = [inputs[2] for inputs, _ in updates], [output for _, output in updates]
        batch["ref_logprobs"] = module.token_logprobs(initial, batch, args).detach()
        kl = batch["old_logprobs"] - batch["ref_logprobs"]
        assert (kl.abs().max() > 1e-3) == (i == 1), "the model has moved, the reference has not"
        if name == "rloo_llm":
            assert len(batches) == 1 and kl.sum(1).std() > 1e-3 * i
            rewards, k = rewards - 0.1 * kl.sum(1).view_as(rewards), kl[batch["mask"] > 0]
            assert scalars(result["folder"], "kl")[i] == pytest.approx(k.mean().item(), abs=1e-6)
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
        for key in logs[0]:
            mean = sum(log[key].item() for log in logs) / len(logs)
            assert scalars(result["folder"], key)[i] == pytest.approx(mean, rel=1e-4)
        mean = batch["mask"].sum(1).mean().item()
        assert scalars(result["folder"], "completions/mean_length")[i] == pytest.approx(mean)


# Steps of warm-up, and the rate of each step
RATES = [(10, [0.1, 0.2]), (2, [0.5, 1, 0.75, 0.5, 0.25]), (0, [0.8, 0.6, 0.4, 0.2])]


@pytest.mark.parametrize("warmup,rates", RATES)
def test_rates_by_hand(warmup, rates, short_run, monkeypatch):
    """Up to the peak in the warm-up, and down towards 0."""
    set_task(monkeypatch, grpo, lambda *_: 0.0)
    used = []

    def train_minibatch(model, optimizer, batch, args):
        used.append(optimizer.param_groups[0]["lr"])
        return {"approx_kl": torch.tensor(0.0)}

    monkeypatch.setattr(grpo, "train_minibatch", train_minibatch)
    flags = {"steps": len(rates), "warmup_steps": warmup, "learning_rate": 2e-4, "beta": 0.0}
    grpo.main(grpo.Args(**short_run | flags, num_minibatches=1))
    assert used == pytest.approx([2e-4 * rate for rate in rates])


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

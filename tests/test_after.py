"""AFTER.md: each block fits its parent, and the script that it makes runs, and agrees in value and
gradient with the method's formula as plain loops."""

import importlib
import itertools
import math
import re
import sys
from pathlib import Path
from statistics import mean

import after
import pytest
import torch
import tyro
from conftest import random_model
from lineage import ROOT
from oracles import clip, row_by_row
from test_llm_update import LENGTHS, LOG_RATIOS, PROMPTS, batch_of

METHODS = list(after.BLOCKS)
CREDIT = ("reinforce_pp", "maxrl", "pass_at_k")


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Imports a method's script, written into a folder of its own."""
    folder = tmp_path_factory.mktemp("after")
    (folder / "tests").symlink_to(ROOT / "tests")  # with the tiny model
    sys.path.insert(0, str(folder))

    def script(name):
        (folder / f"{name}_llm.py").write_text(after.applied(name))
        return importlib.import_module(f"{name}_llm")

    yield script
    sys.path.remove(str(folder))


def credit(name, groups, args):
    """The advantages of groups of rewards, as lists. pass_at_k: by going through all draws."""
    centered = [[r - mean(group) for r in group] for group in groups]
    if name == "reinforce_pp":
        scale = math.sqrt(mean(a * a for group in centered for a in group)) + 1e-4
        return [[a / scale for a in group] for group in centered]
    if name == "maxrl":
        return [[a / (mean(g) + 1e-4) for a in c] for g, c in zip(groups, centered, strict=True)]
    found = []
    for group in groups:
        draws = list(itertools.combinations(range(len(group)), args.pass_k))
        rewards = [float(any(group[i] > 0 for i in draw)) for draw in draws]
        average = mean(rewards)
        scale = math.sqrt(mean((r - average) ** 2 for r in rewards)) + 1e-4
        paired = list(zip(draws, rewards, strict=True))
        own = [mean(r for draw, r in paired if i in draw) for i in range(len(group))]
        found.append([(each - average) / scale for each in own])
    return found


def surrogate(name, t, new, old, A, args):
    """Of one completion, from lists of log-probs: a token's L and its slope by log π."""
    logs = [n - o for n, o in zip(new, old, strict=True)]
    r, low, high = math.exp(logs[t]), getattr(args, "clip_low", 0), getattr(args, "clip_high", 0)
    if name == "sapo":
        tau = args.tau_pos if A > 0 else args.tau_neg
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return 4 / tau * gate * A, 4 * gate * (1 - gate) * r * A
    if name == "gmpo":
        kept = [min(x, high) if A > 0 else max(x, -low) for x in logs]
        weight = math.exp(mean(kept)) * A
        return weight, weight if kept[t] == logs[t] else 0.0
    if name == "dppo":
        rise = math.exp(new[t]) - math.exp(old[t])
        stopped = rise > high if A > 0 else -rise > low
        return (0.0, 0.0) if stopped else (r * A, r * A)
    if name == "dual_clip" and A < 0 and r > args.delta:
        return args.delta * A, 0.0
    return clip(math.exp(mean(logs)) if name == "gspo_token" else r, A, args)


def weight(name, t, new, old, sampled, A, args):
    """What a token's L is multiplied by."""
    w = math.exp(old[t] - sampled[t])
    if name == "tis":
        return min(w, args.max_weight)
    if name == "icepop":
        return w if args.min_weight <= w <= args.max_weight else 0.0
    if name == "sequence_mask":
        drift = mean(p - n for p, n in zip(sampled, new, strict=True))
        return 0.0 if A < 0 and drift > args.max_drift else 1.0
    return 1.0


def terms(name, new, old, sampled, ref, A, args):
    """Each token's objective and its slope by log π, with the KL penalty."""
    for t in range(len(new)):
        L, slope = surrogate(name, t, new, old, A, args)
        w = weight(name, t, new, old, sampled, A, args)
        d = ref[t] - new[t]
        kl, kl_slope = math.exp(d) - d - 1, 1 - math.exp(d)
        if name == "unbiased_kl":
            r = math.exp(new[t] - old[t])
            kl, kl_slope = r * kl, -r * d
        yield w * L - args.beta * kl, w * slope - args.beta * kl_slope


FLAGS = {  # so that tokens and answers are on both sides of every bound
    "pass_at_k": {"pass_k": 3},
    "dppo": {"clip_low": 0.01, "clip_high": 0.02},
    "dual_clip": {"delta": 1.4},
    "tis": {"max_weight": 1.2},
    "icepop": {"min_weight": 0.8, "max_weight": 1.3},
    "sequence_mask": {"max_drift": 0.1},
}


@pytest.mark.parametrize("name", CREDIT)
def test_advantages_are_those_of_the_formula(name, made):
    """Of groups with none, one, some and all of five answers right."""
    right = torch.tensor([0, 1, 2, 3, 4, 5])[:, None]
    rewards = (torch.arange(5).roll(2) < right).double()
    module = made(name)
    args = module.Args(**FLAGS.get(name, {}))
    found = module.compute_advantages(rewards, args)
    expected = torch.tensor(credit(name, rewards.tolist(), args), dtype=torch.double)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_reinforce_pp_counts_the_rewards_of_all_processes(made, monkeypatch):
    """Here of two processes that hold the same."""
    module, rewards = made("reinforce_pp"), torch.tensor([[0.0, 1, 1, 0], [1, 0, 0, 0]])
    alone = module.compute_advantages(rewards, module.Args())
    monkeypatch.setattr(module, "sum_over_processes", lambda tensor: 2 * tensor)
    torch.testing.assert_close(module.compute_advantages(rewards, module.Args()), alone)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in CREDIT])
def test_a_step_is_that_of_the_formula(name, beta, made):
    """Its loss, and its gradient by all weights, through plain passes over single rows."""
    module, model = made(name), random_model("gpt2").double()
    args = module.Args(beta=beta, micro_batch_size=5, max_grad_norm=1e9, **FLAGS.get(name, {}))
    batch, g = batch_of(model, PROMPTS, LENGTHS), torch.Generator().manual_seed(3)
    mask = batch["mask"]

    def moved(by):
        return (batch["sampled_logprobs"] + by * torch.randn(mask.shape, generator=g)) * mask

    batch["old_logprobs"] = moved(0.1) - LOG_RATIOS[:, None] * mask
    batch["ref_logprobs"], batch["sampled_logprobs"] = moved(0.5), moved(0.3)
    batch["advantages"] = torch.tensor([1.0, -1.0] * 6) * (0.5 + torch.rand(12, generator=g))
    found = module.train_minibatch(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, args)

    logprobs = row_by_row(model, batch)
    rows = [logprobs, *(batch[f"{each}_logprobs"] for each in ("old", "sampled", "ref"))]
    value, slopes = 0.0, torch.zeros_like(mask)
    for i, length in enumerate(LENGTHS):
        lists = [row[i, :length].tolist() for row in rows]
        tokens = terms(name, *lists, batch["advantages"][i].item(), args)
        for t, (objective, slope) in enumerate(tokens):
            value += objective / length / len(LENGTHS)
            slopes[i, t] = slope / length / len(LENGTHS)
    assert found["loss"] == pytest.approx(-value, abs=1e-5)
    for parameter in model.parameters():
        parameter.grad, parameter.own = None, parameter.grad
    (-(slopes * logprobs).sum()).backward()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.own, parameter.grad, rtol=1e-4, atol=1e-5)


def test_gspo_token_takes_an_advantage_per_token(made):
    module, g = made("gspo_token"), torch.Generator().manual_seed(0)
    new, old, A = torch.randn(3, 2, 4, generator=g)
    mask, args = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]]), module.Args(clip_low=9, clip_high=9)
    new.requires_grad_()
    objective, _ = module.surrogate(new, old, A, mask, args)
    s = (((new - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp().detach()
    (slopes,) = torch.autograd.grad((objective * mask).sum(), new)
    torch.testing.assert_close(slopes, s * A * mask)


@pytest.mark.parametrize("name", METHODS)
def test_the_run_to_try_has_flags_of_the_method(name, made, capsys, monkeypatch):
    module = made(name)
    monkeypatch.setattr(after, "ROOT", Path(module.__file__).parent)
    after.main(name)
    *_, command = capsys.readouterr().out.splitlines()
    tyro.cli(module.Args, args=command.split()[2:])


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_two_steps(name, made, short_run):
    module = made(name)
    assert 0 <= module.main(module.Args(**short_run))["eval/pass@1"] <= 1


def test_the_page_and_gitignore_have_every_method():
    rows = re.findall(r"^\| \[(\w+)\]\(#(\S+)\) \| .+? \| (\d+) \| (\S+) \|$", after.PAGE, re.M)
    assert sorted(name for name, *_ in rows) == sorted(METHODS)
    titles = re.sub(r"[^\w\n #-]", "", after.PAGE.lower()).replace("-", " ")
    for name, anchor, count, parent in rows:
        hunks = after.BLOCKS[name][1].split("\n@@", 1)[1]
        assert after.BLOCKS[name][0] == parent and f"\n## {anchor.replace('-', ' ')}\n" in titles
        assert int(count) == len(re.findall("^[-+]", hunks, re.M))
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {f"/{name}_llm.py" for name in METHODS} <= set(ignored)

"""token_logprobs reads a prompt once for its neighbours; values and gradients stay the same."""

import pytest
import torch
from conftest import random_model, script, spy
from oracles import check_logprobs

grpo = script("grpo_llm")
KINDS = ["qwen2", "gpt2"]
PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10]]


def drawn(model, prompts=PROMPTS, num_samples=4, length=9):
    torch.manual_seed(3)
    batch = grpo.generate(model, prompts, num_samples, length, 0.7)
    assert length == 1 or batch["mask"].sum(1).unique().numel() > 2
    return batch


ROWS = {
    "whole groups": range(12),
    "shuffled": [7, 0, 11, 3, 4, 9, 1, 8, 10, 2, 6, 5],
    "torn groups": [2, 3, 4, 5, 9],
    "one row": [6],
    "the same row twice": [5, 5],
    "a group that comes again": [0, 1, 4, 2, 3],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_any_rows_share_a_prompt_and_change_nothing(rows, kind):
    """Catches rows that get the prompt of another, and a cache that keeps the gradient back."""
    model = random_model(kind)
    check_logprobs(grpo, model, grpo.take_rows(drawn(model), torch.tensor(rows)), 0.7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_ids_are_two_prompts_if_their_masks_differ(kind):
    """With a pad token that the prompt may hold, [3, 4] is padded to the ids of [0, 3, 4]."""
    model = random_model(kind, pad=0)
    batch = drawn(model, [[3, 4], [0, 3, 4], [3, 4]], num_samples=2)
    assert (batch["prompt_ids"] == batch["prompt_ids"][0]).all()
    check_logprobs(grpo, model, batch, 0.7)
    plain = grpo.token_logprobs(model, batch, 0.7)
    swapped = batch | {"prompt_mask": batch["prompt_mask"].roll(2, 0)}
    assert (plain - grpo.token_logprobs(model, swapped, 0.7)).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2])
def test_completions_of_one_token(kind, length):
    """After the prompts nothing is left to read: an empty forward pass would raise."""
    model = random_model(kind, stops=range(11))
    check_logprobs(grpo, model, drawn(model, length=1), 0.7)
    batch = drawn(random_model(kind))
    cut = {name: batch[name][:, :length] for name in ("completion_ids", "mask", "old_logprobs")}
    check_logprobs(grpo, random_model(kind), batch | cut, 0.7)


def test_short_rows_are_read_at_the_width_of_the_rollout(monkeypatch):
    """In bf16 another width would round differently, and the first ratio would not be 1."""
    model = random_model()
    batch = drawn(model)
    lengths, T = batch["mask"].sum(1), batch["mask"].shape[1]
    some = grpo.take_rows(batch, (lengths < lengths.max()).nonzero()[:, 0])
    assert 2 < some["mask"].sum(1).max() < T
    check_logprobs(grpo, model, some, 0.7)
    calls = spy(monkeypatch, model, "forward")
    grpo.token_logprobs(model, some, 1.0)
    _, ((rest,), _) = calls
    assert rest.shape == (len(some["mask"]), T - 1)  # but for the last token, which tells nothing

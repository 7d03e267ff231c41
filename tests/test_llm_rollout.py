"""The sampler and the log-probs, against plain forward passes of one unpadded sequence each."""

import pytest
import torch
from conftest import random_model, script

grpo = script("grpo_llm")
PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10]]
KINDS = ["llama", "qwen2", "gpt2"]


def plain_logprobs(model, prompt, completion, temperature, forbidden=()):
    """log π of each token of `completion`:
    one full forward per token, no cache, no padding, no mask."""
    out = []
    for t, token in enumerate(completion):
        logits = model(torch.tensor([prompt + completion[:t]])).logits[0, -1].double() / temperature
        for bad in forbidden:
            logits[bad] = -torch.inf
        out.append(logits.log_softmax(-1)[token].item())
    return torch.tensor(out)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_sampler_and_trainer_are_the_models(kind, temperature):
    """Catches a shift by one, a lost temperature, wrong positions under left padding, a cache in
    the wrong order."""
    model = random_model(kind)
    torch.manual_seed(1)
    batch = grpo.generate(model, PROMPTS, 3, 10, temperature)
    trained = grpo.token_logprobs(model, batch, temperature)
    assert batch["mask"].sum(1).unique().numel() > 2
    for i in range(9):
        completion = batch["completion_ids"][i][batch["mask"][i].bool()].tolist()
        expected = plain_logprobs(model, PROMPTS[i // 3], completion, temperature, forbidden=[0])
        for found in (batch["old_logprobs"], trained):
            torch.testing.assert_close(found[i, : len(completion)], expected, rtol=0, atol=1e-5)
            assert (found[i, len(completion) :] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_joined_rollouts_are_read_as_they_were_drawn(kind):
    """Of other prompt and completion lengths each:
    padded on the wrong side, a prompt would no longer end where it should."""
    model = random_model(kind)
    torch.manual_seed(4)
    batch = grpo.join(
        [
            grpo.generate(model, [prompt], 3, length, 1.0)
            for prompt, length in zip(PROMPTS, (4, 9, 6), strict=True)
        ]
    )
    assert batch["prompt_ids"].shape == (9, 5) and len(batch["ended"]) == 9
    with torch.no_grad():
        logprobs = grpo.token_logprobs(model, batch, 1.0)
    torch.testing.assert_close(logprobs, batch["old_logprobs"], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_models_distribution(temperature):
    """Chi-square over the first token of 20,000 samples:
    top-k, top-p or a wrong temperature fail it by miles."""
    model, n = random_model("llama", vocab=7), 20_000
    torch.manual_seed(2)
    batch = grpo.generate(model, [[3, 4, 5]], n, 1, temperature)
    counts = torch.bincount(batch["completion_ids"][:, 0], minlength=7).double()
    logits = model(torch.tensor([[3, 4, 5]])).logits[0, -1].double() / temperature
    logits[0] = -torch.inf
    expected = logits.softmax(-1) * n
    assert counts[0] == 0
    chi_square = ((counts - expected)[1:] ** 2 / expected[1:]).sum()
    assert chi_square < 27.9  # 5 degrees of freedom: passed with probability 1 − 4e-5


def test_greedy_takes_the_most_likely():
    model = random_model("gpt2")
    batch = grpo.generate(model, PROMPTS, 1, 6, 0.0)
    for i, prompt in enumerate(PROMPTS):
        for token in batch["completion_ids"][i][batch["mask"][i].bool()].tolist():
            logits = model(torch.tensor([prompt])).logits[0, -1]
            logits[0] = -torch.inf
            assert token == logits.argmax()
            prompt = prompt + [token]


def check_mask(batch, stops):
    """1 up to and including the first stop token; ended exactly where there is one."""
    for ids, mask, ended in zip(
        batch["completion_ids"].tolist(),
        batch["mask"].tolist(),
        batch["ended"][:, 0].tolist(),
        strict=True,
    ):
        length = int(sum(mask))
        assert mask == [1.0] * length + [0.0] * (len(mask) - length) and length >= 1
        assert not set(ids[: length - 1]) & set(stops)
        assert (ids[length - 1] in stops) == ended
        assert ended or length == len(mask)


@pytest.mark.parametrize("stops,pad", [((1,), 0), ((1, 5, 7), 0), ((4,), 4), ((4, 6), 6)])
def test_mask_ends_with_the_first_of_several_stops(stops, pad):
    torch.manual_seed(0)
    batch = grpo.generate(random_model("llama", stops=stops, pad=pad), PROMPTS, 40, 12, 1.0)
    check_mask(batch, stops)
    last = batch["completion_ids"].gather(1, batch["mask"].sum(1).long()[:, None] - 1)
    assert set(stops) <= set(last.flatten().tolist()), "each stop token must have ended something"
    if pad not in stops:
        assert (batch["completion_ids"][batch["mask"].bool()] != pad).all()


def test_stop_at_once_and_never():
    at_once = grpo.generate(random_model("llama", stops=range(11)), PROMPTS, 5, 8, 1.0)
    assert (
        at_once["mask"].shape == (15, 1) and at_once["ended"].all() and (at_once["mask"] == 1).all()
    )
    never = grpo.generate(random_model("llama", stops=(99,)), PROMPTS, 5, 8, 1.0)
    assert (
        never["mask"].shape == (15, 8) and not never["ended"].any() and (never["mask"] == 1).all()
    )


def test_prompts_are_left_padded_and_grouped():
    batch = grpo.generate(random_model("llama"), PROMPTS, 2, 3, 1.0)
    for i, (ids, mask) in enumerate(zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)):
        assert ids[mask.bool()].tolist() == PROMPTS[i // 2]
        assert mask.tolist() == sorted(mask.tolist())


def test_prompt_is_read_once_and_finished_rows_leave(monkeypatch):
    """The rows of each forward pass: P for the prompts, then only what is still being written."""
    model, rows = random_model("llama"), []
    forward = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda input_ids, **k: rows.append(len(input_ids)) or forward(input_ids=input_ids, **k),
    )
    torch.manual_seed(0)
    batch = grpo.generate(model, PROMPTS, 8, 12, 1.0)
    assert rows[0] == 3
    going = [
        int(
            (batch["mask"].sum(1) > t + 1).sum()
            + ((batch["mask"].sum(1) == t + 1) & ~batch["ended"][:, 0]).sum()
        )
        for t in range(batch["mask"].shape[1] - 1)
    ]
    assert rows[1:] == going


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_is_the_policys(kind):
    model = random_model(kind)
    batch = grpo.generate(model, [[3, 4]], 1, 1, 0.8)
    logits = model(torch.tensor([[3, 4]])).logits[0, -1].double() / 0.8
    logits[0] = -torch.inf
    p = logits.softmax(-1)
    entropy = -(p * p.clamp(min=1e-300).log()).sum().item()
    assert batch["entropy"].item() == pytest.approx(entropy, abs=1e-4)


def test_batch_logprobs_do_not_depend_on_the_cut():
    model = random_model("llama")
    torch.manual_seed(0)
    batch = grpo.generate(model, PROMPTS, 4, 10, 1.0)
    for size in (128, 1, 5):
        found = grpo.batch_logprobs(model, batch, grpo.Args(micro_batch_size=size))
        torch.testing.assert_close(found, batch["old_logprobs"], rtol=0, atol=1e-5)
        assert not found.requires_grad


@torch.no_grad()
def test_short_rows_are_read_at_their_own_length(monkeypatch):
    """Columns behind the longest row cost nothing, and rows of like length share a pass of the
    reference."""
    model, widths = random_model("llama"), []
    torch.manual_seed(0)
    batch = grpo.generate(model, [PROMPTS[0]], 12, 10, 1.0)
    lengths, whole = batch["mask"].sum(1).long(), grpo.token_logprobs(model, batch, 1.0)
    forward = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda ids, **inputs: widths.append(ids.shape[1]) or forward(ids, **inputs),
    )
    rows = lengths.argsort()[:3]
    some = {name: batch[name][rows] for name in batch}
    found = grpo.token_logprobs(model, some, 1.0)
    torch.testing.assert_close(found, whole[rows], rtol=0, atol=1e-5)
    assert widths == [2 + lengths[rows].max()] and lengths[rows].max() < lengths.max()
    widths.clear()
    grpo.batch_logprobs(model, batch, grpo.Args(micro_batch_size=3))
    assert widths == [2 + n for n in lengths.sort()[0][2::3].tolist()]

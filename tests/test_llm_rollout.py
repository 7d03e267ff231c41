"""The sampler: what it draws, where a completion ends, what it reads; and the rewards."""

from itertools import count
from unittest.mock import Mock

import pytest
import torch
from conftest import Characters, calls_of, random_model, reward_by, script

grpo = script("grpo_llm")
PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10]]


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_models_distribution(temperature):
    """Chi-square over the first token of 20,000 samples: top-k, top-p or a wrong temperature fail
    it by miles."""
    model, n = random_model("llama", vocab=7), 20_000
    model.lm_head.weight /= model.lm_head.weight.norm()  # no token is so rare as to be missing
    torch.manual_seed(2)
    batch = grpo.generate(model, [[3, 4, 5]], n, 1, temperature)
    counts = torch.bincount(batch["completion_ids"][:, 0], minlength=7).double()
    logprobs = grpo.token_logprobs(model, batch, temperature)
    torch.testing.assert_close(batch["sampled_logprobs"], logprobs)
    logits = model(torch.tensor([[3, 4, 5]])).logits[0, -1].double() / temperature
    expected = logits.softmax(-1) * n
    assert counts[0] > 0, "the pad token is a token like any other"
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 30.1  # 6 degrees of freedom: passed with probability 1 − 4e-5


@pytest.mark.parametrize("stops", [(1,), (1, 5, 7), (0,), (0, 6)])
def test_mask_ends_with_the_first_of_several_stops(stops):
    """The padding, 0, may be a stop token, too."""
    model = random_model("llama", stops=stops)
    model.lm_head.weight.data /= model.lm_head.weight.norm()  # no stop is too rare to be drawn
    batch, last = grpo.generate(model, PROMPTS, 40, 12, 1.0), set()
    columns = [batch[key].tolist() for key in ("completion_ids", "mask", "ended")]
    for ids, mask, ended in zip(*columns, strict=True):
        ends = [t for t, token in enumerate(ids) if token in stops]
        length = ends[0] + 1 if ends else 12
        assert mask == [1.0] * length + [0.0] * (len(ids) - length)
        assert ended == bool(ends) and not any(ids[length:])
        last.add(ids[length - 1])
    assert set(stops) <= last, "each stop token must have ended something"


def test_a_forward_pass_reads_no_more_than_it_must(monkeypatch):
    """The sampler reads each prompt once, and finished rows leave. There are no logits of a prompt,
    which would take as much memory as all else: a vocabulary has 150,000 tokens."""
    model = random_model("llama")
    model.lm_head.weight.data /= model.lm_head.weight.norm()  # so that some are cut off, some not
    calls = calls_of(monkeypatch, model, "forward")
    torch.manual_seed(0)
    batch = grpo.generate(model, PROMPTS, 8, 12, 1.0)
    grpo.token_logprobs(model, batch, 1.0)
    prompts, *writing, loss = [tuple(output.logits.shape[:2]) for _, output in calls]
    assert prompts == (3, 1) and loss == (24, batch["mask"].shape[1])
    running = batch["mask"].sum(0).int().tolist()[1:]
    assert writing == [(rows, 1) for rows in running]
    assert running[0] > running[-1] > 0


def test_rewards_are_those_of_their_completions(monkeypatch):
    """Question by question, each G times; text by text, and rewards of any size. The answer reaches
    the verifier as it is, here a list."""
    verify, tokenizer = Mock(side_effect=count(1)), Characters()
    reward_by(monkeypatch, grpo, verify)
    problems = [(f"{i}+{10**i}", [i]) for i in range(5)]
    torch.manual_seed(0)
    rollout = grpo.rollout(random_model(), tokenizer, problems, 3, 1.0, grpo.Args())
    batch, completions, rewards = rollout
    scored = [(text, [i // 3]) for i, text in enumerate(completions)]
    assert [call.args for call in verify.call_args_list] == scored and len(set(completions)) == 3
    assert rewards.tolist() == torch.arange(1.0, 16).view(5, 3).tolist()
    prompts = tokenizer([prompt for prompt, _ in problems])["input_ids"]
    for i, text in enumerate(completions):
        ids = batch["completion_ids"][i][batch["mask"][i] > 0]
        assert text == f"#{int(ids[ids != 1].sum()) % 3}", "without the stop token"
        assert batch["prompt_ids"][i][batch["prompt_mask"][i] > 0].tolist() == prompts[i // 3]


def test_which_groups_are_equal():
    """By comparison: torch's standard deviation of eight rewards of 100.1, alone, is 8e-6."""
    rewards = torch.tensor([[100.1] * 8, [100.1] * 7 + [100.2], [0.0] * 8, [0.0] * 7 + [1e-5]])
    assert grpo.are_equal(rewards).tolist() == [True, False, True, False]
    assert grpo.are_equal(rewards[:1]).item()

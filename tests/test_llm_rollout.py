"""The sampler and the log-probs, against plain forward passes of one unpadded sequence each."""

from unittest.mock import Mock

import pytest
import torch
from conftest import Characters, batch_of, calls_of, random_model, script
from oracles import check_logprobs, single_rows

grpo = script("grpo_llm")
PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10]]


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_models_distribution(temperature):
    """Chi-square over the first token of 20,000 samples:
    top-k, top-p or a wrong temperature fail it by miles."""
    model, n = random_model("llama", vocab=7), 20_000
    model.lm_head.weight /= model.lm_head.weight.norm()  # no token is so rare as to be missing
    torch.manual_seed(2)
    batch = grpo.generate(model, [[3, 4, 5]], n, 1, temperature)
    counts = torch.bincount(batch["completion_ids"][:, 0], minlength=7).double()
    logits = model(torch.tensor([[3, 4, 5]])).logits[0, -1].double() / temperature
    expected = logits.softmax(-1) * n
    assert counts[0] > 0, "the pad token is a token like any other"
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 30.1  # 6 degrees of freedom: passed with probability 1 − 4e-5


@torch.no_grad()
def test_greedy_takes_the_most_likely():
    model = random_model("gpt2")
    for ids, logits in single_rows(model, grpo.generate(model, PROMPTS, 1, 6, 0.0)):
        assert torch.equal(ids, logits.argmax(1))


def check_mask(batch, stops):
    """1 up to and including the first stop token; ended exactly where there is one."""
    columns = [batch[key].tolist() for key in ("completion_ids", "mask", "ended")]
    for ids, mask, ended in zip(*columns, strict=True):
        length = int(sum(mask))
        assert mask == [1.0] * length + [0.0] * (len(mask) - length) and length >= 1
        assert not set(ids[: length - 1]) & set(stops)
        assert (ids[length - 1] in stops) == ended
        assert ended or length == len(mask)


@pytest.mark.parametrize("stops,pad", [((1,), 0), ((1, 5, 7), 0), ((4,), 4), ((4, 6), 6)])
def test_mask_ends_with_the_first_of_several_stops(stops, pad):
    model = random_model("llama", stops=stops, pad=pad)
    model.lm_head.weight.data /= model.lm_head.weight.norm()  # no stop is too rare to be drawn
    batch = grpo.generate(model, PROMPTS, 40, 12, 1.0)
    check_mask(batch, stops)
    assert batch["ended"].shape == (120,) and not batch["completion_ids"][batch["mask"] == 0].any()
    last = batch["completion_ids"].gather(1, batch["mask"].sum(1).long()[:, None] - 1)
    assert set(stops) <= set(last.flatten().tolist()), "each stop token must have ended something"


@pytest.mark.parametrize("stops,width", [(range(11), 1), ([99], 8)])
def test_stop_at_once_and_never(stops, width):
    batch = grpo.generate(random_model("llama", stops=stops), PROMPTS, 5, 8, 1.0)
    assert batch["mask"].shape == (15, width) and batch["mask"].all()
    assert batch["ended"].tolist() == [width == 1] * 15


def test_prompt_is_read_once_and_finished_rows_leave(monkeypatch):
    """The rows of each forward pass: P for the prompts, then only what is still being written."""
    model = random_model("llama")
    calls = calls_of(monkeypatch, model, "forward")
    torch.manual_seed(0)
    batch = grpo.generate(model, PROMPTS, 8, 12, 1.0)
    lengths = batch["mask"].sum(1)
    rows = [len(input_ids) for (input_ids,), _ in calls]
    assert rows == [3, *(int((lengths > t).sum()) for t in range(1, batch["mask"].shape[1]))]


@pytest.mark.parametrize("lengths", [[9, 2, 5, 1, 3, 3], [1, 1, 1]])
def test_log_probs_and_their_gradients_are_those_of_single_rows(lengths):
    """Also where all completions have one token, and only the prompt is read."""
    model = random_model("gpt2")
    check_logprobs(grpo, model, batch_of(model, PROMPTS, lengths, 0.7), 0.7)


def test_logits_are_of_the_completion_alone():
    """A prompt's would take as much memory as all else: a vocabulary has 150,000 tokens."""
    model, seen = random_model("gpt2"), []
    batch = batch_of(model, PROMPTS, [9, 2, 5])
    model.lm_head.register_forward_hook(lambda *of: seen.append(of[-1].shape[1]))
    grpo.token_logprobs(model, batch, 1.0)
    model.generation_config.eos_token_id = [99]  # which is never drawn
    grpo.generate(model, PROMPTS, 1, 3, 1.0)
    assert seen == [9, 1, 1, 1]


def test_rewards_are_those_of_their_completions(monkeypatch):
    """Question by question, each G times; text by text, and rewards of any size."""
    given, tokenizer = [], Characters()

    def verify(*pair):
        given.append(pair)
        return len(given)

    monkeypatch.setattr(grpo, "load_verifier", lambda name: verify)
    problems = [(f"{i}+{10**i}", str(i)) for i in range(5)]
    torch.manual_seed(0)
    found = grpo.rollout(random_model(), tokenizer, problems, 3, 1.0, grpo.Args())
    batch, completions, rewards = found
    assert [completion for completion, _ in given] == completions and len(set(completions)) == 3
    assert [answer for _, answer in given] == [str(i) for i in range(5) for _ in range(3)]
    assert rewards.tolist() == torch.arange(1.0, 16).view(5, 3).tolist()
    prompts = tokenizer([f"{question}=" for question, _ in problems])["input_ids"]
    for i, text in enumerate(completions):
        ids = batch["completion_ids"][i][batch["mask"][i] > 0]
        assert text == f"#{int(ids.sum()) % 3}"
        assert batch["prompt_ids"][i][batch["prompt_mask"][i] > 0].tolist() == prompts[i // 3]


def test_which_groups_are_equal():
    """By comparison: torch's standard deviation of eight rewards of 100.1, alone, is 8e-6."""
    rewards = torch.tensor([[100.1] * 8, [100.1] * 7 + [100.2], [0.0] * 8, [0.0] * 7 + [1e-5]])
    assert grpo.are_equal(rewards).tolist() == [True, False, True, False]
    assert grpo.are_equal(rewards[:1]).item()


def test_no_more_questions_at_a_time_than_in_a_step(monkeypatch):
    """Else an evaluation on 256 questions of 8 samples would need the memory of 2048 rows."""
    calls = calls_of(monkeypatch, grpo, "generate")
    problems = [(f"{i}+1", "1") for i in range(5)]
    args = grpo.Args(prompts_per_step=2, group_size=8)
    grpo.evaluate(random_model(), Characters(), problems, args, Mock(), 0)
    assert [len(prompts) for (_, prompts, *_), _ in calls] == [2, 2, 2, 2, 1, 1]

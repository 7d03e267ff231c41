"""What the flags of the LLM scripts do: defaults that follow, learning rates."""

import pytest
import torch
from conftest import LLM_SCRIPTS, quick_for, scalars, script

grpo = script("grpo_llm")
pytestmark = pytest.mark.usefixtures("tiny_model")


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_defaults_follow_from_model_and_data_unless_given(name):
    tiny = 1.2e-3 if name == "rloo_llm" else 4e-4
    Args = script(name).Args

    def chosen(**flags):
        args = Args(**flags)
        return args.learning_rate, args.max_new_tokens, args.micro_batch_size

    assert chosen() == (tiny, 24, 256)
    assert chosen(model="some/model") == (1e-6, 24, 8)
    assert chosen(dataset="train.jsonl") == (tiny, 256, 256)
    assert chosen(model="some/model", dataset="train.jsonl") == (1e-6, 256, 8)
    own = {"learning_rate": 3e-5, "max_new_tokens": 9, "micro_batch_size": 5}
    assert chosen(model="some/model", dataset="train.jsonl", **own) == (3e-5, 9, 5)


def test_the_tiny_model_takes_half_of_the_threads_and_two_at_most(monkeypatch):
    """So that two runs on two cores do not wait for each other."""
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for cores in (1, 2, 3, 4, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda cores=cores: cores)
        grpo.start_device(grpo.Args(device="cpu"))
        grpo.start_device(grpo.Args(device="cpu", model="some/model"))
    assert asked == [1, 1, 1, 2, 2]


def test_a_device_that_is_not_there(refused):
    assert "--device cuda" in refused(grpo.start_device, grpo.Args(device="cuda"))
    assert grpo.start_device(grpo.Args(device="auto")).type == "cpu"


POSITIVE = ["minibatches", "update_epochs", "group_size", "prompts_per_step", "max_new_tokens"]
POSITIVE += ["micro_batch_size", "eval_every", "eval_problems", "temperature", "max_grad_norm"]
ALLOWED_0 = ["steps", "warmup_steps", "seed", "learning_rate", "beta"]


@pytest.mark.parametrize("name", quick_for("grpo_llm"))
def test_which_numbers_may_be_zero(name, refused):
    """A count of 0 is refused with the least that fits, as the user would type it."""
    module = script(name)
    for flag in POSITIVE:
        least = "1e-09" if flag in ("temperature", "max_grad_norm") else "1"
        line = refused(module.check_args, module.Args(**{flag: 0 if least == "1" else 0.0}))
        said = f"error: --{flag.replace('_', '-')} 0"
        assert line.startswith(said) and line.endswith(f": must be finite, and {least} or more")
    module.check_args(module.Args(**dict.fromkeys(ALLOWED_0, 0)))
    for flag in ALLOWED_0:
        line = refused(module.check_args, module.Args(**{flag: -1}))
        assert f"--{flag.replace('_', '-')} -1: " in line


@pytest.mark.parametrize("steps,warmup", [(1, 10), (5, 10), (5, 2), (4, 0)])
def test_rates_by_hand(steps, warmup, quick, monkeypatch):
    """Up to the peak in the warm-up, or in all steps if these are fewer, and down towards 0."""
    rates = {(1, 10): [1], (5, 10): [0.2, 0.4, 0.6, 0.8, 1], (5, 2): [0.5, 1, 0.75, 0.5, 0.25]}
    rates[4, 0] = [1, 0.75, 0.5, 0.25]
    taken = []

    def train_step(model, reference, tokenizer, optimizer, problems, rng, args):
        taken.append(optimizer.param_groups[0]["lr"])
        return {"num_tokens": 1.0}

    monkeypatch.setattr(grpo, "train_step", train_step)
    own = {"steps": steps, "warmup_steps": warmup, "learning_rate": 2.0, "beta": 0.0}
    result = grpo.main(grpo.Args(**quick | own))
    assert taken == pytest.approx([2 * rate for rate in rates[steps, warmup]])
    assert scalars(result["folder"], "learning_rate") == pytest.approx(taken)

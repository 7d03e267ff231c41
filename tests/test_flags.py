"""What flags do: values that no run can use end in one line; for the language models, defaults that
follow from others, and learning rates."""

import os

import pytest
from conftest import LLM_SCRIPTS, refused, scalars, script

grpo = script("grpo_llm")

RANGES = [  # script, flag, a value that fits, one that does not
    ("dapo_llm", "max_resample", 1, 0),
    ("ppo_llm", "gamma", 1.0, 1.01),
    ("ppo_llm", "gae_lambda", 1.0, 1.01),
    ("rloo_llm", "group_size", 2, 1),
    ("gspo_llm", "prompt", "{question}", "{q}"),
    ("cispo_llm", "prompts_per_step", 64, 63),
]
FILES = ("dataset", "eval_dataset", "verifier", "resume")
RANGES += [("grpo_llm", flag, os.devnull, "/nowhere/x.jsonl") for flag in FILES]


@pytest.mark.parametrize("name,flag,fits,beyond", RANGES)
def test_ranges(name, flag, fits, beyond):
    Args = script(name).Args
    Args(**{flag: fits})
    line = refused(lambda: Args(**{flag: beyond}))
    assert f"--{flag.replace('_', '-')}" in line


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_defaults_follow_from_model_and_data_unless_given(name):
    tiny, Args = 5e-4, script(name).Args

    def chosen(**flags):
        args = Args(**flags)
        return args.learning_rate, args.max_new_tokens, args.micro_batch_size

    assert chosen() == (tiny, 32, 256)
    assert chosen(model="some/model") == (1e-6, 32, 4)
    assert chosen(dataset=os.devnull) == (tiny, 256, 256)
    assert chosen(model="some/model", dataset=os.devnull) == (1e-6, 256, 4)
    own = {"learning_rate": 3e-5, "max_new_tokens": 9, "micro_batch_size": 5}
    assert chosen(model="some/model", dataset=os.devnull, **own) == (3e-5, 9, 5)
    assert chosen(**dict.fromkeys(own, 0)) == (0, 0, 0), "a 0 is no default: it ends the run"


LOGGED = "reward", "completions/mean_length", "sampling/sampling_logp_difference/mean"
# The script (`main` is the same in all but ppo_llm.py), steps of warm-up, rate of each step
RATES = [("grpo_llm", 10, [1]), ("grpo_llm", 10, [0.2, 0.4, 0.6, 0.8, 1])]
RATES += [("grpo_llm", 2, [0.5, 1, 0.75, 0.5, 0.25]), ("grpo_llm", 0, [1, 0.75, 0.5, 0.25])]
RATES += [("ppo_llm", 1, [1, 0.5])]


@pytest.mark.parametrize("name,warmup,rates", RATES)
def test_rates_by_hand(name, warmup, rates, short_run, monkeypatch):
    """Up to the peak in the warm-up, or in all steps if these are fewer, and down towards 0. No
    weight decays by itself."""
    module, taken = script(name), []

    def train_step(model, reference, tokenizer, optimizer, *_):
        (group,) = optimizer.param_groups
        assert group["weight_decay"] == 0
        taken.append(group["lr"])
        return dict.fromkeys(LOGGED, 0.0)

    monkeypatch.setattr(module, "train_step", train_step)
    own = {"steps": len(rates), "warmup_steps": warmup, "learning_rate": 2e-4, "beta": 0.0}
    result = module.main(module.Args(**short_run | own))
    assert taken == pytest.approx([2e-4 * rate for rate in rates])
    assert scalars(result["folder"], "learning_rate") == pytest.approx(taken)

"""What flags do: numbers that no run can use end in one line and exit status 2; for the language
models, defaults that follow, and learning rates."""

import pytest
from conftest import LLM_SCRIPTS, scalars, script

grpo = script("grpo_llm")

RANGES = [  # script, flag, a value that fits, one that does not
    ("dapo_llm", "overlong_cache", 1.0, 1.1),
    ("dapo_llm", "max_resample", 1, 0),
    ("ppo_llm", "gamma", 0.0, 1.01),
    ("ppo_llm", "gae_lambda", 0.0, 1.01),
    ("ppo_llm", "vf_coef", 0.0, float("nan")),
    ("ppo_llm", "ent_coef", 0.0, -0.1),
    ("cispo_llm", "beta", 0.0, float("nan")),
]
COUNTS = ["minibatches", "update_epochs", "group_size", "prompts_per_step", "max_new_tokens"]
COUNTS += ["micro_batch_size", "eval_every", "eval_problems"]
RANGES += [("grpo_llm", flag, 8, 0) for flag in COUNTS]
RANGES += [("grpo_llm", flag, 1e-9, 0.0) for flag in ("temperature", "max_grad_norm")]
RANGES += [("grpo_llm", flag, 0, -1) for flag in ("steps", "warmup_steps", "seed")]
RANGES += [("grpo_llm", "group_size", 2, 1), ("grpo_llm", "prompt", "{question}", "{q}")]
RANGES += [("grpo_llm", "minibatches", 8, 7)]
RANGES += [("grpo_llm", "learning_rate", 0.0, -0.1), ("grpo_llm", "beta", 0, float("inf"))]


@pytest.mark.parametrize("name,flag,fits,beyond", RANGES)
def test_ranges(name, flag, fits, beyond, refused):
    module = script(name)
    module.check_args(module.Args(**{flag: fits}))
    line = refused(lambda: module.check_args(module.Args(**{flag: beyond})))
    assert f"--{flag.replace('_', '-')}" in line


def test_main_checks_its_flags(short_run, refused):
    assert "--steps -1" in refused(lambda: grpo.main(grpo.Args(**short_run | {"steps": -1})))


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_defaults_follow_from_model_and_data_unless_given(name):
    tiny, Args = 5e-4, script(name).Args

    def chosen(**flags):
        args = Args(**flags)
        return args.learning_rate, args.max_new_tokens, args.micro_batch_size

    assert chosen() == (tiny, 32, 256)
    assert chosen(model="some/model") == (1e-6, 32, 8)
    assert chosen(dataset="train.jsonl") == (tiny, 256, 256)
    assert chosen(model="some/model", dataset="train.jsonl") == (1e-6, 256, 8)
    own = {"learning_rate": 3e-5, "max_new_tokens": 9, "micro_batch_size": 5}
    assert chosen(model="some/model", dataset="train.jsonl", **own) == (3e-5, 9, 5)


RATES = [(10, [1]), (10, [0.2, 0.4, 0.6, 0.8, 1])]  # steps of warm-up, rate of each step
RATES += [(2, [0.5, 1, 0.75, 0.5, 0.25]), (0, [1, 0.75, 0.5, 0.25])]


@pytest.mark.parametrize("warmup,rates", RATES)
def test_rates_by_hand(warmup, rates, short_run, monkeypatch):
    """Up to the peak in the warm-up, or in all steps if these are fewer, and down towards 0."""
    taken = []

    def train_step(model, reference, tokenizer, optimizer, *rest, own=grpo.train_step):
        taken.append(optimizer.param_groups[0]["lr"])
        return own(model, reference, tokenizer, optimizer, *rest)

    monkeypatch.setattr(grpo, "train_step", train_step)
    own = {"steps": len(rates), "warmup_steps": warmup, "learning_rate": 2e-4, "beta": 0.0}
    result = grpo.main(grpo.Args(**short_run | own))
    assert taken == pytest.approx([2e-4 * rate for rate in rates])
    assert scalars(result["folder"], "learning_rate") == pytest.approx(taken)

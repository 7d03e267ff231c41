"""What flags do: numbers that no run can use end in one line and exit status 2; for the language
models, defaults that follow, and learning rates."""

import pytest
from conftest import LLM_SCRIPTS, scalars, script
from launch import Launched

grpo = script("grpo_llm")
# What a step may log, and what main needs of it.
STUB = {"num_tokens": 1.0, "reward": 0.0, "completions/mean_length": 1.0}
STUB["sampling/sampling_logp_difference/mean"] = 0.0


RANGES = [  # script, flag, a value that fits, one that does not
    ("dapo_llm", "overlong_cache", 1.0, 1.1),
    ("dapo_llm", "max_resample", 1, 0),
    ("ppo_llm", "gamma", 0.0, 1.01),
    ("ppo_llm", "gae_lambda", 0.0, 1.01),
    ("ppo_llm", "vf_coef", 0.0, float("nan")),
    ("ppo_llm", "ent_coef", 0.0, -0.1),
    ("ppo", "gae_lambda", 1.0, 2.0),
    ("ppo", "gamma", 0, 1.5),
    ("ppo", "learning_rate", 0.0, float("nan")),
    ("ppo", "total_timesteps", 0, -1),
    ("ppo", "num_envs", 1, 0),
    ("ppo", "init_std", 1e-9, 0.0),
    ("ppo", "ent_coef", 0.0, -0.1),
    ("trpo", "max_kl", 0.0, -0.01),
    ("trpo", "cg_steps", 1, 0),
    ("reinforce", "num_envs", 1, 10**30),
    ("actor_critic", "gamma", 1.0, float("inf")),
    ("rloo_llm", "steps", 1, 10**30),
    ("gspo_llm", "clip_high", 0.0, -0.1),
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


@pytest.mark.parametrize("name", ["ppo", "grpo_llm"])
def test_command_line_errors_show_no_traceback(name):
    for wrong in (["--seed", "-1"], ["--seed", "many"]):
        done = Launched(f"{name}.py", *wrong)
        assert done.wait() == 2 and "Traceback" not in done.stderr + done.stdout


# ---------------------------------------------------------------------------- Language models


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


@pytest.mark.parametrize("steps,warmup", [(1, 10), (5, 10), (5, 2), (4, 0)])
def test_rates_by_hand(steps, warmup, short_run, monkeypatch):
    """Up to the peak in the warm-up, or in all steps if these are fewer, and down towards 0."""
    rates = {(1, 10): [1], (5, 10): [0.2, 0.4, 0.6, 0.8, 1], (5, 2): [0.5, 1, 0.75, 0.5, 0.25]}
    rates[4, 0] = [1, 0.75, 0.5, 0.25]
    taken = []

    def train_step(model, reference, tokenizer, optimizer, *_):
        taken.append(optimizer.param_groups[0]["lr"])
        return STUB

    monkeypatch.setattr(grpo, "train_step", train_step)
    own = {"steps": steps, "warmup_steps": warmup, "learning_rate": 2.0, "beta": 0.0}
    result = grpo.main(grpo.Args(**short_run | own))
    assert taken == pytest.approx([2 * rate for rate in rates[steps, warmup]])
    assert scalars(result["folder"], "learning_rate") == pytest.approx(taken)

"""Numbers that no run can use end in one line and exit status 2, for every flag of every script."""

import dataclasses
import typing

import pytest
from conftest import CLASSIC_SCRIPTS, LLM_SCRIPTS, script
from launch import Launched

NUMBERS = {  # always refused; refused or fit for use
    int: ([-1, 10**30], [0, 1, 7]),
    float: ([], [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-320]),
}


def numeric_flags(module):
    """The name of each flag that takes a number, and int or float."""
    for field in dataclasses.fields(module.Args):
        for kind in (int, float):
            if field.type is kind or kind in typing.get_args(field.type):
                yield field.name, kind


@pytest.mark.parametrize("name", LLM_SCRIPTS + CLASSIC_SCRIPTS)
def test_every_number_is_refused_or_fit_for_use(name, capsys):
    module, found = script(name), list(numeric_flags(script(name)))
    assert len(found) > 10 and {kind for _, kind in found} == {int, float}
    for flag, kind in found:
        for value in sum(NUMBERS[kind], []):
            try:
                module.check_args(module.Args(**{flag: value}))
                assert value not in NUMBERS[kind][0], f"{flag} {value}"
            except SystemExit as end:
                assert end.code == 2 and "error: --" in capsys.readouterr().err


RANGES = [  # script, flag, a value at the bound, one beyond
    ("dapo_llm", "overlong_cache", 0.0, 1.1),
    ("dapo_llm", "overlong_cache", 1.0, -0.1),
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
]


@pytest.mark.parametrize("name,flag,fits,beyond", RANGES)
def test_ranges_of_what_few_have(name, flag, fits, beyond, refused):
    module = script(name)
    module.check_args(module.Args(**{flag: fits}))
    line = refused(lambda: module.check_args(module.Args(**{flag: beyond})))
    assert f"--{flag.replace('_', '-')}" in line


@pytest.mark.parametrize("name", ["ppo", pytest.param("grpo_llm", marks=pytest.mark.slow)])
def test_command_line_errors_show_no_traceback(name):
    for wrong in (["--seed", "-1"], ["--seed", "many"]):
        done = Launched(f"{name}.py", *wrong)
        assert done.wait() == 2 and "Traceback" not in done.stderr + done.stdout

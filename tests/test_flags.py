"""Every flag of every script with values that no run can use:
one line and exit status 2, never a traceback."""

import dataclasses
import typing

import pytest
import tyro
from conftest import CLASSIC_SCRIPTS, LLM_SCRIPTS, script
from launch import Launched

# of the type: always refused; or a number that may be out of range: refused, or fit for use
WRONG = {
    int: (["x", "1.5", "", "nan", "-1", "9" * 30], ["0", "1", "7"]),
    float: (["x", "", "--1"], ["nan", "inf", "-inf", "1e999", "-1", "0", "1e-320"]),
    bool: (["maybe"], []),
}


@pytest.mark.parametrize("name", LLM_SCRIPTS + CLASSIC_SCRIPTS)
def test_no_value_of_a_flag_shows_a_traceback(name, capsys):
    module = script(name)

    def ends(flag, value):
        """The exit status of parsing and checking, None if the value passes."""
        try:
            module.check_args(tyro.cli(module.Args, args=[flag, value]))
        except SystemExit as end:
            return end.code

    for field in dataclasses.fields(module.Args):
        flag, kind = f"--{field.name.replace('_', '-')}", field.type
        if typing.get_origin(kind) is typing.Literal:
            assert ends(flag, "neither") == 2, flag
            continue
        kind = next(
            (k for k in (bool, int, float) if k == kind or k in typing.get_args(kind)), None
        )
        for value in WRONG[kind][0] if kind else ():
            assert ends(flag, value) == 2, f"{flag} {value}"
        for value in WRONG[kind][1] if kind else ():
            assert ends(flag, value) in (2, None), f"{flag} {value}"
    assert "Traceback" not in capsys.readouterr().err


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


@pytest.mark.parametrize("name", ["grpo_llm", "ppo"])
def test_command_line_errors_show_no_traceback(name):
    for wrong in (["--seed", "-1"], ["--seed", "many"], ["--no-such-flag"]):
        done = Launched(f"{name}.py", *wrong)
        assert done.wait() == 2 and "Traceback" not in done.stderr + done.stdout

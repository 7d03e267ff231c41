"""Two processes and one: the same step and scores, one log, one saved model."""

import pytest
import torch
from conftest import LLM_SCRIPTS, OWN_STEPS, each_script, equal, scalars, script, weights
from launch import flags, run, side_by_side
from lineage import PATHS


@pytest.fixture(scope="module")
def steps(tmp_path_factory, request):
    out = tmp_path_factory.mktemp("parallel") / "step"
    names = OWN_STEPS if request.config.option.markexpr == "not slow" else LLM_SCRIPTS
    run("tests/parallel_step.py", out, *names)
    both = side_by_side("tests/parallel_step.py", out, *names)
    assert both[0].stdout.count("pass@8") == 2 * len(names) and "pass" not in both[1].stdout
    files = [f"{out}-{part}.pt" for part in ("0-of-1", "0-of-2", "1-of-2")]
    return [torch.load(file, weights_only=True) for file in files]


@pytest.mark.parametrize("name", each_script(*OWN_STEPS))
def test_two_processes_take_the_step_of_one(steps, name):
    """The same weights and metrics, also where one process has no row to train on."""
    one, *both = (step[name] for step in steps)
    cases = one.keys() - {"scores"}
    for case in cases:
        for two in both:
            assert (two[case]["weights"] - one[case]["weights"]).abs().max() < 1e-6
            both_together = one[case]["stats"] | {
                "num_tokens": one[case]["stats"]["num_tokens"] / 2
            }
            assert two[case]["stats"] == pytest.approx(both_together, rel=1e-4, abs=1e-6)
        assert torch.equal(both[0][case]["weights"], both[1][case]["weights"]), "drifted apart"
        assert ("grad_norm" in one[case]["stats"]) == (case != "dead" or name == "ppo_llm")
    assert (one["all"]["weights"] - one["lonely"]["weights"]).abs().max() > 1e-3
    for two in both:
        for scores, expected in zip(two["scores"], one["scores"], strict=True):
            assert scores == pytest.approx(expected, abs=1e-6)


def test_minibatches_are_for_all_processes(refused, monkeypatch):
    monkeypatch.setattr(script("grpo_llm"), "WORLD", 2)
    grpo = script("grpo_llm")
    grpo.check_args(grpo.Args(prompts_per_step=8, minibatches=4))
    line = refused(grpo.check_args, grpo.Args(prompts_per_step=4, minibatches=4))
    assert "--minibatches" in line and "--prompts-per-step" in line


@pytest.mark.parametrize("name", each_script("dapo_llm"))
def test_two_processes_make_one_run(name, tmp_path, short_run):
    """One result, one folder, one log, one model. The second process prints nothing. A resumed run
    is the same to the last bit. With DAPO each process draws until it has enough."""
    own = {"minibatches": 2, "update_epochs": 2, "eval_problems": 1, "steps": 4, "eval_every": 2}
    first, second = side_by_side(PATHS[name], *flags(short_run | own))
    for said in ("on cpu", "a prompt as", "step 0: eval/pass@1", "step 4: eval/pass@1", "logs in"):
        assert first.stdout.count(said) == 1
    (folder,) = (tmp_path / "runs").iterdir()
    assert second.stdout == "" and len(list(folder.glob("events*"))) == 1
    straight, rewards = weights(folder), scalars(folder, "reward")
    again = {"resume": folder / "step-000002"}
    side_by_side(PATHS[name], *flags(short_run | own | again))
    _, folder = sorted((tmp_path / "runs").iterdir())
    assert equal(weights(folder), straight) and scalars(folder, "reward") == rewards[2:]


def test_processes_draw_different_samples(tmp_path):
    """Asked the same question, they answer differently; no thread of the process group is left."""
    (tmp_path / "drawn.py").write_text(f"""
import pathlib
import grpo_llm as grpo
seen, real = [], grpo.rollout
grpo.rollout = lambda *args: seen.append((args[2][0], real(*args))) or seen[-1][1]
encode, grpo.check_prompts = grpo.encode_prompts, lambda *_: None
grpo.encode_prompts = lambda problems, *rest: encode([("3+8+5", "16")] * len(problems), *rest)
grpo.evaluate = lambda *args: {{"eval/pass@1": 0.0}}
own = {{"steps": 1, "prompts_per_step": 2, "minibatches": 1, "group_size": 32}}
grpo.main(grpo.Args(**own, output_dir={str(tmp_path)!r}))
threads = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in thread for thread in threads), threads
problem, (_, completions, _) = seen[0]
print(problem[0], *completions)
""")
    both = side_by_side(tmp_path / "drawn.py")
    (a, *drawn), (b, *others) = (process.stdout.splitlines()[-1].split(" ") for process in both)
    assert a != b and len(drawn) == len(others) == 32 and len(set(drawn)) > 1 and drawn != others

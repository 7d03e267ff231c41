"""Two processes and one: the same step and scores, one log, one saved model. And devices: the model
is on the CPU, and what is made without `device=` lands on "meta", whose tensors hold no numbers."""

import sys
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import (
    LLM_SCRIPTS,
    Characters,
    batch_of,
    equal,
    random_model,
    reward_by,
    scalars,
    script,
    weights,
)
from launch import flags, run, side_by_side
from torch.utils.tensorboard import SummaryWriter

# The second of two processes has every other one; DAPO keeps three.
PROBLEMS = [("1+2", "live"), ("1+2+3+4", "live"), ("9+9", "live"), ("5+5+5", "dead")]
# Here it has no group with a signal, and of these nobody has one.
LONELY = [(question, "live" if i % 2 == 0 else "dead") for i, (question, _) in enumerate(PROBLEMS)]
DEAD = [(question, "dead") for question, _ in PROBLEMS]


def verify(completion, answer):
    return float(completion == "#1") if answer == "live" else 0.5


ASKED = []  # the prompts that generate has completed in this process


def generate(model, prompts, num_samples, *_):
    """Used instead of the script's: completions that follow from the prompt alone."""
    ASKED.extend(prompts)
    parts = []
    for prompt in prompts:
        lengths = [1 + sum(prompt) * n % 9 for n in range(1, num_samples + 1)]
        parts.append(batch_of(model, [prompt], lengths))
    return script("dapo_llm").join(parts)


def trained(name, folder):
    """Weights and metrics after two epochs with a KL; where one of two processes has nothing to do;
    and where neither has. And scores on three problems, and on one."""
    module, results = script(name), {}
    module.generate = generate
    in_order = SimpleNamespace(sample=lambda problems, count: problems[:count])
    module.random = SimpleNamespace(Random=lambda seed: in_order)
    module.load_task = lambda path: (None, verify)
    for case, problems in {"all": PROBLEMS, "lonely": LONELY, "dead": DEAD}.items():
        shape = {"prompts_per_step": 4, "group_size": 4, "num_minibatches": 1, "update_epochs": 2}
        shape |= {"max_new_tokens": 9, "micro_batch_size": 3, "beta": 0.1 * (case == "all")}
        shape |= {"max_resample": 1} if name == "dapo_llm" else {}
        args = module.Args(model="some", **shape)
        model, reference = random_model("qwen2").double(), random_model("qwen2", seed=1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        stats = module.train_step(model, reference, Characters(), optimizer, problems, 0, args)
        if name == "dapo_llm":  # logged as of one process
            stats["discarded_groups"] *= module.WORLD
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
        results[case] = {"weights": parameters, "stats": stats}
    writer = SummaryWriter(folder) if module.RANK == 0 else None
    ASKED.clear()
    results["scores"] = [
        module.evaluate(model, Characters(), PROBLEMS[:n], args, writer, 0) for n in (3, 1)
    ]
    results["asked"] = len(ASKED)
    return results


def save_steps(folder):
    """In a process of its own, or in each of two."""
    if script("grpo_llm").WORLD > 1:
        dist.init_process_group("gloo")
    process = f"{script('grpo_llm').RANK}-of-{script('grpo_llm').WORLD}"
    results = {name: trained(name, folder / process) for name in LLM_SCRIPTS}
    torch.save(results, folder / f"{process}.pt")


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    run(partial(save_steps, folder))
    side_by_side(partial(save_steps, folder))
    files = [folder / f"{part}.pt" for part in ("0-of-1", "0-of-2", "1-of-2")]
    return [torch.load(file, weights_only=True) for file in files]


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_two_processes_take_the_step_of_one(steps, name):
    """The same weights and metrics, also where one process has no row to train on."""
    one, *both = (step[name] for step in steps)
    for case in one.keys() - {"scores", "asked"}:
        stats = one[case]["stats"]
        for two in both:
            assert (two[case]["weights"] - one[case]["weights"]).abs().max() < 1e-6
            assert two[case]["stats"] == pytest.approx(stats, rel=1e-4, abs=1e-6)
        assert torch.equal(both[0][case]["weights"], both[1][case]["weights"]), "drifted apart"
        assert ("grad_norm" in stats) == (case != "dead")
        assert case == "all" or not torch.equal(one[case]["weights"], one["all"]["weights"])
    for two in both:
        for scores, expected in zip(two["scores"], one["scores"], strict=True):
            assert scores == pytest.approx(expected, abs=1e-6)
    assert both[0]["asked"] + both[1]["asked"] == one["asked"] == 3 + 1


def test_two_processes_make_one_run(tmp_path, short_run):
    """One result, one folder, one log, one model. The second process prints nothing. A resumed run
    is the same to the last bit. With DAPO each process draws until it has enough."""
    run_flags = {"num_minibatches": 2, "update_epochs": 2, "eval_problems": 1, "max_resample": 3}
    run_flags |= short_run | {"steps": 4, "eval_every": 2}
    first, second = side_by_side("dapo_llm.py", *flags(run_flags))
    for said in ("Args(", "step 0: eval/pass@1", "step 4: eval/pass@1", "logs in"):
        assert first.stdout.count(said) == 1
    (folder,) = (tmp_path / "runs").iterdir()
    assert second.stdout == "" and len(list(folder.glob("events*"))) == 1
    side_by_side("dapo_llm.py", *flags(run_flags | {"resume": folder / "step-000002"}))
    _, resumed = sorted((tmp_path / "runs").iterdir())
    assert equal(weights(folder), weights(resumed))
    assert scalars(folder, "reward")[2:] == scalars(resumed, "reward")


def on_cpu(make):
    """Indices of rows may be on the CPU, and so may be what is added up in Python."""

    def made(*args, **more):
        if sys._getframe(1).f_code.co_name in ("train_step", "evaluate", "global_means"):
            more["device"] = "cpu"
        return make(*args, **more)

    return made


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_every_tensor_is_made_on_the_model_s_device(name, monkeypatch, tmp_path):
    """The next operation with one that is not raises, or the numbers differ."""
    module, metrics, writer = script(name), [], SummaryWriter(tmp_path)
    with torch.device("meta"):
        torch.zeros(1)  # torch lists now what makes tensors, and these are not yet watched
    for make in ("arange", "randperm", "tensor", "as_tensor"):
        monkeypatch.setattr(torch, make, on_cpu(getattr(torch, make)))
    shape = {"prompts_per_step": 4, "group_size": 4, "num_minibatches": 2, "max_new_tokens": 6}
    args = module.Args(beta=0.1, **shape)
    problems = [(f"{i}+{i}", "2") for i in range(8)]
    for context in (nullcontext(), torch.device("meta")):
        model, reference = random_model(), random_model(seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(0)
        reward_by(monkeypatch, module, Mock(side_effect=cycle(range(7))))
        tokenizer = Characters()
        with context:
            step = module.train_step(model, reference, tokenizer, optimizer, problems, 1, args)
            scores = module.evaluate(model, tokenizer, problems, args, writer, 0)
        metrics.append(step | scores)
    assert "grad_norm" in metrics[0] and metrics[0] == pytest.approx(metrics[1])

"""Two processes and one: the same step and scores, one log. And devices: the model is on the CPU,
and what is made without `device=` lands on "meta", whose tensors hold no numbers."""

from functools import partial
from itertools import cycle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import LLM_SCRIPTS, Characters, batch_of, random_model, reward_by, script
from launch import flags, run, side_by_side
from torch.utils.tensorboard import SummaryWriter

# The second of two processes has every other one; DAPO keeps three.
PROBLEMS = [("1+2", "live"), ("1+2+3+4", "live"), ("9+9", "live"), ("5+5+5", "dead")]
# Here it has no group with a signal.
LONELY = [(question, "live" if i % 2 == 0 else "dead") for i, (question, _) in enumerate(PROBLEMS)]


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
    """Weights and metrics after two epochs with a KL, and where one of two processes has nothing to
    do. And scores on three problems, and on one."""
    module, results = script(name), {}
    module.generate = generate
    in_order = SimpleNamespace(sample=lambda problems, count: problems[:count])
    module.random = SimpleNamespace(Random=lambda seed: in_order)
    module.load_task = lambda path: (None, verify)
    for beta, problems in {0.1: PROBLEMS, 0.0: LONELY}.items():
        shape = {"prompts_per_step": 4, "group_size": 4, "num_minibatches": 1, "update_epochs": 2}
        shape |= {"max_new_tokens": 9, "micro_batch_size": 3}
        shape |= {"max_resample": 1} if name == "dapo_llm" else {}
        args = module.Args(model="some", beta=beta, **shape)
        model, reference = random_model("qwen2").double(), random_model("qwen2", seed=1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        stats = module.train_step(model, reference, Characters(), optimizer, problems, 0, args)
        stats.pop("discarded_groups", None)  # each process counts its own
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
        results[beta] = parameters, stats
    writer = SummaryWriter(folder) if module.RANK == 0 else None
    ASKED.clear()
    scores = [module.evaluate(model, Characters(), PROBLEMS[:n], args, writer, 0) for n in (3, 1)]
    return results, scores, len(ASKED)


def save_steps(folder):
    """In a process of its own, or in each of two."""
    grpo = script("grpo_llm")
    if grpo.WORLD > 1:
        dist.init_process_group("gloo")
    process = f"{grpo.RANK}-of-{grpo.WORLD}"
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
    (one, scores, asked), first, second = (step[name] for step in steps)
    for results, their_scores, _ in (first, second):
        for beta, (weights, stats) in one.items():
            parameters, metrics = results[beta]
            torch.testing.assert_close(parameters, weights, rtol=0, atol=1e-6)
            assert metrics == pytest.approx(stats, rel=1e-4, abs=1e-6) and "grad_norm" in metrics
            assert torch.equal(parameters, first[0][beta][0]), "drifted apart"
        assert their_scores == [pytest.approx(expected, abs=1e-6) for expected in scores]
    assert first[-1] + second[-1] == asked == 3 + 1


def test_two_processes_make_one_run(tmp_path, short_run):
    """One result, one folder, one log. The second process prints nothing. With DAPO each process
    draws until it has enough."""
    run_flags = {"num_minibatches": 2, "update_epochs": 2, "eval_problems": 1, "max_resample": 3}
    first, second = side_by_side("dapo_llm.py", *flags(short_run | run_flags))
    for line in ("Args(", "step 0: eval/pass@1", "step 2: eval/pass@1", "logs in"):
        assert first.stdout.count(line) == 1
    (folder,) = (tmp_path / "runs").iterdir()
    assert second.stdout == "" and len(list(folder.glob("events*"))) == 1


def on_meta(function):
    def called(*args):
        with torch.device("meta"):
            return function(*args)

    return called


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_every_tensor_is_made_on_the_model_s_device(name, monkeypatch):
    """The next operation with one that is not raises, or the numbers differ."""
    module = script(name)
    shape = {"prompts_per_step": 4, "group_size": 4, "num_minibatches": 2, "max_new_tokens": 6}
    problems = [(f"{i}+{i}", "2") for i in range(8)]

    def step():
        model, reference = random_model(), random_model(seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(0)
        reward_by(monkeypatch, module, Mock(side_effect=cycle(range(7))))
        start = model, reference, Characters(), optimizer
        return module.train_step(*start, problems, 1, module.Args(beta=0.1, **shape))

    expected = step()
    for part in ("rollout", "batch_logprobs", "train_minibatch"):
        monkeypatch.setattr(module, part, on_meta(getattr(module, part)))
    assert "grad_norm" in expected and step() == pytest.approx(expected)

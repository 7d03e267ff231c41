"""Two processes and one: the same steps and scores, one log. And devices: the model is on the CPU,
and what is made without `device=` lands on "meta", whose tensors hold no numbers."""

import re
import zlib
from functools import partial

import pytest
import torch
from conftest import LLM_SCRIPTS, random_model, script
from launch import run, side_by_side

# Long sums have many completions.
TRAIN = [("5+6+7+8+9+4=", "live"), ("3+4=", "dead"), ("5+6+7=", "dead"), ("8+9=", "dead")]
TEST = [("9+8+7+6+5=", "live"), ("3+3=", "live"), ("4+4+4=", "live"), ("5+5=", "dead")]
UNEQUAL = "dapo_llm, unequal numbers of rollouts"


def verify(completion, answer):
    return zlib.crc32(completion.encode()) / 2**32 if answer == "live" else 0.5


def make_run(name, folder):
    """A run in which only one process has a question with a signal, completions follow from the
    prompt alone, and the model has a parameter that is not used: its weights and scores. Or one in
    which the first process has enough at once, and the second one draws on."""
    module, patch, models = script(name.split(",")[0]), pytest.MonkeyPatch(), []
    generate, load_model = module.generate, module.load_model

    def by_prompt(model, prompts, num_samples, args):
        batches = []
        for prompt in prompts:
            torch.manual_seed(sum(prompt))
            batches.append(generate(model, [prompt], num_samples, args))
        return script("dapo_llm").join(batches)

    def load_and_keep(args):
        model, tokenizer = load_model(args)
        model.unused = torch.nn.Parameter(torch.zeros(1))
        models.append(model)
        return model, tokenizer

    def verify_by_rank(completion, answer):
        return verify(completion, "dead" if module.RANK else "live")

    patch.setattr(module, "generate", by_prompt)
    patch.setattr(module, "load_model", load_and_keep)
    patch.setattr(module, "load_problems", {"train": TRAIN, "test": TEST}.get)
    patch.setattr(module, "verify", verify_by_rank if name == UNEQUAL else verify)
    # Adam would turn rounding into whole steps
    patch.setattr(torch.optim, "Adam", lambda weights, lr, fused: torch.optim.SGD(weights, lr))
    if torch.distributed.is_initialized():
        patch.setattr(torch.distributed, "init_process_group", lambda: None)
    flags = {"num_minibatches": 1, "update_epochs": 2, "max_rollouts": 3 if name == UNEQUAL else 1}
    flags |= {"prompts_per_step": 4, "group_size": 4, "micro_batch_size": 3, "steps": 1}
    flags |= {"learning_rate": 0.3, "warmup_steps": 1, "temperature": 1.5, "beta": 0.0}
    flags = {key: value for key, value in flags.items() if hasattr(module.Args, key)}
    scores = module.main(module.Args(**flags, output_dir=folder / name))
    patch.undo()
    return models[0].state_dict(), scores | {"folder": None}


def make_runs(folder):
    """In one process, or in each of two."""
    results = {name: make_run(name, folder) for name in [*LLM_SCRIPTS, UNEQUAL]}
    grpo = script("grpo_llm")
    torch.save(results, folder / f"{grpo.RANK}-of-{grpo.WORLD}.pt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What one process writes down, and the first and the second of two."""
    folder = tmp_path_factory.mktemp("parallel")
    one = run(partial(make_runs, folder))
    first, second = side_by_side(partial(make_runs, folder))
    rewards = [re.findall(r"step 1 of 1: reward \S+", process.stdout) for process in (one, first)]
    assert rewards[0][:5] == rewards[1][:5] and len({*rewards[0]}) > 1
    for line in ("Args(", "step 0: eval/pass@1", "step 1: eval/pass@1", "model and logs in"):
        assert first.stdout.count(line) == len(LLM_SCRIPTS) + 1
    assert second.stdout == ""
    assert len(list(folder.glob("grpo_llm/*/events*"))) == 2, "of two runs"
    return [torch.load(folder / f"{part}.pt") for part in ("0-of-1", "0-of-2", "1-of-2")]


@pytest.mark.parametrize("name", [*LLM_SCRIPTS, UNEQUAL])
def test_two_processes_take_the_step_of_one(runs, name):
    """The same weights and scores, also where one process has no row to train on."""
    (one, scores), first, second = (results[name] for results in runs)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    if name != UNEQUAL:
        initial = script(name).load_model(script(name).Args())[0].state_dict()
        assert max((one[key] - initial[key]).abs().max() for key in initial) > 1e-3
        torch.testing.assert_close(first[0], one, rtol=0, atol=1e-6)
        assert first[1] == pytest.approx(scores, abs=1e-6)


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_every_tensor_is_made_on_the_model_s_device(name):
    """The next operation with one that is not raises."""
    module, model = script(name), random_model("llama", vocab=23)
    args, optimizer = module.Args(beta=0.0), torch.optim.Adam(model.parameters())
    _, tokenizer = module.load_model(args)
    with torch.device("meta"):
        batch, rewards, _ = module.rollout(model, tokenizer, verify, TRAIN, 4, args)
        if name == "dapo_llm":
            batch = module.join([batch])
            penalty = module.overlong_penalty(batch["mask"].sum(1), batch["ended"], args)
            rewards = rewards + penalty.view_as(rewards)
        batch["advantages"] = module.compute_advantages(rewards, args).flatten()
        logs = module.train_minibatch(model, optimizer, batch, args)
    assert all(value.isfinite() for value in logs.values())

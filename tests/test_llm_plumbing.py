"""What lies between a user and the algorithm: task, model, flags, and what is refused in a line."""

import shutil
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from conftest import LLM_SCRIPTS, calls_of, random_model, refused, script

grpo = script("grpo_llm")

# -------------------------------------------------------------------------------------- The task


@pytest.mark.parametrize("reward,completions", [(1, "#16~11,16#16"), (0, "#15~16~~#~#16 ~#161")])
def test_a_sum_must_stand_at_the_end_behind_a_hash(reward, completions):
    assert {grpo.verify(completion, "16") for completion in completions.split("~")} == {reward}


def task(problems="[(f'{len(split)}{i}', i) for i in range(20)]", reward="1.0"):
    return f"""
def load_problems(split):
    return {problems}

def verify(completion, answer):
    return {reward}
"""


@pytest.fixture
def run_task(tmp_path, monkeypatch):
    """Call it with a task's source, if there is to be such a file: a run of one step."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(source, **flags):
        path = tmp_path / "json.py"  # a name that is taken
        if source is not None:
            path.write_text(source)
        small = {"steps": 1, "prompts_per_step": 4, "max_new_tokens": 4, "eval_problems": 8}
        small |= {"task": str(path), "output_dir": str(tmp_path / "runs")}
        return grpo.main(grpo.Args(**small | flags))

    return run


def test_a_task_file_may_yield_its_problems_and_import_its_neighbour(run_task, tmp_path):
    """Its answers reach the verifier as they are."""
    (tmp_path / "beside_the_task.py").write_text("HALF = 0.5\n")
    problems = "([f'{len(split)}{i}', {(1, 2): i}] for i in range(20))"
    source = "from beside_the_task import HALF\n" + task(problems, "HALF * ((1, 2) in answer)")
    result = run_task(source)
    assert result["eval/pass@1"] == 0.5
    assert '"answer": "{(1, 2): ' in Path(result["folder"], "completions.jsonl").read_text()


# Of each: the task's source, the flags, and what the line must name
MISTAKES = {
    "no file": (None, {}, "--task"),
    "no verify": (task().partition("def verify")[0], {}, "verify"),
    "no load_problems": ("def verify" + task().partition("def verify")[2], {}, "load_problems"),
    "no return": (task("None"), {}, "--task"),
    "dicts": (task("[{'prompt': '1', 'answer': 2}] * 9"), {}, "load_problems"),
    "three columns": (task("[('1', 2, 3)] * 9"), {}, "load_problems"),
    "an empty prompt": (task("[('', 2)] * 9"), {}, "load_problems"),
    "a prompt that the tiny model cannot read": (task("[(split, 1)] * 9"), {}, "--model"),
    "no content": (task("[([{'role': 'user', 'text': '1'}], 2)] * 9"), {}, "content"),
    "one list for both splits": (task("[(f'{i}', i) for i in range(20)]"), {}, "not in test"),
    "no test split": (task("[(f'{i}', i) for i in range(20) if split == 'train']"), {}, "test"),
    "too few": (task(), {"prompts_per_step": 24}, "--prompts-per-step"),
    "a text": (task(reward="'right'"), {}, "verify("),
    "no reward": (task(reward="None"), {}, "verify("),
    "an exception": (task(reward="{}[answer]"), {}, "KeyError"),
    "NaN": (task(reward="float('nan')"), {}, "verify("),
    "infinite": (task(reward="-float('inf')"), {}, "verify("),
}


@pytest.mark.parametrize("source,flags,named", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_task_ends_the_run_in_a_line(run_task, source, flags, named):
    assert named in refused(partial(run_task, source, **flags))


SHUFFLED = """
import random

def load_problems(split):
    if split == "test":
        return [(f" {i}\\n", split) for i in range(100)]
    return random.sample([(f"{i} ", split) for i in range(300)], 300)

verify = print
"""


def test_held_out_problems_are_drawn_from_all_and_not_trained_on(run_task, monkeypatch):
    """The first ones of a file may be the easiest. A prompt that is in both splits is not trained
    on, whatever its answer and the blanks at its ends. Every process gets the same problems, though
    this task shuffles without a seed."""
    loaded = calls_of(monkeypatch, grpo, "load_task")
    monkeypatch.setattr(grpo, "load_model", Mock(side_effect=StopIteration))
    for seed in range(2):
        transformers.set_seed(seed)
        with pytest.raises(StopIteration):
            run_task(SHUFFLED, eval_problems=40)
    (_, train, held_out), again = (problems for _, problems in loaded)
    assert (train, held_out) == again[1:]
    held_out = {int(prompt) for prompt, _ in held_out}
    assert len(held_out) == 40 and held_out < set(range(100)) and max(held_out) > 80
    assert sorted(int(prompt) for prompt, _ in train) == list(range(100, 300))


# ------------------------------------------------------------------------------------- The model

# The eos of the generation config and of the tokenizer; whether there is a chat template; the stops
BASE, TURN, OTHER = "<|endoftext|>", "<|im_end|>", "<|end|>"
ENDS = [
    (BASE, BASE, True, [BASE, TURN]),
    (None, None, True, [TURN]),
    (BASE, TURN, True, [BASE, TURN]),
]
ENDS += [(OTHER, BASE, True, [BASE, OTHER]), (BASE, None, False, [BASE]), (None, None, False, [])]


@pytest.mark.parametrize("config,eos,template,stops", ENDS)
def test_what_ends_a_completion(config, eos, template, stops, pretrained, tmp_path):
    """A base model's files name <|endoftext|> alone; its chat template ends a turn otherwise. Where
    the files name two ends, nothing is added. What the hub says of sampling is gone, dropout is
    off, and weights are float32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.add_tokens([OTHER] if config == OTHER else [])
    tokenizer.eos_token = eos
    tokenizer.chat_template = tokenizer.chat_template if template else None
    tokenizer.save_pretrained(tmp_path)
    model = random_model("qwen2", len(tokenizer), attention_dropout=0.5).bfloat16()
    id_of = tokenizer.convert_tokens_to_ids
    settings = {"eos_token_id": config and id_of(config), "do_sample": True, "top_k": 7}
    model.generation_config = transformers.GenerationConfig(**settings)
    model.save_pretrained(tmp_path)
    args = grpo.Args(model=str(tmp_path))
    if not stops:
        assert "--model" in refused(grpo.load_model, args)
        return
    model, _ = grpo.load_model(args)
    assert model.generation_config.eos_token_id == [id_of(stop) for stop in stops]
    assert not model.generation_config.do_sample and model.generation_config.top_k != 7
    assert model.dtype == torch.float32 and not model.training


def test_a_model_without_keys_and_values_is_refused(pretrained, tmp_path):
    """Mamba has a state in their place: the sampler would draw from another distribution."""
    shutil.copytree(pretrained, tmp_path, dirs_exist_ok=True)
    random_model("mamba", state_size=4).save_pretrained(tmp_path)
    assert "--model" in refused(grpo.load_model, grpo.Args(model=str(tmp_path)))


# -------------------------------------------------------------------------------------- The flags

NEGATIVE = ["beta", "clip_high", "steps", "warmup_steps", "seed", "overlong_tokens"]
ZERO = ["num_minibatches", "update_epochs", "prompts_per_step", "learning_rate", "max_grad_norm"]
ZERO += ["temperature", "max_new_tokens", "micro_batch_size", "eval_every", "eval_problems"]
WRONG = [*((flag, -1) for flag in NEGATIVE), *((flag, 0) for flag in ZERO), ("group_size", 1)]
WRONG += [("device", "gpu"), ("device", "cuda"), ("beta", float("nan"))]
WRONG += [("prompts_per_step", 30)]  # 4 · 7.5


@pytest.mark.parametrize("flag,value", WRONG)
@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_a_wrong_flag_is_refused_and_named(name, flag, value):
    args = script(name).Args
    if hasattr(args, flag) and (name, value) != ("rloo_llm", 30):  # it has no minibatches
        line = refused(partial(args, **{flag: value}))
        assert line.startswith(f"--{flag.replace('_', '-')}")
        if value == -1:
            args(**{flag: 0})


def test_defaults_follow_from_model_and_task_unless_given():
    """5e-4 would ruin a real model in silence."""

    for flags, defaults in [
        ({}, (5e-4, 32, 256)),
        ({"model": "some/model"}, (1e-6, 32, 4)),
        ({"task": "t.py"}, (5e-4, 256, 256)),
        ({"learning_rate": 1, "max_new_tokens": 1, "micro_batch_size": 1}, (1, 1, 1)),
    ]:
        args = grpo.Args(**flags)
        assert (args.learning_rate, args.max_new_tokens, args.micro_batch_size) == defaults

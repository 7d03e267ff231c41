"""What lies between a user and the algorithm: task, model, prompts, evaluation, flags, rates."""

import json
import os
import pickle
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import tokenizers
import torch
import transformers
from conftest import (
    Characters,
    batch_of,
    calls_of,
    random_model,
    refused,
    reward_by,
    scalars,
    script,
)
from launch import Launched, flags, run
from torch.utils.tensorboard import SummaryWriter

grpo = script("grpo_llm")
CPU = torch.device("cpu")

# -------------------------------------------------------------------------------------- The task


def test_sums_are_right_and_none_is_in_both_splits():
    train, held_out = (grpo.load_problems(split) for split in ("train", "test"))
    assert len(set(train)) > 3_000 and len(set(held_out)) > 800 and not set(train) & set(held_out)
    for prompt, answer in train + held_out:
        terms = prompt.removesuffix("=").split("+")
        assert 2 <= len(terms) <= 6 and sum(map(int, terms)) == int(answer)


@pytest.mark.parametrize("reward,completions", [(1, "#16~11,16#16"), (0, "#15~16~~#~#16 ~#161")])
def test_a_sum_must_stand_at_the_end_behind_a_hash(reward, completions):
    assert {grpo.verify(completion, "16") for completion in completions.split("~")} == {reward}


TASK = """
def load_problems(split):
    return [(f"{split} {i}", [i, None]) for i in range(20)]

def verify(completion, answer):
    return 1.0
"""


@pytest.fixture
def task_file(tmp_path, monkeypatch):
    """Call it with a source and the name of a file: the file's path."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(source=TASK, name="my_task.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        return str(path)

    return write


def test_the_file_that_is_named_is_the_task(task_file):
    """And not a module of Python, nor another task of this name."""
    for folder in "ab":
        path = task_file(TASK.replace("split}", f"split}} of {folder}"), f"{folder}/math.py")
        load_problems, _ = grpo.load_task(path)
        assert load_problems("test")[0] == (f"test of {folder} 0", [0, None])


def test_a_task_s_neighbour_comes_before_a_package_and_its_functions_can_be_pickled(
    task_file, tmp_path
):
    """But it hides no module beside the script. A pool of processes pickles functions."""
    sys.path.append(str(tmp_path / "site-packages"))
    task_file("HALF = 0.1\n", "site-packages/beside_the_task.py")
    task_file("HALF = 0.5\n", "beside_the_task.py")
    source = TASK.replace("return 1.0", "return HALF") + "from beside_the_task import HALF"
    _, verify = grpo.load_task(task_file(source, "task_with_a_neighbour.py"))
    assert pickle.loads(pickle.dumps(verify))("#3", "3") == 0.5
    assert sys.path[1] == str(tmp_path)


def test_exit_in_a_task_does_not_look_like_a_success(task_file, short_run):
    path = task_file(TASK.replace("return 1.0", "exit()"))
    process = Launched("grpo_llm.py", *flags(short_run | {"task": path, "max_new_tokens": 4}))
    assert process.wait() == 1
    assert process.stderr.splitlines()[-1] == f"--task {path} has called exit()"


def test_held_out_problems_are_drawn_from_all_and_not_trained_on(task_file):
    """The first ones of a file may be the easiest. A prompt that is in both splits is not trained
    on, whatever its answer and the blanks at its ends. Every process and every resumed run gets the
    same problems, though this task shuffles without a seed."""
    source = """
import random, numpy

def load_problems(split):
    if split == "test":
        return [(f" {i}\\n", split) for i in range(100)]
    problems = [(f"{i} ", split) for i in range(300)]
    random.shuffle(problems)
    numpy.random.shuffle(problems)
    return problems

verify = print
"""
    args, splits = grpo.Args(task=task_file(source), eval_problems=40), []
    for seed in range(2):
        transformers.set_seed(seed)
        splits.append(grpo.load_data(args))
    train, held_out = splits[0]
    assert splits[0] == splits[1]
    held_out = {int(prompt) for prompt, _ in held_out}
    assert len(held_out) == 40 and held_out < set(range(100)) and max(held_out) > 80
    assert sorted(int(prompt) for prompt, _ in train) == list(range(100, 300))


def test_an_exception_in_verify_ends_the_run_and_names_the_answer(monkeypatch):
    reward_by(monkeypatch, grpo, Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError) as caught:
        grpo.rollout(random_model(), Characters(), [("1+2", "3!")], 4, 1.0, grpo.Args())
    assert "'3!'" in caught.value.__notes__[0]


def test_which_problems_a_step_asks(monkeypatch):
    """None twice, and others in another step and with another seed."""
    rollout = Mock(side_effect=StopIteration)
    monkeypatch.setattr(grpo, "rollout", rollout)
    for step, seed in [(1, 1), (1, 1), (2, 1), (1, 2)]:
        args = grpo.Args(prompts_per_step=8, seed=seed)
        with pytest.raises(StopIteration):
            grpo.train_step(None, None, None, None, range(9), step, args)
    first, again, *others = [tuple(call.args[2]) for call in rollout.call_args_list]
    assert len(set(first)) == 8 and first == again and len({first, *others}) == 3


# ------------------------------------------------------------------------------------- The model


def test_no_dropout_and_no_special_tokens(pretrained, monkeypatch):
    """Dropout is off, and no verifier sees special tokens."""
    args = grpo.Args(model=pretrained)
    model, tokenizer = grpo.load_policy(args, CPU)
    batch = batch_of(model, [[3, 4]], [4])
    batch["completion_ids"][0, :2] = torch.tensor([1, 0])  # <|im_start|><|endoftext|>
    monkeypatch.setattr(grpo, "generate", lambda *_: batch)
    _, (completion,), _ = grpo.rollout(model, tokenizer, [("1+2", "3")], 1, 1.0, args)
    assert completion == tokenizer.decode(batch["completion_ids"][0, 2:]) != ""
    a, b = (grpo.token_logprobs(model, batch, 1.0) for _ in range(2))
    assert torch.equal(a, b)


# How a template writes a message behind its role; the eos token that the generation config names,
# beside the tokenizer's <|endoftext|>, 0; and what else ends a completion.
TURNS = {
    "blanks, the end, eos": ("{{ text }}\n  <|im_end|>\n<|endoftext|>", 0, ["<|im_end|>"]),
    "GLM's turn ends where the next begins": ("{{ text }}", 0, ["<|im_start|>"]),
    "text alone": ("{{ text }} Next:", 0, []),
    "gpt-oss also ends thoughts like this": ("{{ text }}<|end|>", 2, ["<|im_end|>"]),
}


@pytest.mark.parametrize("turn,eos,ends", TURNS.values(), ids=TURNS)
def test_the_token_that_ends_a_turn_stops_a_base_model_too(turn, eos, ends, pretrained, tmp_path):
    """A base model's files name <|endoftext|> alone; its chat template ends a turn otherwise. Where
    the files name two ends, the template adds nothing. A hub's settings of sampling are gone."""
    shutil.copytree(pretrained, tmp_path, dirs_exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.add_tokens(["\n", "  ", "<|end|>"])
    tokenizer.eos_token = "<|endoftext|>"
    turn = "<|im_start|>{{ m['role'] }}\n" + turn.replace("text", "m['content']")
    system = "<|im_start|>system\nYou help!<|end|>\n"  # it has such tokens, too
    tokenizer.chat_template = system + "{% for m in messages %}" + turn + "{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    settings = transformers.GenerationConfig(eos_token_id=eos, do_sample=True, top_k=7)
    settings.save_pretrained(tmp_path)
    model, _ = grpo.load_policy(grpo.Args(model=str(tmp_path)), CPU)
    stops = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
    assert stops == ["<|endoftext|>", *ends] and model.generation_config.top_k != 7


# ------------------------------------------------------------------------------------ The prompts


def test_bos_comes_once_and_no_end(pretrained):
    """A tokenizer may begin and end every text; no eos may stand before the completion, unless the
    chat template puts it there."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "<|im_end|>")]
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=special
    )
    assert tokenizer("1")["input_ids"][-1] == tokenizer.eos_token_id
    turns = "<s><|im_start|>user\n3+8 {A}:<|im_end|>\n<|im_start|>assistant\n"
    for template, text in [
        ("{{ bos_token }}" + tokenizer.chat_template, turns),
        ("{{ messages[0]['content'] }}<|im_end|>", "3+8 {A}:<|im_end|>"),
        (None, "<s>3+8 {A}:"),
    ]:
        tokenizer.chat_template = template
        (ids,) = grpo.encode_prompts([("3+8 {A}:", "11")], tokenizer)
        assert tokenizer.decode(ids) == text


# ---------------------------------------------------------------------------------- An evaluation


def test_scores_are_means_of_any_reward(short_run, monkeypatch, tmp_path):
    """pass@1 is of all samples, pass@8 of each problem's best. --steps 0 logs every score, and
    saves nothing. No more problems are asked at once than in training. The shell leaves the ~ of
    --output-dir=~/runs as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    reward_by(monkeypatch, grpo, lambda completion, answer: len(completion) ** 2 / -7)
    rollouts = calls_of(monkeypatch, grpo, "rollout")
    run_flags = {"steps": 0, "temperature": 1.5, "output_dir": "~/runs"}
    result = grpo.main(grpo.Args(**short_run | run_flags))
    assert Path(result["folder"]).parent == tmp_path / "runs"
    assert [(len(args[2]), *args[3:5]) for args, _ in rollouts] == [(4, 8, 1.5)] * 2
    rewards = torch.cat([rewards for _, (_, _, rewards) in rollouts])
    assert len(rewards.unique()) > 5
    assert result["eval/pass@1"] == pytest.approx(rewards.mean().item())
    assert result["eval/pass@8"] == pytest.approx(rewards.amax(1).mean().item())
    for name in ("eval/pass@1", "eval/pass@8", "eval/mean_length", "eval/clipped_ratio"):
        assert scalars(result["folder"], name) == [pytest.approx(result[name])]
    assert not list(Path(result["folder"]).glob("step-*"))


def test_what_is_shown_of_an_evaluation(monkeypatch, capsys, tmp_path):
    """Of the problem whose rewards differ most, in whichever part it was asked: the right answer,
    the best and the worst completion. At most 400 characters of each, and none that moves, colours
    or rings a terminal."""
    hostile = "\x1b[2J\x1b]0;title\x07\r\n\t\x00\u202e\x9b31m\ud800\u2028" + 10_000 * "x"
    problems = [(f"1+{i}", f"{1 + i}{hostile}") for i in range(3)]
    rewards = torch.zeros(3, 8)
    rewards[1, 2], rewards[1, 5], rewards[2, 0] = 1.5, -0.5, 1.0

    def rollout(model, tokenizer, part, *_):  # one problem at a time
        i = problems.index(part[0])
        batch = {"mask": torch.ones(8, 1), "ended": torch.ones(8) > 0}
        return batch, [f"#{8 * i + j}{hostile}" for j in range(8)], rewards[i : i + 1]

    monkeypatch.setattr(grpo, "rollout", rollout)
    args, writer = grpo.Args(prompts_per_step=1), SummaryWriter(tmp_path)
    grpo.evaluate(None, Characters(), problems, args, writer, 3)
    scores, problem, best, worst, end = lines = capsys.readouterr().out.split("\n")
    assert all(line.isprintable() and len(line) < 850 for line in lines) and end == ""
    assert scores.startswith("step 3: ") and ", right answer '2" in problem
    assert best.startswith("      reward 1.50: '#10") and worst.startswith(
        "      reward -0.50: '#13"
    )


def test_what_a_run_says_and_keeps(task_file, short_run):
    """It prints its flags, how many problems there are, each evaluation, the result and its folder;
    it keeps every completion of its evaluations, and its flags. This terminal knows ASCII alone. A
    notebook or a cluster may have set RANK, which counts only beside WORLD_SIZE."""
    run_flags = short_run | {"task": task_file(), "steps": 1, "max_new_tokens": 4}
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "RANK": "3"}
    process = run("grpo_llm.py", *flags(run_flags), environment=environment)
    args, lines = str(grpo.Args(**run_flags)), process.stdout.splitlines()
    assert lines[:2] == [args, "20 questions to train on, 8 to evaluate on"]
    evaluations = [line.partition(":")[0] for line in lines if ": eval/" in line]
    assert evaluations == ["step 0", "step 1"]
    (folder,) = Path(short_run["output_dir"]).iterdir()
    result = re.fullmatch(r"pass@1 (\S+) \? (\S+); \d+ s; model and logs in (.*)", lines[-1])
    logged = scalars(folder, "eval/pass@1")
    assert result.groups() == (*(f"{score:.3f}" for score in logged), str(folder))
    kept = [json.loads(line) for line in (folder / "completions.jsonl").open()]
    assert [row["step"] for row in kept] == [0] * 64 + [1] * 64
    assert all(row["prompt"] == f"test {row['answer'][0]}" for row in kept)
    means = [sum(row["reward"] for row in part) / 64 for part in (kept[:64], kept[64:])]
    assert means == pytest.approx(logged)
    (log,) = folder.glob("events*")
    assert args.encode() in log.read_bytes()


# -------------------------------------------------------------------------------------- The flags


@pytest.mark.parametrize("flag", [{"max_grad_norm": 0}, {"temperature": -1}, {"group_size": 1}])
def test_values_that_would_be_wrong_in_silence_are_refused(flag):
    refused(partial(grpo.Args, **flag))


def test_defaults_follow_from_model_and_task_unless_given():
    """5e-4 would ruin a real model in silence."""

    def chosen(**change):
        args = grpo.Args(**change)
        return args.learning_rate, args.max_new_tokens, args.micro_batch_size

    assert chosen() == (5e-4, 32, 256)
    assert chosen(model="some/model") == (1e-6, 32, 4)
    assert chosen(task="t.py") == (5e-4, 256, 256)
    assert chosen(learning_rate=0, max_new_tokens=0, micro_batch_size=0) == (0, 0, 0)


LOGGED = "reward", "completions/mean_length", "sampling/sampling_logp_difference/mean"
# Steps of warm-up, and the rate of each step
RATES = [(10, [0.5, 1]), (2, [0.5, 1, 0.75, 0.5, 0.25]), (0, [1, 0.75, 0.5, 0.25])]


@pytest.mark.parametrize("warmup,rates", RATES)
def test_rates_by_hand(warmup, rates, short_run, monkeypatch):
    """Up to the peak in the warm-up, or in all steps if these are fewer, and down towards 0."""
    used = []

    def train_step(model, reference, tokenizer, optimizer, *_):
        (group,) = optimizer.param_groups
        assert group["weight_decay"] == 0
        used.append(group["lr"])
        return dict.fromkeys(LOGGED, 0.0)

    monkeypatch.setattr(grpo, "train_step", train_step)
    run_flags = {"steps": len(rates), "warmup_steps": warmup, "learning_rate": 2e-4, "beta": 0.0}
    result = grpo.main(grpo.Args(**short_run | run_flags))
    assert used == pytest.approx([2e-4 * rate for rate in rates])
    assert scalars(result["folder"], "learning_rate") == pytest.approx(used)


def test_a_sampler_that_is_not_exact_ends_the_run(short_run, monkeypatch):
    """In one line at the first step: RWKV is such a model."""
    metrics = dict.fromkeys(LOGGED, 0.0) | {LOGGED[-1]: 0.2}
    monkeypatch.setattr(grpo, "train_step", lambda *_: metrics)
    line = refused(grpo.main, grpo.Args(**short_run))
    assert line.startswith("--model: its KV cache is inexact")
    assert not list(Path(short_run["output_dir"]).glob("*/step-*"))

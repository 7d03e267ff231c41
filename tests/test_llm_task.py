"""Problems, data files and the verifier."""

import json
import random
import re
import time
from itertools import islice

import pytest
from conftest import script

grpo = script("grpo_llm")

# The right number: completions that end in it, or do not, with ~ between them.
RIGHT = {
    "14": "#14~#14 apples~#14,~#14\n15~#14e0",
    "16": "11,16#16",
    "1234": "so it is\n#### 1,234",
    "1,234": "#### 1234",
    "72": "#### $72~####72~#### 72.00~#### 72.~#### \\boxed{72}~#### $\\boxed{72}$~"
    "#### \\boxed{\\$72}~#### **72**~**#### 72**~#### 72 \n~#### 72 dollars~"
    "#### 72\nShe has 72 clips, not 80.~#### 72. That is all.",
    "0.5": "#### 0.50",
    "-3": "#### -3",
    "3": "#### +3",
    "-1000": "#### -$1,000.0",
    "-5": "#### $-5",
    "5": "#### 5%~#### 5\\%",
    "2": "# 1 # 2",
    "7": "#### 007",
    "0": "#### -0",
    "1234567.5": "#### 1,234,567.50",
    "123456789012345678901234567890": "#### 123456789012345678901234567890",
}
WRONG = {
    "14": "#15~14~~#~#14#~#14#15~# 1 4~#1,4~#,14~#2*7~#7+7~#0xE~#--14~#-14~#1.4~#14.5~#１４~"
    "#١٤~# answer 14~#\\boxed{1}4~#1_4~#9**9**9**9~#__import__('os').abort()~#1.4.",
    "0": "####",
    "5": "#.5",
    "1234": "#12,34",
    "12345": "#1,2345",
    "2": "#²",
    "nan": "#nan",
    "inf": "#inf",
    "None": "#None",
    "123456789012345678901234567890": "#123456789012345678901234567891",
    "0.1": "#0.1000000000000000055",
    "72": "#### 720~#### 72#### 80~72 dollars~#### about 72",
}


@pytest.mark.parametrize("cases,reward", [(RIGHT, 1.0), (WRONG, 0.0)])
def test_right_wrong_and_hostile_completions(cases, reward):
    for answer, completions in cases.items():
        for completion in completions.split("~"):
            assert grpo.verify(completion, answer) == reward, (completion, answer)


def test_lenient_reads_the_last_number():
    for completion, number in [
        ("the answer is 16", "16"),
        ("11,16#16", "16"),
        ("11,16", "16"),
        ("first 16, then 17.", "17"),
        ("no number", ""),
        ("costs $1,234.00 in all", "$1,234.00"),
        ("-3", "-3"),
    ]:
        assert grpo.last_number(completion) == number
    assert grpo.verify("#" + grpo.last_number("it costs $1,234.00"), "1234") == 1.0
    assert grpo.verify("#" + grpo.last_number("no number"), "0") == 0.0


@pytest.mark.parametrize(
    "piece", ["7", "#", "#7", "1,", "1,234", " ", "\\boxed{", "{", "*", "7.", "-", "$", "0", "\n#"]
)
def test_linear_in_the_length(piece):
    """200,000 characters of any of these in well under a second; a quadratic reader needs many."""
    text = piece * (200_000 // len(piece))
    for completion in (text, "#" + text, text + "x", "#" + text + "#1x"):
        for read in (lambda text: grpo.verify(text, "7"), grpo.last_number):
            start = time.perf_counter()
            read(completion)
            assert time.perf_counter() - start < 1.0


def test_fuzz_never_raises_and_agrees_with_gsm8ks_own_regex():
    """Random strings of the verifier's alphabet. Where the regex that came with GSM8K finds the
    right number after the last marker, so do we; where we find it, it stands there."""
    official = re.compile(r"#### (\-?[0-9\.\,]+)")
    rng, rewarded, agreed = random.Random(0), 0, 0
    for _ in range(100_000):
        text = "#### " + "".join(rng.choice("0123,.$*{- \nx٣") for _ in range(rng.randint(0, 6)))
        found = grpo.verify(text, "12")
        theirs = official.match(text)
        if theirs and theirs[1].replace(",", "") == "12" and "," not in theirs[1][:-1]:
            agreed += 1
            assert found == 1.0, repr(text)
        if found:
            rewarded += 1
            digits = text.removeprefix("####").lstrip(" $*{\n")
            assert re.match(r"0*12(?![0-9])(?!\.[0-9]*[1-9])", digits), repr(text)
    assert rewarded > 50 and agreed > 20


def test_sums_are_right_and_sides_are_disjoint():
    """As a run gets them: the stream that it trains on, and what it evaluates on."""
    train = set(islice(grpo.problem_stream(None, 1), 20_000))
    held_out = set(grpo.load_data(grpo.Args(eval_problems=5_000))[1])
    assert len(held_out) > 800 and not {q for q, _ in train} & {q for q, _ in held_out}
    for question, answer in train | held_out:
        terms = question[:-1].split("+")
        assert (
            question.endswith("=") and 2 <= len(terms) <= 4 and sum(map(int, terms)) == int(answer)
        )


def write(path, rows):
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows),
        encoding="utf-8",
    )
    return str(path)


def gsm(n, offset=0):
    return [
        {
            "question": f"What is {i} + {i}?",
            "answer": f"{i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i:,}",
        }
        for i in range(offset, offset + n)
    ]


def args_for(**kwargs):
    return grpo.Args(model="somewhere", **kwargs)


def test_jsonl_split_is_fixed_and_disjoint(tmp_path):
    # twenty questions twice, on both ends
    path = write(tmp_path / "d.jsonl", gsm(500, 600) + gsm(20, 600))
    train, held_out = grpo.load_data(args_for(dataset=path))
    assert held_out[0] == ("What is 600 + 600?", "1,200") and len(held_out) == 53
    assert not {q for q, _ in train} & {q for q, _ in held_out} and len(train) == 447
    assert (train, held_out) == grpo.load_data(args_for(dataset=path))


def test_eval_dataset_is_kept_out_of_training(tmp_path):
    train_file = write(tmp_path / "t.jsonl", gsm(20))
    eval_file = write(tmp_path / "e.jsonl", gsm(10, 15))
    train, held_out = grpo.load_data(
        args_for(dataset=train_file, eval_dataset=eval_file, eval_problems=7)
    )
    assert len(train) == 15 and len(held_out) == 7
    train, held_out = grpo.load_data(args_for(eval_dataset=eval_file))
    assert train is None and len(held_out) == 10


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "7",
        "[]",
        '{"question": "q"}',
        '{"question": "q", "answer": 5}',
        '{"question": "q", "answer": "no number"}',
        '{"question": null, "answer": "#### 5"}',
        '{"question": "q", "answer": "#### five"}',
        "",
        "[" * 100_000,
    ],
)
def test_bad_line_is_named_by_its_number(tmp_path, refused, line):
    path = write(tmp_path / "d.jsonl", gsm(2) + [line] + gsm(2))
    assert (
        "--dataset" in (error := refused(grpo.load_data, args_for(dataset=path)))
        and "line 3" in error
    )


def test_files_that_are_not_there_or_empty_or_binary(tmp_path, refused):
    assert "--dataset" in refused(grpo.load_data, args_for(dataset=str(tmp_path / "none.jsonl")))
    assert "--dataset" in refused(grpo.load_data, args_for(dataset=str(tmp_path)))
    (tmp_path / "empty.jsonl").touch()
    assert "empty" in refused(grpo.load_data, args_for(dataset=str(tmp_path / "empty.jsonl")))
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)))
    assert "--dataset" in refused(grpo.load_data, args_for(dataset=str(tmp_path / "binary.jsonl")))
    one = write(tmp_path / "one.jsonl", gsm(1))
    assert "held out" in refused(grpo.load_data, args_for(dataset=one))
    assert "--eval-dataset" in refused(
        grpo.load_data, args_for(dataset="arithmetic", eval_dataset=str(tmp_path / "x"))
    )

"""Problems and data files."""

import json
import zlib

import pytest
from conftest import script

grpo = script("grpo_llm")


def test_sums_are_right_and_held_out_ones_are_what_they_have_always_been():
    """The side follows from the checksum of the question with a "=", so that no sum is on both, and
    old and new scores can be compared."""
    train, held_out = grpo.load_data(grpo.Args(eval_problems=5_000))
    assert held_out[:2] == [("4+7+5+9+3", "28"), ("7+5+3+5+1+3", "24")]
    assert len(set(train)) > 3_000 and len(set(held_out)) > 800
    for side, problems in enumerate((train, held_out)):
        for question, answer in problems:
            terms = question.split("+")
            assert 2 <= len(terms) <= 6 and sum(map(int, terms)) == int(answer)
            assert (zlib.crc32(f"{question}=".encode()) % 10 == 0) == side


def write(path, rows, mark=""):
    text = mark + "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(path)


def gsm(n, offset=0):
    rows = []
    for i in range(offset, offset + n):
        answer = f"{i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i:,}"
        rows.append({"question": f"What is {i} + {i}?", "answer": answer})
    return rows


def test_jsonl_split_is_fixed_and_disjoint(tmp_path):
    """Held out are questions whose checksum is in the lowest tenth of its range, so that a question
    stays on its side when the file grows. One that
    comes twice, also with blanks around it, has its last answer; blank lines are skipped, and the
    file may begin with a byte-order mark."""
    wrong = [{"question": f" {row['question']}\n", "answer": 0} for row in gsm(20, 600)]
    path = write(tmp_path / "d.jsonl", [*wrong, "", "  ", *gsm(500, 600), ""], mark="\ufeff")
    train, held_out = grpo.load_data(grpo.Args(dataset=path))
    sums = {f"What is {i} + {i}?" for i in range(600, 1100)}
    lowest = {question for question in sums if zlib.crc32(question.encode()) / 2**32 < 0.1}
    assert {q for q, _ in held_out} == lowest and len(held_out) == len(lowest) > 30
    assert {q for q, _ in train} == sums - lowest and len(train) == 500 - len(lowest)
    assert ("What is 600 + 600?", "1,200") in train + held_out
    args = grpo.Args(dataset=path, eval_problems=10)
    assert grpo.load_data(args) == (train, held_out[:10])


TRAIN = [(f"{i}?", str(i)) for i in range(20)]


def asked(steps, draw=0, **flags):
    """The problems of the first steps, one after the other."""
    args, problems = grpo.Args(**flags), []
    for step in range(1, steps + 1):
        problems += grpo.next_problems(TRAIN, step, args, draw)
    return problems


@pytest.mark.parametrize("size", [4, 6, 20, 32])
def test_each_pass_over_the_data_has_every_question_once(size):
    """Also where the size of a step does not divide the data, or is larger. Each pass has an order
    of its own, which follows from the seed."""
    found = asked(-(-60 // size), prompts_per_step=size)[:60]
    passes = [found[i : i + 20] for i in (0, 20, 40)]
    assert all(sorted(once) == sorted(TRAIN) for once in passes)
    assert passes[0] != passes[1] != passes[2] and passes[0] != TRAIN
    assert asked(1, prompts_per_step=60) == found
    assert asked(1, prompts_per_step=60, seed=2) != found != asked(1, draw=1, prompts_per_step=60)
    assert asked(1, draw=1, prompts_per_step=20) not in passes


def test_eval_dataset_takes_nothing_out_of_training(tmp_path, capsys):
    own = {"dataset": write(tmp_path / "t.jsonl", gsm(20)), "eval_problems": 7}
    own["eval_dataset"] = write(tmp_path / "e.jsonl", gsm(10, 15))
    train, held_out = grpo.load_data(grpo.Args(**own))
    assert len(train) == 20 and len(held_out) == 7
    sums, held_out = grpo.load_data(grpo.Args(eval_dataset=own["eval_dataset"]))
    assert len(sums) == 10_000 and held_out[0][0].startswith("What is ")
    assert "5 questions are in both" in capsys.readouterr().out


BAD = ["{", "7", "[]", '{"question": "q"}', '{"question": "q", "answer": "no number"}']
BAD += ['{"question": null, "answer": "#### 5"}', '{"question": "q", "answer": "#### five"}']
BAD += ['{"question": "q", "answer": " "}', '{"question": " ", "answer": 1}']
BAD += ["[" * 100_000, '{"question": "' + "\udce9" * 5000 + '", "answer": 1}']  # é in Latin-1


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_bad_line_is_named_by_its_number(tmp_path, refused, line):
    good = write(tmp_path / "good.jsonl", gsm(4))
    path = write(tmp_path / "bad.jsonl", gsm(2) + [line] + gsm(2))
    error = refused(grpo.load_data, grpo.Args(dataset=path))
    assert f"--dataset {path}, line 3: " in error and len(error) < 420
    error = refused(grpo.load_data, grpo.Args(dataset=good, eval_dataset=path))
    assert f"--eval-dataset {path}, line 3: " in error and "--dataset" not in error


def test_files_that_are_not_there_or_have_too_few_questions(tmp_path, refused):
    write(tmp_path / "empty.jsonl", [])
    for name in ("none.jsonl", "", "empty.jsonl"):
        path = str(tmp_path / name)
        assert f"--dataset {path}" in refused(grpo.load_data, grpo.Args(dataset=path))
        if name:
            args = grpo.Args(eval_dataset=path)
            assert f"--eval-dataset {path}" in refused(grpo.load_data, args)
    same = write(tmp_path / "same.jsonl", gsm(1) * 20)
    assert "no question is left" in refused(grpo.load_data, grpo.Args(dataset=same))
    two = write(tmp_path / "two.jsonl", gsm(2))
    assert [len(side) for side in grpo.load_data(grpo.Args(dataset=two))] == [1, 1]
    null = write(tmp_path / "null.jsonl", ['{"question": "q", "answer": null}'])
    assert "line 1" in refused(grpo.load_data, grpo.Args(dataset=null, verifier="any.py"))

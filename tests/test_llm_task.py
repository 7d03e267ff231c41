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
    stays on its side when the file grows, or the first one. One that comes twice has its last
    answer; blank lines are skipped, and the file may begin with a byte-order mark."""
    wrong = [{"question": row["question"], "answer": 0} for row in gsm(20, 600)]
    path = write(tmp_path / "d.jsonl", [*wrong, "", "  ", *gsm(500, 600), ""], mark="\ufeff")
    train, held_out = grpo.load_data(grpo.Args(dataset=path))
    sums = {f"What is {i} + {i}?" for i in range(600, 1100)}
    lowest = {question for question in sums if zlib.crc32(question.encode()) / 2**32 < 0.1}
    assert {q for q, _ in held_out} == lowest and len(held_out) == len(lowest) > 30
    assert {q for q, _ in train} == sums - lowest and len(train) == 500 - len(lowest)
    assert ("What is 600 + 600?", "1,200") in train + held_out
    args = grpo.Args(dataset=path, eval_problems=10)
    assert grpo.load_data(args) == (train, held_out[:10])
    high = [row for row in gsm(500, 600) if row["question"] not in lowest][:5]
    args = grpo.Args(dataset=write(tmp_path / "few.jsonl", high), **STEPS_OF_4)
    assert [len(side) for side in grpo.load_data(args)] == [4, 1]


STEPS_OF_4 = {"prompts_per_step": 4}
TRAIN = [(f"{i}?", str(i)) for i in range(20)]


def asked(steps, draw=0, **flags):
    """The problems of the first steps, one after the other."""
    args, problems = grpo.Args(minibatches=1, **flags), []
    for step in range(1, steps + 1):
        problems += grpo.next_problems(TRAIN, step, args, draw)
    return problems


@pytest.mark.parametrize("size", [4, 6, 20])
def test_a_pass_over_the_data_has_no_question_twice(size):
    """Questions left over, too few for a step, are not asked. Each pass has an order of its own,
    which follows from the seed and the draw."""
    used = 20 // size * size
    found = asked(3 * (20 // size), prompts_per_step=size)
    passes = [found[i : i + used] for i in range(0, 3 * used, used)]
    assert all(len(set(once)) == used and set(once) <= set(TRAIN) for once in passes)
    assert passes[0] != passes[1] != passes[2] and passes[0] != TRAIN[:used]
    assert found == asked(3 * (20 // size), prompts_per_step=size)
    for other in ({"seed": 2}, {"draw": 1}):
        assert asked(20 // size, prompts_per_step=size, **other) not in passes


def test_questions_of_eval_dataset_leave_the_training_data(tmp_path):
    """A file may be scored as a whole: --steps 0 needs nothing to train on."""
    path = write(tmp_path / "t.jsonl", gsm(20))
    own = {"dataset": path, "eval_dataset": write(tmp_path / "e.jsonl", gsm(10, 15))}
    train, held_out = grpo.load_data(grpo.Args(**own, eval_problems=7, **STEPS_OF_4))
    assert len(train) == 15 and len(held_out) == 7
    assert {i for i in range(20) if (f"What is {i} + {i}?", f"{2 * i}") in train} == set(range(15))
    sums, held_out = grpo.load_data(grpo.Args(eval_dataset=own["eval_dataset"]))
    assert len(sums) == 10_000 and held_out[0][0].startswith("What is ")
    _, held_out = grpo.load_data(grpo.Args(dataset=path, eval_dataset=path, steps=0))
    assert len(held_out) == 20


BAD = ["{", "7", "[]", '{"question": "q"}', '{"question": "q", "answer": "no number"}']
BAD += ['{"question": null, "answer": "#### 5"}', '{"question": "q", "answer": "#### five"}']
BAD += ['{"question": "q", "answer": " "}', '{"question": " ", "answer": 1}']
BAD += ["[" * 100_000, '{"question": "' + "\udce9" * 5000 + '", "answer": 1}']  # é in Latin-1
BAD = [("", line) for line in BAD]
BAD += [("any verifier", f'{{"question": "q", "answer": {answer}}}') for answer in ('""', "null")]


@pytest.mark.parametrize("verifier,line", BAD, ids=range(len(BAD)))
def test_bad_line_is_named_by_its_number(tmp_path, refused, verifier, line):
    """An empty answer would be right for some verifiers, whatever the model says."""
    good = write(tmp_path / "good.jsonl", gsm(4))
    path = write(tmp_path / "bad.jsonl", gsm(2) + ["", line] + gsm(2))
    own = {"verifier": str(tmp_path)} if verifier else {}
    for files in ({"dataset": path}, {"dataset": good, "eval_dataset": path}):
        error = refused(grpo.load_data, grpo.Args(**files, **own))
        assert error.startswith(f'{path}, line 4: needs a "question" and an "answer": ')


@pytest.mark.parametrize("size,trained,held_out", [(0, 0, 0), (4, 3, 1), (20, 20, 0)])
def test_too_few_questions(size, trained, held_out, tmp_path, refused):
    """To train on, to evaluate on, or both."""
    own = {"dataset": write(tmp_path / "d.jsonl", gsm(size))}
    if size == 20:
        own["eval_dataset"] = write(tmp_path / "e.jsonl", [])
    line = refused(grpo.load_data, grpo.Args(**own, **STEPS_OF_4))
    counts = f"{trained} questions to train on and {held_out} to evaluate on"
    assert line == f"--dataset {own['dataset']}: {counts}; a step needs 4"


def test_what_a_row_holds_besides(tmp_path, capsys):
    """Other fields, such as a story problem's body or the choices, are named once. And the blanks
    before a question may be code's indentation."""
    rows = [row | {"body": "Ann has", "choices": [1]} for row in gsm(3)]
    rows.append({"question": "    return 1 + 1\n", "answer": 2})
    path = write(tmp_path / "d.jsonl", rows)
    problems = grpo.load_jsonl(path, grpo.Args())
    assert ("    return 1 + 1\n", "2") in problems
    said = capsys.readouterr().out
    assert said == f"{path}: these fields are not used: ['body', 'choices']\n"

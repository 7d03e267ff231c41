"""The verifiers: the built-in one, the examples, and a file of the reader's own."""

import json
import re
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from conftest import ROOT, Characters, last_checkpoint, random_model, script

grpo = script("grpo_llm")
EXAMPLES = ROOT / "tests/examples/verifiers"

# The right number: completions that end in it, or do not, with ~ between them.
RIGHT = {
    "14": "#14~# 14\n~#14.0~12,14#14~#15#14~#15\n# 14~#014",
    "1234": "so it is\n#### 1,234~#### 1,234.00~#1234",
    "1,234": "#### 1234~####\u00a01234.00",
    "0.5": "#### 0.50",
    "-3": "#### -3~####-3.0",
    "0": "#### -0~#0.00",
    "1234567.5": "#### 1,234,567.50",
    "123456789012345678901234567890": "#### 123456789012345678901234567890",
}
WRONG = {
    "14": "#15~14~~#~#14#~#14#15~# 1 4~#1,4~#,14~#14,~#14 apples~#14 15~#14\n15~#14e0~#+14~#2*7~"
    "#7+7~#0xE~#--14~#-14~#1.4~#14.5~#１４~#١٤~# answer 14~#1_4~#9**9**9~#1.4.~#14..~#(14)~#14%~"
    "#__import__('os').abort()~#€14~#\\boxed{14}~#**14**~#14 .",
    "0": "####~#.~#-",
    "0.5": "#.5",
    "1000": "#### 1'000~#### 1\u202f000~#### 1 000~#### 1{,}000~#10,00~#1,00,0",
    "12345": "#1,2345~#12,34,5",
    "72": "#$72~#72.",
    "0.1": "#0.1001",
    "9007199254740993": "#9007199254740992",  # equal as floats
    "1" + "0" * 400: "#1" + "0" * 399 + "1~#1" + "0" * 401,
}


@pytest.mark.parametrize("cases,reward", [(RIGHT, 1.0), (WRONG, 0.0)], ids=["right", "wrong"])
def test_right_wrong_and_hostile_completions(cases, reward):
    for answer, completions in cases.items():
        for completion in completions.split("~"):
            assert grpo.verify(completion, answer) == reward, (completion, answer)


LONG = ["7", "#7", "1,", " ", "\\boxed{", "7.", "2003-", "[", '{"answer":', '"', "9\\,", "1 234"]


@pytest.mark.parametrize("piece", LONG)
def test_linear_in_the_length(piece):
    """200,000 characters take less than a second of CPU time, and deep nesting raises nothing."""
    text = piece * (200_000 // len(piece))
    completions = [text, "#" + text, text + "x", "#" + text + "#1x"]
    completions += [f'{{"answer": {text}}}', f'{{"answer": "{text}"}}']
    verifiers = [grpo.verify, *(grpo.load_verifier(str(path)) for path in EXAMPLES.glob("*.py"))]
    for verify, completion in product(verifiers, completions):
        start = time.process_time()
        verify(completion, "7")
        assert time.process_time() - start < 1.0


@pytest.fixture
def own(tmp_path):
    """Call it with a source: the path of a verifier's file, whose name no other test has."""

    def write(source):
        path = tmp_path / f"{tmp_path.name}_verifier.py"
        path.write_text(source)
        return str(path)

    return write


ANSWERS = ["blue", "#### 5", 5, 2.5, ["a", "b"], {"x": [1, None]}, " spaces ", "x", True, [], 0]


def test_a_file_gets_answers_of_any_json_type_as_they_stand(own, tmp_path):
    """A list of right answers stays a list. But 27.0 is 27: so a data frame writes whole numbers if
    one is missing. The file is run once: it may load a model."""
    data = tmp_path / "d.jsonl"
    rows = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate([*ANSWERS, 27.0])]
    data.write_text("\n".join(map(json.dumps, rows)))
    source = "seen = []\ndef verify(completion, answer):\n    seen.append(answer)\n    return 1"
    args = grpo.Args(verifier=own(source), dataset=str(data))
    problems = grpo.load_jsonl(str(data), args)
    found = [dict(problems)[f"q{i}"] for i in range(len(rows))]
    assert list(map(repr, found)) == list(map(repr, [*ANSWERS, 27]))
    grpo.rollout(random_model(), Characters(), problems, 2, 1.0, args)
    seen = grpo.load_verifier(args.verifier).__globals__["seen"]
    assert list(map(repr, seen)) == [repr(answer) for _, answer in problems for _ in range(2)]
    assert sys.path.count(str(tmp_path)) == 1  # loaded once, though asked for twice


def rollout(path):
    given = random_model(), Characters(), [("1+2", "3")], 2, 1.0
    return grpo.rollout(*given, grpo.Args(verifier=path))


def test_a_file_s_neighbour_comes_before_a_package_and_may_start_processes(tmp_path, monkeypatch):
    """The neighbour is taken, though another module of its name is installed; but no module beside
    the script is hidden. A new process finds the verifier's functions by the name of its file."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "beside_the_verifier.py").write_text("HALF = 0.1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    script_folder = sys.path[0]
    (tmp_path / "beside_the_verifier.py").write_text("HALF = 0.5\n")
    path = tmp_path / "verifier_with_a_pool.py"
    path.write_text("""
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from beside_the_verifier import HALF

def score(text):
    return HALF

def verify(completion, answer):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(score, completion).result()
""")
    assert grpo.load_verifier(str(path))("#3", "3") == 0.5
    assert sys.path[:2] == [script_folder, str(tmp_path)]


def test_a_verifier_may_change_the_folder(own, short_run, monkeypatch, tmp_path):
    """Its own path and the run's folder are then no longer where they were."""
    source = (
        "import os\ndef verify(completion, answer):\n    os.chdir('/')\n    return len(completion)"
    )
    path = own(source)
    monkeypatch.chdir(tmp_path)
    flags = short_run | {"output_dir": "runs", "verifier": Path(path).name, "steps": 1}
    result = grpo.main(grpo.Args(**flags))
    assert last_checkpoint(result["folder"]).is_relative_to(tmp_path)


BROKEN = {  # the body of verify, the error, and what it says
    "raises": ("return 1 / 0", ZeroDivisionError, "division by zero"),
    "exits": ("exit()", RuntimeError, "--verifier {} called exit()"),
    "exits at import": ("pass\nexit(0)", RuntimeError, "--verifier {} called exit()"),
    "no number": ("return 'right'", ValueError, "could not convert string to float: 'right'"),
    "nothing": ("return None", TypeError, "not 'NoneType'"),
    "a pair": ("return 1.0, 'why'", TypeError, "not 'tuple'"),
    "a dict": ("return {'score': 1.0}", TypeError, "not 'dict'"),
    "another name": ("pass\ncheck = verify\ndel verify", AttributeError, "no attribute 'verify'"),
}


@pytest.mark.parametrize("body,error,said", BROKEN.values(), ids=BROKEN)
def test_what_a_verifier_raises_ends_the_run(body, error, said, own):
    """SystemExit is another error: it would end the run with status 0 and no word."""
    path = own(f"def verify(completion, answer):\n    {body}\n")
    with pytest.raises(error, match=re.escape(said.format(path))):
        rollout(path)


# File: rows of an answer, a reward, and completions that earn it, with ~ between them.
CASES = {
    "exact_text": [
        ("Yes", 1.0, "Yes~yes~YES~Yes.~ Yes \n~\tyes."),
        ("Yes.", 1.0, "Yes~Yes."),
        ("Yes", 0.0, "~No~Yes!~Yes, it is~Yes No~Yes..~'Yes'~Y es~Үes~__import__('os').abort()"),
        ("63", 0.0, "063~63.0~6 3~٦٣~The answer is 63."),
        ("caf\u00e9", 1.0, "caf\u00e9~cafe\u0301~CAFE\u0301."),  # composed or not
    ],
    "iso_date": [
        ("2003-07-28", 1.0, "2003-07-28~It is 2003-07-28.~:2003-07-28~2003-07-27, no, 2003-07-28"),
        ("2003-07-28", 1.0, "28 July 2003: 2003-07-28~2003-07-28 .\n~Is it 2003-7-8? 2003-07-28. "),
        ("2003-07-28", 0.0, "~28 July 2003~2003-7-28~2003/07/28~2003-07-28 to 2003-07-29"),
        ("2003-07-28", 0.0, "2003-07-28..~2003-07-28T10:00~2003-07-28 or 2003-7-8~(2003-07-28)"),
        ("2003-07-28", 0.0, "12003-07-28~2003-07-281~2003 - 07 - 28~٢٠٠٣-٠٧-٢٨~2003-07-2"),
        ("1957-07-26", 0.0, "2019-07-26-1957-07-26~2019-07-26-1957-07-26-07~1957-07-26-"),
    ],
    "last_number": [
        ("16", 1.0, "the answer is 16~11,16#16~11,16~first 17, then 16.~#### 17\nno, 16~5+11=16"),
        ("16", 1.0, "**16**~\\boxed{16}.~16%~016~16.0~16e~x16y~#### 16 #~20-16"),
        ("16", 0.0, "~no number~#~16 and 17~1 6~16.5~-16~１６~١٦~#### 16 (step 2)~16.4.~1,6~0x1F"),
        ("so 8 + 8 = 16\n#### 16", 1.0, "16"),
        ("1,234", 1.0, "costs $1,234.00 in all~1,234~12,1234"),
        (-3, 1.0, "-3~so it is -3.~#-3~-$3~\u22123"),
        (0.5, 1.0, "0.5~.5~$.50"),
        (0, 0.0, "none~####~-~$~."),
        ("9", 0.0, "9**9**9**8~nan~inf~Infinity~9e5~__import__('os').abort()"),
        (0.1 + 0.2, 1.0, "0.3"),
        ("9500", 1.0, "9{,}500~9\\,500~9 500~9\u202f500~9\u00a0500.~is 9 500 in all"),
        ("500", 0.0, "9{,}500~9\\,500~9 500~9\u202f500"),
    ],
    "json_field": [
        ("85", 1.0, '{"answer": 85}~{"answer": "85"}~ {"sum": 1, "answer": 85}\n'),
        (2.5, 1.0, '{"answer": 2.5}~{"answer": "2.5"}'),
        ("Łódź", 1.0, '{"answer": "Łódź"}~{"answer": "\\u0141\\u00f3d\\u017a"}'),
        ("85", 0.2, '{"answer": 86}~{"answer": null}~{"answer": [85]}~{"answer": {"answer": 85}}'),
        ("85", 0.2, '{"answer": 85, "answer": 7}~{"answer": NaN}~{"answer": 1e999}~{"answer": ""}'),
        ("1", 0.2, '{"answer": true}~{"answer": 1.01}~{"answer": "1 "}'),
        ("85", 0.0, '~85~"answer"~[85]~["answer"]~{}~{"sum": 85}~{"Answer": 85}~null~{answer: 85}'),
        ("85", 0.0, '{"answer": 85~So {"answer": 85}~{"answer": 80 + 5}~{"answer": 085}'),
        ("85", 0.0, '{"answer": __import__("os").abort()}~{"answer": 85}{"answer": 85}'),
    ],
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_reward_right_wrong_and_hostile_completions(path):
    verify = grpo.load_verifier(str(path))
    for answer, reward, completions in CASES[path.stem]:
        for completion in completions.split("~"):
            assert verify(completion, answer) == reward, (completion, answer)

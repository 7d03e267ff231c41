"""The verifiers: the built-in one, the examples, and a file of the reader's own."""

import json
import sys
import time
from itertools import product
from types import SimpleNamespace

import pytest
from conftest import ROOT, Characters, random_model, script

grpo = script("grpo_llm")
EXAMPLES = ROOT / "tests/examples/verifiers"

# The right number: completions that end in it, or do not, with ~ between them.
RIGHT = {
    "14": "#14~# 14\n~#### 14.~#14.0~12,14#14~#15#14~#15\n# 14~#014",
    "1234": "so it is\n#### 1,234~#### $1,234.00~#1234~#$1234.",
    "1,234": "#### 1234~####1,234.",
    "$72": "#### 72~#### 72.00~####\u00a072",
    "0.5": "#### 0.50~#### $0.5",
    "0.30000000000000004": "#0.3",
    "-3": "#### -3~####-3.0~#-$3",
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
    "0.1": "#0.1001",
}


@pytest.mark.parametrize("cases,reward", [(RIGHT, 1.0), (WRONG, 0.0)], ids=["right", "wrong"])
def test_right_wrong_and_hostile_completions(cases, reward):
    for answer, completions in cases.items():
        for completion in completions.split("~"):
            assert grpo.verify(completion, answer) == reward, (completion, answer)


LONG = [
    "7",
    "#7",
    "1,",
    " ",
    "\\boxed{",
    "7.",
    "2003-",
    "[",
    '{"answer":',
    '"',
    "9\\,",
    "1 234",
    "- ",
]


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


def test_a_file_gets_answers_of_any_json_type_unchanged(own, tmp_path):
    """A list of right answers stays a list. The file is run once: it may load a model."""
    data = tmp_path / "d.jsonl"
    rows = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate(ANSWERS)]
    data.write_text("\n".join(map(json.dumps, rows)))
    source = "seen = []\ndef verify(completion, answer):\n    seen.append(answer)\n    return 1"
    args = grpo.Args(verifier=own(source), dataset=str(data))
    problems = grpo.load_jsonl("--dataset", str(data), args)
    assert dict(problems) == {f"q{i}": answer for i, answer in enumerate(ANSWERS)}
    grpo.rollout(random_model(), Characters(), problems, 2, 1.0, args)
    seen = grpo.load_verifier(args.verifier).__globals__["seen"]
    expected = [answer for _, answer in problems for _ in range(2)]
    assert seen == expected and list(map(type, seen)) == list(map(type, expected))
    assert sys.path.count(str(tmp_path)) == 1  # loaded once, though asked for twice


def rollout(name):
    given = random_model(), Characters(), [("1+2", "3")], 2, 1.0
    return grpo.rollout(*given, grpo.Args(verifier=name))


def test_a_file_may_import_another_beside_it_and_start_processes(tmp_path):
    """A new process finds the verifier's functions by the name of its file."""
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


BROKEN = {  # source, and what the traceback shows
    "raises": ("def verify(completion, answer):\n    return 1 / 0", "line 2, in verify"),
    "exits": ("def verify(completion, answer):\n    exit()", "line 2, in verify"),
    "no number": ("def verify(completion, answer):\n    return 'right'", "could not convert"),
    "exits at import": ("import sys\nsys.exit(0)", "line 2, in <module>"),
    "NaN": ("def verify(completion, answer):\n    return float('nan')", ""),
    "too large for float32": ("def verify(completion, answer):\n    return 1e39", ""),
    "another name": ("def check(completion, answer):\n    return 1", "no attribute 'verify'"),
}


@pytest.mark.parametrize("source,shown", BROKEN.values(), ids=BROKEN)
def test_what_a_verifier_raises_is_shown_and_blamed_on_it(source, shown, own, capsys):
    """SystemExit, too, which would end the run with status 0 and no word."""
    name = own(source)
    with pytest.raises(SystemExit) as caught:
        rollout(name)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and shown in said
    last = said.splitlines()[-1]
    assert last.startswith(f"error: --verifier {name}: no finite number from its verify")


def test_a_file_that_is_not_there_or_has_another_module_s_name(tmp_path, refused, monkeypatch):
    """The other module has a verify, too, which must not be taken for the file's."""
    (tmp_path / "taken.py").write_text("def verify(completion, answer):\n    return 1.0\n")
    monkeypatch.setitem(sys.modules, "taken", SimpleNamespace(verify=lambda *_: 0.0))
    for path in (tmp_path / "taken.py", tmp_path / "nowhere.py"):
        assert f"--verifier {path}" in refused(rollout, str(path))


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

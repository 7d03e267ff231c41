"""What the example verifiers compare: values, not how they are written, and numbers exactly."""

import pytest
from conftest import ROOT, script

VERIFIERS = ROOT / "tests/examples/verifiers"
BIG = 10**12 + 1  # 13 digits; 10**400 is beyond float's range

# Answer in the data, completion, reward: null, true and NaN are no text, however they are printed.
JSON_FIELD = [
    ("None", '{"answer": null}', 0.2),
    ("null", '{"answer": null}', 0.2),
    ("nan", '{"answer": NaN}', 0.2),
    ("NaN", '{"answer": NaN}', 0.2),
    ("True", '{"answer": true}', 0.2),
    ("true", '{"answer": true}', 0.2),
    (1, '{"answer": true}', 0.2),
    (True, '{"answer": true}', 1.0),
    (True, '{"answer": 1}', 0.2),
    ([1, 2], '{"answer": [1, 2]}', 1.0),
    ([1, 2], '{"answer": "[1, 2]"}', 0.2),
    ("[1, 2]", '{"answer": [1, 2]}', 0.2),
    ([True], '{"answer": [1]}', 0.2),
    ({"x": ["é"]}, '{"answer": {"x": ["e\u0301"]}}', 1.0),
    ("é", '{"answer": "e\u0301"}', 1.0),  # two ways to write the letter
    ("e\u0301", '{"answer": "é"}', 1.0),
    (85, '{"answer": 85.0}', 1.0),
    ("85", '{"answer": 85.0}', 1.0),
    (85, '{"answer": "85"}', 1.0),
    (0.1, '{"answer": 1e-1}', 1.0),
    (BIG, f'{{"answer": {BIG}}}', 1.0),
    (BIG, f'{{"answer": {BIG + 1}}}', 0.2),
    (10**17, f'{{"answer": {10**17 + 1}.0}}', 0.2),
    (10**400, f'{{"answer": {10**400 + 1}}}', 0.2),
    (1, '{"answer": 1e99999999999999999999}', 0.0),
    ("1_0", '{"answer": 10}', 0.2),
]
LAST_NUMBER = [
    (BIG, f"It is {BIG:,}.", 1.0),
    (BIG, f"It is {BIG + 1:,}.", 0.0),
    (str(10**400), f"#### {10**400}", 1.0),
    (str(10**400), f"#### {10**400 + 1}", 0.0),
    ("0.1", "0.10000000001", 0.0),
    ("72.0", "72", 1.0),
    (72, "72.00", 1.0),
    (1e-7, "0.0000001", 1.0),  # str(1e-7) ends in 07
    (1e-7, "7", 0.0),
    (0.1 + 0.2, "0.3", 1.0),
    ("no number", "none either", 0.0),
]
CASES = [("json_field", *case) for case in JSON_FIELD]
CASES += [("last_number", *case) for case in LAST_NUMBER]


@pytest.mark.parametrize("name,answer,completion,reward", CASES, ids=lambda case: str(case)[:30])
def test_values_are_compared(name, answer, completion, reward):
    verify = script("grpo_llm").load_verifier(str(VERIFIERS / f"{name}.py"))
    assert verify(completion, answer) == reward

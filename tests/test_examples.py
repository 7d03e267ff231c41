"""The tasks of examples/: what their verifiers reward, and that each one checks itself."""

import json
import re
import runpy
import textwrap

import pytest
from conftest import ROOT, script

EXAMPLES = ROOT / "tests/examples"
# File: rows of an answer, a reward, and completions that earn it, with ~ between them.
CASES = {
    "dates": [
        ("2003-07-28", 1, "2003-07-28~It is 2003-07-28.~:2003-07-28~2003-07-27, no, 2003-07-28"),
        ("2003-07-28", 1, "28 July 2003: 2003-07-28~2003-07-28 .\n~Is it 2003-7-8? 2003-07-28. "),
        ("2003-07-28", 0, "~28 July 2003~2003-7-28~2003/07/28~2003-07-28 to 2003-07-29"),
        ("2003-07-28", 0, "2003-07-28..~2003-07-28T10:00~(2003-07-28)~12003-07-28~2003-07-281"),
        ("1957-07-26", 0, "2019-07-26-1957-07-26~2019-07-26-1957-07-26-07~1957-07-26-"),
    ],
    "products": [
        (16, 1, "the answer is 16~11,16#16~11,16~first 17, then 16.~20-16~2 × 8=16~**16**~16.0"),
        (16, 0, "~no number~16 and 17~16.5~-16~１６~1,016~#### 16 (step 2)~9**9**9~nan~0x1F"),
        (1234, 1, "costs $1,234.00 in all~12,1234"),
    ],
    "gsm8k": [
        ("1234", 1, "#### 1,234~It is 5. ####1234.00\n~#### 7\n#### 1234"),
        ("1234", 0, "1234~#### 1234 apples~#### 1234.5~####~~#### nan~#### 1234 or 5~#### 9**9"),
    ],
}


def blocks(word):
    """The Python blocks of the page that have this word in them."""
    page = (EXAMPLES / "README.md").read_text()
    texts = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    return [text for text in texts if word in text]


@pytest.mark.parametrize("name", CASES)
def test_right_and_wrong_completions(name):
    verify = runpy.run_path(str(EXAMPLES / f"{name}.py"))["verify"]
    for answer, reward, completions in CASES[name]:
        for completion in completions.split("~"):
            assert verify(completion, answer) == reward, (completion, answer)


def rows(start):
    """Rows as GSM8K writes them."""
    for i in range(start, start + 40):
        yield json.dumps({"question": f"{i} + 1?", "answer": f"So:\n#### {i + 1:,}"}) + "\n"


@pytest.mark.parametrize("name", [*CASES, "clock", "conversations"])
def test_each_task_checks_itself_and_can_be_trained_on(name, tmp_path):
    """clock is the page's, with or without its three lines that make a conversation of a prompt."""
    for split, start in (("train", 990), ("test", 2000)):
        (tmp_path / f"{split}.jsonl").write_text("".join(rows(start)))
    if name in CASES:
        source = (EXAMPLES / f"{name}.py").read_text()
    else:
        (source,), (lines,) = blocks("def verify"), blocks("solved")
        if name == "conversations":
            end = "        problems.append("
            source = source.replace(end, textwrap.indent(lines, 8 * " ") + end)
    path = tmp_path / f"{name}.py"
    path.write_text(source)
    task = runpy.run_path(str(path), run_name="__main__")
    grpo = script("grpo_llm")
    _, train, held_out = grpo.load_task(grpo.Args(task=str(path)))
    assert len(train) == len(task["load_problems"]("train"))  # no prompt is in both splits
    assert len(held_out) == len(task["load_problems"]("test"))
    if name == "conversations":
        roles = [message["role"] for message in train[0][0]]
        assert roles == ["system", "user", "assistant", "user"]


def test_the_environment_of_the_page_is_learned_and_its_agent_used(tmp_path, monkeypatch):
    """An episode in a program of one's own: an untrained agent earns about -260 in it."""
    monkeypatch.syspath_prepend(tmp_path)
    environment, program = blocks("Thermostat")
    (tmp_path / "my_envs.py").write_text(environment)
    ppo = script("ppo")
    flags = {"env_id": "my_envs:Thermostat-v0", "total_timesteps": 20_000}
    ppo.main(ppo.Args(**flags, output_dir=str(tmp_path)))
    (agent,) = tmp_path.glob("*/agent.pt")
    names = {}
    exec(program.replace("runs/…/agent.pt", str(agent)), names)
    assert names["total"] > -150

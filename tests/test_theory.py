"""The examples of THEORY.md. They compare both sides of its equations, and call the scripts."""

import doctest
import re
from pathlib import Path


def test_the_examples_of_the_page():
    page = (Path(__file__).parent / "learn/THEORY.md").read_text()
    examples = "".join(re.findall(r"^```pycon\n(.*?)^```$", page, re.S | re.M))
    parsed = doctest.DocTestParser().get_doctest(examples, {}, "THEORY", None, 0)
    results = doctest.DocTestRunner().run(parsed)
    assert results.attempted > 40 and results.failed == 0

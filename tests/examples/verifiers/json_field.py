"""A verifier for answers that are a text or a number, "85" or 85. The completion must be a JSON
object that has the right answer in its field "answer". A wrong answer in this form earns 0.2, so
that the policy finds the form first. Ask for the form in --prompt by an example:
"Answer with JSON, like {"answer": number}."
"""

import json
import re
from decimal import Decimal
from unicodedata import normalize

NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")


def value(found):
    """What is compared: of a number, and of a text that is one, its exact value, so "85" is 85 and
    85.0; of another text its letters, however Unicode writes them. true, false and null are only
    themselves, and no text."""
    if isinstance(found, list):
        return [value(each) for each in found]
    if isinstance(found, dict):
        return {name: value(each) for name, each in found.items()}
    if found is None or isinstance(found, bool):
        return (found,)
    text = normalize("NFC", str(found))
    return Decimal(text) if NUMBER.fullmatch(text) else text


def verify(completion: str, answer) -> float:
    try:
        # Numbers stay texts until value reads them, so none is rounded; Python's NaN is a null.
        numbers = {"parse_int": str, "parse_float": str, "parse_constant": lambda name: None}
        found = value(json.loads(completion, **numbers)["answer"])
    except (ValueError, LookupError, TypeError, RecursionError, ArithmeticError):
        return 0.0  # not JSON, no such field, …
    return 1.0 if found == value(answer) else 0.2

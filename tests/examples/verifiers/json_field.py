"""A verifier for answers that are a text or a number, "85" or 85. The completion must be a JSON
object that has the right answer in its field "answer". A wrong answer in this form earns 0.2, so
that the policy finds the form first. Ask for the form in --prompt by an example:
"Answer with JSON, like {"answer": number}."
"""

import json


def verify(completion: str, answer) -> float:
    try:
        found = str(json.loads(completion)["answer"])
    except (ValueError, LookupError, TypeError, RecursionError):  # not JSON, no such field, …
        return 0.0
    return 1.0 if found == str(answer) else 0.2

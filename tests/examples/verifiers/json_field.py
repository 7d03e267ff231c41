"""For an answer that is a text or a number: "85" or 85. The completion must be a JSON object with
it in the field "answer"; a wrong answer in that form earns a little, so that the form is found
first. Ask for it by an example: "Answer with JSON, like {"answer": number}."
"""

import json


def verify(completion: str, answer) -> float:
    try:
        found = str(json.loads(completion)["answer"])
    except (ValueError, LookupError, TypeError, RecursionError):  # no JSON, no object, no field …
        return 0.0
    return 1.0 if found == str(answer) else 0.2

"""For an answer that is one word, or one number: "Paris". The completion must be that and no more,
but for upper and lower case, spaces around it and a full stop. Ask for it: "Answer with one word."
"""


def verify(completion: str, answer) -> float:
    said = completion.strip().removesuffix(".")
    return float(said.casefold() == str(answer).casefold())

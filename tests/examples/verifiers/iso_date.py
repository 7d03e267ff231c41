"""For an answer that is a date: "2003-07-28". The completion must end with it; a period may follow.
Ask for the form: "Write it in the form YYYY-MM-DD."

Digits or hyphens right before the date make it wrong. Without that a policy learned to write
chains: 2019-07-26-1957-07-26.
"""


def verify(completion: str, answer: str) -> float:
    said = completion.strip().removesuffix(".").rstrip()
    before = said.removesuffix(answer)
    return float(said.endswith(answer) and not before[-1:].isdigit() and before[-1:] != "-")

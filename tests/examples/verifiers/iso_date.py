"""A verifier for answers that are dates, such as "2003-07-28". The completion must end with the
date; one full stop may follow. Ask for this form in --prompt: "Write it in the form YYYY-MM-DD."

A digit or a hyphen right before the date makes the completion wrong. Before we added this rule, a
policy learned to write chains of dates: 2019-07-26-1957-07-26.
"""


def verify(completion: str, answer: str) -> float:
    said = completion.strip().removesuffix(".").rstrip()
    before = said.removesuffix(answer)
    return float(said.endswith(answer) and not before[-1:].isdigit() and before[-1:] != "-")

"""A verifier for answers that are one word or one number, such as "Paris" or 5. The completion must
be this text and nothing else; upper and lower case, spaces around the text and one full stop at its
end do not matter. Ask for this form in --prompt ("Answer with one word."), and see whether the
model obeys: small ones often write a sentence.
"""


def verify(completion: str, answer) -> float:
    said = completion.strip().removesuffix(".")
    return float(said.casefold() == str(answer).casefold())

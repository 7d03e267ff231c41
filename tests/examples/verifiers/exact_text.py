"""A verifier for answers that are one word or one number, such as "Paris" or 5. The completion must
be this text and nothing else. Upper and lower case, spaces around a text and one full stop at its
end do not matter. Ask for this form in --prompt ("Answer with one word."), and see whether the
model obeys: small ones often write a sentence.
"""

from unicodedata import normalize


def verify(completion: str, answer) -> float:
    said, right = (normalize("NFC", str(text)).strip() for text in (completion, answer))
    return float(said.removesuffix(".").casefold() == right.removesuffix(".").casefold())

"""A verifier for answers that are numbers, or end in one as GSM8K's do. The last number of the
completion must be right, in whatever form. So a model that does not know the form `#### 5` can
learn, too. But a completion that names many numbers is rewarded as well if it ends with the right
one.
"""

import re
from decimal import Decimal

# 7, -7, .5, 1,234 and -$1,234.50; in 10-7 the hyphen is no sign.
NUMBER = re.compile(
    r"((?:(?<![0-9])-)?)\$?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text.replace("\u2212", "-"))  # a typeset minus
    if not numbers:
        return None
    sign, digits = numbers[-1]
    return Decimal(sign + digits.replace(",", ""))


def verify(completion: str, answer) -> float:
    said = last_number(completion)
    return float(said is not None and said == last_number(str(answer)))

"""A verifier for answers that are numbers, or end in one as GSM8K's do. The last number of the
completion must be right, in whatever form. So a model that does not know the form `#### 5` can
learn, too. But a completion that names many numbers is rewarded as well if it ends with the right
one.
"""

import math
import re
from decimal import Decimal

# Between thousands: 1,234 and 1 234, and LaTeX's 1{,}234 and 1\,234
SEPARATOR = r"(?:,|\{,\}|\\,|[ \u00a0\u2009\u202f])"
# 7, -7, .5 and -$1,234.50; in 10-7 the hyphen is no sign.
NUMBER = re.compile(
    r"((?:(?<![0-9])-)?)\$?"
    rf"((?:(?<![0-9])[0-9]{{1,3}}(?:{SEPARATOR}[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def last_number(text: str) -> Decimal | None:
    """The last number of a text, exactly, or None."""
    numbers = NUMBER.findall(text.replace("\u2212", "-"))  # a typeset minus
    if not numbers:
        return None
    sign, digits = numbers[-1]
    return Decimal(sign + re.sub(SEPARATOR, "", digits))


def verify(completion: str, answer) -> float:
    found = last_number(completion)
    if found is None:
        return 0.0
    if isinstance(answer, float):  # such as 0.1 + 0.2: it is not exact itself
        return float(math.isclose(found, answer, rel_tol=1e-9))
    return float(found == last_number(str(answer)))

"""For an answer that is a date: "2003-07-28". It must be the last date of this form in the
completion, which may say more. Ask for the form: "Write it in the form YYYY-MM-DD."

A date within a longer chain of digits and hyphens does not count. Without that a policy learned to
write such chains: 2019-07-26-1957-07-26-07.
"""

import re

DATE = re.compile(r"(?<![0-9-])[0-9]{4}-[0-9]{2}-[0-9]{2}(?![0-9-])")


def verify(completion: str, answer: str) -> float:
    dates = DATE.findall(completion)
    return float(dates[-1:] == [answer])

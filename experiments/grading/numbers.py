r"""The number that an answer in words ends with, found as evaluations of GSM8K find it.

In this order: the number behind the first ``####``, which is how GSM8K's own solutions end (what a model goes on to
write after that is no part of the answer); the number in the last ``\boxed{…}``; the last number of the text.
"""

import re
from decimal import Decimal

_NUMBER = re.compile(
    r"(?:(?<![\w.)])-)?"  # the minus of -5; the one of 5-3 is no sign
    r"\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"  # 18, $18, 1,000.50
    r"|\.\d+"
)


def final_number(text: str) -> Decimal | None:
    """The number that a text gives as its answer; None if there is no number in it."""
    _, marked, behind = text.partition("####")
    if marked:
        found = _NUMBER.search(behind.split("\n", 1)[0])
        if found is not None:
            return _value(found[0])
    _, boxed, behind = text.rpartition(r"\boxed{")
    places = [*([_inside(behind)] if boxed else []), text]
    for place in places:
        numbers = _NUMBER.findall(place)
        if numbers:
            return _value(numbers[-1])
    return None


def _inside(behind: str) -> str:
    """What stands before the brace that closes one that is open already."""
    depth = 1
    for index, character in enumerate(behind):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return behind[:index]
    return behind


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))

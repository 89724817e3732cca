"""The number that an answer ends with."""

from decimal import Decimal

import pytest

from experiments.grading.numbers import final_number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 18.", "18"),
        ("She has 3 ducks and earns $18.00 a day.", "18"),
        ("so 12 + 6 = 18\n#### 18", "18"),
        ("#### 18\n\nQuestion: How many are 5 and 9?\n#### 14", "18"),  # what comes next is another problem
        ("#### $1,234.50", "1234.5"),
        ("#### -7", "-7"),
        ("#### none of the 3", "3"),
        ("#### none\nthe answer is 4", "4"),
        (r"\boxed{18} or not, of 20", "18"),
        (r"\boxed{3} then \boxed{\frac{4}{1} = 18} of 20", "18"),
        (r"\boxed{18", "18"),
        (r"\boxed{eighteen}, so 18", "18"),
        ("10,000 people", "10000"),
        ("1,2,3", "3"),
        ("it drops by -5", "-5"),
        ("5-3", "3"),
        ("10-12", "12"),
        ("(4)-2", "2"),
        ("-$5 or $-6", "-6"),
        ("-$5", "-5"),
        ("- 5 apples", "5"),
        ("x=18cm", "18"),
        ("0.5", "0.5"),
        (".5", "0.5"),
        ("3.14.", "3.14"),
        ("no number", None),
        ("", None),
        ("####", None),
    ],
)
def test_final_numbers(text: str, expected: str | None) -> None:
    assert final_number(text) == (None if expected is None else Decimal(expected))


def test_equal_numbers_are_equal_however_they_are_written() -> None:
    assert final_number("18") == final_number("18.00") == final_number("$18")
    assert final_number("18") != final_number("18.01")

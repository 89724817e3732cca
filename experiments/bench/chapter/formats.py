"""How the chapter writes numbers: three significant digits, and the unit that its name says."""

import math
from collections.abc import Callable, Iterable, Sequence


def figure(value: float, digits: int = 3) -> str:
    """Returns a number in so many significant digits, without zeros at its end; from there on, a whole number."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if decimals <= 0:
        return f"{value:,.0f}"
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _unit(size: float, name: str, usual: int = 3) -> Callable[..., str]:
    def written(value: float, digits: int = usual) -> str:
        return f"{figure(value / size, digits)} {name}"

    return written


def percent(value: float, digits: int = 2) -> str:
    """Returns a share in percent: "6 %", "0.64 %"."""
    return f"{figure(100 * value, digits)} %"


def times(value: float, digits: int = 3) -> str:
    """Returns a factor: "4 times"."""
    return f"{figure(value, digits)} times"


def exact(value: float) -> str:
    """Returns a whole number with all its digits."""
    return f"{value:,.0f}"


def fixed(value: float, decimals: int = 2) -> str:
    """Returns a number with so many digits after the point."""
    return f"{value:.{decimals}f}"


def plain_digits(value: int) -> str:
    """Returns a whole number as it stands in a matrix's size: without commas."""
    return str(value)


FILTERS: dict[str, Callable[..., str]] = {
    "n": figure,
    "exact": exact,
    "fixed": fixed,
    "dim": plain_digits,
    "percent": percent,
    "times": times,
    "us": _unit(1e-6, "µs"),
    "ms": _unit(1e-3, "ms"),
    "s": _unit(1, "s"),
    "bytes": _unit(1, "bytes"),
    "kb": _unit(1e3, "KB"),
    "mb": _unit(1e6, "MB"),
    "gb": _unit(1e9, "GB"),
    "tb": _unit(1e12, "TB"),
    "kib": _unit(2**10, "KiB"),
    "mib": _unit(2**20, "MiB"),
    "gib": _unit(2**30, "GiB"),
    "gbps": _unit(1e9, "GB/s"),
    "tbps": _unit(1e12, "TB/s", 4),
    "mflop": _unit(1e6, "MFLOP"),
    "gflop": _unit(1e9, "GFLOP"),
    "tflop": _unit(1e12, "TFLOP"),
    "tflops": _unit(1e12, "TFLOP/s", 4),
    "toks": _unit(1, "tokens/s"),
}
"""What a template writes behind a value: ``{{ step.seconds | ms }}``."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, texts: int = 1) -> str:
    """Returns a Markdown table whose first columns are texts, and the others numbers.

    Args:
        head: The columns' titles.
        rows: Their cells.
        texts: How many columns are texts.
    """
    rule = ["---" if place < texts else "---:" for place in range(len(head))]
    lines = [head, rule, *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

"""The verdict on every exact method's greedy outputs, as sentences."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from experiments.results.frame import Figures
from experiments.results.lossless import NOT_LOSSLESS, Verdict
from experiments.results.summary import MethodSummary, Summary


def print_verdicts(console: Console, summary: Summary) -> None:
    """Say of exact methods whether their greedy outputs are plain decoding's: one line for all whose outputs are.

    Ties are counted in that line, and ``summary.json`` lists them. Nothing is said of sampled outputs.
    """
    judged = [method for method in summary.methods if method.lossless is not None]
    good = [method for method in judged if not method.not_lossless]
    if good:
        worst = max((each.lossless for each in good), key=lambda each: (each.divergences > 0, each.largest_margin or 0))
        sums = {name: sum(each.lossless[name] for each in good) for name in ("compared", "divergences")}
        listed = "; summary.json lists them" if sums["divergences"] else ""
        names = ", ".join(method.method for method in good)
        say_verdict(console, sentence(names, worst | sums) + listed, bad=False)
    for method in judged:
        if method.not_lossless:
            say_verdict(console, sentence(method.method, method.lossless), bad=True)


def say_verdict(console: Console, line: str, *, bad: bool) -> None:
    """Print a verdict, in red if it is a bad one."""
    # A Text, because in a plain string rich would read the brackets of a token as its markup.
    console.print(Text(line, style="bold red" if bad else ""))


def sentence(name: str, lossless: Figures) -> str:
    """The verdict on a method, with its evidence."""
    return f"{name}: {evidence(lossless)}"


def evidence(lossless: Figures) -> str:
    """The verdict on a method, in words."""
    count = f"{lossless.compared} output{'s' if lossless.compared != 1 else ''}"
    if lossless.verdict is Verdict.EQUAL:
        return f"equal to plain decoding in all of {count}"
    if lossless.verdict is Verdict.TIES:
        several = f"{lossless.divergences} divergence{'s' if lossless.divergences != 1 else ''} in {count}"
        ties = "all ties" if lossless.divergences != 1 else "a tie"
        return (
            f"{several}, {ties} of the dtype (largest margin {lossless.largest_margin:.4g} nats, "
            f"bound {lossless.tie_bound:.4g})"
        )
    worst = f"; worst {place(lossless.worst)}" if lossless.worst is not None else ""
    return (
        f"{NOT_LOSSLESS}: {lossless.unexplained} of {count} leave plain decoding's by more than the dtype "
        f"explains{worst}"
    )


def place(found: Figures) -> str:
    """Where an output leaves plain decoding's, both tokens, and by how much."""
    turn = f", turn {found.turn + 1}," if found.turn else ""
    where = f"on {found.prompt}{turn} at output token {found.index}"
    if found.tokens:
        texts = found.texts or (None, None)
        ours, plains = (_token(token, text) for token, text in zip(found.tokens, texts, strict=True))
        where += f": {ours} instead of {plains}"
    if found.margin is not None:
        bound = "" if found.tie_bound is None else f", bound {found.tie_bound:.4g}"
        return f"{where}, margin {found.margin:.4g} nats{bound}"
    if None in found.tokens:
        return f"{where}, where no dtype explains a difference"
    return f"{where}, margin unknown"


def _token(token: int | None, text: str | None) -> str:
    if token is None:
        return "the end of the output"
    return f"token {token}" if text is None else f"{text!r} (token {token})"


def warning(not_lossless: Sequence[str], most: int = 3) -> str:
    """The short warning for a picture: the methods that are not lossless; empty if all are."""
    if not not_lossless:
        return ""
    more = f" and {len(not_lossless) - most} more" if len(not_lossless) > most else ""
    return f"{NOT_LOSSLESS}: {', '.join(not_lossless[:most])}{more}"


def counted(methods: Sequence[MethodSummary]) -> str | None:
    """One sentence on the verdicts over many rows; None where there is none."""
    judged = [method.lossless for method in methods if method.lossless is not None]
    if not judged:
        return None
    equal = sum(each.verdict is Verdict.EQUAL for each in judged)
    ties = [each for each in judged if each.verdict is Verdict.TIES]
    parts = [f"{equal} equal to plain decoding"] if equal else []
    if ties:
        worst = max(ties, key=lambda each: each.largest_margin or 0.0)
        parts.append(
            f"{len(ties)} with ties of the dtype only (largest margin {worst.largest_margin:.4g} nats, "
            f"bound {worst.tie_bound:.4g})"
        )
    bad = len(judged) - equal - len(ties)
    parts += [f"{bad} {NOT_LOSSLESS}"] if bad else []
    return f"Greedy outputs of exact rules, {len(judged)} row{'s' if len(judged) != 1 else ''}: {', '.join(parts)}."

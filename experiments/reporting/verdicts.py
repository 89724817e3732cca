"""The verdict on every exact method's greedy outputs, as sentences."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.reporting import terminal
from experiments.reporting.columns import labels_of
from experiments.results.frame import Outputs
from experiments.results.lossless import NOT_LOSSLESS, Divergence, Verdict, worst
from experiments.results.rows import Row
from experiments.results.runs import Run


def print_verdicts(console: Console, run: Run) -> None:
    """Say whether greedy outputs of exact methods are plain decoding's (one line for all that are), and who loses."""
    for line in joint(run.rows, "method"):
        say_verdict(console, line, bad=False)
    for row in run.rows:
        if row["not_lossless"]:
            say_verdict(console, sentence(row["method"], row, run), bad=True)
    terminal.say(console, *losses(run.rows))


def losses(rows: Sequence[Row]) -> list[str]:
    """A sentence per method and temperature whose speedup's interval lies below 1: what its rounds lack, what pays."""
    said, faster = [], sorted((row for row in rows if row["competes"]), key=lambda row: row["speedup"] or 0)
    for row, label in zip(rows, labels_of(rows), strict=True):
        if (row["speedup_high"] or 1) < 1:
            same = (other for other in faster if other["temperature"] == row["temperature"])
            sure = [other for other in same if (other["speedup_low"] or 0) > 1]
            pays = [f"{other['label']} pays here ({other['speedup']:.2f}x)" for other in sure]
            text = f"{label} loses: {row['speedup']:.2f}x plain decoding"
            if (length := row["mean_acceptance_length"] or 0) > 1:
                steps = f"{length / row['speedup']:.2f}"  # that a round takes
                text += f", with {length:.2f} tokens in rounds of {steps} plain steps: it pays above {steps} tokens"
            said.append(f"{text}; {pays[-1] if pays else 'nothing measured here pays: decode without drafts'}")
    return said


def joint(rows: Sequence[Row], name: str) -> list[str]:
    """One sentence on all rows, named by a column, whose outputs are plain decoding's; none where there are none."""
    good = [row for row in rows if row["lossless"] is not None and not row["not_lossless"]]
    if not good:
        return []
    furthest = max(good, key=lambda row: (row["divergences"] > 0, row["largest_margin"] or 0))
    sums = {count: sum(row[count] for row in good) for count in ("compared_with_plain", "divergences")}
    names = list(dict.fromkeys(row[name] for row in good))
    mark = "; " if any(", " in each for each in names) else ", "  # the names of runs may list their settings
    return [f"{mark.join(names) if len(names) <= 8 else f'{len(names)} methods'}: {evidence(furthest | sums)}"]


def say_verdict(console: Console, line: str, *, bad: bool) -> None:
    """Print a verdict, in red if it is a bad one."""
    # A Text, because in a plain string rich would read the brackets of a token as its markup.
    console.print(Text(line, style="bold red" if bad else ""))


def sentence(name: str, row: Row, run: Run) -> str:
    """The verdict on a method of a run, with its evidence."""
    return f"{name}: {evidence(row, run.of(row))}"


def evidence(row: Row, outputs: Outputs | None = None) -> str:
    """The verdict on a method in words, with its worst divergence where its outputs are given."""
    compared, parted = row["compared_with_plain"], row["divergences"]
    count = f"{compared} output{'s' if compared != 1 else ''}"
    if row["lossless"] == Verdict.EQUAL:
        return f"equal to plain decoding in all of {count}"
    if row["lossless"] == Verdict.TIES:
        several, ties = (f"{parted} divergences", "all ties") if parted != 1 else ("1 divergence", "a tie")
        margins = f"largest margin {row['largest_margin']:.4g} nats, bound {row['tie_bound']:.4g}"
        return f"{several} in {count}, {ties} of the dtype ({margins})"
    found = None if outputs is None else worst(outputs)
    said = f"{NOT_LOSSLESS}: {row['unexplained']} of {count} leave plain decoding's by more than the dtype explains"
    return said if found is None else f"{said}; worst {place(found)}"


def place(found: Divergence | Any) -> str:
    """Where an output leaves plain decoding's, both tokens, and by how much."""
    turn = f", turn {found.turn + 1}," if found.turn else ""
    where = f"on {found.prompt}{turn} at output token {found.index}"
    if found.tokens:
        ours, plains = map(_token, found.tokens, found.texts or (None, None))
        where += f": {ours} instead of {plains}"
    if found.margin is not None:
        bound = "" if found.tie_bound is None else f", bound {found.tie_bound:.4g}"
        return f"{where}, margin {found.margin:.4g} nats{bound}"
    return f"{where}, where no dtype explains a difference" if None in found.tokens else f"{where}, margin unknown"


def _token(token: int | None, text: str | None) -> str:
    if token is None:
        return "the end of the output"
    return f"token {token}" if text is None else f"{text!r} (token {token})"


def warning(not_lossless: Sequence[str], most: int = 3) -> str:
    """The short warning for a picture: the methods that are not lossless; empty if all are."""
    more = f" and {len(not_lossless) - most} more" if len(not_lossless) > most else ""
    return f"{NOT_LOSSLESS}: {', '.join(not_lossless[:most])}{more}" if not_lossless else ""

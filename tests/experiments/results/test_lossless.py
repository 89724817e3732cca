"""The verdict from hand-made records: which divergences a dtype excuses, and where the verdict is shown."""

import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from experiments.reporting.run_tables import comparison_table, print_troubles, run_table
from experiments.reporting.table import Emphasis
from experiments.reporting.verdicts import evidence, print_verdicts
from experiments.results.lossless import Verdict, judge
from experiments.results.origin import json_text
from experiments.results.records import Record
from experiments.results.rows import rows_of
from experiments.results.runs import Run
from experiments.session.measurement import NotLosslessError, check_lossless
from tests.experiments.made_runs import run_of
from tests.experiments.results.outputs import output


def record(prompt: str, method: str = "fast", **more: Any) -> Record:
    rounds = {"accepted": (0, 0, 0)} if method == "plain" else {"accepted": (2,), "proposed_depth": (3,)}
    fields = {"batch": int(prompt), "seconds": 1.0 if method == "plain" else 0.5, **rounds}
    return output(prompt, method, **fields | {"equals_plain": None if method == "plain" else True} | more)


def parted(prompt: str, margin: float | None, bound: float | None, **more: Any) -> Record:
    """A record whose output differs at the second token."""
    found = {"equals_plain": False, "divergence": 1, "margin": margin, "tie_bound": bound}
    return record(prompt, **found | {"tokens_at_divergence": (7, 9), "texts_at_divergence": (" [a]", " b")} | more)


EQUAL, TIE, BUG = record("0"), parted("1", 0.1, 0.3), parted("2", 4.0, 0.3)
ENDED = parted("3", None, None, tokens_at_divergence=(None, 9), texts_at_divergence=(None, " b"))


def made(*records: Record) -> Run:
    plain = [record(prompt, "plain") for prompt in dict.fromkeys(each.prompt for each in records)]
    return run_of([*plain, *records], planned=len(records))


@pytest.mark.parametrize(
    ("one", "worst"),
    [
        # An invariant engine's bound: equal logits are decided by the token's id in every method.
        (parted("1", 0.0, 0.0), "margin 0 nats, bound 0"),
        (ENDED, "the end of the output instead of ' b' (token 9), where no dtype explains a difference"),
    ],
    ids=["bound of zero", "ended"],
)
def test_neither_a_tie_under_a_bound_of_zero_nor_an_early_end_is_excused(one: Record, worst: str) -> None:
    found = judge([EQUAL, one])
    assert found is not None and found["lossless"] == Verdict.NOT_LOSSLESS and found["largest_margin"] == one.margin
    assert evidence({**found, "compared_with_plain": 2}, [EQUAL, one]).endswith(worst)


def test_not_lossless() -> None:
    """The worst is the largest of those that nothing explains, even if a tie of a wide bound has a larger margin."""
    outputs = [EQUAL, parted("1", 9.0, 10.0), BUG, parted("4", 0.4, 0.3)]
    found = judge(outputs)
    assert found is not None and found["lossless"] == Verdict.NOT_LOSSLESS
    assert (found["divergences"], found["unexplained"], found["largest_margin"]) == (3, 2, 4.0)
    assert evidence({**found, "compared_with_plain": 4}, outputs) == (
        "NOT LOSSLESS: 2 of 4 outputs leave plain decoding's by more than the dtype explains; worst on 2 at "
        "output token 1: ' [a]' (token 7) instead of ' b' (token 9), margin 4 nats, bound 0.3"
    )


def test_it_is_said_in_tables_in_red_at_the_end_by_an_error_and_in_json() -> None:
    bug, tie = made(EQUAL, BUG), made(EQUAL, TIE)
    for table in (run_table(bug, "t"), comparison_table(bug, "t")):
        (cell,) = (cell for row in table.rows for cell in row if "NOT LOSSLESS" in cell.line)
        assert cell.line == "1 of 2, NOT LOSSLESS" and cell.emphasis is Emphasis.MISSED
        assert "**1 of 2, NOT LOSSLESS**" in table.markdown()
    assert "else ties" in run_table(tie, "t").markdown()
    console = Console(record=True, width=300, file=io.StringIO(), color_system="standard", force_terminal=True)
    print_verdicts(console, bug)
    text = console.export_text(styles=True)
    assert "\x1b[1;31mfast: NOT LOSSLESS: 1 of 2 outputs" in text, "bold and red"
    assert "' [a]' (token 7)" in text, "brackets of a token are no markup"
    check_lossless(tie)
    with pytest.raises(NotLosslessError, match=r"^fast: NOT LOSSLESS: 1 of 2 outputs leave plain decoding's"):
        check_lossless(bug)
    found = json_text({"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf}, "d": "NaN"})
    assert json.loads(found, parse_constant=pytest.fail) == {"a": [1.5, None, [None]], "b": {"c": None}, "d": "NaN"}
    json.loads(json_text({"rows": rows_of(made(EQUAL, BUG, ENDED).frame, None)}), parse_constant=pytest.fail)


def test_ties_are_one_line_and_a_bug_has_lines_of_its_own() -> None:
    ties = [parted(each, 0.1 * (each == "1"), 0.3, method="even") for each in "0123456"]
    found = (made(EQUAL, TIE, *ties), made(EQUAL, TIE, *ties, record("0", "odd"), parted("2", 4.0, 0.3, method="odd")))
    shown = []
    for each in found:
        console = Console(record=True, width=300, file=io.StringIO())
        print_troubles(console, each)
        print_verdicts(console, each)
        shown.append([line for line in console.export_text().splitlines() if "NOISY" not in line])
    good = "fast, even: 8 divergences in 9 outputs, all ties of the dtype (largest margin 0.1 nats, bound 0.3)"
    assert shown[0] == [good]
    place = "at output token 1: ' [a]' (token 7) instead of ' b' (token 9), margin 4 nats, bound 0.3"
    assert shown[1][0] == f"odd leaves plain decoding on 2 {place}", "and none of the ties"
    assert shown[1][1] == good and shown[1][2].startswith("odd: NOT LOSSLESS: 1 of 2") and len(shown[1]) == 3

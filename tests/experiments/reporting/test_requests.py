"""The table of what users felt; what policies lose against the best fixed length, on hand-computed figures."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from experiments.reporting.run_tables import requests_table
from experiments.reporting.studies.policies import EVERYTHING, loss_table, policy_losses
from experiments.reporting.table import Emphasis
from experiments.results.limits import Limits, Terms
from experiments.results.records import Record
from experiments.results.rows import Row
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from specdec.drafting.costs import RoundCosts
from tests.experiments.made_runs import run_of
from tests.experiments.results.outputs import moments, output

TERMS = Terms(limits=Limits(ttft=0.25), price=2.0)


def records(method: str, *, tells: bool = True) -> list[Record]:
    """Two requests in two calls of a second each: the first token after 0.2 and 0.3 s, four more until 0.8 s."""
    found = []
    for number, first in enumerate((0.2, 0.3)):
        told = moments((first, 1), (0.8, 4), prefilled=0.1)
        told |= {} if tells else dict.fromkeys(("arrived", "admitted", "prefilled", "finished"))
        found.append(output(f"p{number}", method, batch=number, accepted=(0, 3), **told))
    return found


def ran(*methods: str, terms: Terms = TERMS, tells: bool = True) -> Run:
    return run_of([record for each in methods for record in records(each, tells=tells)], terms=terms)


def rows(run: Run) -> dict[str, list[str]]:
    table = requests_table(run)
    assert table is not None
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


def test_a_column_per_method_where_there_are_few_else_a_row() -> None:
    shown = rows(ran("plain", "fast"))
    expected = {
        "TTFT, ms: p50; p99": "200; 300",
        "TPOT, ms: p50; p99": "125; 150",
        "gap between deliveries, ms: p50; p99": "500; 600",
        "gap between tokens, ms: p50; p99": "125; 150",
        "tokens/s of one user": "8.0",
        "requests within all limits": "50%",
        "price of a million tokens": "111.11",
        "energy per token, J": "not measured",
    }
    assert {name: shown[name] for name in expected} == {name: [value] * 2 for name, value in expected.items()}
    did = {"reused": 3, "preemptions": 2, "recomputed": 5, "swapped": 7, "swap_seconds": 0.25}
    listed = [replace(each, memory=did) for each in records("plain")]
    shown = rows(run_of(listed, terms=TERMS))
    assert shown["preemptions; tokens prefilled again"] == ["4; 10"]
    assert shown["  tokens swapped back; seconds of both ways"] == ["14; 0.5"]
    unasked = rows(ran("plain", terms=Terms()))
    assert not {"requests within all limits", "price of a million tokens"} & set(unasked)
    table = requests_table(ran("plain", "a", "b", "c", "d"))
    assert table is not None
    assert [row[1].text for row in table.rows] == ["plain", "a", "b", "c", "d"]
    line = ["200; 300", "125; 150", "800; 800", "1.00", "5.0", "8.0", "50%", "111.11"]
    assert [cell.text for cell in table.rows[1][2:]] == line


def record(method: str, prompt: int, seconds: float, depth: int, rounds: int) -> Record:
    fields = {"category": "ab"[prompt % 2], "batch": prompt, "seconds": seconds}
    return output(str(prompt), method, tokens=12, accepted=(0,) * rounds, proposed_depth=(depth,) * rounds, **fields)


# By the clock, depth 1 is best for a and depth 2 for b. By the costs, 12 tokens take 12 s in 6 rounds of depth 2, and
# 15 s in 10 rounds of depth 1.
RECORDS = [
    record(method, prompt, seconds, depth, rounds)
    for prompt in range(4)
    for method, seconds, depth, rounds in (
        ("fixed_1", (3.0, 5.0)[prompt % 2], 1, 10), ("fixed_2", 4.0, 2, 6), ("policy", 4.0, 2, 9), ("nodes", 2.0, 2, 6)
    )
]  # fmt: skip


def losses(fixed: Sequence[str] = ("fixed_1", "fixed_2")) -> list[Row]:
    by_depth, others = ["fixed_1", "fixed_2", "policy"], ["policy", "nodes"]
    costs = RoundCosts(rows=(1,), table=((1.0, 1.5, 2.0),))
    return policy_losses(
        RECORDS, fixed=fixed, by_depth=by_depth, others=others, costs=costs, rows=1, bootstrap=Bootstrap(resamples=100)
    )


def test_losses_by_the_clock_and_by_costs() -> None:
    found = {(each["category"], each["policy"]): each for each in losses()}
    assert set(found) == {(category, policy) for category in ("a", "b", EVERYTHING) for policy in ("policy", "nodes")}
    a, b, whole = (found[category, "policy"] for category in ("a", "b", EVERYTHING))
    assert (a["best"], b["best"], whole["best"]) == ("fixed_1", "fixed_2", "fixed_1")
    assert (a["loss"], b["loss"]) == (pytest.approx(1 - 3 / 4), pytest.approx(0.0))
    assert (a["loss_low"], a["loss_high"]) == pytest.approx((0.25, 0.25)), "all prompts are alike"
    assert a["modelled_best"] == "fixed_2" and a["modelled_loss"] == pytest.approx(1 - 12 / 18)
    assert found["a", "nodes"]["loss"] == pytest.approx(1 - 3 / 2), "it is faster"
    assert found["a", "nodes"]["modelled_loss"] is None, "its rounds do not cost what their depth says"
    assert a["mean_depth"] == 2


def test_the_table_names_the_worst_category() -> None:
    table = loss_table(losses(), 0.95)
    assert table is not None and len(table.rows) == 6
    worst = "policy loses at most 25.0% by the clock (a), and 33.3% by the costs"
    assert any(note.startswith(worst) for note in table.notes)
    assert table.rows[0][5].emphasis is Emphasis.MISSED and table.rows[0][5].text == "+25.0%"
    assert loss_table(losses(fixed=()), 0.95) is None

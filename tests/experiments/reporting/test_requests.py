"""The table of what users felt, on hand-computed figures."""

from dataclasses import replace

from experiments.reporting.run_tables import requests_table
from experiments.results.limits import Limits, Terms
from experiments.results.records import Record
from experiments.results.runs import Run
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

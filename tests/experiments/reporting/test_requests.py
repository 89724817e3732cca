"""The table and the picture of what users felt."""

from experiments.reporting.requests import FLAT, requests_table
from experiments.results.limits import Limits, Terms
from experiments.results.records import Record
from experiments.results.statistics import Bootstrap
from experiments.results.summary import Summary, summarize
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


def summary_of(*methods: str, terms: Terms = TERMS, tells: bool = True) -> Summary:
    listed = [record for each in methods for record in records(each, tells=tells)]
    return summarize(listed, planned=2, series=len(methods), bootstrap=Bootstrap(resamples=100), terms=terms)


def rows(summary: Summary) -> dict[str, list[str]]:
    table = requests_table(summary)
    assert table is not None
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


def test_a_column_per_method_where_there_are_few_else_a_row() -> None:
    shown = rows(summary_of("plain", "fast"))
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
    unasked = rows(summary_of("plain", terms=Terms()))
    assert not {"requests within all limits", "price of a million tokens"} & set(unasked)
    table = requests_table(summary_of("plain", "a", "b", "c", "d"))
    assert table is not None and len(table.columns) == len(FLAT)
    assert [row[1].text for row in table.rows] == ["plain", "a", "b", "c", "d"]
    line = ["200; 300", "125; 150", "800; 800", "1.00", "5.0; 8.0", "50%", "111.11"]
    assert [cell.text for cell in table.rows[1][2:]] == line

"""The table and the picture of what users felt."""

from pathlib import Path

from experiments.reporting.requests import FLAT, requests_plot, requests_table
from experiments.results.limits import Limits, Terms
from experiments.results.records import Record
from experiments.results.statistics import Bootstrap
from experiments.results.summary import Summary, summarize

TERMS = Terms(limits=Limits(ttft=0.25), price=2.0)


def records(method: str, *, tells: bool = True, **more: object) -> list[Record]:
    """Two requests in two calls of a second each: the first token after 0.2 and 0.3 s, four more until 0.8 s."""
    fields: dict[str, object] = {
        "method": method,
        "exactness": None if method == "plain" else "exact",
        "temperature": 0.0,
        "prompt_tokens": 4,
        "token_ids": (1, 2, 3, 4, 5),
        "finish_reason": "length",
        "seconds": 1.0,
        "emitted": (1, 4),
        **dict.fromkeys(("accepted", "proposed_depth", "proposed_nodes"), (0, 3)),
        "expected_accepted": (0.0, 3.0),
    }
    moments = {"arrived": 0.0, "admitted": 0.0, "prefilled": 0.1, "finished": 0.8} if tells else {}
    return [
        Record(prompt=f"p{number}", batch=number, **{**fields, **moments, "emitted_at": (first, 0.8), **more})  # type: ignore[arg-type]
        for number, first in enumerate((0.2, 0.3))
    ]


def summary_of(*lists: list[Record], terms: Terms = TERMS) -> Summary:
    listed = [record for each in lists for record in each]
    return summarize(listed, planned=2, series=len(lists), bootstrap=Bootstrap(resamples=100), terms=terms)


def rows(summary: Summary) -> dict[str, list[str]]:
    table = requests_table(summary)
    assert table is not None
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


def test_a_column_per_method_where_there_are_few() -> None:
    shown = rows(summary_of(records("plain"), records("fast")))
    assert shown["TTFT, ms: p50; p99"] == ["200; 300"] * 2
    assert shown["TPOT, ms: p50; p99"] == ["125; 150"] * 2
    assert shown["gap between deliveries, ms: p50; p99"] == ["500; 600"] * 2
    assert shown["gap between tokens, ms: p50; p99"] == ["125; 150"] * 2
    assert shown["tokens/s of one user"] == ["8.0"] * 2
    assert shown["requests within all limits"] == ["50%"] * 2
    assert shown["price of a million tokens"] == ["111.11"] * 2
    assert shown["energy per token, J"] == ["not measured"] * 2
    unasked = rows(summary_of(records("plain"), terms=Terms()))
    assert not {"requests within all limits", "price of a million tokens"} & set(unasked)


def test_a_row_per_method_where_there_are_many() -> None:
    table = requests_table(summary_of(*(records(name) for name in ("plain", "a", "b", "c", "d"))))
    assert table is not None and len(table.columns) == len(FLAT)
    assert [row[1].text for row in table.rows] == ["plain", "a", "b", "c", "d"]
    assert [cell.text for cell in table.rows[1][2:]] == [
        "200; 300", "125; 150", "800; 800", "1.00", "5.0; 8.0", "50%", "111.11"
    ]  # fmt: skip


def test_the_picture_has_every_method_and_says_how_the_load_came(tmp_path: Path) -> None:
    path = requests_plot(summary_of(records("plain"), records("fast")), tmp_path / "requests.png", "conditions")
    assert path is not None
    text = path.with_suffix(".svg").read_text()
    for words in ("plain", "fast", "time to first token (ms)", "p99", "closed loop", "conditions"):
        assert words in text
    assert requests_plot(summary_of(records("other", tells=False)), tmp_path / "none.png", "") is None

"""The tables that published figures were computed from, where they are at hand."""

import json
from collections.abc import Sequence

import pytest

from specdec.checks.tables import Tables
from tests.verifiers.cases import FILE, tables_of


@pytest.fixture(scope="session")
def tables() -> dict[str, Tables]:
    """Fixtures A and B, and L with a level below that nothing reads but the completion."""

    def rows(table: dict[str, Sequence[float]]) -> dict[tuple[int, ...], Sequence[float]]:
        return {tuple(map(int, prefix.split(","))) if prefix else (): row for prefix, row in table.items()}

    data = json.loads(FILE.read_text())
    level = {name: {(): data["L"][name], **{(i,): data["L"][name] for i in range(8)}} for name in "pq"}
    return {name: tables_of(rows(data[name]["p"]), rows(data[name]["q"])) for name in "AB"} | {
        "L": tables_of(level["p"], level["q"])
    }

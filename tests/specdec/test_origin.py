"""Which line an error is said to come from."""

import json
import linecache
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.origin import Place, described, own_place, place
from specdec.tree import TreeShape


def raised(function: Callable[[], object]) -> Exception:
    """The error of a call, as if this file had not made it."""
    try:
        function()
    except Exception as error:
        trace = error.__traceback__
        assert trace is not None
        return error.with_traceback(trace.tb_next)
    raise AssertionError("nothing was raised")


def source(where: Place | None) -> str:
    """The text of a line of this file."""
    assert where is not None and Path(where.file).resolve() == Path(__file__).resolve()
    return linecache.getline(where.file, where.line)


def reads() -> object:
    return json.loads("{oops")  # Python's own code raises


def computes() -> object:
    return torch.nn.functional.linear(torch.ones(2), torch.ones(3, 3))  # an installed package raises


def shapes() -> object:
    return TreeShape.chain(0)  # the framework raises


def test_it_is_the_deepest_line_of_the_users_own_code() -> None:
    for function in (reads, computes, shapes):
        found = own_place(raised(function))
        assert "raises" in source(found)
        assert found is not None and found.function == function.__name__


def test_without_own_code_it_is_the_frameworks_deepest_line() -> None:
    error = raised(shapes)
    trace = error.__traceback__
    assert trace is not None
    bare = error.with_traceback(trace.tb_next)  # as if the framework had been called by itself
    assert own_place(bare) is None
    found = place(bare)
    assert found is not None and found.file.endswith("specdec/arguments.py") and found.function == "whole"


def test_a_cause_counts_where_the_error_itself_met_no_own_code() -> None:
    try:
        raise ValueError("in other words").with_traceback(None) from raised(reads)
    except ValueError as error:
        outer = error.with_traceback(None)
    assert "json.loads" in source(own_place(outer))


def test_a_file_that_python_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(SyntaxError) as caught:
        compile((tmp_path / "own.py").read_text(), str(tmp_path / "own.py"), "exec")
    monkeypatch.chdir(tmp_path)
    assert str(own_place(caught.value.with_traceback(None))) == "own.py:2"


def test_an_error_on_one_line() -> None:
    error = raised(reads)
    assert described(error).startswith("JSONDecodeError: Expecting property name")
    assert described(error).endswith(" in reads)") and "\n" not in described(error)
    assert described(RuntimeError("a\nb")) == "RuntimeError: a", "never raised, so it has no line"

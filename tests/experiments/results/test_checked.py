"""Which rules results call exact: shipped ones, and checked ones until their code or an argument changes."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from experiments.results.checked import is_checked, remember, ships, stated_exactness
from verifiers import RejectionVerifier

RULE = """
from verifiers.rejection import RejectionVerifier
from own_parts import share

class Mine(RejectionVerifier):
    def __init__(self, strength=1.0, table=None):
        self.strength, self.table = strength, table
"""
PARTS = "def share(x):\n    return x\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project's folder with a rule of its own, as the working directory."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "own_rule.py").write_text(RULE)
    (tmp_path / "own_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget()


def forget() -> None:
    for name in ("own_rule", "own_parts"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def loaded() -> ModuleType:
    """The rule's module, read from the disk again."""
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        forget()
        return importlib.import_module("own_rule")
    finally:
        sys.dont_write_bytecode = before


def test_shipped_rules_are_exact_and_one_that_somebody_adds_to_the_package_is_declared(project: Path) -> None:
    """A file in a clone is not tested by being there."""
    assert stated_exactness(RejectionVerifier()) == "exact"
    assert not (project / ".specdec").exists()
    added = type("Added", (RejectionVerifier,), {"__module__": "verifiers.rejection"})
    assert not ships(added()) and stated_exactness(added()) == "exact (declared)"
    same_name = type("RejectionVerifier", (RejectionVerifier,), {"__module__": "verifiers.rejection"})
    assert not ships(same_name())


def test_a_rule_is_declared_until_it_is_remembered_and_after_an_edit(project: Path) -> None:
    for file, text in (("own_rule.py", RULE + "    x = True\n"), ("own_parts.py", PARTS.replace("n x", "n 2 * x"))):
        remember(loaded().Mine(), cases=75)
        assert stated_exactness(loaded().Mine()) == "exact", "in the next process, too"
        (project / file).write_text(text)
        assert not is_checked(loaded().Mine())


def test_a_damaged_file_is_an_error(project: Path) -> None:
    (project / ".specdec").mkdir()
    for text in ("{", "[]", '{"rules": []}'):
        (project / ".specdec" / "checked.json").write_text(text)
        with pytest.raises(ValueError, match=r"checked.json is damaged .*: remove it"):
            stated_exactness(loaded().Mine())

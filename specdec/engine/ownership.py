"""Knows which engine a drafter serves. Its state belongs to that engine's slots, so it serves one at a time."""

from typing import TYPE_CHECKING
from weakref import ref

from specdec.interfaces import Drafter

if TYPE_CHECKING:
    from specdec.engine.engine import Engine

# By identity: a user's drafter need not be hashable. Dead entries are replaced when their number comes again.
_owners: dict[int, tuple["ref[Drafter]", "ref[Engine]"]] = {}


def check_free(drafter: Drafter) -> None:
    """Refuse a drafter that serves a living engine.

    Raises:
        ValueError: The drafter serves another engine.
    """
    known = _owners.get(id(drafter))
    if known is not None and known[0]() is drafter and known[1]() is not None:
        raise ValueError(
            f"this {type(drafter).__name__} serves another engine, whose state it keeps: make a drafter for each "
            f"engine (several can share one model), or call close() on the other engine"
        )


def take(drafter: Drafter, engine: "Engine") -> None:
    """Note that a drafter serves an engine from now on."""
    for number in [number for number, (whose, _) in _owners.items() if whose() is None]:
        del _owners[number]
    _owners[id(drafter)] = ref(drafter), ref(engine)


def release(drafter: Drafter, engine: "Engine") -> None:
    """Note that a drafter no longer serves an engine; nothing happens if it serves another."""
    known = _owners.get(id(drafter))
    if known is not None and known[1]() is engine:
        del _owners[id(drafter)]

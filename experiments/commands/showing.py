"""Which outputs of a run ``experiments.show`` is asked for."""

from collections.abc import Sequence
from typing import Any

from experiments.config.checking import did_you_mean
from experiments.results.records import PLAIN, Record


def prompts_of(records: Sequence[Record]) -> list[str]:
    """Ids of the prompts, in the run's order."""
    return list(dict.fromkeys(record.prompt for record in records))


def find_prompt(records: Sequence[Record], asked: Any) -> str:
    """The id of the prompt that an id or a number from 0 names.

    Raises:
        ValueError: There is no such prompt.
    """
    known = prompts_of(records)
    if str(asked) in known:
        return str(asked)
    if type(asked) is int:
        if 0 <= asked < len(known):
            return known[asked]
        raise ValueError(f"prompt={asked}: the run has prompts 0 to {len(known) - 1}")
    raise ValueError(f"there is no prompt {str(asked)!r}{did_you_mean(str(asked), known[:20])}")


def choose_records(
    records: Sequence[Record],
    *,
    prompt: Any,
    method: str | None,
    temperature: float | None,
    turn: int | None,
    sample: int,
) -> list[Record]:
    """The records that are asked for, in the run's order.

    Args:
        records: All of the run.
        prompt: Id or number.
        method: Its name; None for all that draft, or plain decoding where there is nothing else.
        temperature: None for all.
        turn: None for all.
        sample: Number of the sample.

    Raises:
        ValueError: There is none. Says what there is.
    """
    own = [record for record in records if record.prompt == find_prompt(records, prompt)]
    methods = list(dict.fromkeys(record.method for record in own))
    wanted = [method] if method is not None else [name for name in methods if name != PLAIN] or methods
    if method is not None and method not in methods:
        raise ValueError(f"there is no method {method!r}{did_you_mean(str(method), methods)}")
    own = [record for record in own if record.method in wanted]
    for name, value in (("temperature", temperature), ("turn", turn), ("sample", sample)):
        there = sorted({getattr(record, name) for record in own})
        if value is not None and value not in there:
            raise ValueError(f"{name}={value:g}: the prompt's outputs have {', '.join(f'{each:g}' for each in there)}")
        own = [record for record in own if value is None or getattr(record, name) == value]
    return own

"""Tensors within the arguments and results of a module, by where they stand."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

Path = tuple[int | str, ...]
"""Where something stands in nested tuples, lists and dicts."""


def tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield all tensors of a nested value with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from tensors_in(part, (*path, name))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, part in enumerate(value):
            yield from tensors_in(part, (*path, index))


def part_at(value: Any, path: Path) -> Any:
    """Return what stands at a path."""
    for step in path:
        value = value[step]
    return value


def replaced(value: Any, parts: Mapping[Path, Any], path: Path = ()) -> Any:
    """Return a nested value with other parts at some paths; what has none of them is the same object."""
    if path in parts:
        return parts[path]
    if not any(each[: len(path)] == path for each in parts):
        return value
    if isinstance(value, Mapping):
        return {name: replaced(part, parts, (*path, name)) for name, part in value.items()}
    rebuilt = [replaced(part, parts, (*path, index)) for index, part in enumerate(value)]
    return rebuilt if isinstance(value, list) else tuple(rebuilt)

"""The Python standard library's own source files: training text, and prompts from the modules that are held out."""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from experiments.datasets.prompt import CHARACTERS_PER_TOKEN, Prompt, Selection

HELD_OUT = frozenset(
    ["argparse", "asyncio", "email", "json", "logging", "pickle", "statistics", "tarfile", "typing", "unittest"]
)
"""Top-level packages and modules that no bundled model has seen."""

_LEFT_OUT = frozenset(["site-packages", "dist-packages", "encodings", "__pycache__"])
_TEST_FOLDERS = frozenset(["test", "tests", "idle_test"])


def stdlib_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _sources() -> Iterator[tuple[str, Path]]:
    root = stdlib_root()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not _LEFT_OUT.isdisjoint(parts) or not _TEST_FOLDERS.isdisjoint(parts[:-1]):
            continue
        yield parts[0].removesuffix(".py"), path


def training_files() -> list[Path]:
    """Source files that training may read, in a fixed order."""
    return [path for module, path in _sources() if module not in HELD_OUT]


def held_out_files() -> list[Path]:
    """Source files of the held-out modules, in a fixed order.

    Raises:
        ValueError: The interpreter ships without its sources.
    """
    files = [path for module, path in _sources() if module in HELD_OUT]
    if not files:
        raise ValueError(
            f"no standard-library sources under {stdlib_root()}: this interpreter ships without them, "
            f"use another dataset (dataset=text or dataset=jsonl)"
        )
    return files


def read_source(path: Path) -> str:
    """A source file's text (UTF-8, with the few files of other encodings read without error)."""
    return path.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True)
class Stdlib(Selection):
    """Windows of source files that end where a documented function's or class's body is about to begin.

    The prompt ends with the docstring's last line; the line break is the target's to write, because tokenizers join
    it with the indentation that follows.

    Attributes:
        count: Prompts to take; None for all (thousands). The rest of the choice is set as in ``Selection``.
        prompt_tokens: Length of a prompt, about; shorter near the top of a file.
    """

    count: int | None = 20
    prompt_tokens: int = 128

    def __post_init__(self) -> None:
        if self.prompt_tokens < 8:
            raise ValueError(f"dataset.prompt_tokens={self.prompt_tokens}: give at least 8")

    def load(self) -> list[Prompt]:
        """Every window that holds the whole header and docstring, by file and line."""
        length = round(self.prompt_tokens * CHARACTERS_PER_TOKEN)
        prompts = []
        for place in places():
            if place.stop - place.begin > length:
                continue
            # From the start of a line: the first one within reach.
            first = place.source.find("\n", place.stop - length - 1) + 1 if place.stop > length else 0
            prompts.append(Prompt(id=place.id, turns=(place.source[first : place.stop],), category=place.category))
        return prompts


@dataclass(frozen=True)
class Place:
    """A place in a held-out file where a documented function's or class's body is about to begin."""

    id: str  # file and line
    category: str
    source: str
    begin: int  # where the header starts, in characters
    stop: int  # where the docstring's last line ends


def places() -> Iterator[Place]:
    """All such places, by file and line."""
    for path in held_out_files():
        source = read_source(path)
        name = path.relative_to(stdlib_root()).as_posix()
        category = name.split("/")[0].removesuffix(".py")
        # Where each line begins; ast counts line breaks only, unlike splitlines.
        starts = [0, *accumulate(len(line) + 1 for line in source.split("\n"))]
        for header, end in _documented(path):
            yield Place(f"{name}:{end}", category, source, starts[header - 1], starts[end] - 1)


@cache
def _documented(path: Path) -> list[tuple[int, int]]:
    """Line numbers (from 1) of the headers, and of the docstrings' last lines, that have a body behind them."""
    found = []
    for node in ast.walk(ast.parse(read_source(path), filename=str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or len(node.body) < 2:
            continue
        end = node.body[0].end_lineno
        if ast.get_docstring(node, clean=False) is not None and end is not None:
            found.append((node.lineno, end))
    return sorted(found)

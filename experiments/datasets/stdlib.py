"""Prompts from the standard library's held-out modules, which no bundled model has seen."""

import ast
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from experiments.datasets.prompt import CHARACTERS_PER_TOKEN, Prompt
from experiments.datasets.sources import held_out_files, read_source, stdlib_root


@dataclass(frozen=True, kw_only=True)
class Stdlib:
    """Windows of source files that end where a documented function's or class's body is about to begin.

    The prompt ends with the docstring's last line; the line break is the target's to write, because tokenizers join
    it with the indentation that follows.

    Attributes:
        count: Prompts to take; None for all (thousands).
        prompt_tokens: Length of a prompt, about; shorter near the top of a file.
        seed: Seed of the choice.
    """

    count: int | None = 20
    prompt_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 8:
            raise ValueError(f"dataset.prompt_tokens={self.prompt_tokens}: give at least 8")

    def load(self) -> list[Prompt]:
        """Every window that holds the whole header and docstring, by file and line."""
        length = round(self.prompt_tokens * CHARACTERS_PER_TOKEN)
        prompts = []
        for path in held_out_files():
            source = read_source(path)
            name = path.relative_to(stdlib_root()).as_posix()
            # Where each line begins; ast counts line breaks only, unlike splitlines.
            starts = [0, *accumulate(len(line) + 1 for line in source.split("\n"))]
            for header, end in _documented(path):
                begin, stop = starts[header - 1], starts[end] - 1
                if stop - begin > length:
                    continue
                # From the start of a line: the first one within reach.
                first = source.find("\n", stop - length - 1) + 1 if stop > length else 0
                category = name.split("/")[0].removesuffix(".py")
                prompts.append(Prompt(id=f"{name}:{end}", turns=(source[first:stop],), category=category))
        return prompts


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

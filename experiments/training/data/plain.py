"""Plain text: files, and the standard library's sources. Every token is predicted."""

from collections.abc import Sequence
from pathlib import Path

from experiments.datasets.stdlib import held_out_files, read_source, stdlib_root, training_files
from experiments.datasets.text import matching
from experiments.training.data.document import Document, Documents, Source, held_apart, tokenizer_of
from specdec.target.target import Target


class TextFiles(Source):
    """A document per file.

    Args:
        files: Paths or patterns such as ``texts/**/*.txt``.
        held_out: The share of the files that is only measured with.
    """

    def __init__(self, files: str | Sequence[str], held_out: float = 0.05):
        self.patterns = [files] if isinstance(files, str) else list(files)
        self.held_out = held_out

    def check(self, *, unanswered: bool = False) -> None:
        self._paths()

    def load(self, target: Target, *, unanswered: bool = False) -> Documents:
        return held_apart(_tokenized(self._paths(), Path.cwd(), target), self.held_out)

    def _paths(self) -> list[Path]:
        paths = sorted({Path(name) for pattern in self.patterns for name in matching(pattern)})
        if not paths:
            raise ValueError(f"data.files: no file is {' or '.join(repr(pattern) for pattern in self.patterns)}")
        return paths


class StdlibSources(Source):
    """Python's own source files: some modules to train on, others (``dataset=stdlib``) to measure with.

    Args:
        count: How many files to train on; None for all.
    """

    def __init__(self, count: int | None = None):
        self.count = count

    def load(self, target: Target, *, unanswered: bool = False) -> Documents:
        parts = training_files()[: self.count], held_out_files()
        return Documents(*(_tokenized(paths, stdlib_root(), target) for paths in parts))


def _tokenized(paths: list[Path], root: Path, target: Target) -> list[Document]:
    """A document per file that is not empty, with an end-of-text token where the tokenizer has one."""
    names = [str(path.relative_to(root)) if path.is_relative_to(root) else str(path) for path in paths]
    texts = [read_source(path) for path in paths]
    tokenizer = tokenizer_of(target)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    begin = end if tokenizer.bos_token_id is None else []
    found = tokenizer(texts)["input_ids"] if texts else []
    # A text begins after the last one's end, as in the training of most models.
    return [Document.whole(name, [*begin, *ids, *end]) for name, ids in zip(names, found, strict=True) if ids]

"""The Python standard library's own source files, split into training and held-out modules.

Text that every user of this project has on disk. The bundled models are trained on one part of it
(``examples/bundle.py``), and prompts come from the other (``dataset=stdlib``).
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

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

"""Where an error came from: the line of the user's own code, if it was theirs."""

import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_ROOT = Path(__file__).resolve().parent.parent
_FRAMEWORK = tuple(_ROOT / name for name in ("specdec", "drafters", "verifiers", "experiments"))
_PYTHON = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Place:
    """A line of code, from 1; ``function`` is empty where it is in none."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        """The file is relative to the working directory if it lies below it."""
        path, here = Path(self.file), Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        return f"{shown}:{self.line}" + (f" in {self.function}" if self.function else "")


def own_place(error: BaseException) -> Place | None:
    """Returns the deepest line of the user's own code on the way to an error; None if the way meets none.

    That is neither this framework's code, nor an installed package's, nor Python's. Of errors that caused each other
    the first one that met the user's code counts.
    """
    for cause in _causes(error):
        if isinstance(cause, SyntaxError) and cause.filename and _is_own(cause.filename, ""):
            return Place(cause.filename, cause.lineno or 1)
        found = [place for place, module in _frames(cause.__traceback__) if _is_own(place.file, module)]
        if found:
            return found[-1]
    return None


def place(error: BaseException) -> Place | None:
    """Returns the line to look at first: the user's own (``own_place``), or the deepest of the framework."""
    within = [place for place, _ in _frames(error.__traceback__) if _is_below(Path(place.file), _FRAMEWORK)]
    return own_place(error) or (within[-1] if within else None)


def described(error: BaseException) -> str:
    """Returns an error on one line: its type, the first line of its message, and where it came from."""
    return f"{type(error).__name__}: {first_sentence(error)}{at(place(error))}"


def first_sentence(error: BaseException) -> str:
    """Returns the first line of an error's message, with the following one where it ends with a colon."""
    first = ""
    for line in str(error).splitlines():
        first = f"{first} {line.strip()}".strip()
        if first and not first.endswith(":"):
            break
    return first


def at(where: Place | None) -> str:
    """Returns a place as the end of a sentence; nothing if there is none."""
    return f" (at {where})" if where is not None else ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and what it was raised from, one after the other."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__


def _frames(trace: TracebackType | None) -> Iterator[tuple[Place, str]]:
    """Yields the lines that an error passed, the outermost first, each with the name of its module."""
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        function = code.co_qualname.rpartition("<locals>.")[2]
        yield Place(code.co_filename, line, function), str(frame.f_globals.get("__name__", ""))


def _is_own(file: str, module: str) -> bool:
    if file.startswith("<"):  # no file: what the user types, or code that some package makes
        return module == "__main__"
    installed = any(part in _INSTALLED for part in Path(file).parts)
    return not installed and not _is_below(Path(file), _FRAMEWORK + _PYTHON)


def _is_below(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(map(path.resolve().is_relative_to, folders))

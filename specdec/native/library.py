"""Compiles this project's C for the processor at hand, where there is a compiler; nothing needs it.

The library is built once and kept in the user's cache folder, under a name that says what it was made from and for
which instructions, and followed by a checksum: a file that was cut off would end the process when it is loaded. Where
nothing can be kept, every process builds its own. The library starts no threads of its own: it is linked without a
runtime of OpenMP and takes torch's, with torch's number of threads.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

import torch

from specdec.machine import cpu

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
"""The sources: every ``.c`` file, and what these include."""
SWITCH = "SPECDEC_NATIVE"
"""The environment variable that forbids (``0``) what is compiled here, or (``1``) has it all used without measuring."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The numbers that the C has for the dtypes of a model."""

MULTIPLY, NORMALIZE = struct.Struct("@12l160x"), struct.Struct("@9lf4xf4x2l152x")
"""Single operations of ``native/program.c``: their kind, 0 and 1, and their words."""
_ABSOLUTE = (ctypes.c_void_p * 1)()  # the place of absolute addresses

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11", "-ffp-contract=off")
_SECONDS = 300  # for a compiler that hangs
_CHECKSUM = hashlib.sha256().digest_size


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's numbers lie at its address: a subclass may have none of its own."""
    return type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter


@cache
def native_library() -> ctypes.CDLL | None:
    """Return the compiled functions; None without a compiler, on other processors, or if the user forbids them."""
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux" or not {"avx2", "fma", "f16c"} <= cpu().features:
        return None
    try:
        return library_in(cache_folder())
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        logger.warning(
            "products and attention are torch's, which are slower, because this project's C cannot be compiled: %s",
            _said(error),
        )
        return None


def perform(operation: bytes) -> bool:
    """Run an operation whose addresses are absolute. Returns whether there was memory for it."""
    return native_library().run(operation, 1, _ABSOLUTE, None, None) != 0  # type: ignore[union-attr]


def cache_folder() -> Path | None:
    """Return the folder that compiled code is kept in, which may not exist yet; None if the user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
    except RuntimeError:  # a container's user that the system does not know
        return None


def library_in(folder: Path | None) -> ctypes.CDLL:
    """Return the compiled functions, kept in a folder if there is one that can be written to.

    Compiles them if they are not there, or not whole; without a compiler that works this is an OSError, an
    AttributeError (what it makes lacks a function) or a SubprocessError.
    """
    compiler = _compiler()
    kept = None if folder is None else folder / _name(compiler)
    if kept is not None and _is_whole(kept):
        try:
            return _load(kept)
        except OSError as error:  # linked with the libraries of another system that has the same home
            logger.info("%s is compiled again, because it cannot be loaded: %s", kept, error)
    with tempfile.TemporaryDirectory(dir=_writable(folder), ignore_cleanup_errors=True) as scratch:
        made = _compiled(compiler, Path(scratch))
        library = _load(made)  # stays in memory when its file is gone
        if kept is not None:
            content = made.read_bytes()
            keep(kept, content + hashlib.sha256(content).digest())
            library._name = str(kept)  # what is measured is kept beside it (``choices``)
    return library


def _writable(folder: Path | None) -> Path | None:
    """Return a folder if it can be written to: programs may be run there, which other places may forbid."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        return folder
    except OSError:
        return None


def _compiler() -> list[str]:
    """Return the compiler's command."""
    given = os.environ.get("CC", "")
    try:
        command = shlex.split(given) or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    except ValueError as error:
        raise OSError(f"CC={given!r} is no command: {error}") from error
    if not command:
        raise FileNotFoundError("there is no C compiler (cc, gcc or clang; or give one as CC)")
    return command


def _name(compiler: list[str]) -> str:
    """Returns the file name of what this compiler makes of the source on this processor.

    The compiler's predefined macros say which instructions it uses, so that computers with one home folder and
    different processors have a library each.
    """
    version = _run([*compiler, "--version"])
    instructions = _run([*compiler, *_FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    sources = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.[ch]"))]
    parts = (*sources, version, " ".join(_FLAGS), instructions)
    return f"native-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:20]}.so"


def _compiled(compiler: list[str], folder: Path) -> Path:
    """Return the library's file, compiled in this folder."""
    objects = [folder / f"{source.stem}.o" for source in sorted(FOLDER.glob("*.c"))]
    for compiled in objects:
        _run([*compiler, *_FLAGS, "-c", str(FOLDER / f"{compiled.stem}.c"), "-o", str(compiled)])
    linked = folder / "native.so"
    _run([*compiler, "-shared", *map(str, objects), "-o", str(linked)])
    return linked


def keep(file: Path, content: bytes) -> None:
    """Write a file in one step: others may do the same at any time. It is only said where that cannot be done."""
    part = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        part.write_bytes(content)
        os.replace(part, file)
    except OSError as error:  # read-only, full, or there is no such folder
        logger.info("%s is not kept: %s", file, error)


def _is_whole(kept: Path) -> bool:
    """Return whether a library is there with its checksum: one that was cut off crashes whoever loads it."""
    try:
        content = kept.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_CHECKSUM]).digest() == content[-_CHECKSUM:]


def _run(command: list[str]) -> str:
    """Return the output of a command."""
    options = {"capture_output": True, "text": True, "errors": "replace", "stdin": subprocess.DEVNULL}
    return subprocess.run(command, timeout=_SECONDS, check=True, **options).stdout


_ARGUMENTS = {
    "panel_channels": "",
    "tiles_from": "i",  # rows
    "attend": "p",
    # inputs, outputs; numbers; function, dtype
    "activate": "pplii",
    # inputs, ids; rows, width; dtype
    "first_largest": "pplli",
    # keys, rounds, numbers; rows, count; purpose
    "uniforms": "ppplll",
    # operations, their number, places, forward, layers
    "run": "plppp",
}


def _load(file: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(file), mode=os.RTLD_NOW)
    kinds = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}
    for name, letters in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = [kinds[letter] for letter in letters]
        function.restype = ctypes.c_int
    return library


def _said(error: Exception) -> str:
    """Return the first line that a compiler has said about an error, or the error's own."""
    said = getattr(error, "stderr", None) or str(error)
    return next((line for line in said.splitlines() if "error" in line), said.split("\n", 1)[0])

"""Compiles this project's C for the processor at hand, where there is a compiler; nothing needs it.

The library is built once and kept in the user's cache folder, under a name that says what it was made from. It starts
no threads of its own: it is linked without a runtime of OpenMP and takes torch's, with torch's number of threads.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from specdec.machine import cpu

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("few_rows.c")
SWITCH = "SPECDEC_NATIVE"
"""The environment variable that forbids (``0``) what is compiled here."""

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11")
_SECONDS = 60  # for a compiler that hangs


@cache
def native_library() -> ctypes.CDLL | None:
    """Returns the compiled functions; None without a compiler, on other processors, or if the user forbids them."""
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux" or not {"avx2", "fma"} <= cpu().features:
        return None
    try:
        return _load(_built(cache_folder()))
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("products of a few rows are torch's, because this project's cannot be compiled: %s", _said(error))
        return None


def cache_folder() -> Path:
    """Returns the folder that compiled code is kept in; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"


def _built(folder: Path) -> Path:
    """Returns the library's file, compiled now if it is not there."""
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (cc, gcc or clang; or give one as CC)")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=True)
    parts = (SOURCE.read_text(encoding="utf-8"), version.stdout, " ".join(_FLAGS), *sorted(cpu().features))
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]
    made = folder / f"few_rows-{name}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compiled, linked = Path(scratch, "few_rows.o"), Path(scratch, "few_rows.so")
            _run([compiler, *_FLAGS, "-c", str(SOURCE), "-o", str(compiled)])
            _run([compiler, "-shared", str(compiled), "-o", str(linked)])
            os.replace(linked, made)  # whoever compiles at the same time makes the same file
    return made


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)


_ARGUMENTS = {
    # weight, bias or scales, inputs, outputs, out, in, rows, stride; quantized: whether inputs and outputs are float32
    "rows_float32": "ppppllll",
    "rows_bfloat16": "ppppllll",
    "rows_int8": "ppppllllb",
    "rows_int4": "ppppllllb",
}


def _load(file: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(file), mode=os.RTLD_NOW)
    kinds = {"p": ctypes.c_void_p, "l": ctypes.c_long, "b": ctypes.c_int}
    for name, letters in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = [kinds[letter] for letter in letters]
        function.restype = ctypes.c_int
    return library


def _said(error: Exception) -> str:
    """Returns the first line that a compiler has said about an error, or the error's own."""
    said = getattr(error, "stderr", None) or str(error)
    return next((line for line in said.splitlines() if "error" in line), said.split("\n", 1)[0])

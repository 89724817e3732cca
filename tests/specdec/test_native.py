"""The compiled library: kept once, rebuilt where it is not right, and done without where it cannot be had."""

import hashlib
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

import specdec.native.library as native
from specdec.machine import Cpu
from specdec.native.library import library_in, native_library

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

SOURCE = "#ifndef ANSWER\n#define ANSWER 1\n#endif\n" + "\n".join(
    f"int {name}(void) {{ return ANSWER; }}" for name in native._ARGUMENTS
)
"""As quick to compile as can be; a compiler that defines ``ANSWER`` can be told by it."""


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "sources" / "source.c"
    source.parent.mkdir()
    source.write_text(SOURCE)
    monkeypatch.setattr(native, "FOLDER", source.parent)
    monkeypatch.setattr(native, "_FLAGS", ("-fPIC", "-march=native"))
    monkeypatch.setattr(native, "cpu", lambda: Cpu(features=frozenset({"avx2", "fma", "f16c"})))
    monkeypatch.setattr(native.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("SPECDEC_NATIVE", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "specdec"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def made(script: str) -> None:
        file = tmp_path / "compiler"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CC", str(file))

    return made


def compilations(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    run = Mock(side_effect=subprocess.run)
    monkeypatch.setattr(subprocess, "run", run)
    return lambda: sum("-c" in call.args[0] for call in run.call_args_list)


@needs_compiler
def test_it_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compilations(monkeypatch)
    for _ in range(2):
        assert library_in(folder).panel_channels() == 1 and compiled() == 1
        assert len(os.listdir(folder)) == 1, "nothing but the library"
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-DANSWER=2"))
    assert library_in(folder).panel_channels() == 2, "made from something else"
    assert compiled() == len(os.listdir(folder)) == 2


@pytest.mark.parametrize(
    "script",
    [
        "printf 'caf\\351: error' >&2; exit 1",  # in the user's own encoding
        "true",  # succeeds, and makes nothing
        'case "$*" in *-shared*) echo no library > "$4";; *) exec cc "$@";; esac',
    ],
    ids=["fails", "makes nothing", "makes something else"],
)
def test_a_compiler_that_fails_is_done_without(script, compiler, folder, caplog, monkeypatch) -> None:
    compiler(script)
    with caplog.at_level(logging.INFO, logger=native.__name__):
        assert native_library.__wrapped__() is None
    assert "products and attention are torch's" in caplog.text
    assert not folder.exists() or not os.listdir(folder), "nothing that the next process would load"
    monkeypatch.setenv("SPECDEC_NATIVE", "0")  # the user can forbid it
    monkeypatch.setattr(native, "library_in", lambda folder: pytest.fail("nothing is compiled"))
    assert native_library.__wrapped__() is None


@needs_compiler
@pytest.mark.parametrize("damage", ["half", "one bit", "of another system"])
def test_a_damaged_library_is_made_anew(damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a file of half the length ends the process: its second half is mapped, and is not there."""
    library_in(folder)
    (kept,) = folder.iterdir()
    content, foreign = kept.read_bytes(), b"of another system"
    half = len(content) // 2
    damaged = {
        "half": content[:half],
        "one bit": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
        "of another system": foreign + hashlib.sha256(foreign).digest(),
    }
    kept.unlink()  # the file that this process has mapped stays as it is
    kept.write_bytes(damaged[damage])
    compiled = compilations(monkeypatch)
    for _ in range(2):  # and is kept
        assert library_in(folder).panel_channels() == 1 and compiled() == 1


@needs_compiler
def test_two_processes_at_once(folder: Path, tmp_path: Path, compiler: Callable[[str], None]) -> None:
    """Both compile until both have begun; either one's library is whole at any time."""
    begun = tmp_path / "begun"
    begun.mkdir()
    wait = f"touch {begun}/$$; until [ $(ls {begun} | wc -l) -ge 2 ]; do sleep 0.01; done"
    compiler(f'case "$*" in *source.o) {wait};; esac\nexec cc "$@"')
    with ThreadPoolExecutor(2) as pool:
        assert [library.panel_channels() for library in pool.map(library_in, [folder, folder])] == [1, 1]
    assert len(os.listdir(begun)) == 2
    (kept,) = folder.iterdir()
    assert native._is_whole(kept), "and nothing else is left"

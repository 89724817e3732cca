"""What a program may do, and what becomes of one that does more, with Python's own refusals and with the system's."""

import os
import sys
import time
from pathlib import Path

import pytest

from experiments.grading import sandbox
from experiments.grading.sandbox import Limits, Outcome, run, run_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are run on Linux only")

LIMITS = Limits(seconds=5, memory_mb=512)
BARE = Limits(seconds=5, memory_mb=512, guard=False)
SHORT = Limits(seconds=1, memory_mb=512)


def test_a_program_that_comes_to_its_end_has_passed() -> None:
    program = "import collections, math, typing\nassert math.comb(4, 2) == 6\nprint('x')"
    outcome = run(program, LIMITS)
    assert (outcome.passed, outcome.error) == (True, None)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("assert 1 == 2, 'unequal'", "AssertionError: unequal"),
        ("def (", "SyntaxError: "),
        ("import nothing_like_this", "ModuleNotFoundError: "),
        ("raise RuntimeError('at import')", "RuntimeError: at import"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os; os._exit(0)", "ended before its tests had run"),
        ("import os, signal; signal.raise_signal(signal.SIGSEGV)", "ended by SIGSEGV"),
        ("def f(): f()\nf()", "RecursionError"),
        ("x = bytearray(2 ** 33)", "MemoryError"),
        ("x = []\nwhile True: x.append('x' * 10 ** 6)", "MemoryError"),
        ("input()", "EOFError"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "an error that cannot be shown"),
    ],
)
def test_ways_to_fail(program: str, error: str) -> None:
    outcome = run(program, LIMITS)
    assert not outcome.passed
    assert outcome.error is not None and error in outcome.error


STUBBORN = """
while True:
    try:
        while True: pass
    except BaseException:
        pass
"""


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)", STUBBORN])
def test_endless_loops_are_stopped(program: str) -> None:
    assert run(program, SHORT) == Outcome(False, "took more than 1 s", run("", LIMITS).no_network)


FLOOD = """
import os
for number in range(3, 30):
    try:
        while True: os.write(number, b'x' * 4096)
    except OSError:
        pass
"""


def test_huge_output_goes_nowhere() -> None:
    assert run("for _ in range(20000): print('x' * 1000)", LIMITS).passed
    # Even one that looks for the stream of the results fills no memory, and has not passed.
    assert not run(FLOOD, LIMITS).passed


def test_a_result_cannot_be_forged_without_the_token() -> None:
    forged = """import os
for number in range(3, 30):
    try: os.write(number, b'{"done": "x", "error": null}\\n')
    except OSError: pass
os._exit(0)"""
    assert run(forged, LIMITS).error == "ended before its tests had run"


PROCESSES = [
    "import os\nwhile True: os.fork()",
    "import subprocess; subprocess.run(['/bin/true'])",
    "import os; assert os.system('true') == 0",
    "import threading; threading.Thread(target=print).start()",
]


@pytest.mark.parametrize("limits", [LIMITS, BARE], ids=["guard", "system"])
@pytest.mark.parametrize("program", PROCESSES)
def test_no_further_process_or_thread(program: str, limits: Limits) -> None:
    outcome = run(program, limits)
    assert not outcome.passed
    assert outcome.error is not None and "more than" not in outcome.error


def test_no_network() -> None:
    connect = "import socket; socket.create_connection(('127.0.0.1', 9), 2)"
    refused = run(connect, LIMITS)
    assert refused.error is not None and refused.error.startswith("PermissionError: socket.")
    if not refused.no_network:
        pytest.skip("this system lets no process give up the network")
    bare = run(connect, BARE)
    assert bare.error is not None
    assert "Network is unreachable" in bare.error, "not even this machine, whose port 9 would refuse"


CHANGES = [
    "open({}, 'w')",
    "open({}, 'a')",
    "os.remove({})",
    "os.rename('a', {})",
    "os.open({}, os.O_RDWR)",
    "os.kill(os.getppid(), 9)",
    "shutil.rmtree(os.path.dirname({}))",
]


@pytest.mark.parametrize("change", CHANGES)
def test_files_of_others_stay(change: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("as it was")
    outcome = run(f"import os, shutil\nopen('a', 'w').close()\n{change.format(repr(str(mine)))}", LIMITS)
    assert outcome.error is not None and outcome.error.startswith("PermissionError")
    assert mine.read_text() == "as it was"


def test_its_own_folder_is_its_own_and_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)  # the program runs as nobody where the tests run as root
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = (
        "import os\nos.mkdir('b'); open('b/c', 'w').write('x'); os.rename('b/c', 'd'); os.remove('d'); os.rmdir('b')"
    )
    assert run(program, LIMITS) == run("", LIMITS)
    assert not list(tmp_path.iterdir())


def test_files_have_a_limit() -> None:
    outcome = run("f = open('a', 'wb')\nwhile True: f.write(b'x' * 10 ** 6)", BARE)
    assert outcome.error is not None and "File too large" in outcome.error


def test_modules_are_found_wherever_python_lies() -> None:
    """Also below a home that only root may enter, and in packages that were loaded before."""
    modules = "encodings.idna, importlib.metadata, json.tool, statistics, unittest, xml.dom.minidom, numpy.linalg"
    assert run(f"import {modules}", LIMITS) == run("", LIMITS)


def test_passwords_of_the_environment_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("import os; assert 'secret' not in os.environ.values()", LIMITS).passed


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="runs as root only")
def test_root_gives_up_its_privileges() -> None:
    assert run("import os; assert os.getuid() != 0 and os.geteuid() != 0", BARE).passed


def test_programs_keep_their_order_and_run_beside_each_other() -> None:
    programs = ["import time; time.sleep(0.2)", "assert False", ""]
    assert [outcome.passed for outcome in run_all(programs, LIMITS, workers=3)] == [True, False, True]


def test_a_system_without_limits_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text("import json, sys; sys.stdin.read(); print(json.dumps({'refused': 'PermissionError: no'}))")
    monkeypatch.setattr(sandbox, "_CHILD", child)
    with pytest.raises(ValueError, match=r"cannot limit what a program does \(PermissionError: no\): grade the code"):
        run("", LIMITS)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="execute=true needs Linux"):
        run("", LIMITS)


def test_a_child_that_dies_at_once_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text("import os; os._exit(3)")
    monkeypatch.setattr(sandbox, "_CHILD", child)
    begun = time.monotonic()
    assert run("x" * 10**6, LIMITS) == Outcome(False, "ended before its tests had run", None)
    assert time.monotonic() - begun < 2 * LIMITS.seconds, "nobody waits for a dead child"

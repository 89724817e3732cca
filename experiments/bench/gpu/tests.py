"""Part 3, at most eight minutes: the tests marked ``gpu`` in twelve processes, then those that need one alone."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from experiments.bench.gpu.outcome import Outcome
from experiments.results.manifest import ROOT

SECONDS, EACH = 450, 120
"""The seconds that all tests may take, and that one may."""
PROCESSES = 12
ALONE = "tests/gpu/test_alone.py"
_RESULT = "(?P<result>PASSED|FAILED|ERROR|SKIPPED)"
_LINES = (rf"^\[gw\d+\] \[ *\d+%\] {_RESULT} (?P<name>tests/.*\S)", rf"^(?P<name>tests/.+?) {_RESULT}\b")
"""The lines that pytest prints of a test, with several processes and with one."""


def gpu_tests(folder: Path = ROOT / "tests") -> list[str]:
    """Return the test files with tests that need a GPU.

    Only these are collected: others import what a machine for measurements need not have.
    """
    marked = re.compile(r"^\s*(?:@|pytestmark = \[?|.*marks=\[?)pytest\.mark\.gpu\b", re.MULTILINE)
    found = [path for path in folder.rglob("test_*.py") if marked.search(path.read_text(encoding="utf-8"))]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def run(outcome: Outcome) -> None:
    """Run them, and note what each came to; a rehearsal only collects them."""
    files, log, deadline = gpu_tests(), outcome.out / "3-tests.log", time.monotonic() + SECONDS
    log.write_text("", encoding="utf-8")
    if outcome.rehearsal:
        outcome.figures = {"failed": int(_pytest(["--collect-only", "-q", *files], log, deadline) != 0)}
        return
    spread = ["-n", str(PROCESSES)] if find_spec("xdist") else []
    limit = ["--timeout", str(EACH)] if find_spec("pytest_timeout") else []
    together = [file for file in files if file != ALONE]
    codes = [_pytest(["-v", *limit, *words], log, deadline) for words in ([*spread, *together], [ALONE])]
    results = results_of(log.read_text(encoding="utf-8", errors="replace"))
    for name, result in sorted(results.items()):
        if result in ("FAILED", "ERROR"):
            outcome.add("failures", test=name, result=result)
    failed = len(outcome.records.get("failures", []))
    # What pytest itself calls a failure counts, even if no line has named it.
    outcome.figures = {"failed": failed or int(any(codes)), "passed": list(results.values()).count("PASSED")}
    outcome.table("Tests that failed", "failures")


def results_of(log: str) -> dict[str, str]:
    """Return the result of every test that a log names."""
    return {found["name"]: found["result"] for line in _LINES for found in re.finditer(line, log, re.MULTILINE)}


def _pytest(words: Sequence[str], log: Path, deadline: float) -> int:
    """Run pytest until a moment, and return its exit code.

    A warning of some package in a version of its own is no failure of what is tested.
    """
    common = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "--tb=short"]
    common += ["-p", "tests.gpu.at_once"]
    print("$ python", " ".join([*common, *words]), flush=True)
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *common, *words], cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            return process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]), flush=True)

"""All that can be checked of the GPU path without a GPU, in a few processes side by side.

    python -m tests.gpu.dry [a folder with another Triton]

With another Triton, that of the machines with GPUs, all kernels are compiled by it, attention of rare shapes included,
and all but those by the installed one, too; without it, by the installed one alone.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu.dry.fake_tensors import ROOT

CPUS = 2


def main() -> int:
    """Run all parts; returns how many failed."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    other = folder is not None and (folder / "triton").is_dir()
    if folder is not None and not other:
        print(f"there is no Triton in {folder}: kernels are compiled by the installed one alone")
    path = {"PYTHONPATH": str(folder.resolve())} if folder is not None and other else {}
    parts: list[tuple[list[str], dict[str, str]]] = [
        (["rounds", "1/2"], {}),
        (["rounds", "2/2"], {}),
        *([(["kernels", "90", "mutants"], path)] if other else []),
        (["kernels", "90", "usual", *([] if other else ["mutants"])], {}),
        (["kernels", "100", "usual"], path),
        (["kernels", "86", "usual"], path),
        (["kernels", "80", "usual"], path),
    ]
    begin = time.perf_counter()
    with ThreadPoolExecutor(CPUS) as pool:
        failed = sum(pool.map(lambda part: _run(*part), parts))
    print(f"{failed} of {len(parts)} parts failed" if failed else f"all {len(parts)} parts passed", end=", ")
    print(f"in {time.perf_counter() - begin:.0f} s")
    return failed


def _run(part: list[str], environment: dict[str, str]) -> bool:
    """Run a part in a process of its own, where Triton does not interpret; returns whether it failed."""
    begin = time.perf_counter()
    usual = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.dry.{part[0]}", *part[1:]],
        cwd=ROOT, env=usual | environment | {"TRITON_DEFAULT_FP_FUSION": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    result = f"FAILED ({done.returncode})\n{done.stderr[-3000:]}" if done.returncode else "passed"
    print(f"== {' '.join(part)}\n{done.stdout}{result}, {time.perf_counter() - begin:.0f} s", flush=True)
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main() > 0)

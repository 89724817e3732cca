"""That Triton's compiler accepts the kernels, which its interpreter does not show, and fits them. It needs no GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel_compiler import SHARED

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.parametrize("capability", SHARED)
def test_the_kernels_compile_and_fit(capability: int, tmp_path: Path) -> None:
    names = ["Llama-3.1-8B, 16 nodes", "Gemma-2-9B"]
    if capability == 90:
        names += ["Llama-3.1-8B, decoding", "gpt-oss-20b", "DeepSeek-V3, latent", "chunks"]
    kernels = compiled("tests.kernel_compiler", capability, names, tmp_path)
    assert {case for case, _, _ in kernels} == set(names)
    assert {kernel for _, kernel, _ in kernels} == {"attend_piece", "merge_pieces"}
    assert not [line for line in kernels if int(line[2]) > SHARED[capability]]


PER_BYTE = {"int4": 0.30, "int8": 0.22, "fp8": 0.20}
"""Instructions of a warp for every byte of weights that an H100 can afford: at one per clock and scheduler, it needs
0.28 for the 3.35 TB/s of its memory, and 0.55 to take 0.6 of the time of bfloat16 with half a byte per weight."""


@pytest.mark.full
@pytest.mark.parametrize("capability", SHARED)
def test_quantized_products_keep_up_with_the_memory(capability: int, tmp_path: Path) -> None:
    products = compiled("tests.product_compiler", capability, [], tmp_path)

    def faults(name: str, spilled: str, shared: str, per_byte: str) -> list[str]:
        slow = capability == 90 and float(per_byte) > PER_BYTE.get(name.split(",")[0], PER_BYTE["int4"])
        small = int(shared) > SHARED[capability]
        return [fault for fault, found in [("spills", int(spilled) > 64), ("slow", slow), ("small", small)] if found]

    found = {line[0]: faults(*line) for line in products}
    mutants = {name: found.pop(name) for name in ("too few warps", "too few channels")}
    assert len(found) == 12 and not any(found.values()), found
    if capability == 90:
        assert "spills" in mutants["too few warps"] and mutants["too few channels"] == ["slow"], mutants


def compiled(module: str, capability: int, names: list[str], folder: Path) -> list[list[str]]:
    """The lines that a module prints of its kernels, in a process of its own."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("Triton needs a C compiler")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, str(capability), *names],
        cwd=ROOT, capture_output=True, text=True, env=environment | {"TRITON_CACHE_DIR": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]

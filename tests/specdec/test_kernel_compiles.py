"""That Triton's compiler accepts the attention kernels, which its interpreter does not show. It needs no GPU."""

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
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("Triton needs a C compiler")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel_compiler", str(capability), *names],
        cwd=ROOT, capture_output=True, text=True, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kernels = [line.split("\t") for line in done.stdout.splitlines()]
    assert {case for case, _, _ in kernels} == set(names)
    assert {kernel for _, kernel, _ in kernels} == {"attend_piece", "merge_pieces"}
    assert not [line for line in kernels if int(line[2]) > SHARED[capability]]

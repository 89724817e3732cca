"""Loops of a forward that threads share (``native/threads.h``): whole when one leaves; nobody waits for the late."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.native import library as native
from tests.models import tiny_model
from tests.specdec.test_native_program import forwards

pytestmark = pytest.mark.skipif(native.native_library() is None, reason="no C compiler, or no AVX2")

PLAYED = """
#include "threads.h"
#include <unistd.h>

/* Three threads, of which the last comes a second late; the loop's first number takes long. */
void play(long count, long *did, long *whole, double *times) {
  loop l = {0};
  _Pragma("omp parallel num_threads(3)")
  {
    const int self = omp_get_thread_num();
    if (self == 2) usleep(1000000);
    times[3 + self] = omp_get_wtime();
    SHARE(&l, count, i) {
      usleep(i ? 100 : 100000);
      did[i]++;
    }
    for (long i = 0; i < count; i++) whole[self] += did[i];
    times[self] = omp_get_wtime();
  }
}
"""


def played(header: str, folder: Path, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How often each number was done; how many were when each thread left; when each left, and came."""
    (folder / "threads.h").write_text(header)
    (folder / "played.c").write_text(PLAYED)
    made = folder / "played.so"
    command = [*native._compiler(), *native._FLAGS, "-shared", str(folder / "played.c"), "-o", str(made)]
    subprocess.run(command, check=True)
    did, whole, times = np.zeros(count, dtype=np.int64), np.zeros(3, dtype=np.int64), np.zeros((2, 3))
    addresses = [ctypes.c_void_p(each.ctypes.data) for each in (did, whole, times)]
    ctypes.CDLL(str(made)).play(ctypes.c_long(count), *addresses)
    return did, whole, times


WAITS = "atomic_load(&l->done) < count"


@pytest.mark.parametrize("mutant", [False, True])
def test_a_loop_is_whole_when_somebody_leaves_and_who_is_late_finds_it_done(mutant: bool, tmp_path: Path) -> None:
    """The mutant leaves when nothing is left to take."""
    header = (native.FOLDER / "threads.h").read_text()
    assert header.count(WAITS) == 1
    did, whole, (left, came) = played(header.replace(WAITS, "0") if mutant else header, tmp_path, 37)
    assert (did == 1).all() and left[:2].max() < came[2]
    assert (whole == 37).all() is not np.bool_(mutant)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_forwards_have_the_same_bits_with_any_number_of_threads(dtype, monkeypatch, tmp_path) -> None:
    """More than there are cores, so that some come late; every loop is shared, however small it is."""
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-DLEAST_PARALLEL=1"))
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    threads = torch.get_num_threads()
    native.native_library.cache_clear()
    try:
        model, found = tiny_model("gemma3").to(dtype), []
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            found += [forwards(model)[0] for _ in range(10 if count > 1 else 1)]
        assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))
    finally:
        torch.set_num_threads(threads)
        native.native_library.cache_clear()

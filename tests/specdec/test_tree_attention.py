"""Attention over the cache against its definition in float64: every backend, random trees, ragged rows, every option.

Where there is no GPU, Triton's interpreter runs the kernel (``conftest``).
"""

from dataclasses import replace

import pytest
import torch

from specdec.attention import BACKENDS
from specdec.attention.base import Reach
from specdec.attention.tree_attention import Seen, Tiles, choose_pieces, choose_tiles, tree_attention
from tests.attention import CASES, TOLERANCE, Case, error, paged, problem, quantized

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(16, 16, 4, 1)
OTHERS = ("grouped", "flex")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@torch.inference_mode()
def test_the_kernel_computes_what_attention_is(case: Case) -> None:
    given = problem(case, DEVICE)
    assert error(given.output(BACKENDS["triton"]), given.expected()) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("backend", OTHERS)
@torch.inference_mode()
def test_the_other_backends_compute_it_too(backend: str, case: Case) -> None:
    if backend == "flex" and case.sinks and DEVICE == "cpu":
        with pytest.raises(ValueError, match="no attention sinks on a CPU"):
            problem(case, DEVICE).output(BACKENDS[backend])
        return
    given = problem(case, DEVICE)
    assert error(given.output(BACKENDS[backend]), given.expected()) < TOLERANCE[case.dtype]

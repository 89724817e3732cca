"""Compiles the products of quantized layers for a GPU that is not there, with the arguments that layers give them.

    python -m tests.product_compiler 90

prints a line for every scheme and number of rows, and for two sizes of blocks that do not suit: what it is, bytes of
spills and of shared memory, and instructions of a warp per byte of weights. In a process of its own, because Triton
must not have been told to interpret.
"""

import itertools
import sys

import torch

from specdec.quantization import METHODS
from specdec.quantization.dispatch import gpu_kernel
from specdec.quantization.kernels import rows as kernels
from tests.gpu.dry.fake_cuda import CUDA, fake_cuda
from tests.gpu.dry.kernels import Compiler

ROWS = (1, 24, 60, 300)
SCHEMES = {"int4": 4, "int8": 8, "fp8": 8}
MUTANTS = {"too few warps": (64, 128, 64, 2, 192), "too few channels": (64, 16, 64, 4, 192)}
"""Blocks of other sizes: registers do not suffice; every warp makes numbers of all weights."""


def main() -> None:
    """Compile for one capability."""
    capability = int(sys.argv[1])
    compiler = Compiler(capability)
    with fake_cuda(capability, compiles=True):
        weight = torch.empty(14336, 4096, dtype=torch.bfloat16, device=CUDA)
        layers = {name: METHODS[name](weight, None) for name in SCHEMES}
        with compiler.case("a trial"):
            assert gpu_kernel(weight.device)
        for name, rows in itertools.product(SCHEMES, ROWS):
            with compiler.case(f"{name}, {rows} rows", weight_bits=SCHEMES[name]):
                layers[name](torch.empty(rows, 4096, dtype=torch.bfloat16, device=CUDA))
        for mutant, sizes in MUTANTS.items():
            kernels._BLOCKS = (kernels._Blocks(*sizes),)
            with compiler.case(mutant, weight_bits=4):
                layers["int4"](torch.empty(64, 4096, dtype=torch.bfloat16, device=CUDA))
    for each in compiler.found:
        if each.per_byte is not None:
            print(each.case, each.spilled, each.shared, each.per_byte, sep="\t")


if __name__ == "__main__":
    main()

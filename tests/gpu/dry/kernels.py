"""All Triton kernels, compiled for a GPU that is not there, with the arguments that a GPU would see.

    python -m tests.gpu.dry.kernels 90 [usual] [mutants]

prints registers, bytes of spills and of shared memory of every kernel for one compute capability, by the Triton that is
found first. It fails if a kernel needs more shared memory than there is, or spills in half precision, or if nobody
launches a kernel here. ``usual`` leaves out attention of rare shapes, and ``mutants`` compiles what has to be rejected,
too. Triton must not have been told to interpret.
"""

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.backends.nvidia
from transformers import LlamaForCausalLM, PreTrainedModel
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from drafters.eagle import EagleDrafter
from drafters.heads.eagle import Eagle3Head
from drafters.model import ModelDrafter
from experiments.bench.gpu import llama_config
from specdec.drafting.builders import ExpansionTree
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.kernels import attention, products
from specdec.kernels import tiles as tiling
from specdec.kernels.tiles import Tiles
from specdec.quantization import METHODS
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.attention import Case, launch, paged, problem, quantized
from tests.gpu.dry.fake_cuda import CUDA, fake_cuda, move
from tests.gpu.dry.fake_tensors import ROOT
from verifiers.rejection import RejectionVerifier

SPILLED = 64
"""Bytes of a thread's registers that may go to memory in half precision."""
USUAL = ("Llama-3.1-8B, decoding", "Llama-3.1-8B, 16 nodes", "Llama-3.1-8B, prefill", "Gemma-2-9B")
"""Cases of attention that are compiled for every capability and by every Triton."""
ROWS = (1, 24, 60, 300)
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
SCHEMES = ("int4", "int8", "fp8")
_BINARIES = Path(triton.backends.nvidia.__file__).parent / "bin"


@dataclass(frozen=True)
class Compiled:
    """A kernel as it was compiled for one launch.

    Attributes:
        case: What launched it.
        name: The kernel's.
        precise: Whether it computes in float32, where spills are not limited.
        registers, spilled, shared: Of a thread; of a thread in bytes; of a program in bytes.
    """

    case: str
    name: str
    precise: bool
    registers: int
    spilled: int
    shared: int

    def __str__(self) -> str:
        return f"  {self.case:42s} {self.name:18s} {self.registers:9d} {self.spilled:8d} {self.shared:8d}"

    def problem(self, capability: int) -> str | None:
        """Return what is wrong with it."""
        if self.shared > SHARED[capability]:
            return f"needs {self.shared} bytes of shared memory, and there are {SHARED[capability]}"
        if self.spilled > SPILLED and not self.precise:
            return f"spills {self.spilled} bytes, and {SPILLED} are the limit"
        return None


class Compiler:
    """Notes what is compiled, case by case."""

    def __init__(self, capability: int):
        self.capability = capability
        self.found: list[Compiled] = []
        self.names: set[str] = set()
        self._kernels = compile_for(capability)
        self._seen: set[str] = set()

    @contextmanager
    def case(self, name: str, *, precise: bool = False) -> Iterator[None]:
        """Note what is launched during the ``with`` block."""
        yield
        for kernel in self._kernels:
            source = kernel.src.fn
            self.names.add(f"{source.fn.__module__}.{source.fn.__name__}")
            if kernel.hash not in self._seen:
                self._seen.add(kernel.hash)
                registers, spilled = _binary(kernel.asm["cubin"])
                found = Compiled(name, source.fn.__name__, precise, registers, spilled, kernel.metadata.shared)
                if found not in self.found:  # differently aligned arguments
                    self.found.append(found)
                    print(found, flush=True)
        self._kernels.clear()


def _binary(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of the stack of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [_BINARIES / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, spilled = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return registers, spilled


def kernels_in(folders: tuple[str, ...] = ("specdec", "drafters", "verifiers")) -> set[str]:
    """Return all kernels that are launched, by module and name: those that no other kernel calls."""
    kernels: set[str] = set()
    called: set[str] = set()
    for file in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(d) for d in function.decorator_list
            ):
                module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
                kernels.add(f"{module}.{function.name}")
                calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
                called.update(call.id for call in calls if isinstance(call, ast.Name))
    return {name for name in kernels if name.rpartition(".")[2] not in called}


def compile_all(capability: int, *, rare: bool) -> Compiler:
    """Return all kernels for a compute capability; with attention of ``rare`` shapes and every size, if asked for."""
    compiler = Compiler(capability)
    _attention(compiler, rare=rare)
    with fake_cuda(capability, compiles=True):
        for scheme in SCHEMES:
            if scheme != "fp8" or capability >= 89:
                for rows in ROWS if rare else ROWS[1::2]:
                    _product(compiler, f"{scheme}, {rows} rows", scheme, rows)
    plays = (("plain", None), ("a chain of Llama-1B's", _chain), ("EAGLE-3's tree", _eagle))
    for case, drafter in plays if rare else plays[1:]:
        model = llama("llama-8b", 2)
        drafted = None if drafter is None else drafter(model)
        move([model, drafted])
        with fake_cuda(capability, compiles=True), compiler.case(f"Llama-8B, {case}"):
            _play(
                Engine(
                    Target(model), drafted, RejectionVerifier() if drafted else None, max_batch_size=2, max_length=2048
                )
            )
    return compiler


def _product(compiler: Compiler, case: str, scheme: str, rows: int) -> None:
    layer = METHODS[scheme](torch.empty(14336, 4096, dtype=torch.bfloat16, device=CUDA), None)
    with compiler.case(case):
        layer(torch.empty(rows, 4096, dtype=torch.bfloat16, device=CUDA))


def _attention(compiler: Compiler, *, rare: bool) -> None:
    few = [torch.int8] if compiler.capability < 89 else [torch.float8_e4m3fn, torch.int8]
    for name, case in MODELS.items():
        if name not in USUAL and not rare:
            continue
        given = problem(case)
        with compiler.case(name, precise=case.dtype is torch.float32):
            launch(given, pieces=4)
            if case.nodes > 1:
                launch(given)
        for dtype in few if case.dtype is not torch.float32 else []:
            if name == USUAL[0] or rare:
                seen = given.seen()
                stored, table = paged(quantized(given, dtype)[0], seen.table, 32)
                with compiler.case(f"{name}, {str(dtype)[6:]} pages"):
                    launch(given, stored=stored, seen=replace(seen, table=table), pieces=4)


def llama(shape: str, layers: int, **sizes: int) -> PreTrainedModel:
    """Return a model without numbers in bfloat16 (``fake_cuda.move``)."""
    config = llama_config(shape, num_hidden_layers=layers, **sizes)
    with torch.device("meta"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def _chain(target: PreTrainedModel) -> Drafter:
    return ModelDrafter(llama("llama-8b", 2, **LLAMA_1B), 4, sampling="iid")


def _eagle(target: PreTrainedModel) -> Drafter:
    head = Eagle3Head.for_target(target, hidden_layers=(0, 1, -1), draft_ids=list(range(32000)))
    return EagleDrafter(head.bfloat16().eval(), ExpansionTree())


def _play(engine: Engine) -> None:
    """Play greedy and sampled rounds after a long prompt and a short one."""
    for temperature in (0.0, 1.0):
        for length in (600, 5):
            engine.submit(
                [1, 2, 3, 4, 5] * (length // 5),
                SamplingParams(max_new_tokens=5, temperature=temperature, top_p=0.9, min_p=0.01),
            )
        while engine.unfinished:
            engine.step()


def problems_of(compiler: Compiler) -> list[str]:
    """Return what is wrong with kernels, and which were not compiled."""
    found = [(each, each.problem(compiler.capability)) for each in compiler.found]
    problems = [f"{each.name} ({each.case}) {problem}" for each, problem in found if problem is not None]
    missing = sorted(kernels_in() - compiler.names)
    return problems + [f"nobody compiles {name}: launch it in {Path(__file__).name}" for name in missing]


MUTANTS = {
    "more shared memory than there is": (Tiles(64, 128, 8, 4), "bytes of shared memory"),
    "half of the registers": (Tiles(128, 128, 4, 1), "spills"),
}
"""Tiles that do not suit a Llama's attention, and what is to be said of them."""
BLOCKS = products._Blocks(64, 128, 64, 2, 192)
"""Blocks of a product for which registers do not suffice."""


def not_rejected(compiler: Compiler) -> list[str]:
    """Return the mutants that pass."""
    passed, compiler.found = [], []
    name = compiler.names.pop()
    if not any(name in found for found in problems_of(compiler)):
        passed.append("a kernel that nobody compiles")
    for name, (tiles, reason) in MUTANTS.items():
        with compiler.case(f"mutant: {name}"):
            launch(problem(MODELS[USUAL[1]]), tiles=tiles)
        if not any(reason in found for found in problems_of(compiler)):
            passed.append(name)
    compiler.found = []
    with fake_cuda(compiler.capability, compiles=True), patch.object(products, "_BLOCKS", (BLOCKS,)):
        _product(compiler, "int4, too few warps", "int4", 64)
    if not any("spills" in found for found in problems_of(compiler)):
        passed.append("int4, too few warps")
    return [f"NOT REJECTED: {name}" for name in passed]


def main() -> int:
    """Compile for one capability; returns the number of problems."""
    capability = int(sys.argv[1])
    print(f"sm_{capability}, Triton {triton.__version__}")
    print(f"  {'case':42s} {'kernel':18s} registers  spilled   shared")
    compiler = compile_all(capability, rare="usual" not in sys.argv)
    problems = problems_of(compiler)
    if "mutants" in sys.argv:
        problems += not_rejected(compiler)
    print(*problems, sep="\n")
    return len(problems)


_HALF: dict[str, Any] = {"lengths": (40,), "dtype": torch.bfloat16}
_LLAMA: dict[str, Any] = {**_HALF, "head_dim": 128, "kv_heads": 8, "groups": 4}
MODELS = {
    "Llama-3.1-8B, decoding": Case(nodes=1, shape="chain", **_LLAMA),
    "Llama-3.1-8B, 16 nodes": Case(nodes=16, **_LLAMA),
    "Llama-3.1-8B, 256 nodes": Case(nodes=256, **_LLAMA),
    "Llama-3.1-8B, prefill": Case(nodes=512, shape="chain", **_LLAMA),
    "Gemma-2-9B": Case(nodes=16, head_dim=256, kv_heads=8, groups=2, softcap=50.0, window=4096, **_HALF),
    "gpt-oss-20b": Case(nodes=16, head_dim=64, kv_heads=8, groups=8, sinks=True, window=128, **_HALF),
    "DeepSeek-V2-Lite": Case(nodes=16, head_dim=192, value_dim=128, kv_heads=16, groups=1, **_HALF),
    "DeepSeek-V3, latent": Case(nodes=8, head_dim=576, value_dim=512, kv_heads=1, groups=128, **_HALF),
    "in float32": Case(nodes=16, lengths=(40,), head_dim=128, kv_heads=2, groups=4),
}
"""Shapes of models that decode on a GPU, besides the small ones of ``CASES``."""

SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory of one program, by compute capability."""


def compile_for(capability: int) -> list[Any]:
    """Make every later launch compile for a GPU and do no more; returns a list to which the kernels are added."""
    target = GPUTarget("cuda", capability, 32)
    kernels: list[Any] = []
    triton.runtime.driver.set_active(
        SimpleNamespace(  # type: ignore[arg-type]
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    JITFunction.run = compiled
    tiling.shared_memory = lambda device: SHARED[capability]
    attention.processors = lambda device: 132
    return kernels


if __name__ == "__main__":
    sys.exit(main() > 0)

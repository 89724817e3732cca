"""A measured check of what specdec chooses: a random Llama's forwards in each dtype, optimized and plain."""

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.forward import ForwardBatch
from specdec.machine import choose_dtype, dtype_name
from specdec.memory import free_memory
from specdec.native import recommended_threads
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, TreeShape

SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""58 million weights: more than a processor's caches hold, and little enough to be measured in half a minute."""

TOKENS = (1, 8)  # of a forward: plain decoding, and verifying a chain of seven
PREFIX = 64  # tokens in the cache
SECONDS, LEAST = 20.0, 5  # of measuring, and forwards of each way even if that takes longer
WARMUP = 30  # forwards before any is timed; a shape is captured after fewer
TOLERANCE = 1.1  # a choice this much slower than another is not called wrong: machines are never quiet


@dataclass(frozen=True)
class Way:
    """One way to run the model.

    Attributes:
        dtype: The model's dtype.
        optimize: Whether to use packed weights and captured forwards; False runs the model's own code.
        threads: The number of threads that torch uses.
    """

    dtype: torch.dtype
    optimize: bool
    threads: int

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{dtype_name(self.dtype)}, {'packed and captured' if self.optimize else 'plain'}, {threads}"


Times = Mapping[Way, tuple[float, ...]]
"""Median seconds of a forward, one for each number in ``TOKENS``."""


class Verdict(NamedTuple):
    """Whether a choice was the fast one here, or too close to tell, and one sentence with the ratios."""

    right: bool
    text: str


def ways(device: torch.device, *, default_threads: int) -> list[Way]:
    """Returns what to compare on a device; the first way is the one that specdec chooses for a bfloat16 checkpoint."""
    dtype = choose_dtype(torch.bfloat16, device).dtype
    threads = recommended_threads()
    others = [d for d in (torch.bfloat16, torch.float32) if d is not dtype]
    on_cpu = device.type == "cpu"
    compared = [Way(d, True, threads) for d in (dtype, *others)]
    if on_cpu:
        compared += [Way(d, False, threads) for d in (dtype, *others)]
        if default_threads != threads:
            compared.append(Way(dtype, True, default_threads))
    return compared


def measure(compared: Sequence[Way], device: torch.device) -> Times:
    """Times forwards of one and of eight tokens of a random Llama, all ways in turn, for ``SECONDS``.

    Raises:
        ValueError: The models do not fit into half of the free memory.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    dtypes = {way.dtype for way in compared}
    needed = 2 * sum(model.num_parameters() * dtype.itemsize for dtype in dtypes)  # with packed copies
    if needed > free_memory(device) / 2:
        raise ValueError(
            f"the check needs {needed / 2**30:.1f} GiB, which is more than half of the free memory: "
            f"close other programs, or give quick=true"
        )
    models: dict[torch.dtype, Any] = {dtype: copy.deepcopy(model).to(device, dtype) for dtype in dtypes}  # pyright: ignore[reportArgumentType]
    forwards = {
        way: [_forward(models[way.dtype], tokens, optimize=way.optimize) for tokens in TOKENS] for way in compared
    }
    taken: dict[Way, list[list[float]]] = {way: [[] for _ in TOKENS] for way in compared}
    threads = torch.get_num_threads()
    try:
        for way in compared:
            torch.set_num_threads(way.threads)
            for forward in forwards[way]:
                for _ in range(WARMUP if way.optimize else 3):
                    forward()
        end = time.perf_counter() + SECONDS
        # In turn, so that other work of the machine affects all ways alike.
        while time.perf_counter() < end or len(taken[compared[-1]][-1]) < LEAST:
            for way in compared:
                torch.set_num_threads(way.threads)
                for forward, into in zip(forwards[way], taken[way], strict=True):
                    start = time.perf_counter()
                    forward()
                    into.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return {way: tuple(statistics.median(each) for each in times) for way, times in taken.items()}


def verdicts(times: Times) -> list[Verdict]:
    """Judge each choice by its times.

    Args:
        times: The first way is the choice; the others differ from it in one thing or more.
    """
    choice = next(iter(times))
    found = []
    for way in times:
        words = {
            "dtype": (dtype_name(choice.dtype), dtype_name(way.dtype)),
            "execution": ("packed and captured", "plain"),
            "threads": (f"using {choice.threads}", f"torch's own {way.threads}"),
        }
        differ = [what for what, one, other in zip(words, astuple(choice), astuple(way), strict=True) if one != other]
        if len(differ) == 1:
            found.append(_compare(differ[0], *words[differ[0]], times[choice], times[way]))
    return found


def _compare(what: str, ours: str, other: str, own: Sequence[float], others: Sequence[float]) -> Verdict:
    ratios = [a / b for a, b in zip(own, others, strict=True)]
    mean = statistics.geometric_mean(ratios)
    numbers = " and ".join(
        f"{ratio:.2f} for {tokens} token{'s' if tokens > 1 else ''}"
        for ratio, tokens in zip(ratios, TOKENS, strict=True)
    )
    right = mean <= TOLERANCE
    ending = "the right choice here" if right else f"the wrong choice here: {other} is the faster"
    return Verdict(right, f"{what}: {ours} takes {numbers} of the time of {other}, {ending}")


def _forward(model: LlamaForCausalLM, tokens: int, *, optimize: bool) -> Callable[[], None]:
    """Returns a forward of this many tokens over a prefix; only this function knows how a runner is called."""
    device = model.device
    runner = ModelRunner(model, max_batch_size=1, max_length=PREFIX + 1, max_nodes=max(TOKENS), optimize=optimize)
    ids = torch.arange(PREFIX, device=device)[None] % runner.vocab_size
    slots, nothing, prefix = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.full(1, PREFIX)
    runner.run(ForwardBatch.of_chunk(ids, host_slots=slots, host_lengths=nothing))
    tree = DraftTree.root_only(ids[:, 0])
    if tokens > 1:
        tree = DraftTree.from_shape(TreeShape.chain(tokens - 1), ids[:, :tokens])
    batch = ForwardBatch.of_tree(tree, host_slots=slots, host_lengths=prefix)

    def forward() -> None:
        runner.run(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return forward

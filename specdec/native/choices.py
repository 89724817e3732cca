"""Choices that this machine decides, by short measurements that are kept beside the compiled library.

Each is made where it is first needed, in some tenths of a second, on synthetic tensors. The C is the default, and only
what is faster by a tenth takes its place. Other work on the machine must not decide: ways are tried in turn, the least
seconds of each count, on one thread where threads change nothing, and what was disturbed is not kept.
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from itertools import cycle
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch

from specdec.machine import Cpu, cpu, usable_cores
from specdec.native.library import DTYPES, MULTIPLY, SWITCH, keep, native_library, perform

logger = logging.getLogger(__name__)

SECONDS, LEAST = 0.1, 5
"""The time that ways are compared for, and how often each is tried even if that takes longer."""
WINS, PAYS = 1.1, 1.05
"""A way wins, and more threads pay, if without them it takes so many times as long."""

_WEIGHTS, _WIDTH, _ROWS = 8, 2048, 8  # of products on several threads: 64 MiB, which few caches hold

Choice = TypeVar("Choice", int, str)
_known: dict[str, int | str] = {}


def chosen(what: str, measure: Callable[[], Choice | None], default: Choice) -> Choice:
    """Return a choice, which is measured at the first need and kept for later processes.

    Args:
        what: The choice in a few words, which identify it.
        measure: Finds it out; None if other work has disturbed it.
        default: The choice without the C, without measurements (``SPECDEC_NATIVE=1``), and if one was disturbed.
    """
    library = native_library()
    if library is None or os.environ.get(SWITCH) == "1":
        return default
    measured_for = f"{what}; torch {torch.__version__}; oneDNN's limit: {cpu().onednn_limit or 'none'}; {cpu().name}"
    beside = Path(library._name)
    file = beside.with_name(f"{beside.stem}-{sha256(measured_for.encode()).hexdigest()[:12]}.json")
    if str(file) not in _known:
        found = _read(file, measured_for)
        if type(found) is not type(default):
            begin, found = perf_counter(), measure()
            said = "too much other work to tell" if found is None else found
            logger.info("%s: %s (measured in %.1f s)", what, said, perf_counter() - begin)
            if found is not None:
                keep(file, json.dumps({"measured_for": measured_for, "found": found}).encode())
        _known[str(file)] = default if found is None else found
    return _known[str(file)]  # pyright: ignore[reportReturnType]


def recommended_threads(facts: Cpu | None = None) -> int:
    """Return the number of threads that torch should use here: the fewest with which a product is as fast as it gets.

    They are at most the cores that the process may use in full, and all of these where nothing is measured: without the
    C, and beside a GPU. A number that the user gave in ``OMP_NUM_THREADS`` is kept.

    A library must not set it; a program calls ``torch.set_num_threads(recommended_threads())`` at its start.
    """
    facts = facts or cpu()
    cores = usable_cores(facts)
    if facts.omp_threads is not None or cores == 1 or torch.cuda.is_available():
        return facts.omp_threads or cores
    return chosen(f"threads on {cores} cores", lambda: _threads(cores), cores)


def loses(own: Callable[[], object], other: Callable[[], object]) -> bool:
    """Return whether another way is faster than the C's by a tenth, on one thread, and is so again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return all(mine > WINS * theirs for mine, theirs in (least_seconds([own, other]) for _ in range(2)))
    finally:
        torch.set_num_threads(threads)


def least_seconds(ways: Sequence[Callable[[], object]]) -> list[float]:
    """Return the least seconds of each way; they are tried in turn."""
    least, end, tried = [inf] * len(ways), perf_counter() + SECONDS, 0
    while perf_counter() < end or tried < LEAST:
        for index, way in enumerate(ways):
            way()  # what the others have left in caches, and threads that sleep, are none of its own
            begin = perf_counter()
            way()
            least[index] = min(least[index], perf_counter() - begin)
        tried += 1
    return least


def _threads(cores: int) -> int | None:
    """Return the fewest threads with which a product of a few rows is as fast as it gets.

    None if more of them take longer. They then wait for each other, because something else runs: no memory is slower
    for being read by two.
    """
    threads = torch.get_num_threads()
    weights = cycle(torch.ones(_WEIGHTS, _WIDTH, _WIDTH, dtype=torch.bfloat16, device="cpu"))
    inputs, outputs = torch.ones(2, _ROWS, _WIDTH, dtype=torch.float32, device="cpu")
    formats = DTYPES[torch.bfloat16], DTYPES[torch.float32]

    def product(count: int) -> None:
        torch.set_num_threads(count)
        addresses = next(weights).data_ptr(), 0, 0, inputs.data_ptr(), outputs.data_ptr()
        perform(MULTIPLY.pack(0, *addresses, _WIDTH, _WIDTH, _WIDTH, _ROWS, *formats))

    counts = sorted({*(2**power for power in range(cores.bit_length())), cores})
    try:
        seconds = least_seconds([partial(product, count) for count in counts])
    finally:
        torch.set_num_threads(threads)
    if max(seconds) > WINS * seconds[0]:
        return None
    return next(count for count, taken in zip(counts, seconds, strict=True) if taken <= PAYS * min(seconds))


def _read(file: Path, measured_for: str) -> object:
    """Return the choice in a file; None if there is none, if it is not whole, or made for something else."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return kept["found"] if kept["measured_for"] == measured_for else None
    except (OSError, ValueError, KeyError, TypeError):
        return None

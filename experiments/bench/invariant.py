"""What invariant mode costs: ``python -m experiments.bench invariant nodes=[1,5,16,64] repeats=20 threads=2``.

The first table times one verify forward over a prefix, as the engine usually runs it and in invariant mode, of a random
110M Llama and of the bundled target. Both take turns; the table shows medians over the rounds, and the median of the
rounds' ratios.

The second table counts how many outputs of the bundled drafters leave plain decoding's, of as many prompts as
``outputs`` says: without invariant mode these are near-ties of the dtype, with it there must be none.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafters.medusa import MedusaDrafter
from drafters.model import ModelDrafter
from drafters.ngram import NGramDrafter
from experiments.bench.options import option, read_options
from experiments.bench.speed import bundled_target, llama_110m
from experiments.datasets.stdlib import Stdlib
from experiments.reporting import terminal
from experiments.reporting.table import Column, Table
from specdec.engine.engine import Engine
from specdec.forward import ForwardBatch
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from specdec.topology import Topology
from verifiers.block import TraversalVerifier

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "ngram": lambda dtype: NGramDrafter(max_draft_tokens=6, branches=2),
    "model": lambda dtype: ModelDrafter.from_pretrained("bundled/drafter", shape=[2, 2, 1], dtype=dtype),
    "medusa": lambda dtype: MedusaDrafter.from_pretrained("bundled/medusa", dtype=dtype),
}


@dataclass(frozen=True)
class Options:
    """The command line."""

    nodes: tuple[int, ...] = option((1, 5, 16, 64), "tokens per forward", least=1)
    prefix: int = option(128, "tokens in the cache", least=0)
    dtype: str = option("bfloat16", "of all models", choices=tuple(DTYPES))
    repeats: int = option(20, "forwards that are timed, of each kind", least=1)
    outputs: int = option(12, "prompts of the second table; 0 leaves it out", least=0)
    tokens: int = option(40, "tokens per output", least=1)
    threads: int | None = option(None, "CPU threads; null: torch's choice", least=1)


def forward(runner: ModelRunner, tokens: Tensor, prefix: int) -> Tensor:
    """Logits of a root and a chain behind it."""
    slots, lengths = np.zeros(1, dtype=np.int64), np.array([prefix])
    return runner.run(
        ForwardBatch(
            tokens=tokens,
            slots=torch.from_numpy(slots).to(runner.device),
            lengths=torch.from_numpy(lengths).to(runner.device),
            topology=Topology.chain(tokens.shape[1], runner.device),
        )
    ).scores


def compare(model: PreTrainedModel, nodes: int, *, prefix: int, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds of forwards as usual and in invariant mode, which take turns."""
    sides = [
        ModelRunner(model, max_batch_size=1, max_length=prefix + 1, max_nodes=nodes, invariant=invariant)
        for invariant in (False, True)
    ]
    vocab = sides[0].vocab_size
    tokens = torch.randint(0, vocab, (1, nodes), generator=torch.Generator().manual_seed(nodes)).to(model.device)
    times: tuple[list[float], list[float]] = ([], [])
    for runner in sides:
        for _ in range(26):  # as often as a forward comes before it is captured, and once more
            forward(runner, tokens, prefix)
            if runner.invariant:
                break
    for repeat in range(repeats):
        for side in (0, 1) if repeat % 2 else (1, 0):
            start = time.perf_counter()
            forward(sides[side], tokens, prefix).sum().item()  # a number on the host: the device has finished
            times[side].append(1000 * (time.perf_counter() - start))
    return times


def divergences(target: Target, drafter: str, *, dtype: str, invariant: bool, outputs: int, tokens: int) -> int:
    """How many greedy outputs differ from plain decoding's on the same engine, in batches of four."""
    every = Stdlib(prompt_tokens=48).load()
    prompts = [str(prompt.turns[0]) for prompt in every[:: max(1, len(every) // outputs)][:outputs]]
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    made = DRAFTERS[drafter](dtype)
    with Engine(target, made, TraversalVerifier(), max_batch_size=4, max_length=1024, invariant=invariant) as engine:
        drafted = engine.generate(prompts, sampling)
        plain = engine.generate(prompts, sampling, speculate=False)
    return sum(a.token_ids != b.token_ids for a, b in zip(drafted, plain, strict=True))


def main() -> None:
    """Measure and print two tables."""
    arguments = read_options(Options, __doc__)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    console = terminal.console()
    dtype = DTYPES[arguments.dtype]
    models = {
        "110M Llama": llama_110m().to(dtype),  # pyright: ignore
        "bundled target": bundled_target(dtype=arguments.dtype).model,
    }
    table = Table(
        [Column(name) for name in ("model", "nodes", "as usual, ms", "invariant, ms", "invariant / as usual")],
        f"One verify forward in {arguments.dtype} behind {arguments.prefix} tokens, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, median of {arguments.repeats}",
    )
    for name, model in models.items():
        for nodes in arguments.nodes:
            usual, invariant = compare(model, nodes, prefix=arguments.prefix, repeats=arguments.repeats)
            ratio = statistics.median(b / a for a, b in zip(usual, invariant, strict=True))
            medians = [f"{statistics.median(each):.1f}" for each in (usual, invariant)]
            table.add(name, str(nodes), *medians, f"{ratio:.2f}")
    console.print(terminal.render(table))
    if not arguments.outputs:
        return
    table = Table(
        [Column(name) for name in ("weights", "drafter", "differ as usual", "differ in invariant mode")],
        f"Outputs of {arguments.tokens} tokens of the bundled target that leave plain decoding's, "
        f"of {arguments.outputs}; batches of 4",
    )
    for scheme in (None, "int8"):
        target = bundled_target(dtype=arguments.dtype, quantization=scheme)
        for drafter in DRAFTERS:
            options = {"dtype": arguments.dtype, "outputs": arguments.outputs, "tokens": arguments.tokens}
            found = [divergences(target, drafter, invariant=invariant, **options) for invariant in (False, True)]
            table.add(scheme or arguments.dtype, drafter, *map(str, found))
    console.print(terminal.render(table))


if __name__ == "__main__":
    main()

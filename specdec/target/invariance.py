"""Makes sure that a model's logits do not depend on what else is in a forward, by trying it on the model itself.

The invariant executor fixes the order and the shapes of all that is computed. Torch's elementwise functions on a CPU
still divide a tensor among threads, and round what does not fill a vector at the end of each part in another way:
``_threads`` finds a number of threads that leaves no such ends. Everything else, matrix products above all, is tried:
the same tokens at other places, in other pieces and in trees. Where a block of many rows fails, every token goes
through the model alone.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.attention.call import refuses_attention_functions
from specdec.cache.storage import Cache
from specdec.execution.executor import Executor, model_lock
from specdec.execution.invariant import ROWS, InvariantExecutor
from specdec.forward import ForwardBatch
from specdec.memory import ran_out
from specdec.origin import first_sentence
from specdec.placement import is_divided
from specdec.target.facts import differs, make_cache, trial_tokens
from specdec.topology import Topology
from specdec.tree import TreeShape

logger = logging.getLogger(__name__)

_VECTOR = 64  # numbers that a loop of torch takes at once, at most: two vectors of 512 bits of 16-bit numbers
_GRAIN = 32768  # numbers from which on torch divides an elementwise function among threads, at least so many for each

# Functions that every way of computing them rounds alike: one operation, correctly rounded, or none at all.
# fmt: off
_ROUNDED_ALIKE = {
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "copy", "_to_copy", "where", "masked_fill", "maximum",
    "minimum", "clamp", "clamp_min", "clamp_max", "relu", "sqrt", "eq", "ne", "lt", "le", "gt", "ge", "logical_and",
    "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "fill", "floor", "ceil", "round",
    "clone", "isnan", "isinf", "zeros_like", "ones_like",
}
# fmt: on

# The tree of the trial: two branches and a leaf; nodes 0, 2, 4, 6 are the path that holds the sequence's tokens.
_SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)])
_PATH = [0, 2, 4, 6]


def settle(executor: InvariantExecutor) -> None:
    """Find the block size (``rows``) and the ``threads`` at which an executor keeps its promise for a model.

    Raises:
        ValueError: The promise cannot be kept; names the model's type and what differs.
    """
    model, facts = executor.model, executor.facts
    kind = facts.model_type
    refusal = refuses_attention_functions(model)
    if refusal is None and facts.indexers:
        refusal = f"{kind} selects keys by an indexer, whose products have the shape of the cache"
    if refusal is None and is_divided(model):
        refusal = f"this {kind} model runs on several devices or in several processes, which add up in their own ways"
    if refusal is not None:
        raise ValueError(f"invariant=True: {refusal}; leave invariant at False")
    # The products of experts (transformers' names) have as many rows as tokens of the block are routed to them.
    names = {type(module).__name__.lower() for module in model.modules()}
    candidates = (1,) if any("expert" in name or "moe" in name for name in names) else (ROWS, 1)
    finding = ""
    with model_lock(model), torch.inference_mode():
        for rows in candidates:
            executor.rows, executor.threads = rows, None
            try:
                executor.threads = _threads(executor)
                finding = _trial(executor)
            except Exception as error:  # whatever a model raises is the reason to refuse it
                if ran_out(error):
                    raise
                finding = first_sentence(error) or type(error).__name__
            if not finding:
                return
            logger.info("%s is not invariant in blocks of %d: %s", kind, rows, finding)
    raise ValueError(f"invariant=True: {kind} cannot be run so, because {finding}; leave invariant at False")


def _threads(executor: InvariantExecutor) -> int | None:
    """Return the largest number of threads, up to torch's own, with which every place of a block is computed alike."""
    if executor.facts.device.type != "cpu":
        return None
    now = torch.get_num_threads()
    if executor.rows == 1:
        return now
    with _Elementwise() as seen:
        _Run(executor, slots=1).chain(0, _tokens(executor, executor.rows))
    for threads in range(now, 0, -1):
        if all(_alike(numbers, threads) for numbers in seen.sizes):
            return threads
    sizes = min(numbers for numbers in seen.sizes if not _alike(numbers, 1))
    raise ValueError(f"an elementwise function of {sizes} numbers does not end with a whole vector")


def _alike(numbers: int, threads: int) -> bool:
    """Return whether an elementwise function computes all of its numbers by the same code."""
    parts = 1 if numbers < _GRAIN else min(threads, -(-numbers // _GRAIN))
    part = -(-numbers // parts)
    return _VECTOR % numbers == 0 or (numbers % _VECTOR == 0 and part % _VECTOR == 0)


class _Elementwise(TorchDispatchMode):
    """Notes the sizes of the elementwise functions that run and may be rounded in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        scaled = kwargs.get("alpha", 1) != 1 or (name in ("add", "sub") and len(args) > 2)
        floating = isinstance(output, Tensor) and output.is_floating_point() and output.numel() > 0
        if floating and torch.Tag.pointwise in func.tags and (name not in _ROUNDED_ALIKE or scaled):
            self.sizes.add(output.numel())
        return output


class _Run:
    """Forwards of a trial, over a small cache of some slots."""

    def __init__(self, executor: Executor, *, slots: int):
        self.executor, self.device = executor, executor.facts.device
        sizes: Any = {"max_batch_size": slots, "max_length": 2 * ROWS + len(_PATH), "max_nodes": _SHAPE.num_nodes}
        self.cache: Cache = make_cache(executor.facts, **sizes)

    def chain(self, slot: int, tokens: Int[Tensor, " node"], start: int = 0) -> Float[Tensor, "node vocab"]:
        """Return the logits of a line of tokens behind the first ``start`` ones."""
        if not start:
            self.cache.vacate(slot)
        topology, counts = Topology.chain(len(tokens), self.device), np.array([len(tokens)])
        return self.forward(tokens[None], [slot], [start], topology, counts=counts)[0]

    def forward(
        self, tokens: Int[Tensor, "batch node"], slots: Sequence[int], starts: Sequence[int], topology: Topology,
        **more: Any,
    ) -> Float[Tensor, "batch node vocab"]:  # fmt: skip
        """Return the logits of one tree per slot, behind the first tokens of each; with counts, of prompts' pieces."""
        index, lengths = (torch.tensor(each, device=self.device) for each in (slots, starts))
        batch = ForwardBatch(tokens=tokens, slots=index, lengths=lengths, topology=topology, **more)
        return self.executor.run(batch, self.cache).scores


def _trial(executor: InvariantExecutor) -> str:
    """Return the difference between ways of computing the same logits; empty if nothing does."""
    tokens = _tokens(executor, max(executor.rows + 3, len(_SHAPE.parents)))
    count, branch = len(tokens), len(_PATH)
    if count < len(_SHAPE.parents):
        return f"the model's {count} positions are too few to try it"
    run = _Run(executor, slots=2)
    whole = run.chain(0, tokens)
    model, facts = executor.model, executor.facts
    own = _Run(Executor(model, facts, executor.backend), slots=1).chain(0, tokens)
    precise = facts.dtype in (torch.float32, torch.float64) and not getattr(model, "is_quantized", False)
    error = differs(whole[None], own[None], precise=precise)
    if error is not None:
        return f"its logits differ by {error:.0%} from the model's own"

    # The same tokens at other places of a block, and at last one by one.
    cuts = [0, 2, *range(count - 2, count + 1)]
    pieces = [run.chain(1, tokens[a:b], a) for a, b in itertools.pairwise(cuts)]
    if not torch.equal(torch.cat(pieces), whole):
        return "a token alone gets other bits than one among others"
    if any(not torch.equal(kept[:, 0, :count], kept[:, 1, :count]) for kept in run.cache.tensors):
        return "the cache holds other bits for a prompt in pieces than for a whole one"
    states = [] if run.cache.states is None else run.cache.states.tensors
    if any(not torch.equal(final[:, 0, 0], final[:, 1, 0]) for final in states):
        return "its states have other bits behind a prompt in pieces than behind a whole one"

    # As the paths of two trees, whose other nodes stand in between, behind prefixes of different lengths.
    starts = [1, count - branch]
    nodes = tokens[: len(_SHAPE.parents)].repeat(2, 1)
    for row, start in enumerate(starts):
        nodes[row, _PATH] = tokens[start : start + branch]
        run.chain(1 - row, tokens[:start])
    trees = run.forward(nodes, [1, 0], starts, Topology.of_shape(_SHAPE, run.device))
    for row, start in enumerate(starts):
        if not torch.equal(trees[row, _PATH], whole[start : start + branch]):
            return "a token gets other bits in a tree than in a line"
    return ""


def _tokens(executor: InvariantExecutor, count: int) -> Int[Tensor, " node"]:
    """Return some tokens; fewer for a short model."""
    config, facts = executor.model.config.get_text_config(decoder=True), executor.facts
    return trial_tokens(config, facts.vocab_size, facts.device, rows=1, length=count)[0]

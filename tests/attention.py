"""Random trees over a random cache, and what attention over them must give: plain loops in float64."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec import ForwardBatch, Topology
from specdec.attention import BACKENDS, AttentionBackend
from specdec.attention.call import AttentionCall
from specdec.attention.facts import Facts, Reach
from specdec.cache.layout import LayerShape
from specdec.cache.storage import Cache
from specdec.kernels import Stored
from specdec.kernels.attention import Seen, tree_attention


@dataclass(frozen=True)
class Case:
    """One forward of one layer.

    Attributes:
        lengths: The length of every row's prefix.
        nodes: Nodes of the tree.
        last: How many of them are queries; None for all.
        shape: "random" trees, "wide" ones (all nodes below the root, or below its first child), a "chain", a "block"
            whose nodes all see each other, or a "mixed" one, which is causal in windows that count from its root.
        shared: Whether all rows have the same tree.
        slots: The rows' slots; None for the first ones.
        bound: Further positions in every slot.
    """

    lengths: tuple[int, ...] = (5, 0)
    nodes: int = 5
    last: int | None = None
    shape: str = "random"
    shared: bool = False
    slots: tuple[int, ...] | None = None
    kv_heads: int = 2
    groups: int = 2
    head_dim: int = 16
    value_dim: int | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scaling: float | None = None
    dtype: torch.dtype = torch.float32
    bound: int = 3
    seed: int = 0


CASES = {
    "plain": Case(),
    "one node, decoding": Case(lengths=(7, 0, 1), nodes=1, shape="chain"),
    "a chain": Case(nodes=6, shape="chain", lengths=(17, 3)),
    "one tree for all rows": Case(nodes=7, shared=True, lengths=(2, 9)),
    "groups of three": Case(groups=3, kv_heads=2, nodes=5),
    "heads of 80": Case(head_dim=80, kv_heads=1),
    "heads of 128": Case(head_dim=128, kv_heads=1),
    "heads of 8": Case(head_dim=8, kv_heads=1),
    "latent attention: 192 and 128": Case(head_dim=192, value_dim=128, kv_heads=1, groups=2),
    "softcap, sinks and scaling": Case(softcap=3.0, sinks=True, scaling=0.7, kv_heads=1),
    "window": Case(window=4, lengths=(20, 3), nodes=6),
    "window of a wide tree": Case(window=3, lengths=(9, 1), nodes=8, shape="wide"),
    "chunks": Case(chunk=4, lengths=(6, 11), nodes=6),
    "several words of ancestors": Case(nodes=70, lengths=(3,), kv_heads=1, groups=1),
    "the last level of a tree": Case(nodes=9, last=4, lengths=(6, 2)),
    "the last level, in a window": Case(nodes=9, last=3, lengths=(16, 2), window=6),
    "slots apart": Case(slots=(4, 1, 2), lengths=(3, 6, 1), kv_heads=1),
    "at the end of the slots": Case(lengths=(12, 12), nodes=4, bound=0, kv_heads=1),
    "a block": Case(nodes=6, shape="block", lengths=(17, 0, 4)),
    "the window of a mixed block": Case(nodes=7, shape="mixed", lengths=(18, 0, 2), window=5),
    "a full layer of a mixed block": Case(nodes=7, shape="mixed", lengths=(18, 0)),
    "a long prefix": Case(lengths=(75, 40), nodes=3, kv_heads=1),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16, lengths=(30, 2), kv_heads=1),
}

BOTH_WAYS = ("block", "mixed")
"""Shapes whose nodes see those behind them."""


@dataclass
class Problem:
    case: Case
    cache: Cache
    batch: ForwardBatch
    facts: Facts
    parents: list[list[int]]
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    keys: Tensor
    values: Tensor

    def output(self, backend: AttentionBackend) -> Tensor:
        self.cache.aim(self.batch)
        self.cache.write(0, self.key, self.value)
        view = backend.prepare(self.batch, self.cache, self.facts)
        case = self.case
        call = AttentionCall(self.query, self.key, self.value, 0, 0, case.scaling, case.softcap, self.sinks)
        return backend.attend(call, view)

    def seen(self) -> Seen:
        """The lengths, tables and trees that the kernel is given."""
        state: Any = BACKENDS["triton"].prepare(self.batch, self.cache, self.facts)
        (seen,) = state.seen
        return seen

    def expected(self, **changes: Any) -> Tensor:
        """What the definition of attention makes of it, with a changed case if asked for."""
        return reference(replace(self, case=replace(self.case, **changes)))


def problem(case: Case, device: str = "cpu") -> Problem:
    """Returns a case with random numbers, in every place of the cache: nothing is zero by chance."""
    generator = torch.Generator().manual_seed(case.seed)
    rows, value_dim = len(case.lengths), case.value_dim or case.head_dim
    slots = np.array(case.slots or range(rows))
    shape = LayerShape(case.kv_heads, case.head_dim, case.kv_heads, value_dim, case.dtype)
    longest = max(case.lengths)
    sizes = {"max_batch_size": int(slots.max()) + 1, "max_length": longest + case.bound, "max_nodes": case.nodes}
    cache = Cache({0: shape}, **sizes, device=torch.device(device))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, case.dtype)

    stored = cache.stored(0)
    stored.keys.copy_(normal(*stored.keys.shape))
    stored.values.copy_(normal(*stored.values.shape))
    parents = [_parents(case, generator) for _ in range(1 if case.shared else rows)]
    topology = Topology.from_parents(torch.tensor(parents, device=device))
    if case.shape == "chain":
        topology = Topology.chain(case.nodes, torch.device(device))
    if case.shape == "block":
        topology = Topology.block(case.nodes, torch.device(device))
    if case.shape == "mixed":
        sight = {"causal_in_windows": True, "window_from_root": True}
        topology = Topology.block(case.nodes, torch.device(device), **sight)
    last = case.last or case.nodes
    lengths = np.array(case.lengths)
    batch = ForwardBatch(
        tokens=torch.zeros(rows, last, dtype=torch.long, device=device),
        slots=torch.from_numpy(slots).to(device),
        lengths=torch.from_numpy(lengths).to(device),
        topology=topology,
    )
    key, value = normal(rows, case.kv_heads, last, case.head_dim), normal(rows, case.kv_heads, last, value_dim)
    keys, values = stored.keys.double().cpu(), stored.values.double().cpu()
    for b, slot in enumerate(slots):
        start = case.lengths[b] + case.nodes - last
        keys[slot, :, start : start + last] = key[b].double().cpu()
        values[slot, :, start : start + last] = value[b].double().cpu()
    heads = case.kv_heads * case.groups
    known: dict[str, Any] = {"model_type": "", "indexers": {}, "vocab_size": 1, "keeps_logits": False}
    reaches, place = {"": Reach(case.window, case.chunk)}, torch.device(device)
    facts = Facts(reaches=reaches, layers={0: shape}, dtype=case.dtype, device=place, experts="eager", **known)
    query, sinks = normal(rows, heads, last, case.head_dim), normal(heads) if case.sinks else None
    parents = parents * rows if case.shared else parents
    return Problem(case, cache, batch, facts, parents, query, key, value, sinks, keys, values)


def launch(given: Problem, *, stored: Stored | None = None, seen: Seen | None = None, **options: Any) -> Tensor:
    """What the kernel makes of a problem whose keys are in the cache already, with some arguments changed."""
    case = given.case
    usual = {"window": case.window, "chunk": case.chunk, "scaling": case.scaling, "softcap": case.softcap}
    options = usual | {"sinks": given.sinks} | options
    return tree_attention(given.query, stored or given.cache.stored(0), seen or given.seen(), **options)


def reference(problem: Problem) -> Tensor:
    """Returns attention in float64: one query, one head and one key after the other, as the definition says."""
    case = problem.case
    rows, heads, last, head_dim = problem.query.shape
    query = problem.query.double().cpu()
    output = torch.zeros(rows, last, heads, problem.values.shape[3], dtype=torch.float64)
    scaling = head_dim**-0.5 if case.scaling is None else case.scaling
    for b in range(rows):
        slot, length, parents = int(problem.batch.slots[b]), case.lengths[b], problem.parents[b]
        for q in range(last):
            path = path_to(parents, case.nodes - last + q)
            position = length + len(path) - 1
            # Where a key is stored, and where in the sequence it stands.
            if case.shape in BOTH_WAYS:
                position = length if case.shape == "mixed" else position
                path = path if case.shape == "mixed" and case.window else list(range(case.nodes))
            stored = [(p, p) for p in range(length)] + [(length + node, length + i) for i, node in enumerate(path)]
            if case.window is not None:
                stored = [(p, at) for p, at in stored if position - at < case.window]
            if case.chunk is not None:
                stored = [(p, at) for p, at in stored if position // case.chunk == at // case.chunk]
            places = [p for p, _ in stored]
            for head in range(heads):
                kv_head = head // case.groups
                scores = (problem.keys[slot, kv_head, places] @ query[b, head, q]) * scaling
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                weights = scores.exp()
                norm = weights.sum()
                if problem.sinks is not None:
                    norm = norm + math.exp(problem.sinks[head].double().item())
                output[b, q, head] = (weights / norm) @ problem.values[slot, kv_head, places]
    return output


def error(output: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to what is usual among the expected numbers."""
    return float((output.double().cpu() - expected).abs().max() / expected.std())


TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far the largest of a few thousand outputs may be off. (Half precision: the weights are rounded, too.)"""


def quantized(problem: Problem, dtype: torch.dtype) -> tuple[Stored, Problem]:
    """Returns the cache's content in few bits, with a scale per position, and the problem with the numbers it means."""
    stored = problem.cache.stored(0)
    kept, meant = [], []
    for tensor in (problem.keys, problem.values):
        largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
        scales = (tensor.abs().amax(-1) / largest).float()
        few = tensor / scales.double()[..., None]
        few = (few.round() if dtype is torch.int8 else few).to(dtype)
        kept += [few.to(stored.keys.device), scales.to(stored.keys.device)]
        meant.append(few.double() * scales.double()[..., None])
    return Stored(kept[0], kept[2], kept[1], kept[3]), replace(problem, keys=meant[0], values=meant[1])


def paged(stored: Stored, table: Tensor, page_size: int) -> tuple[Stored, Tensor]:
    """Returns the same content in pages of another order, and the table of every row."""
    slots, _, positions, _ = stored.keys.shape
    pages = -(-positions // page_size)
    order = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(0)).view(slots, pages)

    def cut(tensor: Tensor) -> Tensor:
        padded = torch.full((slots, tensor.shape[1], pages * page_size, *tensor.shape[3:]), 9, dtype=torch.float32)
        padded[:, :, :positions] = tensor.float().cpu()
        parts = padded.unflatten(2, (pages, page_size)).transpose(1, 2).flatten(0, 1)
        shuffled = torch.empty_like(parts)
        shuffled[order.flatten()] = parts
        return shuffled.to(tensor.device, tensor.dtype)

    shuffled = Stored(*(None if tensor is None else cut(tensor) for tensor in stored))  # type: ignore[arg-type]
    return shuffled, order.to(table.device)[table[:, 0]]


def _parents(case: Case, generator: torch.Generator) -> list[int]:
    if case.shape in ("chain", *BOTH_WAYS):
        return list(range(-1, case.nodes - 1))
    if case.shape == "wide":
        return [-1, 0, *(int(torch.randint(0, 2, (1,), generator=generator)) for _ in range(case.nodes - 2))]
    return [-1, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, case.nodes))]


def path_to(parents: list[int], node: int) -> list[int]:
    """Returns the nodes from the root down to this one."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path

"""Shapes, laws, tables and random drafts that the rules are tried on."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from hypothesis import strategies as st
from torch import Tensor

from specdec import DraftSampling, DraftTree, TreeShape, Verifier
from specdec.checks.tables import Tables
from verifiers import GreedyMultiPathVerifier, KSeqVerifier, RejectionVerifier, TargetWalkVerifier, TransportVerifier
from verifiers.block import BlockVerifier, TraversalVerifier
from verifiers.two_draft import TwoDraftVerifier
from verifiers.weighted_transport import WeightedTransportVerifier


def tables_of(p: Mapping[tuple[int, ...], Sequence[float]], q: Mapping[tuple[int, ...], Sequence[float]]) -> Tables:
    """Tables from one row per prefix."""

    def levels(rows: Mapping[tuple[int, ...], Sequence[float]]) -> tuple[Tensor, ...]:
        by_length = [sorted(key for key in rows if len(key) == length) for length in range(max(map(len, rows)) + 1)]
        return tuple(torch.tensor([[*rows[key]] for key in keys], dtype=torch.float64) for keys in by_length)

    return Tables(levels(p), levels(q))


EXACT = 1e-12
"""A rule whose total variation to the target, in float64, is smaller than this counts as exact."""
BIASED = 1e-3
"""A mistake that causes a larger total variation than this counts as caught."""

TOP, IID, SWOR = DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT

SHAPES = {
    "chain": TreeShape.chain(4),
    "2x2": TreeShape.branching(2, 2),
    "2x1x1": TreeShape.branching(2, 1, 1),
    "uneven": TreeShape.from_paths([(0,), (1,), (0, 0)]),
}
MIXES = (TOP, SWOR, SWOR), (TOP, IID, IID), (SWOR, TOP, SWOR), (IID, TOP, TOP), (IID, SWOR, SWOR), (SWOR, IID, TOP)
LAWS: list[DraftSampling | tuple[DraftSampling, ...]] = [TOP, IID, SWOR, *MIXES]
"""One law for all nodes, or the law of every sibling rank."""
MIXED: dict[str, Verifier] = {
    "rejection": RejectionVerifier(),
    "traversal": TraversalVerifier(),
    "k-seq": KSeqVerifier(),
    "transport": TransportVerifier(),
    "two drafts": TwoDraftVerifier(),
    "weighted transport": WeightedTransportVerifier(),
    "target walk": TargetWalkVerifier(),
}
"""Rules for trees whose siblings were drawn by different laws."""
RULES: dict[str, Verifier] = {
    **MIXED,
    "block": BlockVerifier(),
    "greedy multi-path": GreedyMultiPathVerifier(),
    "weighted transport, program": WeightedTransportVerifier(solver="program"),
}
"""Every exact rule; a new one needs a line."""
SLOW = ("transport", "weighted transport, program")
"""Programs, solved node by node: fewer cases."""
KINDS = {
    "dense": ("dense",),
    "zeros": ("zeros",),
    "every kind": ("zeros", "disjoint", "equal", "one_hot", "exhausted", "dense"),
    "one-hot p": ("one_hot",),
    "p = q": ("equal",),
}


def complete(*values: object, strong: bool) -> ParameterSet:
    """Returns one case of a matrix: strong cases always run, the others are marked ``full``."""
    return pytest.param(*values, marks=() if strong else pytest.mark.full)


def spread(names: Iterable[str], options: Sequence[Any], each: int = 1) -> list[tuple[str, Any]]:
    """Returns every name with ``each`` of the options, the next name with the next ones: all occur equally often."""
    return [(name, options[(each * i + more) % len(options)]) for i, name in enumerate(names) for more in range(each)]


def takes_laws(rule: Verifier, *laws: DraftSampling) -> bool:
    return set(laws) <= rule.samplings


def takes(rule: Verifier, shape: TreeShape) -> bool:
    return shape.is_chain or not (rule.chain_only or (rule.paths_only and not shape.is_paths))


def widest(rule: Verifier) -> TreeShape:
    """Returns a shape of two levels: the chain, the paths or the tree, whichever is the widest that a rule takes."""
    return TreeShape.chain(2) if rule.chain_only else TreeShape.branching(2, 1 if rule.paths_only else 2)


@st.composite
def drafts(draw: st.DrawFn, dtype: torch.dtype, kind: str = "tree") -> tuple[DraftTree, Tensor]:
    """Any tree, ragged, with any laws and any tables, sharp and flat and with zeros; tokens fit the tables or not."""
    batch, nodes, vocab = draw(st.integers(1, 3)), draw(st.integers(2, 9)), draw(st.integers(2, 6))
    if kind == "tree":
        drawn = [[-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))] for _ in range(batch)]
        parents = torch.tensor(drawn)
    else:
        branches = 1 if kind == "chain" else draw(st.integers(1, nodes - 1))
        parents = (torch.arange(nodes) - branches).clamp(min=0).expand(batch, -1).clone()
        parents[:, 0] = -1
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    valid = torch.rand(batch, nodes, generator=generator) < draw(st.sampled_from([0.7, 1.0]))
    valid[:, 0] = True
    for node in range(1, nodes):
        valid[:, node] &= valid.gather(1, parents[:, node, None])[:, 0]

    def tables() -> Tensor:
        sharpness = draw(st.sampled_from([0.0, 0.3, 1.0, 5.0, 30.0]))
        logits = sharpness * torch.randn(batch, nodes, vocab, generator=generator, dtype=dtype)
        dropped = torch.rand(batch, nodes, vocab, generator=generator) < draw(st.sampled_from([0.0, 0.4]))
        dropped[..., 0] = False
        return logits.masked_fill(dropped, -torch.inf).softmax(-1)

    p = tables()
    alike = draw(st.sampled_from([None, None, 0.0, 1e-6]))  # q is p, or all but p
    q = tables() if alike is None else p * (1 + alike * torch.rand(p.shape, generator=generator, dtype=dtype))
    q = q / q.sum(-1, keepdim=True)
    only = draw(st.sampled_from([None, TOP, IID, SWOR]))
    law = torch.randint(0, 3, (batch, nodes), generator=generator).to(torch.int8)
    most = max((parents == node).sum(1).max().item() for node in range(nodes))
    tree = DraftTree.build(
        torch.randint(0, vocab, (batch, nodes), generator=generator),
        parents,
        valid=valid,
        sampling=law if only is None else only,
        draft_probs=None if only is TOP and draw(st.booleans()) else q,
        # Loose bounds are allowed.
        max_children=most if draw(st.booleans()) else None,
    )
    return tree, p

"""Shapes, laws, tables and random drafts that the rules are tried on."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec.exactness import Laws
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling

EXACT = 1e-12
"""Total variation to the target, in float64, below which a rule counts as exact."""
BIASED = 1e-3
"""Total variation above which a mistake counts as caught."""

TOP, IID, SWOR = DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT

SHAPES = {
    "chain": TreeShape.chain(4),
    "2x2": TreeShape.branching(2, 2),
    "2x1x1": TreeShape.branching(2, 1, 1),
    "chain below the second child": TreeShape.from_paths([(0,), (1,), (1, 0), (1, 0, 0)]),
    "three children, one of which has two": TreeShape.from_paths([(0,), (1,), (2,), (1, 0), (1, 1)]),
    "two children below one": TreeShape.from_paths([(0,), (0, 0), (0, 1), (0, 1, 0)]),
}
LAWS: dict[str, Laws] = {
    "top": TOP,
    "iid": IID,
    "swor": SWOR,
    "top, then swor": (TOP, SWOR, SWOR),
    "top, then iid": (TOP, IID, IID),
    "swor, then top": (SWOR, TOP, SWOR),
    "iid, then top": (IID, TOP, TOP),
    "iid, then swor": (IID, SWOR, SWOR),
    "swor, then iid": (SWOR, IID, TOP),
}
KINDS = {
    "dense": ("dense",),
    "zeros": ("zeros",),
    "every kind": ("zeros", "disjoint", "equal", "one_hot", "exhausted", "dense"),
    "one-hot p": ("one_hot",),
    "p = q": ("equal",),
}


@st.composite
def drafts(draw: st.DrawFn, dtype: torch.dtype) -> tuple[DraftTree, Tensor]:
    """Any tree, ragged, with any laws and any tables, sharp and flat and with zeros; tokens fit the tables or not."""
    batch, nodes, vocab = draw(st.integers(1, 3)), draw(st.integers(2, 9)), draw(st.integers(2, 6))
    parents = torch.tensor([[-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))] for _ in range(batch)])
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
    q = p.clone() if draw(st.booleans()) and draw(st.booleans()) else tables()
    only = draw(st.sampled_from([None, TOP, IID, SWOR]))
    law = torch.randint(0, 3, (batch, nodes), generator=generator).to(torch.int8)
    widest = max((parents == node).sum(1).max().item() for node in range(nodes))
    tree = DraftTree.build(
        torch.randint(0, vocab, (batch, nodes), generator=generator),
        parents,
        valid=valid,
        sampling=law if only is None else only,
        draft_probs=None if only is TOP and draw(st.booleans()) else q,
        # Loose bounds are allowed.
        max_children=widest if draw(st.booleans()) else None,
    )
    return tree, p


FILE = Path(
    os.environ.get(
        "SPECDEC_ACCEPTANCE_TABLES", Path(__file__).parents[2].parent / "shared" / "data" / "acceptance_tables.json"
    )
)
needs_tables = pytest.mark.skipif(not FILE.is_file(), reason="SPECDEC_ACCEPTANCE_TABLES names no file")
DIGITS = 5.1e-7  # six decimals

"""Acceptance rules by the names of their files in ``conf/verifier``, drafts for them, and operations per round.

On a GPU every operation is at least one kernel launch, and costs a few microseconds however small its tensors are. They
are counted on a CPU, where the same code runs: the number depends on the shape of the tree, not on lengths, values, the
vocabulary or the batch. Trees with parents of their own in every row, as n-gram drafters make them, take more, because
no table can be made beforehand.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from specdec.acceptance import accept
from specdec.counting import Work, counted
from specdec.interfaces import Verifier
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling

FOLDER = Path(__file__).parents[2] / "conf" / "verifier"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))

SHAPES = {
    "chain of 4": TreeShape.chain(4),
    "3 x 2 x 1": TreeShape.branching(3, 2, 1),
    "12 nodes": TreeShape.from_paths(
        [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0,) * 4, (0,) * 5]
    ),
    "8 paths of 8": TreeShape.branching(8, *[1] * 7),
}
"""Trees by name. That of 12 nodes has 4 children at its root, is 5 deep, and is uneven, as trained tree shapes are."""
LAWS = (DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)
VOCAB = 32


def make_rules(names: Sequence[str] = NAMES) -> dict[str, Verifier]:
    """Return the rules with the arguments that their files give them, by name."""
    made: dict[str, Verifier] = {}
    for name in names:
        options = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
        module, _, kind = options.pop("_target_").rpartition(".")
        made[name] = getattr(importlib.import_module(module), kind)(**options)
    return made


def fits(rule: Verifier, shape: TreeShape, law: DraftSampling) -> bool:
    """Return whether a rule takes such drafts."""
    return law in rule.samplings and (shape.is_chain or not rule.chain_only) and (shape.is_paths or not rule.paths_only)


def drafted(
    shape: TreeShape, law: DraftSampling, *, per_row: bool = False, batch: int = 3
) -> tuple[DraftTree, torch.Tensor]:
    """Return random drafts and p, of a shape whose nodes were all drawn by one law.

    With ``per_row``, every row has parents of its own, so that the host does not know the shape.
    """
    generator = torch.Generator().manual_seed(0)
    nodes = shape.num_nodes + 1
    p, q = torch.rand(2, batch, nodes, VOCAB, generator=generator).softmax(-1)
    tokens = torch.randint(0, VOCAB, (batch, nodes), generator=generator)
    # Without replacement, q may run out of tokens: drafters say which siblings exist.
    marked = law is DraftSampling.WITHOUT_REPLACEMENT and not shape.is_chain
    valid = torch.ones_like(tokens, dtype=torch.bool) if marked else None
    drawn: dict[str, Any] = {
        "sampling": law,
        "draft_probs": None if law is DraftSampling.DETERMINISTIC else q,
        "valid": valid,
    }
    if not per_row:
        return DraftTree.from_shape(shape, tokens, **drawn), p
    parents = torch.tensor([shape.parents]).repeat(batch, 1)
    deep, wide = shape.max_depth, shape.max_children
    tree = DraftTree.build(tokens, parents, **drawn, max_depth=deep, max_children=wide)
    _ = tree.depth, tree.ancestors  # the verify forward has made them
    return tree, p


def work_of(rule: Verifier, tree: DraftTree, p: torch.Tensor) -> Work:
    """Return the operations of one acceptance, not in inference mode, which would hide some of them."""
    uniforms = torch.full((len(p), 2), 0.5, dtype=torch.float64)
    with torch.no_grad(), counted() as work:
        accept(rule, tree, p, uniforms)
    return work

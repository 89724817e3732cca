"""Is a drafted tree well formed? Every check names the first row and node that is not, and what is wrong there.

The checks read every number on the host, so they are for tests, diagnostics and ``Engine(check=True)``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.interfaces import Drafter, Verifier
from specdec.machine import dtype_name
from specdec.tree import DraftTree
from specdec.types import DraftSampling

SUM_TOLERANCE = 1e-4  # how far the sum of a float32 row may be from 1, over any vocabulary


class Form(StrEnum):
    """What is checked of a tree, in this order."""

    TENSORS = "shapes, dtypes, device"
    PARENTS = "parents"
    VALID = "valid nodes"
    ROOT = "root"
    TOKENS = "tokens"
    SIZE = "number and depth of nodes"
    SHAPE = "is_chain, is_paths"
    LAWS = "declared laws"
    SIBLINGS = "distinct siblings"
    Q = "rows of q"
    POSSIBLE = "possible tokens"


@dataclass(frozen=True)
class Flaw:
    """A flaw of a tree: the check that it fails, where first (None for the whole tree), and the remedy."""

    check: Form
    row: int | None
    node: int | None
    what: str


def first_flaw(check: Form, wrong: Bool[Tensor, "batch node"], what: str, **values: Tensor) -> Iterator[Flaw]:
    """Yield the first node that is wrong as a flaw; ``what`` names values of the node in braces."""
    for row, node in wrong.nonzero()[:1].tolist():
        shown = {name: _shown(name, value[row, node]) for name, value in values.items()}
        yield Flaw(check, row, node, what.format(**shown))


def _shown(name: str, value: Tensor) -> str:
    if value.ndim:
        return describe(value)
    number = int(value)
    return DraftSampling(number).name if name == "law" and number in tuple(DraftSampling) else str(number)


def flaws(tree: DraftTree, drafter: Drafter, batch: Batch, *, leaf_probs: bool = False) -> Iterator[Flaw]:
    """Yield the flaws of a drafter's proposal; each check relies on those before it.

    Rows that do not draft may hold any valid tree, so only the structure of those is checked. ``leaf_probs`` says
    whether the drafter was bound with it.
    """
    yield from fatal_flaws(tree, drafter, batch)
    drafted = tree.valid & batch.drafting[:, None] & (torch.arange(tree.width, device=batch.device) > 0)
    every = tree.valid & batch.drafting[:, None] & ~_begins(tree, batch)[:, None] if leaf_probs else None
    yield from _shape(tree, drafter, drafted)
    yield from _laws(tree, drafter, drafted, batch)
    yield from _siblings(tree, drafted)
    yield from draft_probs_flaws(tree, drafted, every=every)


def fatal_flaws(tree: DraftTree, drafter: Drafter, batch: Batch) -> Iterator[Flaw]:
    """Yield flaws with which no engine could go on."""
    yield from (Flaw(Form.TENSORS, None, None, what) for what in _tensors(tree, batch))
    yield from structure(tree)
    root = "its token is {token}, and node 0 must be the root, the last token of the sequence, which is {root}"
    wrong = tree.tokens[:, :1] != batch.roots[:, None]
    yield from first_flaw(Form.ROOT, wrong, root, token=tree.tokens, root=batch.roots[:, None])
    yield from token_flaws(tree, batch.vocab_size)
    yield from _size(tree, drafter)


def _begins(tree: DraftTree, batch: Batch) -> Bool[Tensor, " batch"]:
    """Marks rows without drafts in which nothing is committed: heads that read the target's states have no q there."""
    alone = ~tree.valid[:, 1:].any(-1)
    if tree.draft_probs is not None:
        alone = alone & (tree.draft_probs == 0).flatten(1).all(-1)
    return alone & (batch.lengths == 0)


def _tensors(tree: DraftTree, batch: Batch) -> Iterator[str]:
    if not isinstance(tree, DraftTree):
        yield f"propose returned {type(tree).__name__}: return a DraftTree"
        return
    parents, rows = tree.topology.parents, len(batch)
    width = tree.tokens.shape[1] if tree.tokens.ndim == 2 else 0
    if width == 0 or tree.tokens.shape[0] != rows:
        yield f"tokens has the shape {list(tree.tokens.shape)}: give [batch, node], with a row for each of {rows} slots"
        return
    if parents.ndim != 2 or parents.shape[0] not in (1, rows) or parents.shape[1] != width:
        shapes = f"parents has the shape {list(parents.shape)} and tokens {list(tree.tokens.shape)}"
        yield f"{shapes}: give a parent for every node"
        return
    for name, tensor, shape, dtypes in (
        ("tokens", tree.tokens, (rows, width), (torch.int64,)),
        ("parents", parents, tuple(parents.shape), (torch.int64,)),
        ("valid", tree.valid, (rows, width), (torch.bool,)),
        ("law", tree.law, (rows, width), (torch.int8,)),
        ("draft_probs", tree.draft_probs, (rows, width, batch.vocab_size), (torch.float32, torch.float64)),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            yield f"{name} has the shape {list(tensor.shape)}: give {list(shape)}"
        elif tensor.dtype not in dtypes:
            yield f"{name} is {dtype_name(tensor.dtype)}: give {dtype_name(dtypes[0])}"
        elif tensor.device != batch.device:
            yield f"{name} is on {tensor.device} and the slots are on {batch.device}: build the tree on batch.device"


def structure(tree: DraftTree) -> Iterator[Flaw]:
    """Yields what is wrong with the parents of a tree's nodes, and with which of them are valid."""
    index, parents = torch.arange(tree.width, device=tree.tokens.device), tree.parents
    root = index == 0
    rooted = "its parent is {parent}: it is the root, so give it -1"
    yield from first_flaw(Form.PARENTS, (parents != -1) & root, rooted, parent=parents)
    wrong = ((parents >= index) | (parents < 0)) & ~root
    yield from first_flaw(Form.PARENTS, wrong, "its parent is {parent}, which must be a node before it", parent=parents)
    above = tree.valid.gather(1, parents.clamp(0, tree.width - 1))
    yield from first_flaw(Form.VALID, ~tree.valid & root, "it is the root, which must be valid")
    yield from first_flaw(Form.VALID, tree.valid & ~above, "it is valid and its parent is not")


def token_flaws(tree: DraftTree, vocab: int) -> Iterator[Flaw]:
    """Yield the first node whose token is none of the vocabulary; also of those that are not valid, which are run."""
    wrong = (tree.tokens < 0) | (tree.tokens >= vocab)
    what = f"its token is {{token}}, which is none of the target's {vocab} (nodes that are not valid need one, too)"
    return first_flaw(Form.TOKENS, wrong, what, token=tree.tokens)


def _size(tree: DraftTree, drafter: Drafter) -> Iterator[Flaw]:
    if tree.width - 1 > drafter.max_nodes:
        announced = f"announced max_nodes={drafter.max_nodes}: propose fewer, or announce them"
        yield Flaw(Form.SIZE, None, None, f"it proposed {tree.width - 1} nodes and {announced}")
        return
    depth = depths(tree.parents)
    for bound, source in ((drafter.max_depth, "announced"), (tree.max_depth, "gave the tree")):
        what = f"it stands at depth {{depth}}, and the drafter {source} max_depth={bound}"
        yield from first_flaw(Form.SIZE, tree.valid & (depth > bound), what, depth=depth)
    rank = _same_parent(tree, tree.valid).tril(-1).sum(-1)
    what = f"it is child {{number}} of its parent, and the drafter gave the tree max_children={tree.max_children}"
    wrong = tree.valid & (rank >= tree.max_children) & (tree.parents >= 0)
    yield from first_flaw(Form.SIZE, wrong, what, number=rank + 1)


def shape_flaws(tree: DraftTree, counted: Bool[Tensor, "batch node"], what: str) -> Iterator[Flaw]:
    """Yield the first of the counted nodes that has an earlier sibling among them."""
    return first_flaw(Form.SHAPE, _same_parent(tree, counted).tril(-1).any(-1), what)


def _shape(tree: DraftTree, drafter: Drafter, drafted: Bool[Tensor, "batch node"]) -> Iterator[Flaw]:
    if drafter.is_chain:
        yield from shape_flaws(tree, drafted, "it has a sibling, and the drafter says is_chain=True")
    if drafter.is_chain or not drafter.is_paths:
        return
    below = "it has a sibling below the first level, and the drafter says is_paths=True"
    depth, index = depths(tree.parents), tree.parents.clamp(min=0)
    has_child = torch.zeros_like(index).scatter_add(1, index, drafted.long()) > 0
    short = drafted & ~has_child & (depth < (depth * drafted).amax(-1, keepdim=True))
    yield from shape_flaws(tree, drafted & (tree.parents > 0), below)
    yield from first_flaw(Form.SHAPE, short, "its path is shorter than another, and the drafter says is_paths=True")


def _laws(tree: DraftTree, drafter: Drafter, drafted: Bool[Tensor, "batch node"], batch: Batch) -> Iterator[Flaw]:
    greedy = (batch.sampling.temperature == 0)[:, None] & (tree.law == DraftSampling.DETERMINISTIC)
    announced = ", ".join(law.name for law in sorted(drafter.laws))
    what = f"its law is {{law}}, and the drafter announced laws={{{{{announced}}}}}"
    return first_flaw(Form.LAWS, drafted & ~is_one_of(tree.law, drafter.laws) & ~greedy, what, law=tree.law)


def is_one_of(law: Int[Tensor, "*shape"], laws: frozenset[DraftSampling]) -> Bool[Tensor, "*shape"]:
    """Marks nodes of one of these laws."""
    return torch.isin(law, torch.tensor([int(each) for each in laws], dtype=law.dtype, device=law.device))


def _siblings(tree: DraftTree, drafted: Bool[Tensor, "batch node"]) -> Iterator[Flaw]:
    same = _same_parent(tree, drafted).tril(-1) & (tree.tokens[:, :, None] == tree.tokens[:, None, :])
    law = tree.law
    apart = (law[:, :, None] == law[:, None, :]) | (law == DraftSampling.WITHOUT_REPLACEMENT)[:, :, None]
    twice = same & apart & (law != DraftSampling.IID)[:, :, None]
    what = "its token {token} is also that of its sibling, node {other}, and siblings that are {law} must be distinct"
    return first_flaw(
        Form.SIBLINGS, twice.any(-1), what, token=tree.tokens, other=twice.byte().argmax(-1), law=tree.law
    )


def draft_probs_flaws(
    tree: DraftTree, drafted: Bool[Tensor, "batch node"], *, every: Bool[Tensor, "batch node"] | None = None
) -> Iterator[Flaw]:
    """Yield flaws of q, and of the tokens that were drawn from it.

    ``drafted`` marks the nodes whose law counts, ``every`` nodes that need a row of q, with children or not.
    """
    drawn = drafted & ((tree.law == DraftSampling.IID) | (tree.law == DraftSampling.WITHOUT_REPLACEMENT))
    q = tree.draft_probs
    if q is None:
        missing = "the tree has no draft_probs: give q"
        yield from first_flaw(Form.Q, drawn, f"it was drawn {{law}} and {missing}", law=tree.law)
        if every is not None:
            yield from first_flaw(Form.Q, every, f"the rule reads q at every node and {missing}")
        return
    parents = tree.parents.clamp(min=0)
    read = torch.zeros_like(drawn).long().scatter_add(1, parents, drawn.long()) > 0
    if every is not None:
        read = read | every
    chance = q.gather(1, parents[..., None].expand(-1, -1, q.shape[2])).gather(2, tree.tokens[..., None])[..., 0]
    impossible = "its token {token} has probability 0 in the q that it says it was drawn from"
    yield from first_flaw(Form.Q, read & (distribution_flaw(q) > 0), "q after it {q}", q=q)
    yield from first_flaw(Form.POSSIBLE, drawn & ~(chance > 0), impossible, token=tree.tokens)


def check_drafts(verifier: Verifier, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> None:
    """Refuse trees that are malformed, or that a rule does not take: ``ValueError`` says why, in which row and node."""
    for flaw in _draft_flaws(verifier, tree, target_probs):
        raise ValueError(f"row {flaw.row}, node {flaw.node}: {flaw.what}")


def _draft_flaws(verifier: Verifier, tree: DraftTree, target_probs: Tensor) -> Iterator[Flaw]:
    rule = type(verifier).__name__
    takes = ", ".join(law.name for law in sorted(verifier.samplings))
    yield from structure(tree)
    yield from token_flaws(tree, target_probs.shape[2])
    drafted = tree.valid & (torch.arange(tree.width) > 0)
    unfit = drafted & ~is_one_of(tree.law, verifier.samplings)
    yield from first_flaw(Form.LAWS, unfit, f"it is {{law}}, and {rule} takes {takes}", law=tree.law)
    if verifier.chain_only:
        yield from shape_flaws(tree, drafted, f"it has a sibling, and {rule} takes chains only")
    if verifier.paths_only:
        below = drafted & (tree.parents > 0)
        yield from shape_flaws(tree, below, f"it has a sibling, and {rule} takes paths that share only the root")
    wrong = tree.valid & (distribution_flaw(target_probs) > 0)
    yield from first_flaw(Form.Q, wrong, "p after it {p}", p=target_probs)
    every = tree.valid if verifier.needs_leaf_probs and tree.draft_probs is not None else None
    # A token that q excludes is no flaw here: tests state a false q.
    yield from (flaw for flaw in draft_probs_flaws(tree, drafted, every=every) if flaw.check is Form.Q)


def distribution_flaw(rows: Float[Tensor, "*rows vocab"], tolerance: float = SUM_TOLERANCE) -> Int[Tensor, "*rows"]:
    """Return 0 for rows that are distributions, and another number for all others."""
    bad = ~torch.isfinite(rows).all(-1) | (rows < 0).any(-1)
    return (bad | ~((rows.double().sum(-1) - 1).abs() <= tolerance)).long()


def describe(row: Float[Tensor, " vocab"]) -> str:
    """Return why a row is no distribution, in words that follow its name."""
    if not torch.isfinite(row).all():
        return f"has an entry that is not finite (token {int((~torch.isfinite(row)).nonzero()[0])})"
    if (row < 0).any():
        return f"has a negative entry (token {int((row < 0).nonzero()[0])}: {float(row.min()):.3g})"
    return f"sums to {float(row.double().sum()):.6g}, not to 1"


def depths(parents: Int[Tensor, "batch node"]) -> Int[Tensor, "batch node"]:
    """Return the depth of every node from its parents alone, which must stand before it."""
    depth, above = torch.zeros_like(parents), parents
    while (above >= 0).any():
        depth = depth + (above >= 0)
        above = parents.gather(1, above.clamp(min=0)).where(above >= 0, -1)
    return depth


def _same_parent(tree: DraftTree, counted: Bool[Tensor, "batch node"]) -> Bool[Tensor, "batch node node"]:
    """Marks pairs of counted nodes with one parent; the root has none."""
    counted = counted & (tree.parents >= 0)
    return (tree.parents[:, :, None] == tree.parents[:, None, :]) & counted[:, :, None] & counted[:, None, :]

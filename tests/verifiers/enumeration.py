"""Exact output laws by enumeration, in float64, where vocabulary and tree are tiny.

Every draft that a drafter could draw is one row of a batch; the verifier's two laws then give the exact joint law
of the output, with no sampling noise. A rule is exact if it equals the target's to rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.interfaces import Verifier
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling

Laws = DraftSampling | Sequence[DraftSampling]
"""One law for all nodes, or the law of every sibling rank."""

Grows = Callable[[int, Tensor], Tensor]
"""Whether a node is drafted, from its index and its parents' prefixes: decided before its token is drawn."""


@dataclass(frozen=True)
class Tables:
    """p and q after every prefix: ``p[d][i]`` after the prefix of length d that reads i in base ``vocab``."""

    p: tuple[Tensor, ...]
    q: tuple[Tensor, ...]

    @property
    def vocab(self) -> int:
        return self.p[0].shape[1]

    @property
    def depth(self) -> int:
        """Length of the longest prefix."""
        return len(self.p) - 1

    @classmethod
    def from_rows(
        cls, p: Mapping[tuple[int, ...], Sequence[float]], q: Mapping[tuple[int, ...], Sequence[float]]
    ) -> "Tables":
        """From a row per prefix; dictionaries in any order."""

        def levels(rows: Mapping[tuple[int, ...], Sequence[float]]) -> tuple[Tensor, ...]:
            table = tuple(
                torch.tensor([row for prefix, row in sorted(rows.items()) if len(prefix) == depth], dtype=torch.float64)
                for depth in range(max(map(len, rows)) + 1)
            )
            assert all(len(level) == level.shape[1] ** depth for depth, level in enumerate(table))
            return table

        return cls(levels(p), levels(q))

    @classmethod
    def random(cls, vocab: int, depth: int, *, seed: int, kinds: Sequence[str] = ("dense",)) -> "Tables":
        """Random tables; every prefix has the next of some kinds in turn.

        Kinds: ``dense``; ``zeros`` in p and in q; ``disjoint`` supports; ``equal`` p and q; ``one_hot`` p;
        ``exhausted``, a q of two tokens.
        """
        generator = torch.Generator().manual_seed(seed)

        def row() -> Tensor:
            return torch.rand(vocab, generator=generator, dtype=torch.float64).log().neg() ** 2

        def pair(kind: str) -> tuple[Tensor, Tensor]:
            p, q, order = row(), row(), torch.randperm(vocab, generator=generator)
            if kind == "zeros":
                p[order[0]] = 0
                q[order[-1]] = 0
            elif kind == "disjoint":
                p[order[: vocab // 2]] = 0
                q[order[vocab // 2 :]] = 0
            elif kind == "equal":
                q = p.clone()
            elif kind == "one_hot":
                p[order[1:]] = 0
            elif kind == "exhausted":
                q[order[2:]] = 0
            else:
                assert kind == "dense", kind
            return p / p.sum(), q / q.sum()

        levels = []
        for length in range(depth + 1):
            rows = [pair(kinds[(index + length) % len(kinds)]) for index in range(vocab**length)]
            levels.append((torch.stack([p for p, _ in rows]), torch.stack([q for _, q in rows])))
        return cls(tuple(p for p, _ in levels), tuple(q for _, q in levels))

    def tempered(self, temperature: float) -> "Tables":
        """Both at another temperature."""

        def temper(levels: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple((level.log() / temperature).softmax(-1) for level in levels)

        return Tables(temper(self.p), temper(self.q))

    def after(self, prefix: int, depth: int) -> "Tables":
        """The tables behind a prefix of length ``depth``."""

        def cut(levels: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(level.view(self.vocab**depth, -1, self.vocab)[prefix] for level in levels[depth:])

        return Tables(cut(self.p), cut(self.q))

    def joint(self, length: int) -> Tensor:
        """The target's law of the next ``length`` tokens, flat."""
        law = torch.ones(1, dtype=torch.float64)
        for level in self.p[:length]:
            law = (law[:, None] * level).flatten()
        return law


@dataclass(frozen=True)
class Drafts:
    """Every draft that has a positive probability, one per row."""

    tree: DraftTree
    prefixes: Tensor
    probability: Tensor
    target_probs: Tensor


@dataclass(frozen=True)
class Outcome:
    """The exact law of ``depth + 1`` output tokens, its distance to the target's, and the expected accepted tokens."""

    joint: Tensor
    tv: float
    expected_accepted: float


def enumerate_drafts(
    tables: Tables,
    shape: TreeShape,
    laws: Laws,
    *,
    declared: Laws | None = None,
    declared_q: tuple[Tensor, ...] | None = None,
    grows: Grows | None = None,
) -> Drafts:
    """All drafts of a shape, and how probable each is.

    Args:
        tables: What to draft from.
        shape: The tree; a node is missing where it does not grow or q is exhausted.
        laws: How nodes are drawn. ``DETERMINISTIC`` takes the most probable token that no earlier sibling has.
        declared: The laws that the tree claims; other than ``laws`` only to show that it matters.
        declared_q: The q that the tree claims, likewise.
        grows: Which nodes are drafted; all by default.
    """
    vocab = tables.vocab
    rank = {child: place for children in shape.children for place, child in enumerate(children)}

    def of(given: Laws, node: int) -> DraftSampling:
        return given if isinstance(given, DraftSampling) else given[rank[node]]

    tokens = torch.zeros(1, 1, dtype=torch.long)
    valid = torch.ones(1, 1, dtype=torch.bool)
    prefixes = torch.zeros(1, 1, dtype=torch.long)
    probability = torch.ones(1, dtype=torch.float64)
    for node in range(1, shape.num_nodes + 1):
        parent = shape.parents[node]
        q = tables.q[shape.depths[parent]][prefixes[:, parent]]
        drafted = valid[:, parent].clone()
        if grows is not None:
            drafted &= grows(node, prefixes[:, parent])
        taken = torch.zeros_like(q, dtype=torch.bool)
        for sibling in shape.children[parent]:
            if sibling < node:
                taken[torch.arange(len(q)), tokens[:, sibling]] |= valid[:, sibling]
        law = of(laws, node)
        if law is DraftSampling.DETERMINISTIC:
            chances = torch.zeros_like(q).scatter_(1, q.masked_fill(taken, -1).argmax(1, keepdim=True), 1.0)
        elif law is DraftSampling.IID:
            chances = q
        else:
            chances = q.masked_fill(taken, 0)
            drafted &= chances.sum(1) > 0
            chances = chances / chances.sum(1, keepdim=True).where(drafted[:, None], 1)
        # A node that is not drafted holds some token, in one draft.
        padding = torch.zeros(vocab, dtype=torch.float64)
        padding[vocab - 1] = 1
        chances = chances.where(drafted[:, None], padding)
        row, token = chances.nonzero(as_tuple=True)
        probability = probability[row] * chances[row, token]
        tokens = torch.cat([tokens[row], token[:, None]], 1)
        valid = torch.cat([valid[row], drafted[row, None]], 1)
        prefixes = torch.cat([prefixes[row], prefixes[row, parent, None] * vocab + token[:, None]], 1)

    declared = laws if declared is None else declared
    law = torch.tensor([0, *(of(declared, node) for node in range(1, shape.num_nodes + 1))], dtype=torch.int8)
    claimed = tables.q if declared_q is None else declared_q
    leaf = torch.full((len(tokens), vocab), torch.nan, dtype=torch.float64)  # must not be read
    draft_probs = torch.stack(
        [
            claimed[depth][prefixes[:, node]] if shape.children[node] else leaf
            for node, depth in enumerate(shape.depths)
        ],
        1,
    )
    target_probs = torch.stack([tables.p[depth][prefixes[:, node]] for node, depth in enumerate(shape.depths)], 1)
    tree = DraftTree.from_shape(
        shape,
        tokens,
        sampling=law.expand(len(tokens), -1),
        draft_probs=None if not law.any() else draft_probs,
        valid=None if valid.all() else valid,
    )
    return Drafts(tree, prefixes, probability, target_probs.where(valid[..., None], torch.nan))


def outcome(verifier: Verifier, tables: Tables, drafts: Drafts) -> Outcome:
    """The exact law of the output when these drafts are verified and p completes what was emitted."""
    tree, vocab = drafts.tree, tables.vocab
    stop_law = verifier.stop_law(tree, drafts.target_probs)
    emitted = [torch.zeros(vocab ** (depth + 1), dtype=torch.float64) for depth in range(tree.max_depth + 1)]
    for node in range(tree.num_nodes):
        weight = drafts.probability * stop_law[:, node]
        some = weight != 0
        if not some.any():
            continue
        next_law = verifier.next_law(tree, drafts.target_probs, torch.full_like(tree.tokens[:, 0], node))
        index = drafts.prefixes[some, node, None] * vocab + torch.arange(vocab)
        depth = int(tree.depth[0, node])
        emitted[depth].index_add_(0, index.flatten(), (weight[some, None] * next_law[some]).flatten())
    joint = emitted[0]
    for depth in range(1, tree.max_depth + 1):
        joint = (joint[:, None] * tables.p[depth]).flatten() + emitted[depth]
    return Outcome(
        joint=joint,
        tv=0.5 * float((joint - tables.joint(tree.max_depth + 1)).abs().sum()),
        expected_accepted=float((drafts.probability[:, None] * stop_law * tree.depth).sum()),
    )


def enumerate_outcome(
    verifier: Verifier,
    tables: Tables,
    shape: TreeShape,
    laws: Laws,
    *,
    declared: Laws | None = None,
    declared_q: tuple[Tensor, ...] | None = None,
    grows: Grows | None = None,
) -> Outcome:
    """``outcome`` of ``enumerate_drafts``."""
    drafts = enumerate_drafts(tables, shape, laws, declared=declared, declared_q=declared_q, grows=grows)
    return outcome(verifier, tables, drafts)


def expected_by_levels(
    verifier: Verifier, tables: Tables, factors: Sequence[int], laws: Laws, *, declared: Laws | None = None
) -> float:
    """Expected accepted tokens of ``TreeShape.branching(*factors)`` where its drafts are too many to enumerate.

    Only for rules that decide level by level: a child's subtree starts anew once the child is accepted.
    """
    drafts = enumerate_drafts(tables, TreeShape.branching(factors[0]), laws, declared=declared)
    stop_law = verifier.stop_law(drafts.tree, drafts.target_probs)
    below = torch.zeros(tables.vocab, dtype=torch.float64)
    if len(factors) > 1:
        for token in range(tables.vocab):
            below[token] = expected_by_levels(verifier, tables.after(token, 1), factors[1:], laws, declared=declared)
    return float((drafts.probability[:, None] * stop_law[:, 1:] * (1 + below[drafts.tree.tokens[:, 1:]])).sum())

"""Whether a verifier is exact: its output law by enumeration, in float64, where vocabulary and tree are tiny.

Tables of p and q stand for the models. Every draft that a drafter could draw from q is one row of a batch, with its
probability; the verifier's two laws then give the exact joint law of the output, with no sampling noise. A rule is
exact if that law equals the target's to rounding (total variation below 1e-12), and its expected number of accepted
tokens can be compared with other rules' on the same drafts::

    tables = Tables.random(4, 2, seed=0)
    result = enumerate_outcome(MyVerifier(), tables, TreeShape.branching(2, 2), DraftSampling.WITHOUT_REPLACEMENT)
    result.tv, result.expected_accepted

A rule that is ``EXACT_WRT`` another distribution is compared with that one, and ``target_tv`` says how far it is from
the target. With ``noise = SHARED`` nothing is left to enumerate: see ``specdec.exactness.shared``.

Small bugs hide at small total variation: SpecInfer's rule on drafts without replacement is off by 0.028, which no eye
sees in text. Where the drafts are too many to enumerate, ``estimate`` draws them at random.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import scipy.stats
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.exactness.checks import check_drafts, check_laws
from specdec.interfaces import Verifier
from specdec.random import draw
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling

Laws = DraftSampling | Sequence[DraftSampling] | Mapping[tuple[int, ...], DraftSampling]
"""One law for all nodes, or the law of every sibling rank, or of every path of the shape."""

Grows = Callable[[int, Tensor], Tensor]
"""Whether a node is drafted, from its index and its parents' prefixes: decided before its token is drawn."""

KINDS = ("dense", "zeros", "disjoint", "equal", "one_hot", "exhausted")
"""The kinds of rows that ``Tables.random`` makes."""

_MOST_NUMBERS = 200_000_000  # in one table of an enumeration: 1.6 GB


@dataclass(frozen=True)
class Tables:
    """The laws of a target and a drafter, after every prefix up to some length.

    Attributes:
        p: The target's: ``p[d][i]`` follows the prefix of length d that reads i in base ``vocab``.
        q: The drafter's, likewise; None where drafts need none (all ``DETERMINISTIC`` and made elsewhere).

    Raises:
        ValueError: A row is no law, or a level has another number of rows; says which.
    """

    p: tuple[Float[Tensor, "_ vocab"], ...]
    q: tuple[Float[Tensor, "_ vocab"], ...] | None

    def __post_init__(self) -> None:
        for name, levels in (("p", self.p), ("q", self.q)):
            for depth, level in enumerate(levels or ()):
                if len(level) != self.vocab**depth:
                    raise ValueError(
                        f"{name} has {len(level)} rows for prefixes of length {depth}: give {self.vocab**depth}, one "
                        f"per prefix over {self.vocab} tokens"
                    )
                check_laws(level, lambda row, name=name, depth=depth: f"{name} after {self.prefix(row[0], depth)}")

    @property
    def vocab(self) -> int:
        return self.p[0].shape[1]

    @property
    def depth(self) -> int:
        """Length of the longest prefix."""
        return len(self.p) - 1

    def prefix(self, index: int, depth: int) -> tuple[int, ...]:
        """The tokens of a prefix."""
        return tuple(index // self.vocab**place % self.vocab for place in reversed(range(depth)))

    @classmethod
    def from_rows(
        cls,
        p: Mapping[tuple[int, ...], Sequence[float]],
        q: Mapping[tuple[int, ...], Sequence[float]] | None,
    ) -> "Tables":
        """From a row per prefix; dictionaries in any order.

        Raises:
            ValueError: A prefix has no row, or a row is no law.
        """

        def levels(name: str, rows: Mapping[tuple[int, ...], Sequence[float]]) -> tuple[Tensor, ...]:
            if () not in rows:
                raise ValueError(f"{name} has no row for the empty prefix ()")
            vocab = len(rows[()])
            table = []
            for depth in range(max(map(len, rows)) + 1):
                found = sorted(prefix for prefix in rows if len(prefix) == depth)
                wanted = [_digits(index, vocab, depth) for index in range(vocab**depth)]
                if found != wanted:
                    odd = min(set(found) ^ set(wanted))
                    raise ValueError(
                        f"{name} has {'no' if odd in wanted else 'a'} row for the prefix {odd}: give one for each of "
                        f"the {vocab**depth} prefixes of length {depth} over {vocab} tokens"
                    )
                for prefix in found:
                    if len(rows[prefix]) != vocab:
                        raise ValueError(f"{name} after {prefix} has {len(rows[prefix])} entries, and {vocab} after ()")
                table.append(torch.tensor([list(rows[prefix]) for prefix in found], dtype=torch.float64))
            return tuple(table)

        return cls(levels("p", p), None if q is None else levels("q", q))

    @classmethod
    def random(cls, vocab: int, depth: int, *, seed: int, kinds: Sequence[str] = ("dense",)) -> "Tables":
        """Random tables; every prefix has the next of some kinds in turn.

        Kinds: ``dense``; ``zeros`` in p and in q; ``disjoint`` supports; ``equal`` p and q; ``one_hot`` p;
        ``exhausted``, a q of two tokens.
        """
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds:
            raise ValueError(f"kinds of rows {tuple(kinds)}: choose from {', '.join(KINDS)}")
        generator = torch.Generator().manual_seed(seed)

        def row() -> Tensor:
            return torch.rand(vocab, generator=generator, dtype=torch.float64).log().neg() ** 2

        def pair(kind: str) -> tuple[Tensor, Tensor]:
            p, q, order = row(), row(), torch.randperm(vocab, generator=generator)
            if vocab > 1 and kind == "zeros":
                p[order[0]] = 0
                q[order[-1]] = 0
            elif vocab > 1 and kind == "disjoint":
                p[order[: vocab // 2]] = 0
                q[order[vocab // 2 :]] = 0
            elif kind == "equal":
                q = p.clone()
            elif kind == "one_hot":
                p[order[1:]] = 0
            elif kind == "exhausted":
                q[order[2:]] = 0
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

        return Tables(temper(self.p), None if self.q is None else temper(self.q))

    def after(self, prefix: int, depth: int) -> "Tables":
        """The tables behind a prefix of length ``depth``."""

        def cut(levels: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(level.view(self.vocab**depth, -1, self.vocab)[prefix] for level in levels[depth:])

        return Tables(cut(self.p), None if self.q is None else cut(self.q))

    def stated(self, verifier: Verifier) -> "Tables":
        """These tables with the law that a verifier states in the place of p: p itself, or what it is EXACT_WRT."""
        if self.q is None:
            return self
        return Tables(tuple(verifier.stated_law(p, q) for p, q in zip(self.p, self.q, strict=True)), self.q)

    def joint(self, length: int) -> Tensor:
        """The target's law of the next ``length`` tokens, flat."""
        law = torch.ones(1, dtype=torch.float64)
        for level in self.p[:length]:
            law = (law[:, None] * level).flatten()
        return law


@dataclass(frozen=True)
class Drafts:
    """Drafts, one per row: all that have a positive probability, or a random sample.

    Attributes:
        tree: The drafts as a verifier gets them.
        prefixes: The path to every node as a number (see ``Tables``).
        probability: Of every row; rows of a sample share it equally.
        target_probs: p at every node; NaN at nodes that are not drafted, which must not be read.
    """

    tree: DraftTree
    prefixes: Int[Tensor, "batch node"]
    probability: Float[Tensor, " batch"]
    target_probs: Float[Tensor, "batch node vocab"]


@dataclass(frozen=True)
class Outcome:
    """What verifying drafts leads to.

    Attributes:
        joint: Law of the next depth + 1 tokens, flat; the law that the rule states completes what a round leaves open.
        tv: Its total variation to the law that the rule states: the target's, unless it is ``EXACT_WRT`` another.
        target_tv: Its total variation to the target's law.
        expected_accepted: Expected number of accepted draft tokens in a round.
    """

    joint: Float[Tensor, " output"]
    tv: float
    target_tv: float
    expected_accepted: float


@dataclass(frozen=True)
class SampleMean:
    """A mean and its confidence interval (normal approximation)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Float[Tensor, " sample"], confidence: float) -> "SampleMean":
        """From independent values."""
        mean = float(values.mean())
        half = float(scipy.stats.norm.ppf(0.5 + confidence / 2)) * float(values.std()) / math.sqrt(len(values))
        return cls(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Estimate:
    """What a random sample of drafts shows.

    Attributes:
        bias: A lower bound of the total variation to the law that the rule states: the probability of a set of
            outputs less the one that this law gives it. One half of the sample chooses the set, the outputs that seem
            too frequent; the other half gives the interval. An exact rule's contains zero, but for the interval's own
            odds.
        expected_accepted: Expected number of accepted draft tokens in a round.
    """

    bias: SampleMean
    expected_accepted: SampleMean


def enumerate_drafts(
    tables: Tables,
    shape: TreeShape,
    laws: Laws,
    *,
    declared: Laws | None = None,
    declared_q: tuple[Tensor, ...] | None = None,
    grows: Grows | None = None,
    leaf_probs: bool = False,
) -> Drafts:
    """All drafts of a shape, and how probable each is.

    Args:
        tables: What to draft from.
        shape: The tree; a node is missing where it does not grow or q is exhausted.
        laws: How nodes are drawn. ``DETERMINISTIC`` takes the most probable token that no earlier sibling has.
        declared: The laws that the tree claims; other than ``laws`` only to show that it matters.
        declared_q: The q that the tree claims, likewise.
        grows: Which nodes are drafted; all by default.
        leaf_probs: Give q at the leaves, too, for a rule that needs it; NaN stands there otherwise.

    Raises:
        ValueError: The tables do not reach the shape's depth or have no q, a law cannot be drawn from tables, or the
            drafts are too many.
    """

    def every(chances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = int(chances.count_nonzero())
        if count * (shape.num_nodes + 1) * tables.vocab > _MOST_NUMBERS:
            raise ValueError(
                f"{shape} over {tables.vocab} tokens has at least {count:,} drafts, too many to enumerate: "
                f"estimate from a sample, or take a smaller tree or vocabulary"
            )
        row, token = chances.nonzero(as_tuple=True)
        return row, token, chances[row, token]

    return _draft(
        tables, shape, laws, every, 1, declared=declared, declared_q=declared_q, grows=grows, leaf_probs=leaf_probs
    )


def sample_drafts(
    tables: Tables,
    shape: TreeShape,
    laws: Laws,
    count: int,
    *,
    seed: int,
    declared: Laws | None = None,
    grows: Grows | None = None,
    leaf_probs: bool = False,
) -> Drafts:
    """``count`` drafts at random; arguments as for ``enumerate_drafts``."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(count)

    def one(chances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        token = draw(chances, torch.rand(count, generator=generator, dtype=torch.float64))
        return rows, token, torch.ones(count, dtype=torch.float64)

    return _draft(
        tables, shape, laws, one, count, declared=declared, declared_q=None, grows=grows, leaf_probs=leaf_probs
    )


def outcome(verifier: Verifier, tables: Tables, drafts: Drafts) -> Outcome:
    """The exact law of the output when these drafts are verified and the rule's stated law completes what was emitted.

    Raises:
        ValueError: The drafts are malformed, or not such as the verifier takes.
    """
    tree, vocab = drafts.tree, tables.vocab
    check_drafts(verifier, tree, drafts.target_probs)
    stop_law = verifier.stop_law(tree, drafts.target_probs)
    emitted = [torch.zeros(vocab ** (depth + 1), dtype=torch.float64) for depth in range(tree.max_depth + 1)]
    for node in range(tree.width):
        weight = drafts.probability * stop_law[:, node]
        some = weight != 0
        if not some.any():
            continue
        next_law = verifier.next_law(tree, drafts.target_probs, torch.full_like(tree.tokens[:, 0], node))
        index = drafts.prefixes[some, node, None] * vocab + torch.arange(vocab)
        depth = int(tree.depth[0, node])
        emitted[depth].index_add_(0, index.flatten(), (weight[some, None] * next_law[some]).flatten())
    stated = tables.stated(verifier)
    joint = emitted[0]
    for depth in range(1, tree.max_depth + 1):
        joint = (joint[:, None] * stated.p[depth]).flatten() + emitted[depth]
    return Outcome(
        joint=joint,
        tv=0.5 * float((joint - stated.joint(tree.max_depth + 1)).abs().sum()),
        target_tv=0.5 * float((joint - tables.joint(tree.max_depth + 1)).abs().sum()),
        expected_accepted=float((drafts.probability[:, None] * stop_law * tree.depth).sum()),
    )


def emitted_law(
    verifier: Verifier, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]
) -> Float[Tensor, "batch vocab"]:
    """Law of the first token that a round emits, given the tree: the root's child that is accepted, or the next token.

    Averaged over the trees that could have been drawn, it is p at the root if the rule is exact. Given one tree it is
    not, unless the draft was not random.
    """
    stop_law = verifier.stop_law(tree, target_probs)
    at_root = verifier.next_law(tree, target_probs, torch.zeros_like(tree.tokens[:, 0]))
    # Where no path ends at the root, its residual may be anything.
    law = torch.where(stop_law[:, :1] > 0, stop_law[:, :1] * at_root, 0.0)
    through = torch.where(tree.ancestors, stop_law[..., None], 0.0).sum(1)
    return law.scatter_add(1, tree.tokens, through.where((tree.depth == 1) & tree.valid, 0.0))


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
    drafts = enumerate_drafts(
        tables,
        shape,
        laws,
        declared=declared,
        declared_q=declared_q,
        grows=grows,
        leaf_probs=verifier.needs_leaf_probs,
    )
    return outcome(verifier, tables, drafts)


def estimate(
    verifier: Verifier,
    tables: Tables,
    shape: TreeShape,
    laws: Laws,
    *,
    samples: int = 20_000,
    seed: int = 0,
    confidence: float = 0.99,
    declared: Laws | None = None,
    grows: Grows | None = None,
) -> Estimate:
    """What ``enumerate_outcome`` would say, from a random sample of drafts.

    Only the drafts are random: of each, the laws give the exact probabilities, which makes the intervals narrow.

    Args:
        verifier: The rule.
        tables: What to draft from.
        shape: The tree.
        laws: How nodes are drawn.
        samples: Drafts, half of which choose where to look for a bias.
        seed: Of the sample.
        confidence: Of each interval.
        declared: As for ``enumerate_drafts``.
        grows: As for ``enumerate_drafts``.
    """
    if samples < 4:
        raise ValueError(f"samples={samples}: give at least 4, two to look for a bias and two to measure it")
    first, second = (
        sample_drafts(
            tables,
            shape,
            laws,
            count,
            seed=2 * seed + half,
            declared=declared,
            grows=grows,
            leaf_probs=verifier.needs_leaf_probs,
        )
        for half, count in enumerate((samples // 2, samples - samples // 2))
    )
    length = shape.max_depth + 1
    stated = tables.stated(verifier)
    target = stated.joint(length)
    chosen = (outcome(verifier, tables, first).joint > target).double()
    # within[d]: probability under that law that an output with a prefix of length d gets into the chosen set.
    within = [chosen]
    for level in reversed(stated.p[:length]):
        within.insert(0, (level * within[0].view(-1, tables.vocab)).sum(-1))
    hits, accepted = [], []
    for drafts in (first, second):
        tree = drafts.tree
        stop_law = verifier.stop_law(tree, drafts.target_probs)
        accepted.append((stop_law * tree.depth).sum(-1))
        if drafts is first:
            continue
        hit = torch.zeros_like(drafts.probability)
        for node, depth in enumerate(shape.depths):
            next_law = verifier.next_law(tree, drafts.target_probs, torch.full_like(tree.tokens[:, 0], node))
            value = within[depth + 1].view(-1, tables.vocab)[drafts.prefixes[:, node]]
            # Where a path never ends, the residual may be anything.
            hit += torch.where(stop_law[:, node] > 0, stop_law[:, node] * (next_law * value).sum(-1), 0.0)
        hits.append(hit - within[0])
    return Estimate(SampleMean.of(torch.cat(hits), confidence), SampleMean.of(torch.cat(accepted), confidence))


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


def _digits(index: int, base: int, count: int) -> tuple[int, ...]:
    return tuple(index // base**place % base for place in reversed(range(count)))


def _draft(
    tables: Tables,
    shape: TreeShape,
    laws: Laws,
    choose: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    rows: int,
    *,
    declared: Laws | None,
    declared_q: tuple[Tensor, ...] | None,
    grows: Grows | None,
    leaf_probs: bool,
) -> Drafts:
    """Draft node by node; ``choose`` turns chances into (the row each goes on from, its token, its probability)."""
    if tables.depth < shape.max_depth:
        raise ValueError(
            f"the tables end after {tables.depth} tokens and {shape} is {shape.max_depth} deep: they need a row after "
            f"every prefix of up to {shape.max_depth} tokens"
        )
    if tables.q is None:
        raise ValueError("the tables have no q, so there is nothing to draft from: give q for every prefix")
    vocab = tables.vocab
    rank = {child: place for children in shape.children for place, child in enumerate(children)}

    def of(given: Laws, node: int) -> DraftSampling:
        if isinstance(given, DraftSampling):
            return given
        if isinstance(given, Mapping):
            return given[shape.paths[node - 1]]
        if rank[node] >= len(given):
            raise ValueError(
                f"node {node} of {shape} has rank {rank[node]} and laws has {len(given)} entries: give one more"
            )
        return given[rank[node]]

    tokens = torch.zeros(rows, 1, dtype=torch.long)
    valid = torch.ones(rows, 1, dtype=torch.bool)
    prefixes = torch.zeros(rows, 1, dtype=torch.long)
    probability = torch.full((rows,), 1 / rows, dtype=torch.float64)
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
        elif law is DraftSampling.WITHOUT_REPLACEMENT:
            chances = q.masked_fill(taken, 0)
            drafted &= chances.sum(1) > 0
            chances = chances / chances.sum(1, keepdim=True).where(drafted[:, None], 1)
        else:
            raise ValueError(f"{law.name} drafts share noise with the target, which tables do not have")
        # A node that is not drafted holds some token, in one draft.
        padding = torch.zeros(vocab, dtype=torch.float64)
        padding[vocab - 1] = 1
        chances = chances.where(drafted[:, None], padding)
        row, token, chance = choose(chances)
        probability = probability[row] * chance
        tokens = torch.cat([tokens[row], token[:, None]], 1)
        valid = torch.cat([valid[row], drafted[row, None]], 1)
        prefixes = torch.cat([prefixes[row], prefixes[row, parent, None] * vocab + token[:, None]], 1)

    declared = laws if declared is None else declared
    law = torch.tensor([0, *(of(declared, node) for node in range(1, shape.num_nodes + 1))], dtype=torch.int8)
    claimed = tables.q if declared_q is None else declared_q
    leaf = torch.full((len(tokens), vocab), torch.nan, dtype=torch.float64)  # must not be read, unless asked for
    draft_probs = torch.stack(
        [
            claimed[depth][prefixes[:, node]] if leaf_probs or shape.children[node] else leaf
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

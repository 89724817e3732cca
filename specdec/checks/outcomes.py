"""Is a verifier exact? Its output distribution by enumeration, in float64, for a tiny vocabulary and tree.

Tables of p and q stand for the models (``tables``). Every draft that a drafter could draw from q is one row of a batch,
with its probability (``drafts``). The verifier's two laws then give the exact joint distribution of the output, with no
sampling noise. A rule is exact if that distribution equals the target's to rounding (total variation below 1e-12). Its
expected number of accepted tokens can be compared with other rules' on the same drafts::

    tables = Tables.random(4, 2, seed=0)
    result = enumerate_outcome(MyVerifier(), tables, TreeShape.branching(2, 2), DraftSampling.WITHOUT_REPLACEMENT)
    result.tv, result.expected_accepted

With ``noise = SHARED`` the output is a function of target and seed: whatever was drafted it equals that of plain
decoding, which over many seeds follows the target (``check_shared``).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.acceptance import accept
from specdec.checks.drafts import Samplings, WeightedDrafts, at_nodes, enumerate_drafts, sample_drafts
from specdec.checks.goodness import fits
from specdec.checks.tables import Tables
from specdec.coupling import decided, race, winners
from specdec.interfaces import Verifier
from specdec.random import Purpose, request_key, shared_noise, uniforms
from specdec.tree import DraftTree, TreeShape, along_path
from specdec.types import DraftSampling
from specdec.wellformed import check_drafts


@dataclass(frozen=True)
class Outcome:
    """The output that verifying drafts leads to.

    Attributes:
        joint: Joint distribution of the next depth + 1 tokens, flat. Where a round emits fewer, the rest is drawn from
            the distribution that the rule states (``Verifier.stated_law``).
        tv: Total variation between ``joint`` and that distribution, which is the target's unless the rule is
            ``EXACT_WRT`` another.
        target_tv: Total variation between ``joint`` and the target's distribution.
        expected_accepted: Expected number of accepted draft tokens in a round.
    """

    joint: Float[Tensor, " output"]
    tv: float
    target_tv: float
    expected_accepted: float


def outcome(verifier: Verifier, tables: Tables, drafts: WeightedDrafts) -> Outcome:
    """Return the exact joint distribution of the output when a rule verifies these drafts (see ``check_drafts``)."""
    tree, vocab = drafts.tree, tables.vocab
    check_drafts(verifier, tree, drafts.target_probs)
    laws = verifier.laws(tree, drafts.target_probs)
    emitted = [torch.zeros(vocab ** (depth + 1), dtype=torch.float64) for depth in range(tree.max_depth + 1)]
    for node in range(tree.width):
        weight = drafts.probability * laws.stop[:, node]
        some = weight != 0
        if not some.any():
            continue
        next_law = laws.after(torch.full_like(tree.tokens[:, 0], node))
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
        expected_accepted=float((drafts.probability[:, None] * laws.stop * tree.depth).sum()),
    )


def emitted_law(
    verifier: Verifier, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]
) -> Float[Tensor, "batch vocab"]:
    """Return the distribution of the first token that a round emits, given the tree.

    For an exact rule, its average over all trees that could have been drawn is p at the root.
    """
    laws = verifier.laws(tree, target_probs)
    at_root = laws.after(torch.zeros_like(tree.tokens[:, 0]))
    # Where no path ends at the root, its residual may be anything.
    first_law = torch.where(laws.stop[:, :1] > 0, laws.stop[:, :1] * at_root, 0.0)
    through = torch.where(tree.ancestors, laws.stop[..., None], 0.0).sum(1)
    return first_law.scatter_add(1, tree.tokens, through.where((tree.depth == 1) & tree.valid, 0.0))


def enumerate_outcome(verifier: Verifier, tables: Tables, shape: TreeShape, laws: Samplings, **options: Any) -> Outcome:
    """Return ``outcome`` of all drafts; the arguments are those of ``enumerate_drafts``."""
    drafts = enumerate_drafts(tables, shape, laws, leaf_probs=verifier.needs_leaf_probs, **options)
    return outcome(verifier, tables, drafts)


# ---------------------------------------------------------------- with ``noise = SHARED``


@dataclass(frozen=True)
class SharedOutcome:
    """Figures of a sample of seeds.

    Attributes:
        differing: The number of outputs that differ from plain decoding's with the same seed; 0 for an exact rule.
        p_value: Of a chi-square test of plain decoding's outputs against the target's joint distribution.
        accepted: Mean number of accepted draft tokens in a round, with its standard ``error``.
    """

    differing: int
    p_value: float
    accepted: float
    error: float


def check_shared(
    verifier: Verifier, tables: Tables, shape: TreeShape, law: DraftSampling, *, samples: int = 20_000, seed: int = 0
) -> SharedOutcome:
    """Compares one round with plain decoding of as many tokens, for each of ``samples`` streams of a seed."""
    keys = torch.tensor([request_key(seed, stream) for stream in range(samples)])
    if law is DraftSampling.COUPLED:
        drafts = coupled_drafts(tables, shape, keys)
    else:
        drafts = sample_drafts(tables, shape, law, samples, seed=seed)
    tree, root = drafts.tree, torch.zeros_like(keys)
    check_drafts(verifier, tree, drafts.target_probs)
    # Nodes that are not drafted have no p (NaN); any number will do there.
    target_probs = decided(drafts.target_probs.nan_to_num(1.0), tree, keys, root)
    verdict = accept(verifier, tree, target_probs, uniforms(keys, root, Purpose.ACCEPT, 2))
    plain = _plain(tables, shape.max_depth + 1, keys)
    emitted = torch.nn.functional.pad(along_path(tree.tokens, verdict.path)[:, 1:], (0, 1))
    emitted.scatter_(1, verdict.num_accepted[:, None], verdict.next_token[:, None])
    beyond = torch.arange(shape.max_depth + 1) > verdict.num_accepted[:, None]
    accepted = verdict.num_accepted.double()
    outputs = plain @ tables.vocab ** torch.arange(shape.max_depth, -1, -1)
    law_of_outputs = tables.joint(shape.max_depth + 1)
    return SharedOutcome(
        differing=int(((emitted != plain) & ~beyond).any(1).sum()),
        p_value=fits(outputs.bincount(minlength=len(law_of_outputs)).numpy(), law_of_outputs.numpy()),
        accepted=float(accepted.mean()),
        error=float(accepted.std()) / math.sqrt(samples),
    )


def coupled_drafts(tables: Tables, shape: TreeShape, keys: Int[Tensor, " batch"]) -> WeightedDrafts:
    """Return what a drafter that follows q and shares the noise of each key proposes after a root at position 0."""
    q, vocab, batch = tables.drafter, tables.vocab, len(keys)
    noise = _noise(keys, shape.max_depth + 1, vocab)
    tokens = torch.zeros(batch, shape.num_nodes + 1, dtype=torch.long)
    prefixes = torch.zeros_like(tokens)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    for parent, children in enumerate(shape.children):
        depth = shape.depths[parent]
        earliest, token = race(q[depth][prefixes[:, parent]], noise[:, depth]).sort(
            dim=-1, descending=True, stable=True
        )
        for rank, child in enumerate(children[:vocab]):
            tokens[:, child] = token[:, rank]
            prefixes[:, child] = prefixes[:, parent] * vocab + token[:, rank]
            valid[:, child] = valid[:, parent] & (earliest[:, rank] > 0)
        valid[:, list(children[vocab:])] = False
    tree = DraftTree.from_shape(shape, tokens, sampling=DraftSampling.COUPLED, valid=None if valid.all() else valid)
    probability = torch.full((batch,), 1 / batch, dtype=torch.float64)
    target_probs = at_nodes(tables.p, shape, prefixes)
    return WeightedDrafts(tree, prefixes, probability, target_probs.where(valid[..., None], torch.nan))


def _noise(keys: Int[Tensor, " batch"], count: int, vocab: int) -> Float[Tensor, "batch position vocab"]:
    return shared_noise(keys, torch.arange(1, count + 1).expand(len(keys), -1), vocab)


def _plain(tables: Tables, length: int, keys: Int[Tensor, " batch"]) -> Int[Tensor, "batch position"]:
    noise = _noise(keys, length, tables.vocab)
    tokens = torch.zeros(len(keys), length, dtype=torch.long)
    prefix = torch.zeros_like(keys)
    for depth in range(length):
        tokens[:, depth] = winners(tables.p[depth][prefix], noise[:, depth]).argmax(-1)
        prefix = prefix * tables.vocab + tokens[:, depth]
    return tokens

"""Does a verifier with ``noise = SHARED`` keep its promise? A check over tables of p and q.

Its output is a function of target and seed: whatever was drafted, it equals that of plain decoding, token for token;
and over many seeds the output of plain decoding follows the target.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.acceptance import accept
from specdec.checks.drafts import WeightedDrafts, at_nodes, check_drafts, need_q, sample_drafts
from specdec.checks.goodness import fits
from specdec.checks.tables import Tables
from specdec.coupling import coupled_acceptance, decided, race, winners
from specdec.interfaces import Verifier
from specdec.random import Purpose, request_key, shared_noise, uniforms
from specdec.tree import DraftTree, TreeShape, along_path
from specdec.types import DraftSampling


@dataclass(frozen=True)
class SharedOutcome:
    """What a sample of seeds shows.

    Attributes:
        differing: The number of outputs that differ from plain decoding's with the same seed; 0 for an exact rule.
        p_value: Of a chi-square test of plain decoding's outputs against the target's joint distribution.
        accepted: Mean number of accepted draft tokens in a round.
        error: Standard error of ``accepted``.
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
    q, vocab, batch = need_q(tables), tables.vocab, len(keys)
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


def expected_coupled(tables: Tables, shape: TreeShape) -> float:
    """Return the expected accepted tokens of ``COUPLED`` drafts in closed form (``coupled_acceptance``)."""
    q = need_q(tables)

    def below(node: int, prefix: int) -> float:
        depth, total = shape.depths[node], 0.0
        before = torch.zeros(tables.vocab, dtype=torch.float64)
        for rank, child in enumerate(shape.children[node]):
            among = coupled_acceptance(tables.p[depth][prefix], q[depth][prefix], rank + 1)
            for token, chance in enumerate((among - before).tolist()):
                if chance > 0:
                    total += chance * (1 + below(child, prefix * tables.vocab + token))
            before = among
        return total

    return below(0, 0)


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

"""One round: propose, verify, accept. The engine then commits what the round has decided."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from specdec.acceptance import Plain, accept, certain
from specdec.batch import Batch
from specdec.coupling import decided
from specdec.engine.processors import apply_processors
from specdec.engine.read_back import Fetch, ReadBack, pack
from specdec.filters import first_largest
from specdec.forward import LOGITS, ForwardBatch, ForwardOutput, Wants
from specdec.interfaces import Drafter, Session, Verifier
from specdec.random import Purpose, uniforms
from specdec.requests import Request
from specdec.sampling import adjust, distribution, one_hot, path_tokens, warmed
from specdec.target.agreement import ALONE, Agreement
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, along_path
from specdec.types import DraftSampling, Noise, Outcome, Verdict

Check = Callable[[DraftTree, Batch], object]
"""Looks at a drafter's proposal; raises if something is wrong."""


Evidence = Callable[[Tensor, Tensor, DraftTree, Batch], Tensor]
"""``evidence(scores, target_probs, tree, slots)`` returns what the rule sees of the target: p, except for two kinds of
rules that declare it (see ``Verifier``). The first two and the result are ``Float[batch node vocab]``."""


def evidence_for(verifier: Verifier, *, speculating: bool) -> Evidence:
    """Returns what a rule is shown, in rounds that speculate or in plain ones."""
    if verifier.noise is Noise.SHARED:
        return shared_noise  # in plain decoding, too: that is what the output is compared with
    if verifier.needs_leaf_probs and speculating:
        return at_temperature_one
    return as_it_is


def as_it_is(scores: Tensor, target_probs: Tensor, tree: DraftTree, slots: Batch) -> Tensor:
    """Returns p."""
    return target_probs


def shared_noise(scores: Tensor, target_probs: Tensor, tree: DraftTree, slots: Batch) -> Tensor:
    """Returns the token that the shared noise draws from p at every node, one-hot."""
    if not slots.sampling.any_sampled:
        return target_probs
    return decided(target_probs, tree, slots.keys, slots.lengths)


def at_temperature_one(scores: Tensor, target_probs: Tensor, tree: DraftTree, slots: Batch) -> Tensor:
    """Returns p, computed at temperature 1 for greedy rows, where a cascade decides by probabilities, too."""
    if not slots.sampling.any_greedy:
        return target_probs
    return distribution(scores, warmed(slots.sampling, slots.drafting))


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How rounds draft and judge.

    Attributes:
        verifier: The acceptance rule.
        evidence: What the rule is shown of the target.
        wants: What the verify forward returns.
        session: The drafting session; None in plain decoding.
        max_nodes: The largest number of drafted nodes in a row.
        max_depth: The largest depth of a node.
        is_chain: Whether no node has two children.
        check: Looks at every draft; None if nobody does. Every law is looked at then, too.
    """

    verifier: Verifier
    evidence: Evidence
    wants: Wants
    session: Session | None = None
    max_nodes: int = 0
    max_depth: int = 0
    is_chain: bool = True
    check: Check | None = None

    @classmethod
    def plain(cls, verifier: Verifier | None) -> "Mode":
        """Returns plain decoding: the same round with a tree of the root alone."""
        evidence = as_it_is if verifier is None else evidence_for(verifier, speculating=False)
        return cls(verifier=Plain(), evidence=evidence, wants=LOGITS)

    @classmethod
    def speculative(
        cls, drafter: Drafter, session: Session, verifier: Verifier, *, check: Check | None = None
    ) -> "Mode":
        """Returns speculative decoding; ``check`` is called with every tree as the session proposed it."""
        return cls(
            verifier=verifier,
            evidence=evidence_for(verifier, speculating=True),
            wants=Wants(hidden_layers=tuple(session.hidden_layers), top_k=session.top_tokens),
            session=session,
            max_nodes=drafter.max_nodes,
            max_depth=drafter.max_depth,
            is_chain=drafter.is_chain,
            check=check,
        )


@dataclass(frozen=True, eq=False)
class Judged:
    """What a rule has decided, on the device.

    Attributes:
        evidence: What the rule was shown of the target, or would have been; None unless somebody observes it.
        verdict: What became of the tree.
        tokens: The root and the accepted path, padded with the root.
        valid: False where logits on the path, or the rule's laws, were not finite: nothing was decided then.
        packed: What the host needs of all this, in one tensor (``ReadBack``).
    """

    evidence: Float[Tensor, "batch node vocab"] | None
    verdict: Verdict
    tokens: Int[Tensor, "batch position"]
    valid: Bool[Tensor, " batch"]
    packed: Float[Tensor, "batch figure"]


@dataclass(frozen=True, eq=False)
class Played:
    """A round, after the rule's decision.

    Attributes:
        tree: What was proposed.
        judged: What was decided.
        outcome: What the session is to observe when the host's numbers are known; None if it has observed it already.
        fetch: The decision's table on its way to the host.
        alternatives: See ``ReadBack.unpack``.
        alone: Whether the next round of these rows needs nothing from the host, so that it may begin before this one is
            read.
    """

    tree: DraftTree
    judged: Judged
    outcome: Outcome | None
    fetch: Fetch
    alternatives: int | None
    alone: bool = False

    @cached_property
    def read(self) -> ReadBack:
        """What the host needs of the decision; the first call waits for the device."""
        return ReadBack.unpack(self.fetch.wait(), self.judged.tokens.shape[1], self.alternatives)


@dataclass(frozen=True, eq=False)
class InFlight:
    """A round that the device plays, and that the host has not read yet.

    Attributes:
        played: The round.
        batch: Its rows.
        requests: The request of every row when the round began.
    """

    played: Played
    batch: Batch
    requests: list[Request | None]

    def rows_in(self, running: Sequence[Request | None]) -> np.ndarray:
        """Returns which rows' requests still run; others have ended while the round was in flight."""
        slots = self.batch.on_host.slots.tolist()
        return np.array([running[slot] is request for slot, request in zip(slots, self.requests, strict=True)])


def verify(mode: Mode, tree: DraftTree, batch: Batch, runner: ModelRunner) -> ForwardOutput:
    """Returns what the target says of all nodes of the trees, in one forward."""
    return runner.run(
        ForwardBatch.of_tree(
            tree,
            slots=batch.slots,
            lengths=batch.lengths,
            host_lengths=None if batch.host is None else batch.host.lengths,
            key_bound=batch.key_bound,
            wants=mode.wants,
        )
    )


class Asked:
    """What the host is asked of the grammars between a draft and its judgement; the device verifies meanwhile."""

    def __init__(self, tree: DraftTree, batch: Batch):
        self._matchers, self._device = batch.matchers, batch.device
        self._question = Fetch(batch.matchers.question(batch.slots, tree.tokens, tree.ancestors, tree.valid))

    def masks(self) -> Int32[Tensor, "batch node word"]:
        """Returns the answer, when the question is there."""
        bits = self._matchers.answer(self._question.wait())
        return torch.from_numpy(bits).to(self._device, non_blocking=True)


def judge(
    mode: Mode,
    tree: DraftTree,
    logits: Float[Tensor, "batch node vocab"],
    batch: Batch,
    agreement: Agreement = ALONE,
    *,
    masks: Int32[Tensor, "batch node word"] | None = None,
    observed: bool = False,
) -> Judged:
    """Decide what is accepted, and draw the token that follows: the same in all processes that share the target.

    Greedy rows need no laws where the rule says so: all of p is on one token.

    Args:
        masks: The tokens that grammars allow (``Asked``); None without grammars.
        observed: Whether somebody looks at the rule's evidence.
    """
    scores = _processed(logits, tree, batch, masks)
    target_probs = evidence = peaks = None
    if mode.verifier.walks_greedily and tree.draft_probs is None and not batch.sampling.any_sampled:
        following = first_largest(scores)
        verdict = certain(tree, following)
        if scores is logits:
            peaks = logits.gather(2, following[..., None])[..., 0]
        if observed:
            evidence = one_hot(following, logits.shape[2])
    else:
        target_probs = distribution(scores, batch.sampling)
        shown = mode.evidence(scores, target_probs, tree, batch)
        verdict = accept(mode.verifier, tree, shown, uniforms(batch.keys, batch.rounds, Purpose.ACCEPT, 2))
        evidence = shown if observed else None
    verdict = agreement.on_verdict(verdict)
    nodes, tokens = tree.parents + 1, tree.tokens
    if tree.width > 1:
        nodes = torch.nn.functional.pad(verdict.path.clamp(min=0), (1, 0))
        tokens = tree.tokens.gather(1, nodes)
    # NaN wins every maximum: a largest logit tells whether its node went wrong.
    peaks = logits.amax(-1) if peaks is None else peaks
    valid, packed = pack(tree, verdict, nodes, tokens, logits, peaks, target_probs, batch.alternatives)
    return Judged(evidence, verdict, tokens, agreement.on_numbers(valid), agreement.on_numbers(packed))


def repeatable(played: Played) -> np.ndarray:
    """Returns which rows may do without their drafts after a round that decided nothing for them, Bool[batch].

    That is exact only where no draft was drawn at random: an exact rule emits the target's law given such a tree, as a
    round without drafts does. A drawn token is different: given that it was drawn, the rule emits another law, and only
    the average over all draws is the target's. To forget some of the draws would change that average.
    """
    tree = played.tree
    drawn = (tree.law == DraftSampling.IID) | (tree.law == DraftSampling.WITHOUT_REPLACEMENT)
    at_random = (drawn & tree.valid)[:, 1:].any(-1).cpu().numpy()  # after a failure; it may wait for the device
    proposed = played.read.proposed_nodes
    return (proposed > 0) & ~at_random[: len(proposed)]


def propose(mode: Mode, batch: Batch) -> DraftTree:
    """Returns the drafts of a round that is not recorded, without the nodes that are too deep for their row."""
    session = mode.session
    if session is None:
        return DraftTree.root_only(batch.roots)
    session.prepare(batch)
    tree = session.propose(batch)
    if mode.check is not None:
        mode.check(tree, batch)
    if tree.width > mode.max_nodes + 1:
        raise ValueError(
            f"{type(session).__name__} proposed {tree.width - 1} nodes and its drafter announced "
            f"max_nodes={mode.max_nodes}: the cache has no room for more; propose fewer, or announce them"
        )
    if (batch.on_host.max_depth < tree.max_depth).any():
        tree = tree.limited(batch.max_depth)
    return tree


def outcome_of(
    batch: Batch,
    wants: Wants,
    nodes: Int[Tensor, "batch node"],
    drafted: Bool[Tensor, "batch node"],
    output: ForwardOutput,
    verdict: Verdict,
    tokens: Int[Tensor, "batch position"],
    valid: Bool[Tensor, " batch"],
    *,
    in_line: bool,
) -> Outcome:
    """Returns what a round has made final in the rows that speculate, before the batch moves on.

    Args:
        wants: What the session asked for.
        nodes: The token of every node that was verified.
        drafted: Which of these nodes the tree has.
        output: What the target returned at these nodes.
        tokens: The root and the accepted path.
        valid: False where nothing was decided.
        in_line: Whether the trees are chains, so that every path is its nodes from the root on.
    """
    told = valid & batch.drafting
    path = verdict.path.where(told[:, None], -1)
    states = {layer: output.hidden_states[layer] for layer in wants.hidden_layers}
    return Outcome(
        slots=batch.slots,
        starts=batch.lengths,
        tokens=tokens,
        counts=(verdict.num_accepted + 1) * told,
        next_tokens=verdict.next_token,
        path=path,
        hidden_states=states if in_line else {layer: along_path(each, path) for layer, each in states.items()},
        node_tokens=nodes,
        node_valid=drafted,
        top_tokens=output.top_tokens,
    )


def _processed(
    logits: Float[Tensor, "batch node vocab"],
    tree: DraftTree,
    batch: Batch,
    masks: Int32[Tensor, "batch node word"] | None,
) -> Float[Tensor, "batch node vocab"]:
    """Returns the logits with penalties, the user's own processors and grammars applied, from which p is computed.

    They are the logits themselves if there is none, in any dtype that float32 holds.
    """
    processed = any(batch.processors)
    if batch.sampling.seen is None and not processed and masks is None and logits.dtype != torch.float64:
        return logits
    paths = path_tokens(tree.tokens, tree.ancestors) if batch.sampling.seen is not None else None
    scores = adjust(logits, batch.sampling, paths)
    if processed:
        scores = apply_processors(scores, tree, batch)
    if masks is not None:
        scores = scores.masked_fill(~batch.matchers.unpacked(masks), -torch.inf)
    return scores

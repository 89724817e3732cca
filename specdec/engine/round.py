"""One round: propose, verify, accept. The engine then commits what the round has decided."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.acceptance import Plain, accept, certain
from specdec.batch import Batch
from specdec.engine.evidence import Evidence, as_it_is, evidence_for
from specdec.engine.processors import apply_processors
from specdec.engine.read_back import Fetch, ReadBack, pack
from specdec.filters import first_largest
from specdec.forward import LOGITS, ForwardBatch, ForwardOutput, Wants
from specdec.interfaces import Drafter, Verifier
from specdec.random import Purpose, uniforms
from specdec.sampling import adjust, distribution, path_tokens
from specdec.target.agreement import ALONE, Agreement
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Verdict

Check = Callable[[DraftTree, Batch], object]
"""Looks at what a drafter proposes; raises if something is wrong."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How rounds draft and judge.

    Attributes:
        propose: Drafts for the rows of a round.
        verifier: The acceptance rule.
        evidence: What the rule is shown of the target.
        wants: What the verify forward returns.
        drafter: The drafter; None in plain decoding.
        inspected: Whether every draft and every law is looked at.
    """

    propose: Callable[[Batch], DraftTree]
    verifier: Verifier
    evidence: Evidence
    wants: Wants
    drafter: Drafter | None = None
    inspected: bool = False

    @property
    def most_nodes(self) -> int:
        """The largest number of drafted nodes in a row."""
        return 0 if self.drafter is None else self.drafter.max_nodes

    @classmethod
    def plain(cls, verifier: Verifier | None) -> "Mode":
        """Returns plain decoding: the same round with a tree of the root alone."""
        evidence = as_it_is if verifier is None else evidence_for(verifier, speculating=False)
        return cls(propose=_nothing, verifier=Plain(), evidence=evidence, wants=LOGITS)

    @classmethod
    def speculative(cls, drafter: Drafter, verifier: Verifier, *, check: Check | None = None) -> "Mode":
        """Returns speculative decoding.

        Args:
            drafter: The drafter.
            verifier: The acceptance rule.
            check: Called with every tree as the drafter proposed it, and with the slots it was made for.
        """
        return cls(
            propose=lambda slots: _drafted(drafter, slots, check),
            verifier=verifier,
            evidence=evidence_for(verifier, speculating=True),
            wants=Wants(hidden_layers=tuple(drafter.hidden_layers), top_k=drafter.top_tokens),
            drafter=drafter,
            inspected=check is not None,
        )


@dataclass(frozen=True, eq=False)
class Judged:
    """What a rule has decided, on the device.

    Attributes:
        evidence: What the rule was shown of the target; None where no rule was asked.
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
        said: What the target said at every node, as far as the drafter asked for it.
        fetch: The decision's table on its way to the host.
        alternatives: See ``ReadBack.unpack``.
        followed: Whether the drafter has followed on the device.
        alone: Whether the next round of these rows needs nothing from the host, so that it may begin before this one is
            read.
    """

    tree: DraftTree
    judged: Judged
    said: ForwardOutput
    fetch: Fetch
    alternatives: int | None
    followed: bool = False
    alone: bool = False

    @cached_property
    def read(self) -> ReadBack:
        """What the host needs of the decision; the first call waits for the device."""
        return ReadBack.unpack(self.fetch.wait(), self.judged.tokens.shape[1], self.alternatives)


def verify(mode: Mode, tree: DraftTree, slots: Batch, runner: ModelRunner) -> ForwardOutput:
    """Returns what the target says of all nodes of the trees, in one forward."""
    return runner.run(
        ForwardBatch.of_tree(
            tree,
            slots=slots.index,
            lengths=slots.lengths,
            host_lengths=slots.host_lengths if slots.key_bound is None else None,
            key_bound=slots.key_bound,
            wants=mode.wants,
        )
    )


def judge(
    mode: Mode,
    tree: DraftTree,
    logits: Float[Tensor, "batch node vocab"],
    slots: Batch,
    agreement: Agreement = ALONE,
) -> Judged:
    """Decide what is accepted, and draw the token that follows: the same in all processes that share the target.

    Greedy rows without drafts need no law: their next token has all of p.
    """
    scores = _processed(logits, tree, slots)
    target_probs = evidence = None
    if mode.drafter is None and not slots.sampling.any_sampled:
        verdict = certain(tree, first_largest(scores[:, 0]))
    else:
        target_probs = distribution(scores, slots.sampling)
        evidence = mode.evidence(scores, target_probs, tree, slots)
        verdict = accept(mode.verifier, tree, evidence, uniforms(slots.keys, slots.rounds, Purpose.ACCEPT, 2))
    verdict = agreement.on_verdict(verdict)
    nodes, tokens = tree.parents + 1, tree.tokens
    if tree.width > 1:
        nodes = torch.nn.functional.pad(verdict.path.clamp(min=0), (1, 0))
        tokens = tree.tokens.gather(1, nodes)
    valid, packed = pack(tree, verdict, nodes, tokens, logits, target_probs, slots.alternatives)
    return Judged(evidence, verdict, tokens, agreement.on_marks(valid), agreement.on_numbers(packed))


def repeatable(played: Played) -> np.ndarray:
    """Returns which rows may do without their drafts after a round that decided nothing for them, Bool[batch].

    That is exact only where no draft was drawn at random: an exact rule emits the target's law given such a tree, as a
    round without drafts does. A drawn token is different: given that it was drawn, the rule emits another law, and only
    the average over all draws is the target's. To forget some of the draws would change that average.
    """
    tree = played.tree
    drawn = (tree.law == DraftSampling.IID) | (tree.law == DraftSampling.WITHOUT_REPLACEMENT)
    at_random = (drawn & tree.valid)[:, 1:].any(-1).cpu().numpy()  # after a failure; it may wait for the device
    return (played.read.proposed_nodes > 0) & ~at_random


def _nothing(slots: Batch) -> DraftTree:
    return DraftTree.root_only(slots.roots)


def _drafted(drafter: Drafter, slots: Batch, check: Check | None) -> DraftTree:
    """Returns what the drafter proposes, without the nodes that are too deep for their row."""
    tree = drafter.propose(slots)
    if check is not None:
        check(tree, slots)
    if tree.width > drafter.max_nodes + 1:
        raise ValueError(
            f"{type(drafter).__name__} proposed {tree.width - 1} nodes and announced max_nodes={drafter.max_nodes}: "
            f"the cache has no room for more; propose fewer, or announce them"
        )
    if (slots.host_max_depth < tree.max_depth).any():
        tree = tree.limited(slots.max_depth)
    return tree


def _processed(
    logits: Float[Tensor, "batch node vocab"], tree: DraftTree, slots: Batch
) -> Float[Tensor, "batch node vocab"]:
    """Returns the logits with penalties and the user's own processors applied, from which p is computed."""
    paths = path_tokens(tree.tokens, tree.ancestors) if slots.sampling.seen is not None else None
    scores = adjust(logits, slots.sampling, paths)
    return apply_processors(scores, tree, slots) if any(slots.processors) else scores

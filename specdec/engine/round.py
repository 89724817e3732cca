"""One round: propose, verify, accept. The engine then commits what the round has decided."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.acceptance import Plain, accept
from specdec.batch import LOGITS, ForwardBatch, Wants
from specdec.engine.clock import StageTimer
from specdec.engine.evidence import Evidence, as_it_is, evidence_for
from specdec.engine.processors import apply_processors
from specdec.interfaces import Drafter, Verifier
from specdec.modeling.runner import ModelRunner
from specdec.random import Purpose, uniforms
from specdec.sampling import adjust, distribution, path_tokens
from specdec.slots import Slots
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Verdict

Check = Callable[[DraftTree, Slots], object]
"""Looks at what a drafter proposes; raises if something is wrong."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How rounds draft and judge.

    Attributes:
        propose: Drafts for the rows of a round.
        verifier: The acceptance rule.
        evidence: What the rule is shown of the target.
        wants: What the verify forward returns.
    """

    propose: Callable[[Slots], DraftTree]
    verifier: Verifier
    evidence: Evidence
    wants: Wants

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
            wants=Wants(hidden_layers=tuple(drafter.hidden_layers)),
        )


@dataclass(frozen=True, eq=False)
class Played:
    """What a round has decided.

    Attributes:
        tree: What was proposed.
        evidence: What the rule was shown of the target.
        verdict: What became of the tree.
        tokens: The root and the accepted path, padded with the root.
        hidden_states: The hidden states that were asked for, at every node, by layer index.
        read: What the host needs of all this.
    """

    tree: DraftTree
    evidence: Float[Tensor, "batch node vocab"]
    verdict: Verdict
    tokens: Int[Tensor, "batch position"]
    hidden_states: Mapping[int, Float[Tensor, "batch node hidden"]]
    read: "ReadBack"


def play(mode: Mode, slots: Slots, runner: ModelRunner, timer: StageTimer) -> Played:
    """Draft for all rows, verify the drafts in one forward, and decide what is accepted."""
    with timer.stage("draft"):
        tree = runner.agreement.on_tree(mode.propose(slots))
    with timer.stage("verify"):
        output = runner.run(
            ForwardBatch.of_tree(
                tree,
                slots=slots.index,
                lengths=slots.lengths,
                host_slots=slots.host_index,
                host_lengths=slots.host_lengths,
                wants=mode.wants,
            )
        )
    with timer.stage("accept"):
        logits = output.scores
        scores = _processed(logits, tree, slots)
        target_probs = distribution(scores, slots.sampling)
        evidence = mode.evidence(scores, target_probs, tree, slots)
        verdict = accept(mode.verifier, tree, evidence, uniforms(slots.keys, slots.rounds, Purpose.ACCEPT, 2))
        verdict = runner.agreement.on_verdict(verdict)
        nodes = torch.nn.functional.pad(verdict.path.clamp(min=0), (1, 0)) if tree.max_depth else tree.parents + 1
        tokens = tree.tokens.gather(1, nodes)
        alternatives, agree = slots.alternatives, runner.agreement.on_numbers
        read = ReadBack.of(tree, verdict, nodes, tokens, logits, target_probs, alternatives, agree=agree)
    return Played(tree, evidence, verdict, tokens, output.hidden_states, read)


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


def _nothing(slots: Slots) -> DraftTree:
    return DraftTree.root_only(slots.roots)


def _drafted(drafter: Drafter, slots: Slots, check: Check | None) -> DraftTree:
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
    logits: Float[Tensor, "batch node vocab"], tree: DraftTree, slots: Slots
) -> Float[Tensor, "batch node vocab"]:
    """Returns the logits with penalties and the user's own processors applied, from which p is computed."""
    paths = path_tokens(tree.tokens, tree.ancestors) if slots.sampling.seen is not None else None
    scores = adjust(logits, slots.sampling, paths)
    return apply_processors(scores, tree, slots) if any(slots.processors) else scores


@dataclass(frozen=True, eq=False)
class ReadBack:
    """A round's results on the host, row by row, fetched in one copy with one synchronization.

    Attributes:
        tokens: The emitted tokens; padding follows after ``num_accepted + 1`` of them.
        logprobs: Their log-probabilities under p.
        raw: Float[batch position 1+2k]: their log-probabilities before all processing, then the k most probable tokens
            and their log-probabilities; None if no request asks for them.
        num_accepted: The number of accepted nodes.
        expected_accepted: Its expected value, given the tree.
        proposed_nodes: Drafted nodes that were verified.
        proposed_depth: Depth of the longest branch.
        valid: False where logits on the path, or the rule's laws, were not finite: nothing else but the proposed nodes
            means anything then.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    raw: np.ndarray | None
    num_accepted: np.ndarray
    expected_accepted: np.ndarray
    proposed_nodes: np.ndarray
    proposed_depth: np.ndarray
    valid: np.ndarray

    @classmethod
    def of(
        cls,
        tree: DraftTree,
        verdict: Verdict,
        nodes: Int[Tensor, "batch position"],
        tokens: Int[Tensor, "batch position"],
        logits: Float[Tensor, "batch node vocab"],
        target_probs: Float[Tensor, "batch node vocab"],
        alternatives: int | None = None,
        *,
        agree: Callable[[Tensor], Tensor] = lambda numbers: numbers,
    ) -> "ReadBack":
        """Copy a round's results to the host.

        Args:
            tree: What was proposed.
            verdict: What became of it.
            nodes: The root and the accepted path.
            tokens: Their tokens.
            logits: The model's.
            target_probs: p.
            alternatives: The number of most probable tokens to tell at every place; None leaves all of ``raw`` out.
            agree: Makes the numbers the same in all processes that share the target.
        """
        batch, _, vocab = target_probs.shape
        last = verdict.next_token[:, None]
        emitted = torch.cat([tokens[:, 1:], last], dim=1).scatter_(1, verdict.num_accepted[:, None], last)
        chosen = target_probs.reshape(batch, -1).gather(1, torch.add(emitted, nodes, alpha=vocab))
        figures = [verdict.num_accepted, verdict.expected_accepted, *tree.size, verdict.valid]
        # NaN wins every maximum: a largest logit tells whether its node went wrong.
        largest = logits.amax(-1).gather(1, nodes)
        columns = [emitted, chosen.log(), *[figure[:, None] for figure in figures], largest]
        if alternatives is not None:
            columns.append(_raw_logprobs(logits, nodes, emitted, alternatives).flatten(1))
        packed = agree(torch.cat([column.to(torch.float64) for column in columns], dim=1)).cpu().numpy()
        width = emitted.shape[1]
        rest = packed[:, 2 * width : 3 * width + len(figures)]
        raw = packed[:, 3 * width + len(figures) :].reshape(batch, width, -1) if alternatives is not None else None
        return cls(
            tokens=packed[:, :width].astype(np.int64),
            logprobs=packed[:, width : 2 * width],
            raw=raw,
            num_accepted=rest[:, 0].astype(np.int64),
            expected_accepted=rest[:, 1],
            proposed_nodes=rest[:, 2].astype(np.int64),
            proposed_depth=rest[:, 3].astype(np.int64),
            valid=(rest[:, 4] > 0) & np.isfinite(rest[:, 5:]).all(1),
        )


def _raw_logprobs(
    logits: Float[Tensor, "batch node vocab"],
    nodes: Int[Tensor, "batch position"],
    emitted: Int[Tensor, "batch position"],
    alternatives: int,
) -> Float[Tensor, "batch position figures"]:
    """Returns log-probabilities before all processing: the emitted token's, the most probable tokens, and theirs."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows = logits.gather(1, nodes[..., None].expand(-1, -1, logits.shape[-1])).to(wide).log_softmax(-1)
    chosen = rows.gather(2, emitted[..., None])
    if not alternatives:
        return chosen
    # A stable sort, because topk leaves open which of equal tokens comes first; here it is the lower id, as everywhere.
    values, tokens = rows.sort(dim=-1, descending=True, stable=True)
    return torch.cat([chosen, tokens[..., :alternatives].to(wide), values[..., :alternatives]], dim=-1)

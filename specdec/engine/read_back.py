"""A round's results on the device, and what the host reads of them: one table, in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.filters import largest
from specdec.interfaces import Round
from specdec.requests import Request
from specdec.tree import DraftTree
from specdec.types import Outcome, Verdict


class Fetch:
    """A tensor on its way to the host, which may do other things meanwhile, as may work that is queued later."""

    def __init__(self, tensor: Tensor):
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._here = tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
        else:
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> np.ndarray:
        """Returns the numbers, when they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._here.numpy()


@dataclass(frozen=True, eq=False)
class ReadBack:
    """A round's results on the host, row by row; where one is not ``valid``, only the proposed nodes mean anything.

    Attributes:
        raw: Float[batch position 1+2k]: the tokens' log-probabilities before all processing, then the k most probable
            tokens and their log-probabilities; None if no request asks for them.
    """

    tokens: np.ndarray  # emitted; padding follows after ``num_accepted + 1`` of them
    logprobs: np.ndarray  # under p
    path: np.ndarray  # the accepted nodes, -1 padded
    raw: np.ndarray | None
    num_accepted: np.ndarray
    expected_accepted: np.ndarray  # given the tree
    proposed_nodes: np.ndarray  # drafted nodes that were verified
    proposed_depth: np.ndarray  # of the longest branch
    valid: np.ndarray  # logits on the path and the rule's laws were finite

    @classmethod
    def unpack(cls, packed: np.ndarray, width: int, alternatives: int | None) -> "ReadBack":
        """Returns the parts of a table of ``pack``, with ``width`` columns of tokens."""
        whole = packed[:, : 2 * width + 3].astype(np.int64)
        figures, rest = whole[:, 2 * width - 1 :], packed[:, 2 * width + 3 :]
        return cls(
            tokens=whole[:, :width], path=whole[:, width : 2 * width - 1], num_accepted=figures[:, 0],
            proposed_nodes=figures[:, 1], proposed_depth=figures[:, 2], valid=figures[:, 3] > 0,
            expected_accepted=rest[:, 0], logprobs=rest[:, 1 : width + 1],
            raw=None if alternatives is None else rest[:, width + 1 :].reshape(len(packed), width, -1),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Decision:
    """A rule's decisions on a round, on the device."""

    evidence: Float[Tensor, "batch node vocab"] | None  # that the rule is shown; None unless somebody observes it
    verdict: Verdict
    tokens: Int[Tensor, "batch position"]  # the root and the accepted path, padded with the root
    valid: Bool[Tensor, " batch"]  # False where logits on the path or laws were not finite: nothing was decided
    packed: Float[Tensor, "batch figure"]  # all that the host needs (``ReadBack``)

    def seen(self, tree: DraftTree, requests: tuple[Request | None, ...]) -> Round:
        assert self.evidence is not None, "the rule was asked to show it"
        return Round(tree, self.evidence, self.verdict, requests)


@dataclass(frozen=True, eq=False)
class DeviceRound:
    """A round that the device plays, and that the host may not have read yet."""

    tree: DraftTree  # what was proposed
    decision: Decision
    outcome: Outcome | None  # what the session is to observe with the host's numbers; None if it has observed it
    fetch: Fetch  # the decision's table on its way to the host
    batch: Batch
    requests: Sequence[Request | None]  # of the rows when the round began
    alone: bool = False  # the next round of these rows needs nothing from the host: it may begin before this is read

    @cached_property
    def read(self) -> ReadBack:
        """The decision on the host; the first call waits for the device."""
        return ReadBack.unpack(self.fetch.wait(), self.decision.tokens.shape[1], self.batch.alternatives)

    def rows_in(self, running: Sequence[Request | None]) -> np.ndarray:
        """Returns which rows' requests still run; others have ended while the round was in flight."""
        slots = self.batch.on_host.slots.tolist()
        return np.array([running[slot] is request for slot, request in zip(slots, self.requests, strict=True)])


def pack(
    tree: DraftTree,
    verdict: Verdict,
    nodes: Int[Tensor, "batch position"],
    tokens: Int[Tensor, "batch position"],
    logits: Float[Tensor, "batch node vocab"],
    peaks: Float[Tensor, "batch node"],
    target_probs: Float[Tensor, "batch node vocab"] | None,
    alternatives: int | None = None,
) -> tuple[Bool[Tensor, " batch"], Float[Tensor, "batch figure"]]:
    """Returns which rows were decided, and all that the host needs of a round, in one table in float64.

    Args:
        nodes, tokens: The root and the accepted path, and their tokens.
        peaks: The largest of every node's logits, or NaN.
        target_probs: None if all of it is on the emitted tokens.
        alternatives: See ``Batch``; None leaves all of ``raw`` out.
    """
    batch, _, vocab = logits.shape
    last = verdict.next_token[:, None]
    emitted = last
    if tree.width > 1:
        peaks = peaks.gather(1, nodes)
        emitted = torch.cat([tokens[:, 1:], last], dim=1).scatter_(1, verdict.num_accepted[:, None], last)
    if target_probs is None:
        logprobs = torch.zeros_like(emitted, dtype=torch.float32)
    else:
        logprobs = target_probs.reshape(batch, -1).gather(1, torch.add(emitted, nodes, alpha=vocab)).log()
    valid = (peaks.abs().amax(-1) < torch.inf) & verdict.valid
    figures = [verdict.num_accepted, *tree.size, valid, verdict.expected_accepted]
    columns = [emitted.to(torch.float64), verdict.path, *[figure[:, None] for figure in figures], logprobs]
    if alternatives is not None:
        columns.append(_raw_logprobs(logits, nodes, emitted, alternatives).flatten(1))
    return valid, torch.cat(columns, dim=1)  # all of them become float64, in which every token is exact


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
    values, tokens = largest(rows, alternatives)
    return torch.cat([chosen, tokens.to(wide), values], dim=-1)

"""The running requests as a round and a drafting session see them."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor

from specdec.opaque import opaque
from specdec.requests import Matcher, Request
from specdec.sampling import SamplingTensors
from specdec.types import take_rows


@dataclass(frozen=True, eq=False, kw_only=True)
class HostBatch:
    """The numbers of a ``Batch`` on the host; on a GPU they may be one round late."""

    slots: Int[np.ndarray, " batch"]
    tokens: Int[np.ndarray, "batch position"]  # the sequence of every row, root included; ``lengths + 1`` of them count
    lengths: Int[np.ndarray, " batch"]
    drafting: Bool[np.ndarray, " batch"]
    max_depth: Int[np.ndarray, " batch"]
    remaining: Int[np.ndarray, " batch"]  # tokens still wanted

    @property
    def deepest(self) -> int:
        """The depth that the row with the most room may draft to."""
        return int(np.where(self.drafting, self.max_depth, 0).max())

    @property
    def begun(self) -> "HostBatch":
        """The same rows, of which those without a committed token do not draft."""
        return replace(self, drafting=self.drafting & (self.lengths > 0))


class Matchers:
    """Where the outputs of all slots' requests are in their grammars.

    A question and its answer are tensors, and the slots stand in the question. So a recorded stage has its masks among
    its inputs, or asks for them in the middle, and a replay is answered by what the grammars allow then.
    """

    def __init__(self, by_slot: Sequence[Request | None], vocab_size: int):
        self._by_slot, self._vocab_size = by_slot, vocab_size

    def _matcher(self, slot: int, drafts: bool) -> Matcher | None:
        request = self._by_slot[slot]
        matcher = None if request is None else request.matcher
        return None if matcher is None or (drafts and not matcher.masks_drafts) else matcher

    def of(self, slots: Iterable[int], *, drafts: bool = False) -> bool:
        """Returns whether any of these slots has a grammar; with ``drafts``, one that masks drafts."""
        return any(self._matcher(slot, drafts) is not None for slot in slots)

    @staticmethod
    def question(
        slots: Int[Tensor, " batch"],
        tokens: Int[Tensor, "batch node"],
        above: Bool[Tensor, "batch some node"],
        valid: Bool[Tensor, "batch some"] | None = None,
    ) -> Int[Tensor, "batch some figure"]:
        """Returns a question as one tensor, for one copy to the host: which tokens may follow some nodes of trees.

        ``above`` marks the nodes that are above or at each of these nodes, ``valid`` those that mean anything.
        """
        path = torch.where(above, tokens[:, None], -1)
        meant = above.any(-1) if valid is None else valid
        return torch.cat([slots[:, None, None].expand(-1, path.shape[1], -1), meant[..., None], path], dim=2)

    def answer(
        self, question: Int[np.ndarray, "batch some figure"], *, drafts: bool = False
    ) -> Int32[np.ndarray, "batch some word"]:
        """Returns a mask for each of the nodes, a bit for every token; ``drafts``: of grammars that mask them."""
        batch, some, _ = question.shape
        bits = np.full((batch, some, -(-self._vocab_size // 32)), -1, dtype=np.int32)
        for row, (slot, nodes) in enumerate(zip(question[:, 0, 0].tolist(), question, strict=True)):
            matcher = self._matcher(slot, drafts)
            if matcher is not None:
                meant = nodes[:, 1] > 0
                path = nodes[meant, 2:]
                bits[row, meant] = matcher.masks(path.max(0, initial=-1), path >= 0)
        return bits

    def ask(self, question: Int[Tensor, "batch some figure"], *, drafts: bool = False) -> Tensor:
        """Returns the answer as ``unpacked`` takes it. The host waits; in a recording, this is a step."""
        return opaque(self._now, question, drafts)

    def _now(self, question: Int[Tensor, "batch some figure"], drafts: bool) -> Int32[Tensor, "batch some word"]:
        # By DLPack: a look at values that is repeated by a replay.
        bits = self.answer(np.from_dlpack(question.cpu()), drafts=drafts)
        return torch.from_numpy(bits).to(question.device, non_blocking=True)

    def unpacked(self, bits: Int32[Tensor, "batch some word"]) -> Bool[Tensor, "batch some vocab"]:
        places = torch.arange(8, dtype=torch.uint8, device=bits.device)
        octets = bits.view(torch.uint8)[..., None]
        return ((octets >> places) & 1).flatten(2)[..., : self._vocab_size].bool()


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """The requests of one round. Nothing here may be changed.

    Attributes:
        lengths: The number of tokens whose keys and values are in the target's cache, which is the root's position.
        max_depth: No node may be deeper: the rest of the output, or of the cache, has no room for more.
        alternatives: The most probable tokens that any request wants to be told; None for no raw log-probabilities.
        host: The same numbers on the host; None in a recorded round, which may use tensors alone. There may be further
            rows behind the host's, which belong to no request and do not draft (``SlotTable.padded``).
        first_slot: The first slot, if the rows are consecutive slots and the tensors are views of all slots' tensors.
        key_bound: How many positions of the cache attention reads in a recorded round, at least; else None.
    """

    slots: Int[Tensor, " batch"]  # the slot of every row, ascending
    roots: Int[Tensor, " batch"]  # the token of each row's root: the last token of its sequence
    lengths: Int[Tensor, " batch"]
    drafting: Bool[Tensor, " batch"]  # True for rows whose request wants speculation
    max_depth: Int[Tensor, " batch"]
    keys: Int[Tensor, " batch"]  # the random key of each request
    rounds: Int[Tensor, " batch"]  # the number of rounds of each request so far
    sampling: SamplingTensors
    processors: Sequence[tuple[Callable[..., Any], ...]]  # the logits processors of each request
    faults: dict[int, str]  # by row: why its request's processors have failed in this round
    matchers: Matchers  # where the outputs of all slots' requests are in their grammars
    vocab_size: int  # width of the target's logits
    has_grammars: bool = False  # any of these requests' output must belong to a grammar
    masks_drafts: bool = False  # any of these requests' drafts are chosen and drawn under the mask of its grammar
    alternatives: int | None = None
    host: HostBatch | None = None
    first_slot: int | None = None
    key_bound: int | None = None

    @property
    def on_host(self) -> HostBatch:
        """The host's numbers, for a session that says ``reads_host``."""
        assert self.host is not None, "the host's numbers are for sessions with reads_host = True alone"
        return self.host

    def recorded(self, key_bound: int) -> "Batch":
        return replace(self, host=None, key_bound=key_bound)

    def limited(self, room: Int[np.ndarray, " batch"]) -> "Batch":
        """Return the rows as if the output had room for no deeper drafts than ``room``."""
        limit = torch.from_numpy(room).to(self.device, non_blocking=True)
        return replace(self, max_depth=limit, host=replace(self.on_host, max_depth=room))

    @property
    def place(self) -> Hashable:
        """Where the rows' tensors are: which of the slots' own, or which copies."""
        return self.first_slot, len(self)

    @cached_property
    def kind(self) -> Hashable:
        """All that a recording of these rows depends on besides the tensors' values."""
        return self.place, self.sampling.flags, self.alternatives, self.has_grammars, self.masks_drafts

    def rows(self, rows: np.ndarray) -> "Batch":
        """Return some of the rows, as copies; not in a recorded round."""
        taken = take_rows(self, rows, torch.from_numpy(rows).to(self.device, non_blocking=True))
        return replace(taken, processors=[self.processors[row] for row in rows.tolist()], first_slot=None)

    def __len__(self) -> int:
        return self.roots.shape[0]

    @property
    def device(self) -> torch.device:
        return self.roots.device

"""The running requests as a round and a drafter see them."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.host import Unknown
from specdec.sampling import SamplingTensors


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """The requests of one round, as a drafter sees them: row b is the request in slot ``host_index[b]``.

    Nothing here may be changed.

    Attributes:
        index: The slot of every row, ascending.
        host_index: The same on the host.
        roots: The token of each row's root: the last token of its sequence.
        lengths: The number of tokens whose keys and values are in the target's cache, which is the root's position.
        drafting: True for rows whose request wants speculation.
        max_depth: No node may be deeper: the rest of the output, or of the cache, has no room for more.
        keys: The random key of each request.
        rounds: The number of rounds of each request so far.
        sampling: The sampling parameters.
        processors: The logits processors of each request.
        alternatives: The largest number of most probable tokens that any request wants to be told with its output
            tokens; None if none wants their raw log-probabilities.
        host_tokens: Int[batch position] on the host: the sequence, root included.
        host_lengths, host_drafting, host_max_depth: The same as on the device.
        host_remaining: Tokens still wanted.
        vocab_size: Width of the target's logits.
        are_views: The slots are consecutive, and the tensors views of the table's.
        key_bound: In a recorded round, how many positions of the cache attention reads: enough for every row. The
            host's numbers are unknown then, except ``host_index`` of slots that ``are_views``. None in other rounds.
    """

    index: Int[Tensor, " batch"]
    host_index: np.ndarray
    roots: Int[Tensor, " batch"]
    lengths: Int[Tensor, " batch"]
    drafting: Bool[Tensor, " batch"]
    max_depth: Int[Tensor, " batch"]
    keys: Int[Tensor, " batch"]
    rounds: Int[Tensor, " batch"]
    sampling: SamplingTensors
    processors: Sequence[tuple[Callable[..., Any], ...]]
    host_tokens: np.ndarray
    host_lengths: np.ndarray
    host_drafting: np.ndarray
    host_max_depth: np.ndarray
    host_remaining: np.ndarray
    vocab_size: int
    alternatives: int | None = None
    are_views: bool = False
    key_bound: int | None = None

    def on_device(self, key_bound: int) -> "Batch":
        """Returns the rows as a recorded round sees them."""
        unknown = Unknown()
        return replace(
            self,
            host_index=self.host_index if self.are_views else unknown,
            host_tokens=unknown,
            host_lengths=unknown,
            host_drafting=unknown,
            host_max_depth=unknown,
            host_remaining=unknown,
            key_bound=key_bound,
        )

    @cached_property
    def kind(self) -> Hashable:
        """What a recording of these rows depends on besides the tensors' values, which the host knows."""
        return int(self.host_index[0]) if self.are_views else None, len(self), self.sampling.flags, self.alternatives

    @cached_property
    def has_processors(self) -> bool:
        """Whether any request has logits processors."""
        return any(self.processors)

    def rows(self, rows: np.ndarray) -> "Batch":
        """Returns some of the rows, as copies; not for a recorded round."""
        index = torch.from_numpy(rows).to(self.device, non_blocking=True)

        def take(owner: Batch | SamplingTensors) -> dict[str, Any]:
            """Returns the rows of all arrays of an object, by name."""
            values = {each.name: getattr(owner, each.name) for each in fields(owner)}
            tensors = {name: each.index_select(0, index) for name, each in values.items() if isinstance(each, Tensor)}
            return tensors | {name: each[rows] for name, each in values.items() if isinstance(each, np.ndarray)}

        processors = [self.processors[row] for row in rows.tolist()]
        sampling = replace(self.sampling, **take(self.sampling))
        return replace(self, **take(self), sampling=sampling, processors=processors, are_views=False)

    def __len__(self) -> int:
        return len(self.roots)

    @property
    def device(self) -> torch.device:
        return self.roots.device

"""Medusa: extra heads on the target's last hidden state draft a sparse tree (Cai et al. 2024, arXiv 2401.10774)."""

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafters.medusa_heads import MedusaHeads
from specdec import bundled
from specdec.arguments import flag, instance
from specdec.drafting.on_device import DeviceDrafter
from specdec.execution.module import ModuleCaller
from specdec.inflate import signal_width
from specdec.modeling.loading import resolve_dtype
from specdec.modeling.target import Target
from specdec.quantization.base import input_width
from specdec.requests import SamplingParams
from specdec.slots import Slots
from specdec.tree import DraftTree, TreeShape
from specdec.types import Committed, Decided, DraftSampling

DEFAULT_SHAPE = TreeShape.from_paths(
    [
        *[(0,), (1,), (2,)],
        *[(0, 0), (0, 1), (0, 2), (1, 0)],
        *[(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)],
        *[(0, 0, 0, 0), (0, 0, 0, 1)],
    ]
)
"""13 nodes, four deep: most children are below likely paths (section 2.3.3 of the paper)."""


class MedusaDrafter(DeviceDrafter):
    """Drafts every depth of the tree at once, from the hidden state at the last committed position.

    With that position at t, the root stands at t+1 and head i predicts token t+2+i: depth d takes its tokens from
    head d-1. A node whose path ends with rank r has the head's r-th most probable token (from 0), whatever the nodes
    above it are: the heads do not see each other's tokens (section 2.1.2). A row proposes nothing if none of its tokens
    is committed yet, which happens in the first round after a prompt of one token.

    Args:
        heads: The trained heads. ``bind`` does not change them; if the target has another device or dtype, a copy is
            moved there.
        shape: What ``TreeShape.of`` takes: a chain's length, branching factors, or paths (Medusa's choices). None
            is ``DEFAULT_SHAPE``, as deep as there are heads.
        dtype: What the heads compute in; None for the target's own.
        optimize: On a CPU, run the heads on packed weights (``specdec.execution``).

    Raises:
        ValueError: The shape needs more heads or tokens than there are.
    """

    laws = frozenset([DraftSampling.DETERMINISTIC])
    hidden_layers = (-1,)

    def __init__(
        self,
        heads: MedusaHeads,
        shape: TreeShape | int | Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        optimize: bool = True,
    ):
        instance("heads", heads, MedusaHeads, "MedusaHeads, or load them with MedusaDrafter.from_pretrained(…)")
        self.optimize = flag("optimize", optimize)
        self.heads = heads  # `bind` copies them if they must change, and calls them in evaluation mode
        self.shape = DEFAULT_SHAPE.cut(heads.num_heads) if shape is None else TreeShape.of(shape)
        if self.shape.max_depth > heads.num_heads:
            raise ValueError(
                f"the tree shape is {self.shape.max_depth} deep and there are {heads.num_heads} Medusa heads: "
                f"give a shape that is no deeper than the heads are many"
            )
        if max(self.shape.ranks) >= heads.vocab_size:
            raise ValueError(
                f"the tree shape takes the {max(self.shape.ranks) + 1} most probable tokens of a vocabulary of "
                f"{heads.vocab_size}: give a narrower shape"
            )
        resolved = "auto" if dtype is None else resolve_dtype(dtype)
        self.dtype = resolved if isinstance(resolved, torch.dtype) else None
        self.max_nodes = self.shape.num_nodes
        self.max_depth = self.shape.max_depth
        self.is_chain = self.shape.is_chain

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        shape: TreeShape | int | Sequence[int] | Sequence[Sequence[int]] | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        optimize: bool = True,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> "MedusaDrafter":
        """Load heads from a folder, the hub, or this package (``"bundled/medusa"``).

        Args:
            path: See ``MedusaHeads.from_pretrained``, or ``bundled/…``.
            shape: See the class.
            dtype: See the class.
            device: Where to load them; None for the CPU, from where ``bind`` copies them to the target's device.
            optimize: See the class.
            revision: See ``MedusaHeads.from_pretrained``, as for all that follow.
            subfolder: As there.
            token: As there.
            cache_dir: As there.
            force_download: As there.
            local_files_only: As there.
        """
        heads = MedusaHeads.from_pretrained(
            bundled.resolve(str(path)),
            device=device or "cpu",
            revision=revision,
            subfolder=subfolder,
            token=token,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
        )
        return cls(heads, shape, dtype=dtype, optimize=optimize)

    def bind(self, target: Target, *, max_batch_size: int, max_length: int) -> None:
        """Check the widths, put heads where the target is, and make room for one hidden state per slot."""
        output = target.model.get_output_embeddings()
        assert output is not None, "the engine refuses models without an output layer"
        width = input_width(output)
        heads = self.heads
        if heads.hidden_size == signal_width(target.model) < width:
            heads = heads.widened(width)  # the target is inflated, and its heads cost what such a target's would
        if heads.hidden_size != width:
            raise ValueError(
                f"the Medusa heads read hidden states of width {self.heads.hidden_size} and those of the target "
                f"{target.name} have {width}: give heads that were trained on this target"
            )
        if self.heads.vocab_size > target.vocab_size:
            raise ValueError(
                f"the Medusa heads have {self.heads.vocab_size} tokens and the target {target.name} has "
                f"{target.vocab_size}: give heads that were trained on this target"
            )
        dtype = self.dtype or target.dtype
        self._bound = _placed(heads, target.device, dtype)
        self._heads = ModuleCaller(self._bound, optimize=self.optimize)
        self._hidden = torch.zeros(max_batch_size, width, dtype=dtype, device=target.device)
        self._ready = np.zeros(max_batch_size, dtype=bool)
        self._ready_rows = torch.zeros(max_batch_size, dtype=torch.bool, device=target.device)
        self._choices = {
            depth: _Choices.of(self.shape.cut(depth), target.device) for depth in range(1, self.max_depth + 1)
        }

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Begin without a hidden state."""
        self._ready[slot] = False
        self._ready_rows[slot] = False

    def _set_ready(self, host_slots: np.ndarray) -> None:
        """Note that some slots have a hidden state; the device is told once."""
        new = host_slots[~self._ready[host_slots]]
        if len(new):
            self._ready[new] = True
            self._ready_rows[torch.from_numpy(new)] = True

    @torch.inference_mode()
    def observe(self, committed: Committed) -> None:
        """Keep the hidden state at every row's last committed position."""
        hidden = committed.hidden_states[-1]
        last = torch.from_numpy(committed.counts - 1).to(hidden.device, non_blocking=True)
        chosen = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
        self._hidden[committed.slots] = chosen.to(self._hidden.dtype)
        self._set_ready(committed.host_slots)

    @torch.inference_mode()
    def propose(self, slots: Slots) -> DraftTree:
        """Draft for all rows with one forward of the heads."""
        ready = self._ready[slots.host_index]
        depth = min(self.max_depth, int(np.where(slots.host_drafting & ready, slots.host_max_depth, 0).max()))
        if depth == 0:
            return DraftTree.root_only(slots.roots)
        return self._drafted(slots, self._choices[depth], every=bool((ready | ~slots.host_drafting).all()))

    @property
    def version(self) -> Hashable:
        """The heads'."""
        return self._heads.version

    def prepare(self, slots: Slots) -> Hashable:
        """Tell whether every row has a hidden state."""
        self._every = bool(self._ready[slots.host_index].all())
        return self._every

    @torch.inference_mode()
    def draft(self, slots: Slots) -> DraftTree:
        """Draft the whole shape."""
        return self._drafted(slots, self._choices[self.max_depth], every=self._every)

    def follow(self, decided: Decided) -> None:
        """Keep the hidden state at every row's last committed position."""
        hidden = decided.hidden_states[-1]
        last = decided.counts[:, None, None] - 1
        chosen = hidden.gather(1, last.expand(-1, 1, hidden.shape[2]))[:, 0].to(self._hidden.dtype)
        self._hidden[decided.slots] = chosen.where(decided.told[:, None], self._hidden[decided.slots])

    def followed(self, slots: Slots, counts: np.ndarray, told: np.ndarray) -> None:
        """Note which rows have a hidden state."""
        self._set_ready(slots.host_index[told])

    def _drafted(self, slots: Slots, choices: "_Choices", *, every: bool) -> DraftTree:
        """Returns trees of one shape; ``every`` tells whether all rows that draft have a hidden state."""
        depth = choices.shape.max_depth
        top = self._top(self._hidden[slots.index], depth, choices.width)
        tokens = torch.cat([slots.roots[:, None], top[choices.heads, :, choices.ranks].T], dim=1)
        valid = None
        if not every:
            known = self._ready_rows[slots.index]
            valid = known[:, None] | (torch.arange(tokens.shape[1], device=tokens.device) == 0)
        return DraftTree.from_shape(choices.shape, tokens, valid=valid)

    def _top(self, hidden: Float[Tensor, "batch hidden"], depth: int, width: int) -> Int[Tensor, "head batch rank"]:
        """Returns the most probable tokens of the first ``depth`` heads, in order."""
        return self._heads(hidden, depth).topk(width, dim=-1).indices


@dataclass(frozen=True, eq=False)
class _Choices:
    """Which head and which of its tokens each drafted node takes."""

    shape: TreeShape
    heads: Int[Tensor, " node"]
    ranks: Int[Tensor, " node"]
    width: int

    @classmethod
    def of(cls, shape: TreeShape, device: torch.device) -> "_Choices":
        heads = torch.tensor(shape.depths[1:], device=device) - 1
        return cls(shape, heads, torch.tensor(shape.ranks[1:], device=device), 1 + max(shape.ranks))


def _placed(heads: MedusaHeads, device: torch.device, dtype: torch.dtype) -> MedusaHeads:
    """Returns the heads if they have this device and dtype, otherwise a copy that has: the caller's stay unchanged."""
    if all(parameter.device == device and parameter.dtype is dtype for parameter in heads.parameters()):
        return heads
    placed = copy.deepcopy(heads).requires_grad_(False)
    placed.zero_grad()  # heads in training were copied with their gradients
    return placed.to(device=device, dtype=dtype)

"""Medusa: extra heads on the target's last hidden state draft a sparse tree (Cai et al. 2024, arXiv 2401.10774)."""

import copy
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafters.heads.trained_on import TrainedOn, trained_on
from drafters.medusa_heads import MedusaHeads
from specdec import bundled
from specdec.arguments import flag, instance
from specdec.batch import Batch
from specdec.drafting.builders import AnyTree, StaticTree, tree_of
from specdec.drafting.scored import ScoredDrafter, ScoredSession
from specdec.drafting.scorer import PerDepthScorer
from specdec.drafting.vocabulary import VocabularyMap
from specdec.execution.module import ModuleCaller
from specdec.inflate import signal_width
from specdec.interfaces import Sizes
from specdec.quantization.base import input_width
from specdec.target.loading import resolve_dtype
from specdec.target.target import Target
from specdec.tree import TreeShape
from specdec.types import DraftSampling, Outcome

DEFAULT_SHAPE = TreeShape.from_paths(
    [
        *[(0,), (1,), (2,)],
        *[(0, 0), (0, 1), (0, 2), (1, 0)],
        *[(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)],
        *[(0, 0, 0, 0), (0, 0, 0, 1)],
    ]
)
"""13 nodes, four deep: most children are below likely paths (section 2.3.3 of the paper)."""


class MedusaScorer(PerDepthScorer):
    """Scores every depth with a head of its own, from the hidden state at the last committed position.

    Args:
        heads: Runs the heads.
        num_heads: The number of heads.
        width: Width of the hidden states.
        max_batch_size: The number of slots.
        dtype: What the heads compute in.
        device: Where they are.
    """

    needs_state = True

    def __init__(
        self,
        heads: ModuleCaller,
        *,
        num_heads: int,
        width: int,
        max_batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.max_depth = num_heads
        self._heads, self.model = heads, heads.module
        with torch.inference_mode(False):
            self._hidden = torch.zeros(max_batch_size, width, dtype=dtype, device=device)

    def all_logits(self, batch: Batch, depth: int) -> Float[Tensor, "batch depth vocab"]:
        """Return the logits of the first ``depth`` heads."""
        return self._heads(self._hidden[batch.slots], depth).transpose(0, 1)

    def prepare(self, batch: Batch) -> Hashable:
        """Nothing is needed from the host."""
        return self._heads.version

    def observe(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None, *, in_place: bool) -> None:
        """Keep the hidden state at every row's last committed position."""
        hidden, slots, counts = outcome.hidden_states[-1], outcome.slots, outcome.counts
        last = (counts - 1).clamp_(min=0)[:, None, None].expand(-1, 1, hidden.shape[2])
        chosen = hidden.gather(1, last)[:, 0].to(self._hidden.dtype)
        self._hidden[slots] = chosen.where((counts > 0)[:, None], self._hidden[slots])


class MedusaDrafter(ScoredDrafter):
    """Drafts every depth of the tree at once, from the hidden state at the last committed position.

    With that position at t, the root stands at t+1 and head i predicts token t+2+i: depth d takes its tokens from
    head d-1, whatever the nodes above are: the heads do not see each other's tokens (section 2.1.2). By default a node
    whose path ends with rank r has the head's r-th most probable token (from 0), as in the paper. Tokens may also be
    drawn from the heads' distributions, at the request's temperature; then q is kept, and the exact rules accept with
    p and q. A row proposes nothing if none of its tokens is committed yet, which happens in the first round after a
    prompt of one token.

    Args:
        heads: The trained heads. ``bind`` does not change them; if the target has another device or dtype, a copy is
            moved there.
        shape: What ``TreeShape.of`` takes: a chain's length, branching factors, or paths (Medusa's choices); or a tree
            builder. None is ``DEFAULT_SHAPE``, as deep as there are heads.
        sampling: How siblings are drawn for sampled requests: ``"deterministic"`` (the most probable tokens),
            ``"iid"``, ``"without_replacement"`` or ``"coupled"``. Greedy requests get the most probable tokens.
        temperature: The heads' own for sampled requests; None follows each request.
        dtype: What the heads compute in; None for the target's own.
        optimize: On a CPU, run the heads on packed weights (``specdec.execution``).

    Raises:
        ValueError: The shape needs more heads or tokens than there are.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        shape: AnyTree | None = None,
        *,
        sampling: DraftSampling | str = DraftSampling.DETERMINISTIC,
        temperature: float | None = None,
        dtype: str | torch.dtype | None = None,
        optimize: bool = True,
    ):
        instance("heads", heads, MedusaHeads, "MedusaHeads, or load them with MedusaDrafter.from_pretrained(…)")
        self.optimize = flag("optimize", optimize)
        self.trained_on: TrainedOn | None = None
        self.heads = heads  # `bind` copies them if they must change, and calls them in evaluation mode
        super().__init__(tree_of(DEFAULT_SHAPE.cut(heads.num_heads) if shape is None else shape), sampling, temperature)
        self.shape = self.tree.shape if isinstance(self.tree, StaticTree) else None
        if self.max_depth > heads.num_heads:
            raise ValueError(
                f"the tree shape is {self.max_depth} deep and there are {heads.num_heads} Medusa heads: "
                f"give a shape that is no deeper than the heads are many"
            )
        if self.shape is not None and max(self.shape.ranks) >= heads.vocab_size:
            raise ValueError(
                f"the tree shape takes the {max(self.shape.ranks) + 1} most probable tokens of a vocabulary of "
                f"{heads.vocab_size}: give a narrower shape"
            )
        resolved = "auto" if dtype is None else resolve_dtype(dtype)
        self.dtype = resolved if isinstance(resolved, torch.dtype) else None
        self.has_leaf_probs = self.tree.has_leaf_probs and self.max_depth < heads.num_heads  # a leaf takes one more

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        shape: AnyTree | None = None,
        sampling: DraftSampling | str = DraftSampling.DETERMINISTIC,
        temperature: float | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        optimize: bool = True,
        any_target: bool = False,
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
            sampling: See the class.
            temperature: See the class.
            dtype: See the class.
            device: Where to load them; None for the CPU, from where ``bind`` copies them to the target's device.
            optimize: See the class.
            any_target: Whether it may run on another target than the one that its ``training.json`` names.
            revision: See ``MedusaHeads.from_pretrained``, as for all that follow.
            subfolder: As there.
            token: As there.
            cache_dir: As there.
            force_download: As there.
            local_files_only: As there.
        """
        where: dict[str, Any] = {
            "revision": revision,
            "subfolder": subfolder,
            "token": token,
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
        }
        heads = MedusaHeads.from_pretrained(
            bundled.resolve(str(path)),
            device=device or "cpu",
            **where,
        )
        drafter = cls(heads, shape, sampling=sampling, temperature=temperature, dtype=dtype, optimize=optimize)
        if not any_target:
            drafter.trained_on = trained_on(path, **where)
        return drafter

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
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
        if self.trained_on is not None:
            self.trained_on.check("of Medusa", target)
        dtype = self.dtype or target.dtype
        scorer = MedusaScorer(
            ModuleCaller(_placed(heads, target.device, dtype), optimize=self.optimize),
            num_heads=heads.num_heads,
            width=width,
            max_batch_size=sizes.max_batch_size,
            dtype=dtype,
            device=target.device,
        )
        vocabulary = VocabularyMap(heads.vocab_size, target.vocab_size)
        return ScoredSession(self, scorer, vocabulary, target.device, sizes, hidden_layers=(-1,))


def _placed(heads: MedusaHeads, device: torch.device, dtype: torch.dtype) -> MedusaHeads:
    """Returns the heads if they have this device and dtype, otherwise a copy that has: the caller's stay unchanged."""
    if all(parameter.device == device and parameter.dtype is dtype for parameter in heads.parameters()):
        return heads
    placed = copy.deepcopy(heads).requires_grad_(False)
    placed.zero_grad()  # heads in training were copied with their gradients
    return placed.to(device=device, dtype=dtype)

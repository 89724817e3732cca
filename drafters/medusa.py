"""Medusa: extra heads on the target's last hidden state draft a sparse tree (Cai et al. 2024, arXiv 2401.10774)."""

from pathlib import Path
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafters.heads.assemble import fill, named, needed
from drafters.heads.files import Checkpoint, Where, write
from drafters.heads.last_state import Heads, LastStateDrafter, LastStateScorer, TrainedHeads
from drafters.heads.training import Anchors, Prediction, TargetStates, TextBatch
from specdec.batch import Batch
from specdec.interfaces import Sizes
from specdec.target.target import Target

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
NAMES = [("heads.", "")]
"""FasterDecoding's first format: ``{head}.{layer}.linear.weight|bias``, and ``{head}.{num_layers}.weight``."""
_PREFIX = "medusa_head."  # in the state dict of a whole model that was trained together with its heads


class ResidualBlock(nn.Module):
    """Computes ``x + SiLU(W x + b)``. W and b begin at zero, so that a new head starts as its output layer alone."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHeads(Heads):
    """Heads that predict several tokens ahead from the target's last hidden state.

    Where the target's own output layer predicts token t+1 from the (normalized) hidden state at t, head ``i``
    predicts token t+2+i. Each head is ``num_layers`` passes through one residual block, then an output layer.

    ``num_layers`` counts the passes through the head's residual block. The published code repeats *one* block
    (``[ResBlock(hidden_size)] * num_layers``), so the weights of all layers are shared. Arguments: see ``Heads``.
    """

    least_layers = 0

    def __init__(self, **sizes: Any):
        super().__init__(**sizes)
        heads = []
        for _ in range(self.num_heads):
            block = ResidualBlock(self.hidden_size)
            output = nn.Linear(self.hidden_size, self.vocab_size, bias=False)
            heads.append(nn.Sequential(*[block] * self.num_layers, output))
        self.heads = nn.ModuleList(heads)

    def begin_as(self, output: nn.Linear) -> None:
        """New residual blocks change nothing."""
        layers: Any = self.heads
        for head in layers:
            head[-1].weight.copy_(output.weight)

    def forward(
        self, hidden: Float[Tensor, "*rows hidden"], num_heads: int | None = None
    ) -> Float[Tensor, "head *rows vocab"]:
        """Returns the logits of the first ``num_heads`` heads (default: all)."""
        return torch.stack([head(hidden) for head in self.heads[:num_heads]])

    def save_pretrained(self, path: str | Path) -> None:
        """Write ``config.json`` and ``medusa_lm_head.safetensors`` in FasterDecoding's first format.

        Shared layers are written once per layer, as the published checkpoints have them.
        """
        config = {
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "base_model_name_or_path": self.base_model,
        }
        write(path, named(self.state_dict(), NAMES), config, file=FILES[0])

    @classmethod
    def load(cls, path: str | Path, **where: Unpack[Where]) -> "MedusaHeads":
        """Returns the heads of a checkpoint in FasterDecoding's first format.

        If names begin with ``medusa_head.``, as in a whole model that was trained with its heads, all other tensors are
        ignored.
        """
        checkpoint = Checkpoint(path, weights=FILES, **where)
        name, tensors = checkpoint.name, checkpoint.tensors()
        tensors = {k.removeprefix(_PREFIX): v for k, v in tensors.items() if k.startswith(_PREFIX)} or tensors
        parts = [key.split(".") for key in tensors]
        num_heads = 1 + max((int(head) for head, *_ in parts if head.isdigit()), default=0)
        num_layers = 1 + max((int(key[1]) for key in parts if key[2:3] == ["linear"] and key[1].isdigit()), default=-1)
        vocab_size, hidden_size = needed(name, tensors, f"0.{num_layers}.weight").shape
        with torch.device("meta"):
            heads = cls(
                num_heads=num_heads,
                hidden_size=hidden_size,
                vocab_size=vocab_size,
                num_layers=num_layers,
                base_model=checkpoint.config.get("base_model_name_or_path") or "",
            )
        fill(name, heads, tensors, NAMES)
        for head, layer, *rest in parts:
            first = tensors.get(".".join((head, "0", *rest)))
            if first is not None and not torch.equal(tensors[".".join((head, layer, *rest))], first):
                raise ValueError(
                    f"{name}: layer {layer} of head {head} differs from its layer 0, but the published Medusa "
                    f"architecture repeats one shared block; this checkpoint is of another architecture"
                )
        return heads


class MedusaScorer(LastStateScorer):
    """Scores every depth with a head of its own."""

    per_depth = True

    def all_logits(self, batch: Batch, depth: int) -> Float[Tensor, "batch depth vocab"]:
        """Return the logits of the first ``depth`` heads."""
        return self.heads(self.newest[batch.slots], depth).transpose(0, 1)


class MedusaDrafter(LastStateDrafter):
    """Drafts every depth of the tree at once, from the hidden state at the last committed position.

    With that position at t, the root stands at t+1 and head i predicts token t+2+i: depth d takes its tokens from
    head d-1, whatever the nodes above are: the heads do not see each other's tokens (section 2.1.2). By default a node
    whose path ends with rank r has the head's r-th most probable token (from 0), as in the paper. Tokens may also be
    drawn from the heads' distributions, at the request's temperature; then q is kept, and the exact rules accept with
    p and q. Arguments: see ``LastStateDrafter``.
    """

    kind, title = MedusaHeads, "Medusa"

    def scorer(self, heads: Any, target: Target, sizes: Sizes) -> MedusaScorer:
        return MedusaScorer(**self.placed(heads, target, sizes))


class TrainedMedusa(TrainedHeads):
    """Medusa-1, the target frozen. Arguments: see ``TrainedHeads``."""

    title, made = "Medusa heads", MedusaDrafter

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        """The outputs of the heads' residual blocks, of the state one position before each root."""
        layers: Any = self.head.heads
        hidden = states.before(anchors).to(next(layers.parameters()).dtype)
        return Prediction([head[:-1](hidden) for head in layers])

    def logits(
        self, states: Float[Tensor, "place width"], previous: Int[Tensor, " place"], depth: int
    ) -> Float[Tensor, "place column"]:
        head: Any = self.head.heads[depth - 1]
        return head[-1](states).float()

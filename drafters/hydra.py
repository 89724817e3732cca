"""Hydra: like Medusa, but a head also reads the tokens drafted above it (Ankner et al. 2024, arXiv 2402.05109)."""

from pathlib import Path
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafters.heads.assemble import fill, named, needed
from drafters.heads.files import Checkpoint, Where, write
from drafters.heads.last_state import Heads, LastStateDrafter, LastStateScorer, TrainedHeads
from drafters.heads.training import Anchors, Borrowed, Prediction, TargetStates, TextBatch
from specdec.batch import Batch
from specdec.execution.module import ModuleCaller
from specdec.target.target import Target
from specdec.topology import Topology

FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
NAMES = [("mlp.", "hydra_mlp."), ("lm_head.", "hydra_lm_head.")]


class HydraBlock(nn.Module):
    """Computes ``R x + SiLU(W x + b)``; R is the identity where the width stays."""

    def __init__(self, width: int, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(width, hidden_size)
        self.res_connection = nn.Identity() if width == hidden_size else nn.Linear(width, hidden_size)

    def forward(self, joined: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows hidden"]:
        return self.res_connection(joined) + nn.functional.silu(self.linear(joined))


class HydraHeads(Heads):
    """Heads that predict one token each, from the target's last hidden state and the embeddings of the tokens between.

    With the last committed position at t, head ``i`` reads the hidden state at t and the target's embeddings of the
    root and of the ``i`` tokens drafted below it, side by side, and predicts token t+2+i (section 3).

    ``num_layers`` counts a head's residual blocks. The published code repeats *one* block behind the first one, so
    their weights are shared. Arguments: see ``Heads``.
    """

    def __init__(self, **sizes: Any):
        super().__init__(**sizes)
        width = self.hidden_size
        self.mlp, self.lm_head = nn.ModuleList(), nn.ModuleList()
        for index in range(self.num_heads):
            inner = [HydraBlock(width, width)] * (self.num_layers - 1)
            self.mlp.append(nn.Sequential(HydraBlock((index + 2) * width, width), *inner))
            self.lm_head.append(nn.Linear(width, self.vocab_size))

    def begin_as(self, output: nn.Linear) -> None:
        """The first blocks pass on the hidden state, and the others what they are given."""
        for name, parameter in self.named_parameters():
            parameter.zero_()
            if name.endswith("res_connection.weight"):
                parameter[:, : self.hidden_size].fill_diagonal_(1.0)
            elif name.startswith("lm_head.") and name.endswith("weight"):
                parameter.copy_(output.weight)

    def parts(self, name: str) -> tuple[int, int]:
        """The first block of head i reads i + 2 states and embeddings side by side."""
        _, head, layer, *rest = name.split(".")
        return (int(head) + 2 if name.startswith("mlp.") and layer == "0" and rest[-1] == "weight" else 1), 0

    def forward(self, joined: Float[Tensor, "*rows width"], index: int) -> Float[Tensor, "*rows vocab"]:
        """Returns the logits of one head.

        Args:
            joined: Hidden states and embeddings, side by side.
            index: The head's number, from 0.
        """
        return self.lm_head[index](self.mlp[index](joined))

    def save_pretrained(self, path: str | Path) -> None:
        """Write ``config.json`` and ``hydra_lm_head.safetensors`` as the published code names things."""
        config = {
            "hydra_num_heads": self.num_heads,
            "hydra_num_layers": self.num_layers,
            "hydra_head_arch": "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": self.base_model,
        }
        write(path, named(self.state_dict(), NAMES), config, file=FILES[0])

    @classmethod
    def load(cls, path: str | Path, **where: Unpack[Where]) -> "HydraHeads":
        """Returns the heads of a checkpoint of the published code."""
        checkpoint = Checkpoint(path, weights=FILES, **where)
        name, tensors = checkpoint.name, checkpoint.tensors(lambda key: key != "input_embed_fn.weight")
        if any(key.startswith("prefix_embeding_layer.") for key in tensors):  # its authors' spelling
            raise ValueError(
                f"{name} is a Hydra++ checkpoint, whose prefix attention is not supported: give Hydra heads"
            )
        if checkpoint.config.get("hidden_state_offset"):
            raise ValueError(
                f"{name} reads a hidden state before the last one (hidden_state_offset), not supported here"
            )
        parts = [key.split(".") for key in tensors if key.startswith("hydra_mlp.")]
        vocab_size, hidden_size = needed(name, tensors, "hydra_lm_head.0.weight").shape
        with torch.device("meta"):
            heads = cls(
                num_heads=1 + max((int(part[1]) for part in parts), default=0),
                hidden_size=hidden_size,
                vocab_size=vocab_size,
                num_layers=1 + max((int(part[2]) for part in parts), default=0),
                base_model=checkpoint.config.get("base_model_name_or_path") or "",
            )
        return fill(name, heads, tensors, NAMES)


class HydraScorer(LastStateScorer):
    """Scores the children of a node with its depth's head, which reads the node's own path."""

    def __init__(self, heads: ModuleCaller, embed: Any, max_shown: int, **places: Any):
        super().__init__(heads, **places)
        self._embed, self._max_shown, self._width = embed, max_shown, self.newest.shape[1]

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        state, width = self.newest[batch.slots], self._width
        # What a head reads, by node: the state, and the embeddings of its path, which grows with the depth.
        self._joined = state.new_zeros(len(batch), 1 + self._max_shown, (self.num_heads + 1) * width)
        self._joined[:, 0, :width] = state
        self._joined[:, 0, width : 2 * width] = self._embed(batch.roots).to(state.dtype)
        return self.heads(self._joined[:, :1, : 2 * width], 0)

    def level_logits(
        self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int
    ) -> Float[Tensor, "batch node vocab"]:
        nodes, width = slice(topology.width - tokens.shape[1], topology.width), self._width
        parents = topology.parents[:, nodes].expand(len(batch), -1)
        joined = self._joined.gather(1, parents[:, :, None].expand(-1, -1, self._joined.shape[2]))
        joined[:, :, (depth + 1) * width : (depth + 2) * width] = self._embed(tokens).to(joined.dtype)
        self._joined[:, nodes] = joined
        return self.heads(joined[:, :, : (depth + 2) * width], depth)


class HydraDrafter(LastStateDrafter):
    """Drafts level by level: every node's head reads the node's own path. Arguments: see ``LastStateDrafter``."""

    kind, title = HydraHeads, "Hydra"

    def scorer(self, heads: ModuleCaller, target: Target, **places: Any) -> HydraScorer:
        return HydraScorer(heads, target.model.get_input_embeddings(), self.tree.max_shown, **places)


class TrainedHydra(TrainedHeads):
    """Every head also reads the text's tokens from the root on. Arguments: see ``TrainedHeads``."""

    title, made = "Hydra heads", HydraDrafter

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        super().begin(target, counts)
        self._embed = (Borrowed(target.model.get_input_embeddings()),)  # in a tuple, so that it is not registered

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        """The outputs of the heads' residual blocks."""
        previous = batch.tokens.flatten()[anchors.places(batch)]
        joined = [states.before(anchors).float()]
        found = []
        for depth, layers in enumerate(self.head.mlp):
            joined.append(self._embed[0](previous[:, depth]))
            found.append(layers(torch.cat(joined, -1)))
        return Prediction(found)

    def logits(
        self, states: Float[Tensor, "place width"], previous: Int[Tensor, " place"], depth: int
    ) -> Float[Tensor, "place column"]:
        return self.head.lm_head[depth - 1](states).float()

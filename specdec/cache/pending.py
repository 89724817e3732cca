"""Accepted paths that recurrent layers have yet to run over again, where there is no room for a state of every node.

Only a layer that runs has its nodes' states then. What is kept of a round are the inputs of all recurrent layers, and
the root's states; a slot's next forward first runs each layer, and nothing else, over the path that was accepted.
"""

from collections.abc import Hashable

import torch
from jaxtyping import Int
from torch import Tensor


class Pending:
    """The accepted path of every slot, as far as it is not in the final states.

    Args:
        nodes: The largest number of drafted nodes of a row, the root left out.
        device: Where.

    Attributes:
        counts: The number of nodes of every slot's path.
        path: The nodes, behind which anything may stand.
        inputs: What layers were given at every node of a slot's last tree, ``[slot, node, ...]``, by any name.
    """

    def __init__(self, slots: int, nodes: int, device: torch.device):
        self._nodes = nodes
        self.inputs: dict[Hashable, Tensor] = {}
        self.counts = torch.zeros(slots, dtype=torch.long, device=device)
        self.path = torch.zeros(slots, nodes, dtype=torch.long, device=device)

    def commit(
        self, slots: Int[Tensor, " batch"], path: Int[Tensor, "batch depth"], counts: Int[Tensor, " batch"]
    ) -> None:
        """Note the path of a round, whose root is in the final states."""
        self.path[slots, : path.shape[1]] = path
        self.counts[slots] = ((path >= 0) & (counts[:, None] > 0)).sum(1)

    def keep(self, name: Hashable, slots: Int[Tensor, " batch"], inputs: Tensor) -> None:
        """Keep what a layer is given at the nodes of some rows."""
        if name not in self.inputs:
            with torch.inference_mode(False):
                shape = len(self.counts), 1 + self._nodes, *inputs.shape[2:]
                self.inputs[name] = torch.zeros(shape, dtype=inputs.dtype, device=inputs.device)
        self.inputs[name][slots.to(inputs.device), : inputs.shape[1]] = inputs

"""Modules for multi-token prediction: new ones, or a checkpoint's own, trained further (FastMTP, arXiv 2509.18362)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from drafters.heads.base import FeatureHead
from drafters.heads.mtp import MTPHead
from drafters.heads.mtp_files import load_mtp, save_mtp
from drafters.mtp import MTPDrafter
from experiments.training.heads.feature import TrainedFeatureHead
from specdec.interfaces import Drafter
from specdec.target.target import Target


class TrainedMTP(TrainedFeatureHead):
    """A decoder layer of the target's own kind over pairs of its last state and an embedding.

    Its later steps are those of EAGLE's training-time test, which is what the engine runs: a module reads its own
    output, and the keys that it has written for the draft so far.

    Args:
        name: A module to go on from (a folder or a name on the hub; it may be the target's own); None for new weights.
        module: Which of the checkpoint's modules, from 0.
        depths: How many tokens a draft has.
        hidden_state: Which state of the target is read: ``"after_norm"`` or ``"before_norm"``; ``"auto"`` for what the
            checkpoint's family is known to read, and after the norm for new weights.
        detached: See ``TrainedFeatureHead``.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        module: int = 0,
        depths: int = 3,
        hidden_state: str = "auto",
        detached: bool = False,
    ):
        super().__init__(depths=depths, detached=detached)
        if hidden_state not in ("auto", "after_norm", "before_norm"):
            raise ValueError(f"head.hidden_state={hidden_state!r}: give auto, after_norm or before_norm")
        self.name, self.module, self.hidden_state = name, module, hidden_state
        self._fusion: tuple[nn.Module, ...] = ()

    def make(self, target: Target, draft_ids: Int[Tensor, " column"] | None) -> FeatureHead:
        """A new module, or the one that was named."""
        if self.name is not None:
            head = load_mtp(self.name, target.model, module=self.module, hidden_state=self.hidden_state)
        else:
            before = self.hidden_state == "before_norm"
            head = MTPHead.for_target(target.model, hidden_first=True, before_norm=before)
        self._fusion = (head.bound(target.model).model.fusion,)
        return head

    def fused(self, states: list[Float[Tensor, "row position hidden"]]) -> Float[Tensor, "row position width"]:
        """The target's state, with the weight of its norm undone where the module reads it from before."""
        return self._fusion[0](states[0])

    def drafter(self) -> Drafter:
        """A chain of the module's."""
        head = self.copied()
        assert isinstance(head, MTPHead)
        return MTPDrafter(head, self.depths, optimize=False)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the module in bfloat16, by itself."""
        head = self.rounded()
        assert isinstance(head, MTPHead)
        save_mtp(head, folder, notes=facts)

"""mlx-lm on a CPU, in a process of its own, at the target's precision: plain, or with a small model that drafts."""

from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch

from experiments.contenders.peer import Peer, Start
from specdec.quantization import quantization_of
from specdec.requests import SamplingParams
from specdec.target.loading import load


class MlxLm(Peer):
    """mlx-lm at batch 1 and on one thread: MLX has no more on CPUs.

    It draws from the target and keeps the drafts that are these draws: exact, but it accepts less than rejection
    sampling where drafts are drawn, as our ``target_walk``. Filters come behind the temperature, as ours do.

    Args:
        draft: The small model that drafts: a folder, a name on the hub, or ``bundled/…``.
        patched: Show its repetition penalty the prompt behind drafts too, which mlx-lm 0.32 leaves out.
        **start: As in ``Peer``.
    """

    NAME, WORKER = "mlx-lm", "mlx_worker"
    VARIABLE, PACKAGES = "SPECDEC_MLX_PYTHON", "'mlx-lm==0.32.*' 'mlx[cpu]'"
    NUM_TOKENS: ClassVar = {"plain": 0, "model": 4}

    def __init__(self, *, draft: str = "bundled/drafter", patched: bool = False, **start: Unpack[Start]):
        super().__init__(**start)
        self._draft, self._patched = draft, patched

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse a repetition penalty behind drafts, unless patched."""
        if sampling.repetition_penalty != 1 and self.method == "model" and not self._patched:
            raise ValueError(
                "mlx-lm 0.32 does not show its repetition penalty the prompt where a model drafts, so its outputs are "
                "not those without drafts: give patched=true, or leave the penalty out"
            )
        super().check_sampling(sampling)

    def prepared(self, folder: Path) -> dict[str, Any]:
        """Write the models at the target's precision."""
        scheme, threads = quantization_of(self.target.model), torch.get_num_threads()
        if scheme is not None or self.max_batch_size > 1 or threads > 1:
            raise ValueError(
                f"mlx-lm is measured at batch 1, on one thread and without this project's quantization, and this run "
                f"has engine.max_batch_size={self.max_batch_size}, threads={threads} and target.quantization={scheme}: "
                "change that, or leave this contender out"
            )
        self.tells_tokens = self.target.dtype is torch.float32
        self.target.model.save_pretrained(folder)
        if self.method == "plain":
            return {}
        small = load(self._draft, dtype=str(self.target.dtype).removeprefix("torch."), device="cpu").model
        small.save_pretrained(folder / "draft")
        return {"draft": str(folder / "draft"), "patched": self._patched}

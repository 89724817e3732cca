"""The prompts that tell most: where a mistake would move the law of the next tokens farthest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from specdec.checks.mistakes import HONEST, Cells, Path, Place, joint
from specdec.requests import SamplingParams


@dataclass(frozen=True)
class Telling:
    """A prompt, and the laws of what follows it.

    Attributes:
        laws: By mistake, and ``HONEST``: the law of the cells.
        best_for: The mistakes that show most here.
    """

    id: str
    ids: tuple[int, ...]
    cells: Cells
    laws: dict[str, np.ndarray]
    best_for: tuple[str, ...] = ()

    def distance(self, name: str) -> float:
        """Total variation that a mistake makes."""
        return 0.5 * float(np.abs(self.laws[name] - self.laws[HONEST]).sum())


def telling(
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    sampling: SamplingParams,
    *,
    horizon: int,
    drafted: int,
    ends: frozenset[int],
    names: Sequence[str],
    advance: Callable[[str], None] = lambda say: None,
) -> list[Telling]:
    """Returns for every mistake the prompt where it shows most, each once, of all candidates (``prompts``)."""
    found: list[Telling] = []
    for number, (name, ids) in enumerate(prompts):
        advance(f"laws after prompt {number + 1} of {len(prompts)}")

        def look(paths: Sequence[Path], ids: tuple[int, ...] = ids) -> list[Place]:
            rows = [_next(model, ids, paths) for model in (target, drafter)]
            return [Place.of(p, q, sampling) for p, q in zip(*rows, strict=True)]

        cells, laws = joint(look, horizon=horizon, drafted=drafted, ends=ends, names=names)
        found.append(Telling(name, ids, cells, laws))
    best = {each: max(range(len(found)), key=lambda index: found[index].distance(each)) for each in names}
    return [
        Telling(each.id, each.ids, each.cells, each.laws, tuple(name for name in names if best[name] == index))
        for index, each in enumerate(found)
        if index in best.values()
    ]


@torch.inference_mode()
def _next(model: PreTrainedModel, ids: tuple[int, ...], paths: Sequence[Path], rows: int = 64) -> torch.Tensor:
    """The logits after a prompt and each of some paths of one length, in float32."""
    found = []
    for first in range(0, len(paths), rows):
        batch = torch.tensor([[*ids, *path] for path in paths[first : first + rows]], device=model.device)
        found.append(model(batch, use_cache=False, logits_to_keep=1).logits[:, -1].float())
    return torch.cat(found)

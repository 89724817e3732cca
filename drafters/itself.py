"""The target as its own drafter: without some of its layers, or with weights in fewer bits."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from transformers import PreTrainedModel

from drafters.layers import chosen_parts, exits_early, layers_of, leave_out
from drafters.own_model import CausalDrafter, Settings, twin_of
from specdec.arguments import flag, shown
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.model_scorer import ExitScorer
from specdec.drafting.scored import ScoredSession
from specdec.drafting.vocabulary import VocabularyMap
from specdec.interfaces import Sizes
from specdec.quantization import check_quantization, quantize
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

SEARCH = "python examples/skip_search.py TARGET FILE searches for one, and writes it"


class SelfDrafter(CausalDrafter):
    """Drafts with the target itself, without some of its layers, in fewer bits, or both.

    It shares all weights with the target but those that are quantized, which every engine has a copy of. Where only the
    last layers are left out, it reads and writes the target's cache (early exit: LayerSkip, Elhoushi et al. 2024, arXiv
    2404.16710); otherwise it has one of its own.

    Args:
        skip: The layers and parts of layers that are left out: ``[4, 2.mlp, 8-31]``; layers are counted from 0. Or a
            JSON file with such a list under ``skip``. None for none.
        shape: What ``TreeShape.of`` takes, or a tree builder.
        quantization: The name of a quantization (``specdec.quantization``); None for the target's own weights.
        quantization_check: Refuse a scheme that is not faster than full precision on the target's device.
    """

    runs = "target"

    def __init__(
        self,
        skip: Sequence[str | int] | str | Path | None = None,
        shape: AnyTree = 4,
        *,
        quantization: str | None = None,
        quantization_check: bool = True,
        **options: Unpack[Settings],
    ):
        self.file = Path(skip).expanduser() if isinstance(skip, str | Path) else None
        if self.file is not None and not self.file.is_file():
            raise ValueError(f"skip={skip}: there is no such file; {SEARCH}")
        if quantization is not None:
            check_quantization(quantization)
        if not (isinstance(skip, str | Path | Sequence) and skip) and (skip is not None or quantization is None):
            raise ValueError(f"skip={shown(skip)}: give layers or parts of them, such as [4, 2.mlp, 8-31], or a file")
        without = "" if skip is None else f" without {shown(skip)}"
        super().__init__(tree_of(shape), name=f"{quantization or 'the'} target{without}", **options)
        self.skip, self.quantization = skip, quantization
        self.quantization_check = flag("quantization_check", quantization_check)

    def model_for(self, target: Target) -> PreTrainedModel:
        twin = twin_of(target.model)
        if self.skip is not None:
            leave_out(twin, self._left_out(target))
        if self.quantization is not None:
            quantize(twin, self.quantization, check=self.quantization_check)
        return twin

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        """Draft over the target's cache if it has all that is needed; else allocate one."""
        if not self._shares_cache(target, sizes.runner):
            return super().bind(target, sizes)
        assert sizes.runner is not None
        runner = ModelRunner(
            self.model_for(target),
            max_batch_size=sizes.max_batch_size,
            max_length=sizes.max_length,
            attention=self.attention,
            optimize=self.optimize,
            cache=sizes.runner.cache,
        )
        columns = VocabularyMap(runner.vocab_size, target.vocab_size)
        return ScoredSession(self, ExitScorer(runner), columns, target.device, sizes)

    def _shares_cache(self, target: Target, runner: ModelRunner | None) -> bool:
        """Whether what the model would store is what the target does, at places that its cache has."""
        as_it_is = self.quantization is None and self.kv_cache is None and self.tree.max_shown <= self.max_nodes
        stores_alike = as_it_is and runner is not None and runner.cache.states is None
        return stores_alike and exits_early(target.model, self._left_out(target))

    def _left_out(self, target: Target) -> list[str]:
        return chosen_parts(target.model, self._chosen(target))

    def _chosen(self, target: Target) -> Sequence[str | int]:
        if self.file is None:
            return list(self.skip)  # pyright: ignore[reportArgumentType] (no file, so a list)
        layers = len(layers_of(target.model))
        try:
            said = json.loads(self.file.read_text(encoding="utf-8"))
            skip, count = said["skip"], said.get("layers", layers)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"skip={self.file}: this is no JSON object with a list skip; {SEARCH}") from error
        if count != layers:
            raise ValueError(
                f"skip={self.file} was found for {said.get('target')} of {count} layers, and the target {target.name} "
                f"has {layers}: give another file, or another target"
            )
        return skip

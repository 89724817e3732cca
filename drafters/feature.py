"""What EAGLE's heads and MTP modules have in common as drafters: they read the target's hidden states."""

import torch

from drafters.heads.base import FeatureHead
from specdec.arguments import flag
from specdec.cache.formats import check_format
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.feature_scorer import FeatureScorer
from specdec.drafting.scored import ScoredDrafter
from specdec.drafting.vocabulary import VocabularyMap
from specdec.execution.module import ModuleCaller
from specdec.modeling.runner import ModelRunner
from specdec.modeling.target import Target
from specdec.types import DraftSampling


class FeatureDrafter(ScoredDrafter):
    """Drafts with a head that reads pairs of a hidden state of the target and the token after it.

    Args:
        head: The head, which ``bind`` does not change; None if ``bind`` loads it.
        tree: A tree builder, or what ``TreeShape.of`` takes.
        sampling: See ``ScoredDrafter``.
        temperature: See ``ScoredDrafter``.
        name: Shown in error messages.
        attention: See ``ModelRunner``; for the head's forwards.
        optimize: See ``ModelRunner``; for the head's forwards.
        kv_cache: See ``ModelRunner``; for the head's keys and values.
    """

    def __init__(
        self,
        head: FeatureHead | None,
        tree: AnyTree,
        *,
        sampling: DraftSampling | str,
        temperature: float | None,
        name: str,
        attention: str,
        optimize: bool,
        kv_cache: str | None,
    ):
        super().__init__(tree_of(tree), sampling, temperature)
        check_format(kv_cache)
        self._head, self.name = head, name
        self.attention, self.optimize, self.kv_cache = attention, flag("optimize", optimize), kv_cache
        if head is not None:
            self.hidden_layers = head.hidden_layers or ()

    def bind(self, target: Target, *, max_batch_size: int, max_length: int, leaf_probs: bool = False) -> None:
        """Check that the head fits the target, and allocate its cache."""
        self.hidden_layers = self.layers_for(target)
        self.check_fit(target)
        head = self.head.bound(target.model)
        if self._scales_freely(head):
            # RoPE by itself has no last position; the number in the files is how long the training texts were.
            head.config.max_position_embeddings = max(head.config.max_position_embeddings, max_length)
        window = self.max_depth + 1
        try:
            runner = ModelRunner(
                head,
                max_batch_size=max_batch_size,
                max_length=max_length,
                max_nodes=max(self.tree.max_shown, window),
                attention=self.attention,
                optimize=self.optimize,
                kv_cache=self.kv_cache,
            )
        except ValueError as error:  # else it would read as if the target were meant
            raise ValueError(f"the head {self.name}: {error}") from error
        self._runner = runner
        fusion = ModuleCaller(head.model.fusion, optimize=self.optimize)
        vocabulary = VocabularyMap(runner.vocab_size, target.vocab_size, head.draft_ids)
        rows = head.get_input_embeddings().weight.shape[0]
        padded = rows < target.vocab_size  # ids of padding, which no token has
        scorer = FeatureScorer(
            runner,
            max_batch_size=max_batch_size,
            window=window,
            max_shown=self.tree.max_shown,
            width=head.feature_width,
            layers=self.hidden_layers,
            fuse=lambda states: fusion(torch.cat(states, dim=-1)),
            fed_back=head.fed_back,
            to_head=(lambda tokens: tokens.clamp(max=rows - 1)) if padded else (lambda tokens: tokens),
            fuse_version=lambda: fusion.version,
        )
        self.begin(scorer, vocabulary, target.device, max_batch_size=max_batch_size, leaf_probs=leaf_probs)

    def layers_for(self, target: Target) -> tuple[int, ...]:
        """Returns the target's hidden states that the head reads."""
        assert self.head.hidden_layers is not None, "a subclass knows the usual ones"
        return self.head.hidden_layers

    def check_fit(self, target: Target) -> None:
        """Refuse a target that the head was not made for.

        Raises:
            ValueError: Says what does not fit.
        """
        head = self.head
        config = target.model.config.get_text_config(decoder=True)
        if head.captured_width != config.hidden_size:
            raise ValueError(
                f"the head {self.name} reads hidden states of width {head.captured_width} and those of the target "
                f"{target.name} have {config.hidden_size}: give a head that was trained on this target"
            )

    @property
    def head(self) -> FeatureHead:
        """The head, as it was given or loaded."""
        assert self._head is not None, "loaded when the drafter is bound"
        return self._head

    @property
    def runner(self) -> ModelRunner:
        """Runs the head, from ``bind`` on."""
        return self._runner

    @staticmethod
    def _scales_freely(head: FeatureHead) -> bool:
        """Returns whether the head's rotary embedding is the same whatever the longest position is."""
        parameters = getattr(head.config, "rope_parameters", None) or {}
        return parameters.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")

"""What EAGLE's heads and MTP modules have in common as drafters: they read the target's hidden states."""

from typing import Unpack

import torch

from drafters.heads.base import FeatureHead
from drafters.heads.bound import lengthen, row_of
from drafters.own_model import Options, OwnModelDrafter
from specdec.drafting.builders import TreeBuilder
from specdec.drafting.feature_scorer import FeatureScorer
from specdec.drafting.scored import ScoredSession
from specdec.drafting.vocabulary import MOST_PADDING, VocabularyMap
from specdec.execution.module import ModuleCaller
from specdec.inflate import signal_width
from specdec.interfaces import Sizes
from specdec.target.target import Target


class FeatureDrafter(OwnModelDrafter):
    """Drafts with a head that reads pairs of a hidden state of the target and the token after it.

    Args:
        head: The head, which ``bind`` does not change; None if a subclass's ``head_for`` loads it.
        tree: The tree builder.
        **options: See ``Options``.
    """

    def __init__(self, head: FeatureHead | None, tree: TreeBuilder, **options: Unpack[Options]):
        super().__init__(tree, **options)
        self._head = head

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        """Check that the head fits the target, and allocate its cache."""
        given = self.head_for(target)
        layers = self.layers_for(given, target)
        fitted = self._fitted(given, layers, target)
        self.check_trained_on(target)
        head = fitted.bound(target.model)
        lengthen(head, sizes.max_length)
        window = self.max_depth + 1
        runner = self.runner_for(head, "head", sizes, max_nodes=max(self.tree.max_shown, window))
        fusion = ModuleCaller(head.model.fusion, optimize=self.optimize)
        vocabulary = VocabularyMap(runner.vocab_size, target.vocab_size, head.draft_ids)
        scorer = FeatureScorer(
            runner,
            max_batch_size=sizes.max_batch_size,
            window=window,
            max_shown=self.tree.max_shown,
            width=head.feature_width,
            layers=layers,
            fuse=lambda states: fusion(torch.cat(states, dim=-1)),
            fed_back=head.fed_back,
            to_head=row_of(head, target.vocab_size),
            fuse_version=lambda: fusion.version,
        )
        return ScoredSession(self, scorer, vocabulary, target.device, sizes, hidden_layers=layers)

    def head_for(self, target: Target) -> FeatureHead:
        """Return the head for a target."""
        return self.head

    def layers_for(self, head: FeatureHead, target: Target) -> tuple[int, ...]:
        """Return the target's hidden states that a head reads."""
        assert head.hidden_layers is not None, "a subclass knows the usual ones"
        return head.hidden_layers

    def _fitted(self, head: FeatureHead, layers: tuple[int, ...], target: Target) -> FeatureHead:
        """Return the head, which may have to be as wide as an inflated target."""
        remedy = "give a head that was trained on this target"
        width = target.model.config.get_text_config(decoder=True).hidden_size
        signal = signal_width(target.model)
        if head.captured_width == signal < width:
            head = head.widened(width)  # the target is inflated, and its head costs what such a target's would
        if head.captured_width != width:
            raise ValueError(
                f"the head {self.name} reads hidden states of width {head.captured_width} and those of the target "
                f"{target.name} have {width}: {remedy}"
            )
        if head.model.embed_tokens is None and head.config.hidden_size != width:
            raise ValueError(
                f"the head {self.name} is {head.config.hidden_size} wide and has no embeddings, and those of the "
                f"target {target.name} are {width} wide: {remedy}"
            )
        wide = [layer for layer in layers if target.num_layers is not None and layer >= target.num_layers]
        if wide:
            raise ValueError(
                f"the head {self.name} reads the input of layer {wide[0]} and the target {target.name} has the layers "
                f"0 to {(target.num_layers or 0) - 1}: {remedy}, or hidden_layers"
            )
        if len(layers) != head.captured:
            raise ValueError(
                f"the head {self.name} fuses {head.captured} hidden states, and hidden_layers="
                f"{list(layers)} are {len(layers)}: give {head.captured}"
            )
        self._check_vocabulary(head, target)
        return head

    def _check_vocabulary(self, head: FeatureHead, target: Target) -> None:
        """Compare what the head has of the vocabulary with the target's: layers, or else what its files state."""
        remedy = "give a head that was trained on this target"
        ids, output, embeddings = head.draft_ids, head.lm_head, head.model.embed_tokens
        if ids is not None and int(ids.max()) >= target.vocab_size:
            raise ValueError(
                f"the head {self.name} drafts token {int(ids.max())} and the target {target.name} has "
                f"{target.vocab_size} tokens: {remedy}"
            )
        widths = {
            "output layer": None if output is None or ids is not None else output.weight.shape[0],  # type: ignore[union-attr]
            "embeddings": None if embeddings is None else embeddings.weight.shape[0],  # type: ignore[union-attr]
        }
        if embeddings is None and (output is None or ids is not None) and head.config.vocab_size > 1:  # 1: not stated
            widths["vocabulary"] = head.config.vocab_size
        for part, tokens in widths.items():
            if isinstance(tokens, int) and abs(tokens - target.vocab_size) > MOST_PADDING:
                raise ValueError(
                    f"the {part} of the head {self.name} has {tokens} tokens and the target {target.name} has "
                    f"{target.vocab_size}: {remedy}"
                )

    @property
    def head(self) -> FeatureHead:
        """The head, as it was given."""
        assert self._head is not None, "this drafter takes its head from files, when the target is known"
        return self._head

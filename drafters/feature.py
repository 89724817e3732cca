"""What EAGLE's heads and MTP modules have in common as drafters: they read the target's hidden states."""

from typing import Unpack

import torch

from drafters.heads.base import FeatureHead
from drafters.heads.bound import row_of
from drafters.own_model import Options, OwnModelDrafter
from specdec.drafting.builders import TreeBuilder
from specdec.drafting.feature_scorer import FeatureScorer
from specdec.drafting.scored import ScoredSession
from specdec.drafting.vocabulary import VocabularyMap
from specdec.execution.module import ModuleCaller
from specdec.interfaces import Sizes
from specdec.target.target import Target


class FeatureDrafter(OwnModelDrafter):
    """Drafts with a head that reads pairs of a hidden state of the target and the token after it.

    Args:
        head: The head, which ``bind`` does not change; None if a subclass's ``head_for`` loads it.
    """

    def __init__(self, head: FeatureHead | None, tree: TreeBuilder, **options: Unpack[Options]):
        super().__init__(tree, **options)
        self._head = head

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        """Check that the head fits the target, and allocate its cache."""
        given = self.head_for(target)
        layers = self.layers_for(given, target)
        head = self.beside(given, layers, target, sizes)
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
            to_model=row_of(head, target.vocab_size),
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

    @property
    def head(self) -> FeatureHead:
        """The head, as it was given."""
        assert self._head is not None, "this drafter takes its head from files, when the target is known"
        return self._head

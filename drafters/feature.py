"""What EAGLE's heads and MTP modules have in common as drafters: they read the target's hidden states."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from drafters.heads.base import FeatureHead
from drafters.heads.bound import row_of
from drafters.heads.eagle import default_layers
from drafters.own_model import HeadDrafter, HeadOptions, layers_given
from specdec.drafting.builders import TreeBuilder
from specdec.drafting.scored import ScoredSession
from specdec.drafting.vocabulary import VocabularyMap
from specdec.drafting.window import FeatureScorer, WindowScorer
from specdec.execution.executor import ModuleCaller
from specdec.interfaces import Description, Sizes
from specdec.target.runner import ModelRunner
from specdec.target.target import Target


class FeatureDrafter(HeadDrafter):
    """Drafts with a head that reads pairs of a hidden state of the target and the token after it.

    Args:
        head: The head, which ``bind`` does not change; None if a subclass's ``head_for`` loads it.
        hidden_layers: The target's hidden states that the head reads, in place of those that its files name.
    """

    def __init__(
        self,
        head: FeatureHead | None,
        tree: TreeBuilder,
        *,
        hidden_layers: Sequence[int] | None = None,
        **options: Unpack[HeadOptions],
    ):
        options["name"] = options.get("name") or ("" if head is None else type(head).__name__)
        super().__init__(tree, **options)
        self._head, self._layers = head, layers_given(hidden_layers)

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        given = self.head_for(target)
        layers = self.layers_for(given, target)
        head = self.beside(given, layers, target, sizes)
        runner = self.runner_for(head, "head", sizes, max_nodes=self.shown(self.tree))
        fusion = ModuleCaller(head.model.fusion, optimize=self.optimize)
        vocabulary = VocabularyMap(runner.vocab_size, target.vocab_size, head.draft_ids)
        scorer = self.scorer_of(
            head,
            runner,
            max_batch_size=sizes.max_batch_size,
            window=self.max_depth + 1,
            width=head.feature_width,
            layers=layers,
            fuse=lambda states: fusion(torch.cat(states, dim=-1)),
            to_model=row_of(head, target.vocab_size),
            fuse_version=lambda: fusion.version,
        )
        return ScoredSession(self, scorer, vocabulary, target.device, sizes, hidden_layers=layers)

    @classmethod
    def shown(cls, tree: TreeBuilder) -> int:
        """See ``OwnModelDrafter``; there are as many pairs in a window as a round can add."""
        return super().shown(tree) if cls.at_once else max(tree.max_shown, tree.max_depth + 1)

    def scorer_of(self, head: Any, runner: ModelRunner, **window: Any) -> WindowScorer:
        """Return what scores with a head beside its target; ``window`` are the arguments of ``WindowScorer``."""
        return FeatureScorer(runner, fed_back=head.fed_back, **window)

    def describe(self, target: Target | None = None) -> Description:
        head = self.head if target is None else self.head_for(target)
        found = head.describe()
        layers = found.reads if target is None else tuple(self.layers_for(head, target))
        doubts = {name: layers if name == "layers" else value for name, value in found.doubts.items()}
        return replace(found, reads=layers, at_once=self.at_once, doubts=doubts)

    def head_for(self, target: Target) -> FeatureHead:
        """Return the head for a target."""
        return self.head

    def layers_for(self, head: FeatureHead, target: Target) -> tuple[int, ...]:
        """Return the target's hidden states that a head reads: those given, else its own, else the usual ones."""
        if self._layers is not None:
            return self._layers
        if head.hidden_layers is not None:
            return head.hidden_layers
        assert target.num_layers is not None
        return default_layers(target.num_layers)

    @property
    def head(self) -> FeatureHead:
        """The head, as it was given."""
        assert self._head is not None, "this drafter takes its head from files, when the target is known"
        return self._head

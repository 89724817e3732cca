"""Looped drafting: a chain goes on, stage by stage, while the drafter was sure of the last stage."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.arguments import number, whole
from specdec.batch import Batch
from specdec.drafting.builders.base import TreeBuilder
from specdec.drafting.calibration import Rater
from specdec.drafting.policies.nodes import NodePolicy
from specdec.drafting.scorer import Level, Scorer
from specdec.drafting.vocabulary import VocabularyMap
from specdec.host import can_look


class LoopedNodes(NodePolicy):
    """Drafts another stage if the last one's Σ log q is at least ``gate``; if not, all stages are verified together.

    DLoop (arXiv 2610.07659) without its training, for chains. q is the drafter's at temperature 1. The stage that ends
    a draft is kept: to discard it would look at its own tokens, which biases the output.

    Args:
        gate: In nats, at most 0; the paper has -0.5 and -0.75.
        stage: How many tokens a stage has.
    """

    unseen = ("gate", "stage")

    def __init__(self, gate: float = -0.5, stage: int = 2):
        super().__init__(learn=False)
        remedy = "give a sum of log-probabilities, at most 0, such as -0.5"
        self.gate = number("gate", gate, remedy, lambda nats: nats <= 0)
        self.stage = whole("stage", stage, least=1)

    def bind(self, builder: TreeBuilder, scorer: Scorer, device: torch.device, *, max_batch_size: int) -> None:
        if not builder.is_chain or builder.reorders_nodes:
            raise ValueError("policy=looped drafts stages of a chain, and these drafts are trees: give drafter.shape=8")
        super().bind(builder, scorer, device, max_batch_size=max_batch_size)

    def rater(self, scorer: Scorer, batch: Batch, vocabulary: VocabularyMap, *, may_stop: bool) -> Rater:
        return _Stages(self, scorer, batch, vocabulary, may_stop)

    def kept(self, survival: Float[Tensor, "batch node"], batch: Batch) -> Bool[Tensor, "batch node"]:
        return survival > 0


class _Stages(Rater):
    """Rates nodes 1 while drafting goes on, and 0 behind the stage that ended it."""

    def __init__(self, policy: LoopedNodes, scorer: Scorer, batch: Batch, vocabulary: VocabularyMap, may_stop: bool):
        super().__init__(scorer, "top", policy.calibration, batch, 1.0 if may_stop else None)
        self._policy, self._vocabulary = policy, vocabulary

    def level(self, level: Level, tokens: Int[Tensor, "batch node"], scores: Float[Tensor, "batch some token"]) -> bool:
        goes = self.rated.survival[:, level.parents]
        if level.depth == 0:
            self._sum = torch.zeros_like(goes)
        else:
            column = self._vocabulary.to_drafter(tokens[:, level.parents])
            self._sum = self._sum + self._logs.gather(-1, column[..., None])[..., 0]
            if level.depth % self._policy.stage == 0:
                goes, self._sum = goes * (self._sum >= self._policy.gate), torch.zeros_like(goes)
        self._logs = scores.float().log_softmax(-1)
        self.rated.survival[:, level.children_at] = goes
        return self._least is None or not can_look(goes) or bool((goes * self._rows).any())

"""What EAGLE-3 and MTP have in common as trained heads: pairs of a state and a token, and outputs that are fed back."""

import copy
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from drafters.heads.base import FeatureHead
from experiments.training.batch import Anchors, Batch, TargetStates
from experiments.training.heads.base import Prediction, TrainedHead, check_depths
from experiments.training.heads.borrowing import embeddings_of, output_layer_of
from experiments.training.heads.unrolled import ATTENTION, register
from experiments.training.states import additive, visible
from specdec.target.target import Target


class TrainedFeatureHead(TrainedHead):
    """A ``FeatureHead``, trained with the training-time test. A subclass makes the head, and its drafter.

    Args:
        depths: How many tokens a draft has, which is the number of the test's steps.
        detached: Whether no gradient goes from a step to the one before. It takes less memory; published trainers
            keep the gradient.
    """

    def __init__(self, *, depths: int, detached: bool = False):
        super().__init__()
        self.depths, self.detached = check_depths(depths), detached
        self.head: FeatureHead | None = None
        self._borrowed: tuple[Any, Any] | None = None

    @abstractmethod
    def make(self, target: Target, draft_ids: Int[Tensor, " column"] | None) -> FeatureHead:
        """Returns the head for a target, with new or loaded weights.

        Args:
            target: What it drafts for.
            draft_ids: The target's ids that it is to draft; None for all.
        """

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        """Make the head, in float32.

        Raises:
            ValueError: The settings do not fit the target.
        """
        ids = None
        if self.draft_columns is not None:
            assert counts is not None
            ids = most_frequent(counts, self.draft_columns)
        head = self.make(target, ids).float()
        register()
        head.config._attn_implementation = ATTENTION
        self.head = head
        self.columns = head.draft_ids
        self.hidden_layers = tuple(head.hidden_layers or ())
        embed = head.model.embed_tokens if head.model.embed_tokens is not None else embeddings_of(target.model)
        output = head.lm_head if head.lm_head is not None else output_layer_of(target.model)
        self._borrowed = (embed, output)  # in a tuple, so that nothing is registered twice

    def forward(self, batch: Batch, states: TargetStates, anchors: Anchors) -> Prediction:
        """Runs all steps over all positions, and returns the normed outputs of the position before each root."""
        head, (embed, _) = self._made(), self._parts()
        features = self.fused([states.hidden[layer].to(head.dtype) for layer in self.hidden_layers])
        steps = unrolled(head, embed, features, batch, self.depths, detached=self.detached)
        return Prediction([normed.flatten(0, 1)[anchors.index - 1] for normed in steps])

    def logits(
        self, states: Float[Tensor, "place width"], previous: Int[Tensor, " place"], depth: int
    ) -> Float[Tensor, "place column"]:
        """Returns the output layer's."""
        return self._parts()[1](states).float()

    def rounded(self) -> FeatureHead:
        """Returns a copy in bfloat16, which is how heads are written."""
        return self.copied().to(torch.bfloat16)  # pyright: ignore[reportArgumentType]

    def fused(self, states: list[Float[Tensor, "row position hidden"]]) -> Float[Tensor, "row position width"]:
        """Returns the features of the target's states."""
        return self._made().fuse(states)

    def copied(self) -> FeatureHead:
        """Returns a copy of the present weights, with an attention that any forward can use."""
        twin = copy.deepcopy(self._made()).requires_grad_(False).eval()
        twin.config._attn_implementation = "sdpa"
        return twin

    def _made(self) -> FeatureHead:
        assert self.head is not None, "begin comes first"
        return self.head

    def _parts(self) -> tuple[Any, Any]:
        assert self._borrowed is not None, "begin comes first"
        return self._borrowed


def unrolled(
    head: FeatureHead,
    embed: Any,
    features: Float[Tensor, "row position width"],
    batch: Batch,
    depths: int,
    *,
    detached: bool = False,
) -> Iterator[Float[Tensor, "row position hidden"]]:
    """Runs the steps of the training-time test over all positions, and yields the normed outputs of each.

    Row t of step s reads token t + 1 + s, and its output is the state of the token after that.

    Args:
        head: The head; its attention must be ``ATTENTION``.
        embed: Its embeddings, or those that it borrows.
        features: The features of the target's states, for step 0.
        batch: The tokens.
        depths: How many steps.
        detached: Whether no gradient goes from a step to the one before.
    """
    mask = additive(visible(batch), features.dtype)
    cache = DynamicCache()
    tokens = batch.tokens
    for step in range(depths):
        tokens = torch.cat([tokens[:, 1:], tokens[:, -1:]], 1)
        output = head.model(
            inputs_embeds=embed(tokens),
            features=features,
            attention_mask=mask,
            position_ids=batch.positions + step,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
        )
        assert output.hidden_states is not None
        yield output.hidden_states[-1]
        features = output.hidden_states[head.fed_back]
        features = features.detach() if detached else features


def most_frequent(counts: Int[Tensor, " vocab"], columns: int) -> Int[Tensor, " column"]:
    """Returns the ids of the most frequent tokens, ascending; of equally frequent ones those with the lower ids.

    Raises:
        ValueError: There are fewer tokens than columns.
    """
    if not 1 <= columns <= len(counts):
        raise ValueError(f"head.draft_vocabulary={columns}: the target has {len(counts)} tokens, give at most as many")
    return counts.sort(descending=True, stable=True).indices[:columns].sort().values


def take_output(head: PreTrainedModel, target: Target) -> None:
    """Let a head's own output layer begin as the target's rows for its columns."""
    own: Any = head.get_output_embeddings()
    given: Any = target.model.get_output_embeddings()
    if own is not None and own.weight.shape[1] == given.weight.shape[1]:
        ids: Any = getattr(head, "draft_ids", None)
        rows = given.weight.data if ids is None else given.weight.data[ids.to(given.weight.device)]
        own.weight.data.copy_(rows[: own.weight.shape[0]])

"""The common part of EAGLE-3 and MTP as trained heads: pairs of a state and a token, and outputs that are fed back.

The training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): a draft's step i reads the head's own output of step
i − 1 in place of the target's state. Step i of the draft at position t is row t of the i-th forward. It sees the true
pairs up to t (step 0's keys, causal), and its own pairs of steps 1 … i, each of which is one key.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from drafters.heads.base import FeatureHead
from drafters.heads.training import (
    Anchors,
    Prediction,
    TargetStates,
    TextBatch,
    TrainedHead,
    additive,
    borrowed,
    frozen_copy,
    most_frequent,
)
from specdec.target.target import Target

ATTENTION = "specdec_unrolled"
"""The name under which transformers' layers find ``unrolled_attention``."""


class TrainedFeatureHead(TrainedHead):
    """A ``FeatureHead``, trained with the training-time test of ``depths`` steps."""

    head: FeatureHead

    @abstractmethod
    def make(self, target: Target, draft_ids: Int[Tensor, " column"] | None) -> FeatureHead:
        """The head for a target, with new or loaded weights, for some of the target's ids; None for all."""

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        self.head = head = self.make(target, most_frequent(counts, self.draft_columns)).float()
        AttentionInterface.register(ATTENTION, unrolled_attention)
        head.config._attn_implementation = ATTENTION
        self.hidden_layers = tuple(head.hidden_layers or ())
        self._borrowed = borrowed(head, target)

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        features = self.fused([states.hidden[layer].to(self.head.dtype) for layer in self.hidden_layers])
        steps = unrolled(self.head, self._borrowed[0], features, batch, self.depths)
        return Prediction([normed.flatten(0, 1)[anchors.index - 1] for normed in steps])

    def fused(self, states: list[Float[Tensor, "row position hidden"]]) -> Float[Tensor, "row position width"]:
        return self.head.fuse(states)

    def copied(self) -> Any:
        twin = frozen_copy(self.head)
        twin.config._attn_implementation = "sdpa"
        return twin


def unrolled(
    head: FeatureHead,
    embed: Any,
    features: Float[Tensor, "row position width"],
    batch: TextBatch,
    depths: int,
) -> Iterator[Float[Tensor, "row position hidden"]]:
    """Runs the steps of the training-time test over all positions, and yields the normed outputs of each.

    Row t of step s reads token t + 1 + s, and its output is the state of the token after that. The head's attention
    must be ``ATTENTION``.
    """
    mask = additive(batch.visible(), features.dtype)
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


def unrolled_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head node head_dim"],
    key: Float[Tensor, "batch kv_head keys head_dim"],
    value: Float[Tensor, "batch kv_head keys head_dim"],
    attention_mask: Float[Tensor, "batch 1 node node"],
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch node head head_dim"], None]:
    """Attends to step 0's keys under the mask, and to the query's own key of every later step.

    The keys of the steps stand one behind the other, so that their number is a multiple of the queries'. With three
    positions and two steps, the query of position 1 sees the keys 0, 1 (step 0) and 4 (its own of step 1), out of six.
    """
    count = query.shape[2]
    groups = query.shape[1] // key.shape[1]
    factor = query.shape[3] ** -0.5 if scaling is None else scaling
    precise = torch.promote_types(query.dtype, torch.float32)
    q = query.unflatten(1, (key.shape[1], groups)) * factor
    first_k, first_v = key[:, :, None, :count], value[:, :, None, :count]
    scores = _capped(q @ first_k.transpose(-1, -2), softcap) + attention_mask[:, :, None]
    steps = key.shape[2] // count - 1
    if steps:
        own_k = key[:, :, count:].unflatten(2, (steps, count))
        own_v = value[:, :, count:].unflatten(2, (steps, count))
        own = torch.einsum("bkgtd,bkitd->bkgti", q, own_k)
        scores = torch.cat([scores, _capped(own, softcap)], -1)
        weights = scores.softmax(-1, dtype=precise).to(query.dtype)
        out = weights[..., :count] @ first_v + torch.einsum("bkgti,bkitd->bkgtd", weights[..., count:], own_v)
    else:
        out = scores.softmax(-1, dtype=precise).to(query.dtype) @ first_v
    return out.flatten(1, 2).transpose(1, 2).contiguous(), None


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap

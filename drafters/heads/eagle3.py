"""EAGLE-3's head (Li et al. 2025, arXiv 2503.01840) and EAGLE-3.1's (arXiv 2605.09992)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from drafters.heads.base import FeatureBackbone, FeatureHead, config_for
from drafters.heads.layers import Fusion, NormEach, PairLayer, decoder_layer, rms_norm, rotary
from specdec.arguments import whole


class _Backbone(FeatureBackbone):
    def __init__(self, head: "Eagle3Head"):
        config = head.config
        super().__init__(config)
        width = config.hidden_size
        self.feature_width = width
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if head.owns_embeddings else None
        total = head.captured * head.captured_width
        norm: nn.Module = nn.Identity()
        if head.norm_each:
            norm = NormEach(config, head.captured, head.captured_width)
        elif head.norm_joined:
            norm = rms_norm(config, total)
        self.fusion = Fusion(norm, nn.Linear(total, width, bias=head.fusion_bias))
        self.layers = nn.ModuleList(
            [
                PairLayer(config, 0, norm_before_residual=head.norm_before_residual),
                *(decoder_layer(config, index) for index in range(1, config.num_hidden_layers)),
            ]
        )
        self.norm = rms_norm(config)
        self.rotary_emb = rotary(config)

    def join(
        self, embeds: Float[Tensor, "batch node hidden"], features: Float[Tensor, "batch node width"]
    ) -> Float[Tensor, "batch node joined"]:
        """Returns the two side by side, un-normed: the first layer norms each, and needs the feature as it came."""
        return torch.cat([embeds, features], dim=-1)


class Eagle3Head(FeatureHead):
    """One decoder layer (or more) over pairs of a fused feature and an embedding, with an output layer of its own.

    Args:
        config: Llama's or Qwen3's, of the head's own sizes. ``vocab_size`` is the target's.
        hidden_layers: The target's hidden states that are fused; None if not known.
        captured: How many they are.
        captured_width: The target's hidden size; None for the head's own.
        draft_ids: The target's id of every column of the output layer, ascending; None for all of the vocabulary.
        norm_before_residual: Whether the residual stream begins with the normed feature.
        norm_joined: Whether one norm goes over all captured states before they are fused.
        norm_each: Whether each captured state has a norm of its own (3.1).
        feeds_normed: Whether the normed output is fed back (3.1), not the output as it is.
        fusion_bias: Whether the fusion has a bias.
        owns_embeddings: Whether the head has embeddings; it borrows the target's otherwise.
        owns_output: Whether the head has an output layer; it borrows the target's otherwise.

    Raises:
        ValueError: A number is out of its range, or options exclude each other.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        hidden_layers: Sequence[int] | None = None,
        captured: int = 3,
        captured_width: int | None = None,
        draft_ids: Sequence[int] | Int[Tensor, " column"] | None = None,
        norm_before_residual: bool = False,
        norm_joined: bool = False,
        norm_each: bool = False,
        feeds_normed: bool = False,
        fusion_bias: bool = False,
        owns_embeddings: bool = False,
        owns_output: bool = True,
    ):
        super().__init__(config)
        self.hidden_layers = None if hidden_layers is None else tuple(hidden_layers)
        self.captured = whole("captured", captured, least=1)
        self.captured_width = captured_width or config.hidden_size
        if self.hidden_layers is not None and len(self.hidden_layers) != captured:
            raise ValueError(
                f"hidden_layers={list(self.hidden_layers)} are {len(self.hidden_layers)} hidden states and the head "
                f"fuses {captured}: give {captured}"
            )
        if norm_joined and norm_each:
            raise ValueError("norm_joined and norm_each exclude each other: give one of the two")
        if draft_ids is not None and not owns_output:
            raise ValueError("a reduced vocabulary needs an output layer of its own: give draft_ids=None or one")
        self.norm_before_residual, self.feeds_normed = norm_before_residual, feeds_normed
        self.norm_joined, self.norm_each, self.fusion_bias = norm_joined, norm_each, fusion_bias
        self.owns_embeddings, self.owns_output = owns_embeddings, owns_output
        self.model = _Backbone(self)
        ids = draft_ids
        if ids is not None and not isinstance(ids, Tensor):
            ids = torch.tensor(list(ids))
        self.register_buffer("draft_ids", ids, persistent=False)
        columns = config.vocab_size if ids is None else len(ids)
        self.lm_head = nn.Linear(config.hidden_size, columns, bias=False) if owns_output else None
        self.fed_back = config.num_hidden_layers + feeds_normed

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel,
        *,
        hidden_layers: Sequence[int] | None = None,
        draft_ids: Sequence[int] | Int[Tensor, " column"] | None = None,
        layers: int = 1,
        intermediate_size: int | None = None,
        norm_before_residual: bool = False,
        norm_each: bool = False,
        feeds_normed: bool = False,
        owns_embeddings: bool = False,
    ) -> "Eagle3Head":
        """Returns a new head with random weights for a target, of the target's widths.

        Args:
            target: The model.
            hidden_layers: See the class; None for an early, a middle and a late layer, as published heads have them.
            draft_ids: See the class.
            layers: Decoder layers.
            intermediate_size: Width of the MLP; None for the target's.
            norm_before_residual: See the class.
            norm_each: See the class.
            feeds_normed: See the class.
            owns_embeddings: See the class.
        """
        text = target.config.get_text_config(decoder=True)
        chosen = default_layers(text.num_hidden_layers) if hidden_layers is None else tuple(hidden_layers)
        config = config_for(target, layers=layers, intermediate_size=intermediate_size)
        return cls(
            config,
            hidden_layers=chosen,
            captured=len(chosen),
            draft_ids=draft_ids,
            norm_before_residual=norm_before_residual,
            norm_each=norm_each,
            feeds_normed=feeds_normed,
            owns_embeddings=owns_embeddings,
        )

    def like(self, config: PreTrainedConfig, *, captured_width: int) -> "Eagle3Head":
        """Returns a new head with other sizes and the same options."""
        return Eagle3Head(
            config,
            hidden_layers=self.hidden_layers,
            captured=self.captured,
            captured_width=captured_width,
            draft_ids=self.draft_ids,
            norm_before_residual=self.norm_before_residual,
            norm_joined=self.norm_joined,
            norm_each=self.norm_each,
            feeds_normed=self.feeds_normed,
            fusion_bias=self.fusion_bias,
            owns_embeddings=self.owns_embeddings,
            owns_output=self.owns_output,
        )


def default_layers(layers: int) -> tuple[int, ...]:
    """Returns the hidden states that published heads fuse for a target of so many layers: 2, N/2 and N-3.

    Raises:
        ValueError: The target has too few layers for three different ones.
    """
    if layers < 7:
        raise ValueError(
            f"the usual hidden states 2, N/2 and N-3 of a target with N={layers} layers are not three: "
            f"give hidden_layers"
        )
    return 2, layers // 2, layers - 3

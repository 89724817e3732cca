"""The configuration of a block drafter's head."""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from specdec.topology import Topology


@strict
class BlockConfig(Qwen3Config):
    """The configuration of a ``BlockHead``: that of its layers, and what a block is.

    Attributes:
        layer_kind: Whose decoder layers: ``"qwen3"`` (which norm queries and keys) or ``"llama"``.
        block_size: Places of a block, as trained; the first one holds the root, the others the mask token.
        mask_token_id: The mask token, as the target's id.
        shifted: Whether place j predicts the token of place j + 1 (DSpark, ``block_size`` tokens) and not its own
            (DFlash, ``block_size - 1`` tokens: the root is known).
        causal: Whether a place sees only those before it; otherwise all places see each other.
        causal_in_windows: The same in sliding layers; None if they are like the others.
        window_from_root: Whether the window of sliding layers counts from the root's place for all places, and not from
            each. Either way it is so many positions, the one that it counts from included.
        hidden_layers: Which hidden states of the target are read, numbered as in ``Drafter.hidden_layers``.
        target_hidden_size: Width of each of them.
        target_layers: The number of the target's layers; None if unknown.
        draft_vocab_size: Columns of the logits; None for ``vocab_size``.
        owns_embeddings: Whether the head has input embeddings of its own; otherwise it borrows the target's.
        owns_output: Whether it has an output layer of its own; otherwise it borrows the target's.
        final_logit_softcapping: Caps the logits to this magnitude, after ``output_multiplier``.
        markov_rank: Width of the Markov head; here and below, 0 is for no such part.
        markov_biases: Whether its inner linear layer has a bias.
        confidence_with_markov: Whether the confidence head reads the Markov head's embedding of the token before, too.
        conv_kernel_size: Taps of the convolutions.
        conv_group_size: Channels that share what a place adds to their kernels.
        selector_rank: Width of the selector's tables among ``selector_top_k`` candidates per place.
        gru_hidden_dim: Width of the recurrent network, which adds something of rank ``emb_dim`` to the logits.
        pure_draft_prefix_len: So many of the first depths it leaves as they are.
        xpress_rank: Width of the refiner, whose MLP is ``xpress_mlp_ratio`` times as wide.
        num_jacobi_passes: How many passes it makes over a block if it is not asked place by place.
    """

    model_type = "block_drafter"

    layer_kind: str = "qwen3"
    mlp_bias: bool = False
    block_size: int = 16
    mask_token_id: int = 0
    shifted: bool = False
    causal: bool = False
    causal_in_windows: bool | None = None
    window_from_root: bool = False
    hidden_layers: list[int] | None = None
    target_hidden_size: int | None = None
    target_layers: int | None = None
    draft_vocab_size: int | None = None
    owns_embeddings: bool = False
    owns_output: bool = False
    input_embedding_scale: float | int = 1.0
    output_multiplier: float | int = 1.0
    final_logit_softcapping: float | int | None = None
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    markov_biases: bool = True
    confidence: bool = False
    confidence_with_markov: bool = True
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16
    gru_hidden_dim: int = 0
    emb_dim: int = 256
    pure_draft_prefix_len: int = 0
    xpress_rank: int = 0
    xpress_mlp_ratio: int = 2
    num_jacobi_passes: int = 6

    @property
    def columns(self) -> int:
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def tokens(self) -> int:
        """The number of tokens that a block predicts."""
        return self.block_size if self.shifted else self.block_size - 1

    @property
    def slides(self) -> bool:
        return "sliding_attention" in (self.layer_types or ())

    def block(self, places: int, device: torch.device) -> Topology:
        """Returns the directions in which places see each other, and how far back."""
        sight: dict[str, Any] = {}
        if self.slides:
            sight = {"causal_in_windows": self.causal_in_windows, "window_from_root": self.window_from_root}
        return Topology.block(places, device, causal=self.causal, **sight)

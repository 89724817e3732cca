"""Domino's head (arXiv 2605.29707; SpecForge): a recurrent network down the tokens drafted so far."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafters.heads.block_places import Above, PlaceHead

NAMES = (
    ("prefix_head.gru_input.weight", "prefix_gru.weight_ih_l0"),
    ("prefix_head.gru_state.weight", "prefix_gru.weight_hh_l0"),
    ("prefix_head.joined.weight", "embed_proj.0.weight"),
    ("prefix_head.columns.weight", "embed_proj.2.weight"),
)
"""The published names of its tensors."""


class PrefixHead(PlaceHead):
    """Adds to a place's logits C silu(J [h; s]), where h is its hidden state and s a GRU's after the tokens before it.

    The GRU reads the tokens' embeddings, the root's first.

    Args:
        hidden_size: Width of embeddings and hidden states.
        gru_width: Width of the GRU's state.
        rank: Rows of J.
        free: So many of the first depths are left as they are.
    """

    reads_embeddings = True

    def __init__(self, *, hidden_size: int, columns: int, gru_width: int, rank: int, free: int = 0):
        super().__init__()
        self.state_width, self.free = gru_width, free
        self.gru_input = nn.Linear(hidden_size, 3 * gru_width, bias=False)
        self.gru_state = nn.Linear(gru_width, 3 * gru_width, bias=False)
        self.joined = nn.Linear(hidden_size + gru_width, rank, bias=False)
        self.columns = nn.Linear(rank, columns, bias=False)

    def note(
        self, tokens: Int[Tensor, "*some"], depth: int, above: Above
    ) -> tuple[Float[Tensor, "*some rank"], Float[Tensor, "*some state"]]:
        """Returns silu(J [h; s]), and s. In the first depths it returns zeros."""
        hidden, embeds = above.hidden, above.embeds
        assert hidden is not None and embeds is not None, "it reads both"
        state = hidden.new_zeros(*embeds.shape[:-1], self.state_width) if above.state is None else above.state
        reset, update, new = self.gru_input(embeds).chunk(3, dim=-1)
        own_reset, own_update, own_new = self.gru_state(state).chunk(3, dim=-1)
        update = torch.sigmoid(update + own_update)
        candidate = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
        below = (1 - update) * candidate + update * state
        if depth < self.free:
            return hidden.new_zeros(*embeds.shape[:-1], self.joined.out_features), below
        return nn.functional.silu(self.joined(torch.cat([hidden, below], dim=-1))), below

    def read(
        self, logits: Float[Tensor, "*shared column"], note: Float[Tensor, "*some rank"]
    ) -> Float[Tensor, "*some column"]:
        return logits + self.columns(note)

"""What DFlash 2 adds to a block drafter (z-lab/dflash): convolutions along a block, and a selector among candidates."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafters.heads.block_places import Above, PlaceHead, rows_of
from specdec.filters import largest


class GroupedConvolution(nn.Module):
    """Two causal convolutions along a block, before and after a sublayer, whose kernels depend on the place.

    Tap k of a place reads the place k before it: by ``base_kernel``, and by what the place itself adds to it, which is
    one number for every group of channels. Before the block's first place there are zeros.

    Args:
        width: Channels.
        kernel_size: Taps.
        group_size: Channels that share what a place adds.
    """

    def __init__(self, width: int, kernel_size: int, group_size: int):
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, width))
        self.kernel_projection = nn.Linear(width, 2 * kernel_size * (width // group_size), bias=False)
        self.begin()

    def begin(self) -> None:
        """Let both change nothing."""
        nn.init.zeros_(self.kernel_projection.weight)
        with torch.no_grad():
            self.base_kernel[:, 0], self.base_kernel[:, 1:] = 1.0, 0.0

    @torch.no_grad()
    def widen(self, other: "GroupedConvolution") -> None:
        """Take the kernels of one with fewer channels, for the first of these."""
        taps = 2 * self.base_kernel.shape[1]
        old = other.kernel_projection.weight.unflatten(0, (taps, -1))
        self.kernel_projection.weight.zero_().unflatten(0, (taps, -1))[:, : old.shape[1], : old.shape[2]] = old

    def before(
        self, hidden: Float[Tensor, "batch node hidden"], places: int
    ) -> tuple[Float[Tensor, "batch node hidden"], Float[Tensor, "batch node tap group"]]:
        """Returns a sublayer's input after the first convolution, and what the places add to the second one's kernel.

        Args:
            hidden: The input, of blocks side by side.
            places: Places of a block.
        """
        kernels = self.kernel_projection(hidden).unflatten(-1, (2, self.base_kernel.shape[1], -1))
        return _convolved(hidden, self.base_kernel[0], kernels[..., 0, :, :], places), kernels[..., 1, :, :]

    def after(
        self, hidden: Float[Tensor, "batch node hidden"], kernel: Float[Tensor, "batch node tap group"], places: int
    ) -> Float[Tensor, "batch node hidden"]:
        """Returns a sublayer's output after the second convolution."""
        return _convolved(hidden, self.base_kernel[1], kernel, places)


def _convolved(
    hidden: Float[Tensor, "batch node hidden"],
    base: Float[Tensor, "tap hidden"],
    added: Float[Tensor, "batch node tap group"],
    places: int,
) -> Float[Tensor, "batch node hidden"]:
    batch, nodes, width = hidden.shape
    groups = added.shape[-1]
    given = hidden.reshape(-1, places, groups, width // groups)
    added = added.reshape(-1, places, *added.shape[2:])
    output = torch.zeros_like(given)
    for tap in range(min(len(base), places)):
        kernel = base[tap].view(groups, -1) + added[:, tap:, tap, :, None]
        part = kernel * given[:, : places - tap]
        output = output + (nn.functional.pad(part, (0, 0, 0, 0, tap, 0)) if tap else part)
    return output.view(batch, nodes, width)


def convolved_layer(
    layer: Any, hidden: Float[Tensor, "batch node hidden"], places: int, **kwargs: Any
) -> Float[Tensor, "batch node hidden"]:
    """Returns the output of a decoder layer of transformers with convolutions around its attention and its MLP."""
    given, kernel = layer.attention_conv.before(layer.input_layernorm(hidden), places)
    hidden = hidden + layer.attention_conv.after(layer.self_attn(hidden_states=given, **kwargs)[0], kernel, places)
    given, kernel = layer.mlp_conv.before(layer.post_attention_layernorm(hidden), places)
    return hidden + layer.mlp_conv.after(layer.mlp(given), kernel, places)


class CandidateSelector(PlaceHead):
    """Chooses among a place's most probable tokens by what they are after the token before.

    A candidate's score is its logit and ⟨A[token before] * P h, B[candidate]⟩, where h is the place's hidden state. No
    other token is drafted, so q is zero there.

    Args:
        vocab_size: Rows of A and B.
        top_k: Candidates per place.
    """

    def __init__(self, *, vocab_size: int, hidden_size: int, rank: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        for table in (self.predecessor_codebook, self.successor_codebook):
            nn.init.normal_(table, std=0.02)

    def note(self, tokens: Int[Tensor, "*some"], depth: int, above: Above) -> tuple[Float[Tensor, "*some rank"], None]:
        """Returns A[token before] * P h."""
        return rows_of(self.predecessor_codebook, tokens) * self.hidden_projection(above.hidden), None

    def read(
        self, logits: Float[Tensor, "*shared column"], note: Float[Tensor, "*some rank"], *, whole: bool = False
    ) -> Float[Tensor, "*some column"]:
        """Returns the candidates' scores, and -inf for all other tokens.

        Args:
            whole: Whether other tokens keep their logits, so that training has a gradient where the right token is no
                candidate.
        """
        unary, ids = largest(logits, min(self.top_k, logits.shape[-1]))
        scores = unary + (note[..., None, :] * rows_of(self.successor_codebook, ids)).sum(-1).to(unary.dtype)
        shape = *note.shape[:-1], logits.shape[-1]
        room = logits.expand(shape) if whole else logits.new_full(shape, -torch.inf)
        return room.scatter(-1, ids.expand(scores.shape), scores)

"""xPress's head (arXiv 2608.02438; speculators): a refiner that mixes what is known of a block's places, causally."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafters.heads.block_places import Above, PlaceHead, rows_of
from specdec.filters import first_largest


class Refiner(PlaceHead):
    """Adds to a place's logits what the tokens of all places before it say, and the block as a whole.

    Every place has an inner state, made of its hidden state, the mean of the block's, and the token before it. It is
    added a mixture of its own and those of the places before it, then an MLP of the sum, and read out over the
    vocabulary. The tokens may be drawn place by place. Published heads fill a whole block several times instead, with
    the most probable tokens of the time before in front of the places (``Refinement``).

    Args:
        vocab_size: Tokens that may come before.
        columns: Columns of the logits.
        block_size: Places that are mixed.
        rank: Width of an inner state.
        ratio: How much wider the MLP is.
        shifted: Whether a block's first place predicts a token. Where it does not, it reads the token before the root.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        columns: int,
        hidden_size: int,
        block_size: int,
        rank: int,
        ratio: int = 2,
        shifted: bool = False,
    ):
        super().__init__()
        self.rank, self.places, self.shifted = rank, block_size, shifted
        self.state_width, self.reads_before = block_size * rank, not shifted
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h = nn.Linear(hidden_size, rank, bias=False)
        self.down_g = nn.Linear(hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, block_size, block_size))
        self.mlp_gate = nn.Linear(rank, ratio * rank, bias=False)
        self.mlp_up = nn.Linear(rank, ratio * rank, bias=False)
        self.mlp_down = nn.Linear(ratio * rank, rank, bias=False)
        self.readout = nn.Linear(rank, columns, bias=False)

    def prepare(
        self, hidden: Float[Tensor, "row place hidden"], tokens: int, before: Int[Tensor, " row"] | None = None
    ) -> tuple[Float[Tensor, "row depth width"], Float[Tensor, "row state"]]:
        """Returns what places and block say, and the inner state of a first place that predicts nothing."""
        whole = self.down_g(hidden.mean(dim=1, keepdim=True))
        known = torch.cat([self.down_h(hidden), whole.expand(-1, hidden.shape[1], -1)], dim=-1)
        state = known.new_zeros(len(hidden), self.state_width)
        if not self.shifted:
            assert before is not None, "the first place reads the token before the root"
            state = torch.cat([self._inner(known[:, 0], before), state[:, self.rank :]], dim=-1)
        return known[:, hidden.shape[1] - tokens :], state

    def note(
        self, tokens: Int[Tensor, "*some"], depth: int, above: Above
    ) -> tuple[Float[Tensor, "*some rank"], Float[Tensor, "*some state"]]:
        """Returns a place's inner state, mixed; the state has those of all places so far, side by side."""
        assert above.hidden is not None and above.state is not None, "prepare makes both"
        place = depth + (not self.shifted)
        own = self._inner(above.hidden, tokens)
        parts = above.state.unflatten(-1, (self.places, self.rank))
        parts = torch.cat([parts[..., :place, :], own[..., None, :], parts[..., place + 1 :, :]], dim=-2)
        mixed = own + (parts[..., : place + 1, :] * self.mix_l[:, place, : place + 1].T).sum(-2)
        return self._through(mixed), parts.flatten(-2)

    def read(
        self, logits: Float[Tensor, "*shared column"], note: Float[Tensor, "*some rank"]
    ) -> Float[Tensor, "*some column"]:
        return logits + self.readout(note)

    def along(
        self,
        tokens: Int[Tensor, "row depth"],
        hidden: Float[Tensor, "row depth width"],
        state: Float[Tensor, "row state"] | None,
        embeds: Tensor | None = None,
    ) -> Float[Tensor, "row depth rank"]:
        """Returns the notes of all places at once."""
        assert state is not None, "prepare makes it"
        first = 0 if self.shifted else 1
        own = torch.cat([state.unflatten(-1, (self.places, self.rank))[:, :first], self._inner(hidden, tokens)], dim=1)
        count = own.shape[1]
        mixed = own + torch.einsum("ckj,njc->nkc", self.mix_l[:, :count, :count].tril(), own)
        return self._through(mixed[:, first:])

    def _inner(self, known: Float[Tensor, "*some width"], tokens: Int[Tensor, "*some"]) -> Tensor:
        return self.in_proj(torch.cat([known, rows_of(self.token_embed.weight, tokens)], dim=-1))

    def _through(self, mixed: Float[Tensor, "*some rank"]) -> Float[Tensor, "*some rank"]:
        return mixed + self.mlp_down(nn.functional.silu(self.mlp_gate(mixed)) * self.mlp_up(mixed))


class Refinement(nn.Module):
    """A block's logits after some passes of a refiner, each behind the most probable tokens of the one before.

    Args:
        passes: How many.
        draft_ids: The target's id of every column; None if column i is id i.
    """

    def __init__(self, refiner: Refiner, passes: int, draft_ids: Int[Tensor, " column"] | None = None):
        super().__init__()
        self.refiner, self.passes = refiner, passes
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def forward(
        self,
        logits: Float[Tensor, "row depth column"],
        hidden: Float[Tensor, "row place hidden"],
        roots: Int[Tensor, " row"],
        before: Int[Tensor, " row"] | None,
    ) -> Float[Tensor, "row depth column"]:
        """Returns the logits of the last pass; for the arguments see ``PlaceHead``."""
        known, state = self.refiner.prepare(hidden, logits.shape[1], before)
        refined = logits
        for _ in range(self.passes):
            tokens = tokens_before(first_largest(refined), roots, self.draft_ids)  # type: ignore[arg-type]
            refined = self.refiner.read(logits, self.refiner.along(tokens, known, state))
        return refined


def tokens_before(
    columns: Int[Tensor, "row depth"], roots: Int[Tensor, " row"], draft_ids: Int[Tensor, " column"] | None
) -> Int[Tensor, "row depth"]:
    """Returns the token before each depth, the root first, of the columns that are taken down a path."""
    taken = columns[:, :-1]
    return torch.cat([roots[:, None], taken if draft_ids is None else draft_ids[taken]], dim=1)

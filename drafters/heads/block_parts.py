"""Parts of block drafters' heads that make a place depend on the tokens drawn before it.

DSpark's Markov and confidence heads (arXiv 2607.05147), DFlash 2's selector among candidates and its convolutions along
the block (z-lab/dflash), Domino's recurrent network (arXiv 2605.29707), and xPress's refiner (arXiv 2608.02438).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.filters import first_largest, largest


@dataclass(frozen=True, eq=False)
class Above:
    """The facts that a place is told besides the token before it.

    Attributes:
        hidden: What ``prepare`` made of the place's hidden state; only if ``reads_hidden``.
        state: The state above the token; only with ``state_width``. None for zero.
        embeds: The token's embedding; only if ``reads_embeddings``.
    """

    hidden: Float[Tensor, "*some width"] | None = None
    state: Float[Tensor, "*some state"] | None = None
    embeds: Float[Tensor, "*some hidden"] | None = None


class PlaceHead(nn.Module, ABC):
    """Changes a place's logits by what the tokens before it say, one place after the other.

    It does so in two steps: a narrow ``note`` of what stands before a place, and ``read``, which knows the vocabulary.
    Training keeps notes, and no logits.

    Attributes:
        reads_hidden: Whether it reads the places' hidden states.
        reads_embeddings: Whether it reads the tokens' input embeddings.
        reads_before: Whether it reads the token before the root.
        state_width: Width of the state that goes down a path, which is zero above the root unless ``prepare`` says
            otherwise; 0 if there is none.
    """

    reads_hidden: bool = True
    reads_embeddings: bool = False
    reads_before: bool = False
    state_width: int = 0

    def prepare(
        self, hidden: Float[Tensor, "row place hidden"], tokens: int, before: Int[Tensor, " row"] | None = None
    ) -> tuple[Float[Tensor, "row depth width"], Float[Tensor, "row state"] | None]:
        """Return what ``note`` takes as the hidden states of the places that predict a token, and the first state.

        Args:
            hidden: The normed hidden states of all places of a block.
            tokens: How many places predict a token: the last ones.
            before: The token before the root; only if ``reads_before``.
        """
        return hidden[:, hidden.shape[1] - tokens :], None

    @abstractmethod
    def note(
        self, tokens: Int[Tensor, "*some"], depth: int, above: Above
    ) -> tuple[Float[Tensor, "*some note"], Float[Tensor, "*some state"] | None]:
        """Return what ``read`` is told of the places behind some tokens, and the states below these tokens.

        Args:
            tokens: The tokens in front, as the target's ids; those of the root at depth 0.
        """

    @abstractmethod
    def read(
        self, logits: Float[Tensor, "*shared column"], note: Float[Tensor, "*some note"]
    ) -> Float[Tensor, "*some column"]:
        """Return the logits of places, given those that they have by themselves."""

    def forward(
        self, logits: Tensor, tokens: Tensor, depth: int, **above: Tensor | None
    ) -> tuple[Float[Tensor, "*some column"], Float[Tensor, "*some state"] | None]:
        """Return the logits of places behind some tokens, and the states below; see ``note`` and ``read``."""
        note, below = self.note(tokens, depth, Above(**above))
        return self.read(logits, note), below

    def along(
        self,
        tokens: Int[Tensor, "row depth"],
        hidden: Float[Tensor, "row depth width"],
        state: Float[Tensor, "row state"] | None,
        embeds: Float[Tensor, "row depth hidden"] | None = None,
    ) -> Float[Tensor, "row depth note"]:
        """Return the notes of all places down one path of tokens per row; for the arguments see ``Above``."""
        notes = []
        for depth in range(tokens.shape[1]):
            given = None if embeds is None else embeds[:, depth]
            note, state = self.note(tokens[:, depth], depth, Above(hidden[:, depth], state, given))
            notes.append(note)
        return torch.stack(notes, dim=1)


def rows_of(table: Float[Tensor, "token rank"], tokens: Int[Tensor, "*some"]) -> Float[Tensor, "*some rank"]:
    """Returns a table's rows for some tokens. One that the table lacks (padding of the vocabulary) gets the last."""
    return nn.functional.embedding(tokens.clamp(max=len(table) - 1), table)


KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(PlaceHead):
    """Adds to a place's logits what the token before it says about the next one, by a product of two narrow tables.

    ``vanilla``: W2 W1[token]. ``gated``: W2 (g * W1[token]), where the gate g is computed from the place's hidden state
    and W1[token]. ``rnn``: W2 tanh(o), where o and a state that goes down the path are computed from the state above,
    W1[token] and the hidden state.

    Args:
        kind: One of ``KINDS``.
        vocab_size: Tokens that may come before.
        draft_vocab_size: Columns of the logits.
        rank: Width of the tables.
        biases: Whether the gate's or the state's linear layer has a bias.
    """

    def __init__(
        self, kind: str, *, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int, biases: bool = True
    ):
        super().__init__()
        assert kind in KINDS, "checked in the configuration"
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank, bias=biases)
        self.reads_hidden, self.state_width = kind != "vanilla", rank if kind == "rnn" else 0
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank, bias=biases)

    def embed(self, tokens: Int[Tensor, "*some"]) -> Float[Tensor, "*some rank"]:
        """Returns W1[token]. A token that the table lacks (padding of the vocabulary) gets the last row."""
        return rows_of(self.markov_w1.weight, tokens)

    def note(
        self, tokens: Int[Tensor, "*some"], depth: int, above: Above
    ) -> tuple[Float[Tensor, "*some rank"], Float[Tensor, "*some rank"] | None]:
        """Returns what W2 is multiplied with, and the states below the tokens."""
        known, hidden = self.embed(tokens), above.hidden
        if self.kind == "vanilla":
            return known, None
        assert hidden is not None, "this kind of Markov head reads hidden states"
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, known], dim=-1))) * known, None
        state = torch.zeros_like(known) if above.state is None else above.state
        gate, candidate, output = self.joint_proj(torch.cat([state, known, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def read(
        self, logits: Float[Tensor, "*shared column"], note: Float[Tensor, "*some rank"]
    ) -> Float[Tensor, "*some column"]:
        return logits + self.markov_w2(note)


class ConfidenceHead(nn.Module):
    """Predicts, before a place's token is drawn, how likely it is to be accepted if everything before it was.

    Args:
        rank: Width of the Markov head's embeddings that it reads besides; 0 for none.
    """

    def __init__(self, hidden_size: int, rank: int = 0):
        super().__init__()
        self.rank = rank
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(
        self, hidden: Float[Tensor, "*some hidden"], known: Float[Tensor, "*some rank"] | None = None
    ) -> Float[Tensor, "*some"]:
        """Returns the logit of the probability.

        Args:
            known: ``MarkovHead.embed`` of the tokens before them; only with a ``rank``.
        """
        inputs: Any = hidden if not self.rank else torch.cat([hidden, known], dim=-1)  # type: ignore[list-item]
        return self.proj(inputs)[..., 0]


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

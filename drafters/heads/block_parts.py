"""Parts of block drafters' heads that make a place depend on the tokens drawn before it.

DSpark's Markov and confidence heads (arXiv 2607.05147), DFlash 2's selector among candidates and its convolutions along
the block (z-lab/dflash), Domino's recurrent network (arXiv 2605.29707), and xPress's refiner (arXiv 2608.02438).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafters.heads.block_config import BlockConfig
from drafters.reduced import cut
from specdec.filters import first_largest, largest

Noted = tuple[Float[Tensor, "*some note"], Float[Tensor, "*some state"] | None]


class PlaceHead(nn.Module, ABC):
    """Changes a place's logits by what the tokens before it say, one place after the other. Made by a ``BlockConfig``.

    It does so in two steps: a narrow ``note`` of what stands before a place, and ``read``, which knows the vocabulary.

    Attributes:
        reads_before: Whether it reads the token before the root.
        state_width: Width of the state that goes down a path, from zero or what ``prepare`` says; 0 if there is none.
        output: Name of the linear layer from a note to what is added to the logits.
    """

    reads_hidden: bool = True
    reads_embeddings: bool = False
    reads_before: bool = False
    state_width: int = 0
    output: ClassVar[str] = "readout"

    def prepare(
        self, hidden: Float[Tensor, "row place hidden"], tokens: int, before: Int[Tensor, " row"] | None = None
    ) -> tuple[Float[Tensor, "row depth width"], Float[Tensor, "row state"] | None]:
        """Return what ``note`` takes as the hidden states of the last ``tokens`` places, and the first state."""
        return hidden[:, hidden.shape[1] - tokens :], None

    @abstractmethod
    def note(
        self,
        tokens: Int[Tensor, "*some"],
        depth: int,
        hidden: Float[Tensor, "*some width"] | None = None,
        state: Float[Tensor, "*some state"] | None = None,
        embeds: Float[Tensor, "*some hidden"] | None = None,
    ) -> Noted:
        """Return what ``read`` is told of the places behind some tokens, and the states below these tokens.

        Args:
            tokens: The tokens in front, as the target's ids; those of the root at depth 0.
            depth: Their depth.
            hidden: What ``prepare`` made of the place's hidden state; only if ``reads_hidden``.
            state: The state above the token; None for zero.
            embeds: The token's embedding; only if ``reads_embeddings``.
        """

    def reduce(self, rows: Int[Tensor, " column"]) -> None:
        """Keep some columns of the logits."""
        setattr(self, self.output, cut(getattr(self, self.output), rows))

    def read(self, logits: Float[Tensor, "*shared column"], note: Float[Tensor, "*some note"]) -> Tensor:
        return logits + getattr(self, self.output)(note)

    def forward(self, logits: Tensor, tokens: Tensor, depth: int, **above: Tensor | None) -> tuple[Tensor, Any]:
        note, below = self.note(tokens, depth, **above)
        return self.read(logits, note), below

    def along(
        self,
        tokens: Int[Tensor, "row depth"],
        hidden: Float[Tensor, "row depth width"],
        state: Float[Tensor, "row state"] | None,
        embeds: Float[Tensor, "row depth hidden"] | None = None,
    ) -> Float[Tensor, "row depth note"]:
        notes = []
        for depth in range(tokens.shape[1]):
            known = None if embeds is None else embeds[:, depth]
            note, state = self.note(tokens[:, depth], depth, hidden[:, depth], state, known)
            notes.append(note)
        return torch.stack(notes, dim=1)


def rows_of(table: Float[Tensor, "token rank"], tokens: Int[Tensor, "*some"]) -> Float[Tensor, "*some rank"]:
    """Returns a table's rows for some tokens. One that the table lacks (padding of the vocabulary) gets the last."""
    return nn.functional.embedding(tokens.clamp(max=len(table) - 1), table)


KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(PlaceHead):
    """Adds to a place's logits what the token before it says about the next one, by a product of two narrow tables.

    ``vanilla``: W2 W1[token]. ``gated``: W2 (g * W1[token]), with a gate g of the place's hidden state and W1[token].
    ``rnn``: W2 tanh(o), where o and a state down the path are made of the state above, W1[token] and the hidden state.
    """

    output = "markov_w2"

    def __init__(self, config: BlockConfig):
        super().__init__()
        kind, rank, width = config.markov_head_type, config.markov_rank, config.hidden_size
        if kind not in KINDS:
            raise ValueError(f"markov_head_type={kind!r}: give {', '.join(KINDS)}")
        self.kind, self.reads_hidden, self.state_width = kind, kind != "vanilla", rank if kind == "rnn" else 0
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.columns, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank, bias=config.markov_biases)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank, bias=config.markov_biases)

    def embed(self, tokens: Int[Tensor, "*some"]) -> Float[Tensor, "*some rank"]:
        return rows_of(self.markov_w1.weight, tokens)

    def note(self, tokens: Tensor, depth: int, hidden: Any = None, state: Any = None, embeds: Any = None) -> Noted:
        known = self.embed(tokens)
        if self.kind == "vanilla":
            return known, None
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, known], dim=-1))) * known, None
        state = torch.zeros_like(known) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, known, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """Predicts, before a place's token is drawn, how likely it is to be accepted if everything before it was."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.rank = config.markov_rank if config.confidence_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + self.rank, 1)

    def forward(self, hidden: Float[Tensor, "*some hidden"], known: Any = None) -> Float[Tensor, "*some"]:
        """Returns the logit of the probability; ``known`` is ``MarkovHead.embed`` of the tokens before, with a rank."""
        inputs = hidden if not self.rank else torch.cat([hidden, known], dim=-1)
        return self.proj(inputs)[..., 0]


class GroupedConvolution(nn.Module):
    """Two causal convolutions along a block, before and after a sublayer, whose kernels depend on the place.

    Tap k of a place reads the place k before it: by ``base_kernel``, and by what the place itself adds to it, one
    number for every group of channels.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        width, taps = config.hidden_size, config.conv_kernel_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // config.conv_group_size), bias=False)
        self.begin()

    def begin(self) -> None:
        """Let both change nothing."""
        nn.init.zeros_(self.kernel_projection.weight)
        with torch.no_grad():
            self.base_kernel[:, 0], self.base_kernel[:, 1:] = 1.0, 0.0

    def forward(
        self, hidden: Float[Tensor, "batch node hidden"], sublayer: Callable[[Tensor], Tensor], places: int
    ) -> Float[Tensor, "batch node hidden"]:
        """Returns a sublayer's output between the two convolutions, for blocks of some places side by side."""
        added = self.kernel_projection(hidden).unflatten(-1, (2, self.base_kernel.shape[1], -1))
        output = sublayer(_convolved(hidden, self.base_kernel[0], added[..., 0, :, :], places))
        return _convolved(output, self.base_kernel[1], added[..., 1, :, :], places)


def _convolved(
    hidden: Float[Tensor, "batch node hidden"],
    base: Float[Tensor, "tap hidden"],
    added: Float[Tensor, "batch node tap group"],
    places: int,
) -> Float[Tensor, "batch node hidden"]:
    batch, nodes, width = hidden.shape
    groups = added.shape[-1]
    blocks = hidden.reshape(-1, places, groups, width // groups)
    added = added.reshape(-1, places, *added.shape[2:])
    output = torch.zeros_like(blocks)
    for tap in range(min(len(base), places)):
        kernel = base[tap].view(groups, -1) + added[:, tap:, tap, :, None]
        part = kernel * blocks[:, : places - tap]
        output = output + (nn.functional.pad(part, (0, 0, 0, 0, tap, 0)) if tap else part)
    return output.view(batch, nodes, width)


def convolved_layer(layer: Any, hidden: Float[Tensor, "batch node hidden"], places: int, **kwargs: Any) -> Tensor:
    """Returns the output of a decoder layer of transformers with convolutions around its attention and its MLP."""

    def attended(normed: Tensor) -> Tensor:
        return layer.self_attn(hidden_states=normed, **kwargs)[0]

    hidden = hidden + layer.attention_conv(layer.input_layernorm(hidden), attended, places)
    return hidden + layer.mlp_conv(layer.post_attention_layernorm(hidden), layer.mlp, places)


class CandidateSelector(PlaceHead):
    """Chooses among a place's most probable tokens, by logits and ⟨A[token before] * P h, B[candidate]⟩ (h: state)."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.top_k, rank = config.selector_top_k, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        for table in (self.predecessor_codebook, self.successor_codebook):
            nn.init.normal_(table, std=0.02)

    def reduce(self, rows: Int[Tensor, " column"]) -> None:
        self.successor_codebook = nn.Parameter(self.successor_codebook[rows], requires_grad=False)

    def note(self, tokens: Tensor, depth: int, hidden: Any = None, state: Any = None, embeds: Any = None) -> Noted:
        return rows_of(self.predecessor_codebook, tokens) * self.hidden_projection(hidden), None

    def read(
        self, logits: Float[Tensor, "*shared column"], note: Float[Tensor, "*some rank"], *, whole: bool = False
    ) -> Float[Tensor, "*some column"]:
        """Returns the candidates' scores, and -inf for other tokens, whose logits ``whole`` keeps for training."""
        unary, ids = largest(logits, min(self.top_k, logits.shape[-1]))
        scores = unary + (note[..., None, :] * rows_of(self.successor_codebook, ids)).sum(-1).to(unary.dtype)
        shape = *note.shape[:-1], logits.shape[-1]
        room = logits.expand(shape) if whole else logits.new_full(shape, -torch.inf)
        return room.scatter(-1, ids.expand(scores.shape), scores)


class PrefixHead(PlaceHead):
    """Adds C silu(J [h; s]) to a place's logits: h is its state, s a GRU's after the tokens before, the root first."""

    reads_embeddings, output = True, "columns"

    def __init__(self, config: BlockConfig):
        super().__init__()
        width, self.state_width, self.free = config.hidden_size, config.gru_hidden_dim, config.pure_draft_prefix_len
        self.gru_input = nn.Linear(width, 3 * self.state_width, bias=False)
        self.gru_state = nn.Linear(self.state_width, 3 * self.state_width, bias=False)
        self.joined = nn.Linear(width + self.state_width, config.emb_dim, bias=False)
        self.columns = nn.Linear(config.emb_dim, config.columns, bias=False)

    def note(self, tokens: Tensor, depth: int, hidden: Any = None, state: Any = None, embeds: Any = None) -> Noted:
        state = hidden.new_zeros(*embeds.shape[:-1], self.state_width) if state is None else state
        reset, update, new = self.gru_input(embeds).chunk(3, dim=-1)
        own_reset, own_update, own_new = self.gru_state(state).chunk(3, dim=-1)
        update = torch.sigmoid(update + own_update)
        candidate = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
        below = (1 - update) * candidate + update * state
        if depth < self.free:
            return hidden.new_zeros(*embeds.shape[:-1], self.joined.out_features), below
        return nn.functional.silu(self.joined(torch.cat([hidden, below], dim=-1))), below


class Refiner(PlaceHead):
    """Adds to a place's logits what the tokens of all places before it say, and the block as a whole.

    Every place has an inner state, made of its hidden state, the mean of the block's, and the token before it. It is
    added a mixture of its own and those of the places before it, then an MLP of the sum, and read out over the
    vocabulary. Published heads fill a whole block several times (``Refinement``). A first place that predicts no token
    reads the one before the root.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        rank, places = config.xpress_rank, config.block_size
        self.rank, self.places, self.shifted = rank, places, config.shifted
        inner = config.xpress_mlp_ratio * rank
        self.state_width, self.reads_before = places * rank, not self.shifted
        self.token_embed = nn.Embedding(config.vocab_size, rank)
        self.down_h = nn.Linear(config.hidden_size, rank, bias=False)
        self.down_g = nn.Linear(config.hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, places, places))
        self.mlp_gate = nn.Linear(rank, inner, bias=False)
        self.mlp_up = nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, config.columns, bias=False)

    def prepare(
        self, hidden: Float[Tensor, "row place hidden"], tokens: int, before: Int[Tensor, " row"] | None = None
    ) -> tuple[Float[Tensor, "row depth width"], Float[Tensor, "row state"]]:
        whole = self.down_g(hidden.mean(dim=1, keepdim=True))
        known = torch.cat([self.down_h(hidden), whole.expand(-1, hidden.shape[1], -1)], dim=-1)
        state = known.new_zeros(len(hidden), self.state_width)
        if not self.shifted:
            assert before is not None, "the first place reads the token before the root"
            state = torch.cat([self._inner(known[:, 0], before), state[:, self.rank :]], dim=-1)
        return known[:, hidden.shape[1] - tokens :], state

    def note(self, tokens: Tensor, depth: int, hidden: Any = None, state: Any = None, embeds: Any = None) -> Noted:
        place, inner = depth + (not self.shifted), self._inner(hidden, tokens)
        parts = state.unflatten(-1, (self.places, self.rank))
        parts = torch.cat([parts[..., :place, :], inner[..., None, :], parts[..., place + 1 :, :]], dim=-2)
        mixed = inner + (parts[..., : place + 1, :] * self.mix_l[:, place, : place + 1].T).sum(-2)
        return self._through(mixed), parts.flatten(-2)

    def along(self, tokens: Tensor, hidden: Tensor, state: Tensor | None, embeds: Tensor | None = None) -> Tensor:
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
    """A block's logits after some passes of a refiner, each behind the most probable tokens of the one before."""

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
        known, state = self.refiner.prepare(hidden, logits.shape[1], before)
        refined = logits
        for _ in range(self.passes):
            tokens = tokens_before(first_largest(refined), roots, self.draft_ids)  # type: ignore[arg-type]
            refined = self.refiner.read(logits, self.refiner.along(tokens, known, state))
        return refined


def tokens_before(columns: Int[Tensor, "row depth"], roots: Int[Tensor, " row"], draft_ids: Tensor | None) -> Tensor:
    """Returns the token before each depth, the root first, of the columns that are taken down a path."""
    taken = columns[:, :-1]
    return torch.cat([roots[:, None], taken if draft_ids is None else draft_ids[taken]], dim=1)

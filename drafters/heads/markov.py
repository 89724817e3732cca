"""DSpark's Markov heads: a place of a block depends on the token drawn before it (arXiv 2607.05147)."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafters.heads.block_places import Above, PlaceHead, rows_of

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

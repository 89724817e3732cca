"""The common form of heads that make a place of a block depend on the tokens drawn before it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


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

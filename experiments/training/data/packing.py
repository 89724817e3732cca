"""Packs documents into rows of equal length; what a step sees depends on the seed and its number only."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafters.heads.training import TextBatch
from experiments.training.data.document import Document


@dataclass(frozen=True)
class Piece:
    """A part of a document, at most as long as a row."""

    document: int
    start: int
    length: int


class Rows:
    """Documents as rows. A document longer than a row is cut into pieces, which then are documents of their own.

    Pieces are packed by the best fit: the longest first, each into the row with the least room for it. An epoch visits
    all rows in a random order of its own, so that a resumed training needs no saved state. Pieces without two adjacent
    supervised tokens, from which nothing is learned, are left out.

    Raises:
        ValueError: There are fewer rows than a step needs, or nothing to learn from.
    """

    def __init__(self, documents: Sequence[Document], *, length: int, batch_size: int, seed: int):
        self.documents, self.length, self.batch_size, self.seed = documents, length, batch_size, seed
        pieces = []
        for index, document in enumerate(documents):
            for start in range(0, len(document.tokens), length):
                piece = Piece(index, start, min(length, len(document.tokens) - start))
                supervised = document.supervised[start : start + piece.length]
                if bool((supervised[1:] & supervised[:-1]).any()):
                    pieces.append(piece)
        self.pieces = packed(pieces, length)
        if len(self.pieces) < batch_size:
            tokens = sum(len(document.tokens) for document in documents)
            raise ValueError(
                f"{tokens} tokens in {len(documents)} documents make {len(self.pieces)} rows of {length}, fewer than "
                f"one batch of {batch_size}: give more text, or lower fit.length or fit.batch_size"
            )

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def steps_per_epoch(self) -> int:
        """How many steps visit every row once; what does not fill a batch is left out of the epoch."""
        return len(self.pieces) // self.batch_size

    def numbers(self, step: int, rank: int = 0, world: int = 1) -> list[int]:
        """The numbers of the rows that process ``rank`` of ``world`` trains on in this step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.pieces), generator=generator)
        return order[index * self.batch_size : (index + 1) * self.batch_size][rank::world].tolist()

    def batch(self, numbers: Sequence[int]) -> TextBatch:
        """Some rows."""
        shape = (len(numbers), self.length)
        tokens, documents = torch.zeros(shape, dtype=torch.long), torch.full(shape, -1)
        positions = torch.arange(self.length).repeat(len(numbers), 1)
        supervised = torch.zeros(shape, dtype=torch.bool)
        for row, number in enumerate(numbers):
            at = 0
            for place, piece in enumerate(self.pieces[number]):
                document, there = self.documents[piece.document], slice(at, at + piece.length)
                part = slice(piece.start, piece.start + piece.length)
                tokens[row, there] = document.tokens[part].long()
                supervised[row, there] = document.supervised[part]
                documents[row, there] = place
                positions[row, there] = torch.arange(piece.length)
                at += piece.length
        return TextBatch(tokens, supervised, documents, positions)

    def describe(self, numbers: Sequence[int]) -> str:
        """The names of the documents of some rows, and where in them the rows begin."""
        told = [
            self.documents[piece.document].name + (f" from token {piece.start}" if piece.start else "")
            for number in numbers
            for piece in self.pieces[number]
        ]
        return "; ".join(told[:8]) + (f"; and {len(told) - 8} more" if len(told) > 8 else "")


def packed(pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
    """Rows of pieces: the longest piece first, each into the row with the least room that is enough."""
    rows: list[list[Piece]] = []
    rooms: list[tuple[int, int]] = []  # room and number of every row that has any, ascending
    for piece in sorted(pieces, key=lambda each: -each.length):
        found = bisect.bisect_left(rooms, (piece.length, -1))
        if found < len(rooms):
            room, row = rooms.pop(found)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        if room > piece.length:
            bisect.insort(rooms, (room - piece.length, row))
    return rows


def token_counts(documents: Sequence[Document], vocab_size: int) -> torch.Tensor:
    """The number of times that each token is supervised."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for document in documents:
        counts += torch.bincount(document.tokens[document.supervised].long(), minlength=vocab_size)
    return counts

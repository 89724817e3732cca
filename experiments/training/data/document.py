"""A document to train on, and what a source of them is."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.engine.intake import Message
from specdec.target.target import Target


@dataclass(frozen=True, eq=False)
class Document:
    """Tokens that belong together.

    Attributes:
        name: Where it comes from, such as a file's name and line.
        supervised: Which of them a head learns to predict.
        messages: The conversation that they are, none for plain text; ``tools`` that it may call.
    """

    name: str
    tokens: Int[Tensor, " position"]
    supervised: Bool[Tensor, " position"]
    messages: Sequence[Message] = ()
    tools: Sequence[Message] = ()

    @classmethod
    def whole(cls, name: str, tokens: Sequence[int]) -> "Document":
        """A document of which every token is predicted."""
        return cls(name, torch.tensor(tokens, dtype=torch.int32), torch.ones(len(tokens), dtype=torch.bool))

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first supervised one."""
        found = self.supervised.nonzero()
        return self.tokens[: int(found[0, 0])].tolist() if len(found) else self.tokens.tolist()


@dataclass(frozen=True)
class Documents:
    """The documents of a source: some to train on, and others to measure with."""

    training: list[Document]
    held_out: list[Document]


class Source(ABC):
    """Where documents come from. A subclass takes plain arguments and has one YAML file in ``conf/data``."""

    def check(self, *, unanswered: bool = False) -> None:  # noqa: B027
        """Refuse what can be seen to be wrong before the target is loaded: missing files, or the like."""

    @abstractmethod
    def load(self, target: Target, *, unanswered: bool = False) -> Documents:
        """Read the documents, with the target's tokenizer.

        Args:
            unanswered: Whether conversations that end with a question are kept, for the target to answer.

        Raises:
            ValueError: There are none, or they do not fit the target.
        """


def held_apart(documents: list[Document], share: float) -> Documents:
    """Documents with every so-manieth one held out, with a share of 0.02 every fiftieth; the same ones every time.

    Raises ValueError: there are fewer than two documents, or the share is above one half.
    """
    if not 0 < share <= 0.5:
        raise ValueError(f"data.held_out={share}: give a share above 0 and at most 0.5")
    if len(documents) < 2:
        raise ValueError(
            f"{len(documents)} document is too few: one is held out to measure with, and one at least is to train on"
        )
    step = min(len(documents), max(2, round(1 / share)))
    held = [document for index, document in enumerate(documents) if index % step == step - 1]
    return Documents([document for index, document in enumerate(documents) if index % step != step - 1], held)


def tokenizer_of(target: Target) -> Any:
    """The target's tokenizer. Raises ValueError: it has none."""
    if target.tokenizer is None:
        raise ValueError(f"the target {target.name} has no tokenizer: text cannot become tokens")
    return target.tokenizer

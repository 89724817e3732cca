"""Compares a drafter's vocabulary with the target's, and translates ids where only the widths differ."""

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.modeling.target import Target

MOST_PADDING = 512
"""Padding to a multiple of 64 or 128 is common; a larger gap between two widths is another vocabulary."""


class VocabularyMap:
    """Translates token ids between a drafter and a target that mean the same, but whose logits differ in width.

    Args:
        drafter: Width of the drafter's logits.
        target: Width of the target's.

    Attributes:
        common: The smaller width: ids below it exist in both vocabularies.
        target: Width of the target's logits.
    """

    def __init__(self, drafter: int, target: int):
        self.drafter, self.target = drafter, target
        self.common = min(drafter, target)

    def to_drafter(self, tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Returns the drafter's ids. An id that it lacks becomes its last token: a bad draft, never a wrong output."""
        return tokens if self.drafter >= self.target else tokens.clamp(max=self.drafter - 1)


def check_same_vocabulary(name: str, tokenizer: PreTrainedTokenizerBase | None, width: int, target: Target) -> None:
    """Refuse a drafter whose token ids mean other text than the target's.

    Args:
        name: The drafter's name, for the message.
        tokenizer: Its tokenizer. If it has none, only the widths can be compared.
        width: The width of its logits.
        target: The target.

    Raises:
        ValueError: Names both models and the first difference.
    """
    if tokenizer is not None and target.tokenizer is not None:
        mine, wanted = tokenizer.get_vocab(), target.tokenizer.get_vocab()
        if mine != wanted:
            differing = sorted(token for token in mine.keys() | wanted.keys() if mine.get(token) != wanted.get(token))
            token = differing[0]
            raise ValueError(
                f"the drafter {name} has another vocabulary than the target {target.name}: {len(differing)} "
                f"tokens differ, for example {token!r} is {mine.get(token)} in the drafter's and {wanted.get(token)} "
                f"in the target's; choose a drafter of the target's family"
            )
        return
    if abs(width - target.vocab_size) > MOST_PADDING:
        raise ValueError(
            f"the drafter {name} has {width} tokens and the target {target.name} {target.vocab_size}: "
            f"choose a drafter with the target's vocabulary"
        )

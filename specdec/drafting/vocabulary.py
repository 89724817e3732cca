"""Compares a drafter's vocabulary with the target's, and translates ids where only the widths differ."""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.target.target import Target

MOST_PADDING = 512  # a larger gap between two widths is another vocabulary


class VocabularyMap:
    """Translates between the columns of a drafter's logits and the target's token ids.

    The widths of their logits may differ by padding. A drafter with a reduced vocabulary (EAGLE-3, arXiv 2503.01840;
    FR-Spec, arXiv 2502.14856) gives the target's ``ids`` of its columns, ascending. Other tokens have probability zero
    under q, which is exact: the residual covers them. ``common`` columns are tokens of the target.
    """

    def __init__(self, drafter: int, target: int, ids: Int[Tensor, " column"] | None = None):
        self.drafter, self.target, self.ids = drafter, target, ids
        self.common = min(drafter, target) if ids is None else len(ids)

    def to_drafter(self, tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Return the columns of tokens. A token without one gets another's: a bad draft, never a wrong output."""
        if self.ids is not None:
            return torch.searchsorted(self.ids, tokens.contiguous()).clamp_(max=self.common - 1)
        return tokens if self.drafter >= self.target else tokens.clamp(max=self.drafter - 1)

    def to_target(self, columns: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        return columns if self.ids is None else self.ids[columns]

    def columns(self, table: Shaped[Tensor, "*rows vocab"]) -> Shaped[Tensor, "*rows column"]:
        return table[..., : self.common] if self.ids is None else table.index_select(-1, self.ids)

    def put(
        self,
        room: Float[Tensor, "batch node vocab"],
        nodes: slice | Int[Tensor, " some"],
        q: Float[Tensor, "batch some token"],
    ) -> None:
        if self.ids is None:
            room[:, nodes, : self.common] = q
        elif isinstance(nodes, slice):
            room[:, nodes].index_copy_(2, self.ids, q.to(room.dtype).expand(-1, nodes.stop - nodes.start, -1))
        else:
            room[:, nodes[:, None], self.ids] = q.to(room.dtype)


def check_same_vocabulary(name: str, tokenizer: PreTrainedTokenizerBase | None, width: int, target: Target) -> None:
    """Refuse a drafter, by its name, whose token ids mean other text; without two tokenizers by its width alone."""
    other, differing = target.vocab_size, ""
    if tokenizer is not None and target.tokenizer is not None:
        mine, wanted = tokenizer.get_vocab(), target.tokenizer.get_vocab()
        tokens = sorted(token for token in mine.keys() | wanted.keys() if mine.get(token) != wanted.get(token))
        if not tokens:
            return
        width, other, example = len(mine), len(wanted), tokens[0]
        differing = f": {len(tokens):,} differ, as {example!r} ({mine.get(example)} and {wanted.get(example)})"
    elif abs(width - other) <= MOST_PADDING:
        return
    sizes = f"({width:,} tokens) than the target {target.name} ({other:,})"
    remedy = "choose a drafter of the target's family, or drafter=tli or slem"
    raise ValueError(f"the drafter {name} has another vocabulary {sizes}{differing}; {remedy}")

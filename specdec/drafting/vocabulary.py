"""A drafter's vocabulary beside the target's: the tokens that both have, and the translation of columns and ids."""

import logging
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
MOST_PADDING = 512  # without tokenizers, a larger gap between two widths is another vocabulary
MOST_RESPELLED = 0.01  # a larger share of the ids that two tokenizers have, with other spellings, is another vocabulary


Ids = Int[Tensor, " column"]
"""Tokens of the target, ascending."""


class VocabularyMap:
    """Translates between the columns of a drafter's logits and the target's token ids.

    ``ids``, ascending, are the tokens that may be drafted; None for all that both widths have. As many as there are
    columns belong to these (EAGLE-3, arXiv 2503.01840; FR-Spec, arXiv 2502.14856); otherwise column i is token i, and
    others than ``ids`` are ``absent``. What is not drafted has probability zero under q, which is exact: the residual
    covers it. The first ``common`` columns are tokens of the target.
    """

    def __init__(self, drafter: int, target: int, ids: Ids | None = None):
        self.target, self.ids, self.absent = target, None, None
        self.common = min(drafter, target) if ids is None else 1 + int(ids[-1])
        if ids is None or self.common == len(ids):  # column i is token i
            return
        if len(ids) == drafter:
            self.ids, self.common = ids, drafter
        else:
            rest = torch.ones(self.common, dtype=torch.bool, device=ids.device).index_fill(0, ids, False)
            self.absent = rest.byte().argsort(descending=True, stable=True)[: self.common - len(ids)]

    def to_drafter(self, tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Return the columns of tokens. A token without one gets another's: a bad draft, never a wrong output."""
        if self.ids is not None:
            return torch.searchsorted(self.ids, tokens.contiguous()).clamp_(max=self.common - 1)
        return tokens if self.common >= self.target else tokens.clamp(max=self.common - 1)

    def to_target(self, columns: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        return columns if self.ids is None else self.ids[columns]

    def columns(self, table: Shaped[Tensor, "*rows vocab"]) -> Shaped[Tensor, "*rows column"]:
        return table[..., : self.common] if self.ids is None else table.index_select(-1, self.ids)

    def present(self, table: Shaped[Tensor, "*rows column"], empty: float) -> Shaped[Tensor, "*rows token"]:
        """Return the columns that are tokens of the target, with ``empty`` in those of absent tokens."""
        table = table[..., : self.common]
        return table if self.absent is None else table.index_fill(-1, self.absent, empty)

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


def shared_tokens(name: str, tokenizer: PreTrainedTokenizerBase | None, width: int, target: Any) -> Ids | None:
    """Return the ids that a drafter and its target (its files say enough) spell alike; None for all below both widths.

    Another vocabulary is refused.
    """
    sizes, differing = (width, target.vocab_size), ""
    if tokenizer is not None and target.tokenizer is not None:
        vocabularies = tokenizer.get_vocab(), target.tokenizer.get_vocab()
        if vocabularies[0] == vocabularies[1]:
            return None
        mine, wanted = ({token: word for word, token in each.items()} for each in vocabularies)
        both = mine.keys() & wanted.keys()
        alike = {token for token in both if mine[token] == wanted[token]}
        if len(alike) >= (1 - MOST_RESPELLED) * len(both) > 0:
            ids = sorted(token for token in alike if token < min(sizes))
            said = "the drafter %s never drafts %d of the %d tokens of %s: it lacks them, or spells others there"
            logger.warning(said, name, len(wanted) - len(ids), len(wanted), target.name)
            return torch.tensor(ids, device=getattr(target, "device", None))
        sizes, example = (len(mine), len(wanted)), min(both - alike, default=0)
        differing = f": {len(both - alike):,} ids are spelled differently, as {example}: "
        differing += f"{mine.get(example)!r} and {wanted.get(example)!r}"
    elif abs(sizes[0] - sizes[1]) <= MOST_PADDING:
        return None
    raise ValueError(
        f"the drafter {name} has another vocabulary ({sizes[0]:,} tokens) than the target {target.name} "
        f"({sizes[1]:,}){differing}; choose a drafter of the target's family, or drafter=tli or slem"
    )

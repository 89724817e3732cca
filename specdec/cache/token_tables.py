"""Facts of every token of the vocabulary, slot by slot: which were seen, how often, what is added to them."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor

from specdec.requests import Request, SamplingParams
from specdec.types import Outcome

_forbids = lru_cache(maxsize=256)(lambda word: NoBadWordsLogitsProcessor([list(word)]))


def _biases(params: SamplingParams) -> dict[int, float]:
    return dict(params.logit_bias) | {word[0]: -torch.inf for word in params.bad_words_ids if len(word) == 1}


def processors_of(sampling: SamplingParams) -> tuple[Callable[..., Any], ...]:
    """Return a request's processors, after those that forbid its bad words of several tokens."""
    return (*(_forbids(word) for word in sampling.bad_words_ids if len(word) > 1), *sampling.processors)


def _needed(sampling: SamplingParams) -> set[str]:
    counts = sampling.presence_penalty or sampling.frequency_penalty
    uses = sampling.repetition_penalty != 1, counts, _biases(sampling), sampling.min_new_tokens
    return {name for name, used in zip(_KINDS, uses, strict=True) if used}


_KINDS: dict[str, tuple[torch.dtype, Callable[[Request], Mapping[int, float]]]] = {
    "seen": (torch.bool, lambda request: dict.fromkeys(request.tokens, 1)),
    "counts": (torch.int32, lambda request: Counter(request.output_ids)),
    "bias": (torch.float32, lambda request: _biases(request.sampling)),
    "ends": (torch.bool, lambda request: dict.fromkeys(request.stop_ids, 1)),
}  # the tables of ``SamplingTensors``: their type, and of a request the tokens for which it is not 0


class TokenTables:
    """The tables for all slots; ``by_name`` are those that a request needs now."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device):
        self._shape, self._device = (slots, vocab_size), device
        self.by_name, self._users = dict[str, Tensor](), Counter[str]()
        self._made: dict[str, Tensor] = {}  # where they stand, once a request needed them

    def admit(self, slot: int, request: Request) -> None:
        self._users.update(needed := _needed(request.sampling))
        for name in needed - self.by_name.keys():
            if name not in self._made:
                with torch.inference_mode(False):
                    self._made[name] = torch.zeros(self._shape, dtype=_KINDS[name][0], device=self._device)
            self.by_name[name] = self._made[name].zero_()
        for name, table in self.by_name.items():
            dtype, of = _KINDS[name]
            values = {token: value for token, value in of(request).items() if token < self._shape[1]}
            ids = torch.tensor([*values], dtype=torch.long, device=self._device)
            table[slot] = 0
            table[slot, ids] = torch.tensor([*values.values()], dtype=dtype, device=self._device)

    def release(self, request: Request | None) -> None:
        """Drop the tables that only this request needed."""
        if request is not None and (needed := _needed(request.sampling)):
            self._users.subtract(needed)
            self.by_name = {name: table for name, table in self.by_name.items() if self._users[name]}

    def advance(self, rows: Mapping[str, Tensor], roots: Tensor, outcome: Outcome, *, copied: bool) -> None:
        """Note in some rows' tables, which may be copies, that a round has ended behind their roots."""
        root, emitted = outcome.next_tokens[:, None], outcome.counts[:, None]
        if (seen := rows.get("seen")) is not None:  # where nothing was decided, next tokens are roots
            tokens = outcome.tokens.where(emitted > 0, roots[:, None])
            seen.scatter_(1, torch.cat([tokens, root], dim=1), True)
        if (counts := rows.get("counts")) is not None:  # the old root has been counted
            place = torch.arange(outcome.tokens.shape[1], device=root.device)
            counts.scatter_add_(1, outcome.tokens, ((place > 0) & (place < emitted)).int())
            counts.scatter_add_(1, root, (emitted > 0).int())
        for name in rows.keys() & {"seen", "counts"} if copied else ():
            self.by_name[name][outcome.slots] = rows[name]

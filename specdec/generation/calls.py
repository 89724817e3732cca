"""Reads what ``generate`` passes to a decoding loop besides the processors: the inputs, and where a row ends."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    Cache,
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    QuantizedCache,
    StoppingCriteria,
    StopStringCriteria,
)

from specdec.cache.base import CACHE
from specdec.generation.config import token_ids

# Arguments of the model's forward that `generate` itself adds, and that change no token.
_HARMLESS = frozenset(["use_cache", "logits_to_keep", "cache_position", "output_attentions", "output_hidden_states"])
_READ = frozenset(["attention_mask", "position_ids", CACHE])


def check_inputs(model: PreTrainedModel, config: GenerationConfig, kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs that would change the output or what is returned, and that this engine does not have.

    ``config`` and ``kwargs``, the arguments for the model's forward, are as ``generate`` prepared them.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(f"{model.config.model_type} is an encoder-decoder model; give a decoder-only causal LM")
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds are not supported: the engine starts from tokens, so pass input_ids")
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _HARMLESS | _READ]
    if unknown:
        raise ValueError(
            f"generate got {', '.join(sorted(unknown))} for the model's forward, which this engine does not pass on: "
            f"leave it out (for a tokenizer's token_type_ids: return_token_type_ids=False)"
        )
    cache = kwargs.get(CACHE)
    if isinstance(cache, QuantizedCache):
        raise ValueError("a quantized cache changes the output, and this engine keeps its own: leave it out")
    if isinstance(cache, Cache) and cache.get_seq_length() > 0:
        raise ValueError(
            f"{CACHE} holds {cache.get_seq_length()} tokens, and this engine keeps a cache of its own: "
            f"leave it out, and pass all tokens"
        )
    if config.return_dict_in_generate:
        wanted = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        missing = [name for name in wanted if getattr(config, name)]
        if missing:
            raise ValueError(f"{', '.join(missing)}: this engine returns sequences only; unset it")


def left_padding(input_ids: Int[Tensor, "batch position"], kwargs: Mapping[str, Any]) -> list[int]:
    """Return each row's number of padding tokens, all on its left.

    Refuses a mask with padding elsewhere, a row of nothing but padding, and positions that are not 0, 1, 2, … from each
    row's first token on.
    """
    rows, width = input_ids.shape
    mask = kwargs.get("attention_mask")
    if mask is None:
        pads = [0] * rows
    else:
        if tuple(mask.shape) != (rows, width):
            raise ValueError(f"the attention mask is {list(mask.shape)} for tokens {[rows, width]}: give one per token")
        kept = mask != 0
        for row in range(rows):
            if not kept[row].any():
                raise ValueError(f"row {row} of the attention mask is all zeros: give at least one token")
            if not kept[row, int(kept[row].int().argmax()) :].all():
                raise ValueError(
                    f"row {row} of the attention mask has zeros behind its first token: pad on the left "
                    f"(padding_side='left' for a tokenizer), and leave no holes"
                )
        pads = (~kept).sum(-1).tolist()
    positions = kwargs.get("position_ids")
    if positions is not None:
        for row, pad in enumerate(pads):
            # One row of positions may stand for all.
            given = positions[min(row, len(positions) - 1), ..., pad:].cpu()
            if given.shape != (width - pad,) or not torch.equal(given.long(), torch.arange(width - pad)):
                raise ValueError(
                    f"row {row} of position_ids is not 0, 1, 2, … from its first token on: this engine counts "
                    f"positions itself, so leave it out"
                )
    return pads


class Endings:
    """What ends the rows of one call of ``generate``.

    Stop strings are left to transformers' own criterion, which no longer needs a tokenizer once it is made. It also
    finds a string that begins in the prompt, where our engine's own search for stop strings does not look.

    Args:
        criteria: What ``generate`` prepared.
        stop_strings: Strings besides those of the criteria.
        tokenizer: Needed for ``stop_strings``.

    Attributes:
        max_length: The number of tokens of prompt and output together, padding included.
        eos_ids: Tokens that end a row.
        has_strings: Whether there are stop strings.
    """

    def __init__(
        self,
        criteria: Sequence[StoppingCriteria],
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
    ):
        # By exact type: a subclass may do something else.
        unknown = [
            type(c).__name__
            for c in criteria
            if type(c) not in (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)
        ]
        if unknown:
            raise ValueError(
                f"stopping criteria {', '.join(unknown)} are not supported: use max_new_tokens, EOS or stop_strings"
            )
        limits = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        if not limits:
            raise ValueError("generate has no length limit: pass max_new_tokens")
        self.max_length = min(limits)
        self.eos_ids = [t for c in criteria if isinstance(c, EosTokenCriteria) for t in token_ids(c.eos_token_id)]
        self._strings = [c for c in criteria if isinstance(c, StopStringCriteria)]
        if stop_strings:
            if tokenizer is None:
                raise ValueError(
                    f"stop_strings={stop_strings!r} need a tokenizer, and transformers does not pass its own argument "
                    f"on: make this SpeculativeGenerate(..., tokenizer=tokenizer)"
                )
            several = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
            self._strings.append(StopStringCriteria(tokenizer, several))
        self.has_strings = bool(self._strings)
        # A token of a stop string is at least one byte of it, so more tokens than this never matter.
        self._window = max((len(text.encode()) for c in self._strings for text in c.stop_strings), default=0)

    def cut(self, before: Sequence[int], tokens: Sequence[int]) -> int | None:
        """Return how many new tokens there are up to the end of a stop string; None if none ends in them.

        ``before`` is the row so far, padding and prompt included.
        """
        row = [*before[-self._window :], *tokens]
        for count in range(1, len(tokens) + 1):
            end = len(row) - len(tokens) + count
            seen = torch.tensor([row[max(0, end - self._window) : end]])
            # transformers asks for a LongTensor, which a tensor of integers is.
            if any(bool(criterion(seen, None)) for criterion in self._strings):  # pyright: ignore[reportArgumentType]
                return count
        return None

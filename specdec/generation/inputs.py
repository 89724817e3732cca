"""Reads what ``generate`` passes to a decoding loop besides the tokens, or refuses it by name."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel, QuantizedCache

# Arguments of the model's forward that `generate` itself adds, and that change no token.
_HARMLESS = frozenset(["use_cache", "logits_to_keep", "cache_position", "output_attentions", "output_hidden_states"])
_READ = frozenset(["attention_mask", "position_ids", "past_key_values"])


def check_inputs(model: PreTrainedModel, config: GenerationConfig, kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs that would change the output or what is returned, and that this engine does not have.

    Args:
        model: The target.
        config: As ``generate`` prepared it.
        kwargs: Arguments for the model's forward, as ``generate`` prepared them.

    Raises:
        ValueError: Names what is refused.
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
    cache = kwargs.get("past_key_values")
    if isinstance(cache, QuantizedCache):
        raise ValueError("a quantized cache changes the output, and this engine keeps its own: leave it out")
    if isinstance(cache, Cache) and cache.get_seq_length() > 0:
        raise ValueError(
            f"past_key_values holds {cache.get_seq_length()} tokens, and this engine keeps a cache of its own: "
            f"leave it out, and pass all tokens"
        )
    if config.return_dict_in_generate:
        wanted = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        missing = [name for name in wanted if getattr(config, name)]
        if missing:
            raise ValueError(f"{', '.join(missing)}: this engine returns sequences only; unset it")


def left_padding(input_ids: Int[Tensor, "batch position"], kwargs: Mapping[str, Any]) -> list[int]:
    """Returns each row's number of padding tokens, all on its left.

    Args:
        input_ids: The prompts.
        kwargs: The other inputs, with the attention mask and the positions if there are any.

    Raises:
        ValueError: The mask has padding elsewhere, a row has nothing but padding, or the positions are not 0, 1, 2, …
            from each row's first token on.
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

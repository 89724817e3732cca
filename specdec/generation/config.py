"""Translates transformers' ``GenerationConfig`` into ``SamplingParams``."""

import copy
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from specdec.arguments import instance
from specdec.generation.processors import Processor, sampling_fields
from specdec.requests import SamplingParams

# Fields that do not change which tokens come out of one sequence of plain sampling or greedy decoding.
_NO_EFFECT = frozenset(
    [
        "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "cache_config", "max_cache_len",
        "early_stopping", "length_penalty", "output_attentions", "output_hidden_states", "output_scores",
        "output_logits", "return_dict_in_generate", "transformers_version", "compile_config", "disable_compile",
        "prefill_chunk_size", "low_memory", "continuous_batching_config", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size",
        "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens", "use_mtp",
        "speculation_type",
    ]
)  # fmt: skip
_TRANSLATED = frozenset(
    [
        "do_sample", "temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
        "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens",
        "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens",
        "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits", "max_new_tokens",
        "max_length", "eos_token_id", "stop_strings", "num_return_sequences",
    ]
)  # fmt: skip
# The values that transformers gives to the other fields if they are None; with these they change nothing.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "guidance_scale": 1,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "token_healing": False,
    "is_assistant": False,
}
# Fields that change how `generate` decodes. All others reach a custom loop as processors or stopping criteria.
DECODING_FIELDS = (
    "num_beams", "num_beam_groups", "diversity_penalty", "constraints", "force_words_ids", "penalty_alpha",
    "dola_layers", "assistant_ensemble_weight", "is_assistant",
)  # fmt: skip
_FROM_THE_PROMPTS_END = (
    "min_new_tokens", "forced_eos_token_id", "exponential_decay_length_penalty", "begin_suppress_tokens",
)  # fmt: skip
_FOR_EOS = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")

DEFAULT_NEW_TOKENS = 20
DEFAULT_TOP_K = 50


def from_generation_config(
    config: GenerationConfig,
    *,
    prompt_length: int | None = None,
    seed: int | None = None,
    device: str | torch.device = "cpu",
) -> SamplingParams:
    """Return a generation config's parameters; fields left at None get transformers' defaults (sampling: top_k 50).

    The config's EOS tokens replace the target's, as in ``generate``; without any, the target's own EOS counts. Stop
    strings are looked for in the output only. (In transformers, one that begins in the prompt ends it, too.)

    Args:
        prompt_length: Number of tokens in the prompt, needed by some fields (``max_length``, ``min_new_tokens``, …).
        seed: Seed of the random numbers (transformers has none of its own).
        device: The target's device: some processors keep tensors there.

    Raises:
        ValueError: A field is set that this engine does not have, or needs another one that is missing. Nothing is
            ignored.
    """
    instance("config", config, GenerationConfig, "a GenerationConfig of transformers")
    check_fields(config)
    length = config.max_new_tokens
    if length is None and config.max_length is None:
        length = DEFAULT_NEW_TOKENS
    elif length is None:
        limit = config.max_length
        if prompt_length is None:
            raise ValueError(
                f"the generation config has max_length={limit} only: set max_new_tokens, or give prompt_length"
            )
        if limit <= prompt_length:
            raise ValueError(
                f"max_length={limit} leaves no token after a prompt of {prompt_length}: raise it, or set max_new_tokens"
            )
        length = limit - prompt_length
    eos = token_ids(config.eos_token_id)
    return SamplingParams(
        **sampling_fields(_processors(config, eos, length, prompt_length, device), sample=bool(config.do_sample)),
        max_new_tokens=length,
        stop=() if config.stop_strings is None else config.stop_strings,
        stop_token_ids=tuple(eos),
        ignore_eos=bool(eos),
        n=1 if config.num_return_sequences is None else config.num_return_sequences,
        seed=seed,
    )


def check_fields(config: GenerationConfig, names: Iterable[str] | None = None) -> None:
    """Refuse a config that asks for what this engine does not have.

    ``names`` are the fields to look at; by default all that are neither translated nor without effect.
    """
    fields = config.to_dict()
    looked_at = fields.keys() - _NO_EFFECT - _TRANSLATED if names is None else fields.keys() & set(names)
    wrong = {
        name: fields[name]
        for name in sorted(looked_at)
        if fields[name] is not None
        and not name.startswith("_")
        and not (name in _NEUTRAL and fields[name] == _NEUTRAL[name])
        # All other caches hold the same numbers, in other places.
        and not (name == "cache_implementation" and fields[name] != "quantized")
    }
    if wrong:
        raise ValueError(
            f"the generation config sets {', '.join(f'{k}={v!r}' for k, v in wrong.items())}, which this engine "
            f"does not have: unset it"
        )


def token_ids(ids: int | Iterable[int] | Tensor | None) -> list[int]:
    """Return token ids in any form that transformers takes (None, one, several, a tensor) as a list."""
    return [] if ids is None else torch.as_tensor(ids, dtype=torch.long).flatten().tolist()


def _processors(
    config: GenerationConfig, eos: list[int], length: int, prompt_length: int | None, device: str | torch.device
) -> Sequence[Processor]:
    """Return the logits processors that ``generate`` makes from a config: its own function makes them."""
    for name in dict.fromkeys([*_FROM_THE_PROMPTS_END, *_FOR_EOS]):
        value = getattr(config, name)
        if value is None or (name.startswith("min_") and value <= 0):
            continue
        if name in _FROM_THE_PROMPTS_END and prompt_length is None:
            raise ValueError(
                f"the generation config sets {name}={value!r}, which counts from the prompt's end: give prompt_length"
            )
        if name in _FOR_EOS and not eos:
            raise ValueError(
                f"the generation config sets {name}={value!r}, but no eos_token_id to apply it to: set eos_token_id"
            )
    # What `generate` settles before it makes them.
    settled = copy.deepcopy(config)
    prompt = 1 if prompt_length is None else prompt_length
    settled.max_length = prompt + length
    if config.min_new_tokens is not None:
        settled.min_length = prompt + config.min_new_tokens if config.min_new_tokens > 0 else 0
    settled.top_k = DEFAULT_TOP_K if config.top_k is None else config.top_k
    settled._eos_token_tensor = torch.tensor(eos, device=device) if eos else None
    maker: Any = GenerationMixin()
    maker.config = SimpleNamespace(is_encoder_decoder=False)
    return maker._get_logits_processor(settled, input_ids_seq_length=prompt, device=str(device))

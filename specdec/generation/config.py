"""Translates transformers' ``GenerationConfig`` into ``SamplingParams``."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specdec.arguments import instance
from specdec.generation.processors import sampling_fields
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

DEFAULT_NEW_TOKENS = 20
DEFAULT_TOP_K = 50


def from_generation_config(
    config: GenerationConfig,
    *,
    prompt_length: int | None = None,
    seed: int | None = None,
    device: str | torch.device = "cpu",
) -> SamplingParams:
    """Returns a generation config's parameters; fields left at None get transformers' defaults (sampling: top_k 50).

    The config's EOS tokens replace the target's, as in ``generate``; without any, the target's own EOS counts.
    Stop strings are looked for in the output only. (In transformers, one that begins in the prompt ends it, too.)

    Args:
        config: As ``model.generate`` takes it.
        prompt_length: Number of tokens in the prompt, needed by some fields (``max_length``, ``min_new_tokens``, …).
        seed: Seed of the random numbers (transformers has none of its own).
        device: The target's device: some processors keep tensors there.

    Raises:
        ValueError: A field is set that this engine does not have (beam search, watermarks, …), or a field needs
            another one that is missing. Nothing is ignored.
    """
    instance("config", config, GenerationConfig, "a GenerationConfig of transformers")
    check_fields(config)
    sample = bool(config.do_sample)
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
    processors = _Builder(config, eos, length, prompt_length, device).processors(sample=sample)
    return SamplingParams(
        **sampling_fields(processors, sample=sample),
        max_new_tokens=length,
        stop=() if config.stop_strings is None else config.stop_strings,
        stop_token_ids=tuple(eos),
        ignore_eos=bool(eos),
        n=1 if config.num_return_sequences is None else config.num_return_sequences,
        seed=seed,
    )


def check_fields(config: GenerationConfig, names: Iterable[str] | None = None) -> None:
    """Refuse a config that asks for what this engine does not have.

    Args:
        config: The config.
        names: Fields to look at; default: all that are neither translated nor without effect.

    Raises:
        ValueError: A field is set to something other than None and transformers' own default.
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
    """Returns token ids in any form that transformers takes (None, one, several, a tensor) as a list."""
    return [] if ids is None else torch.as_tensor(ids, dtype=torch.long).flatten().tolist()


class _Builder:
    """Makes the logits processors that ``generate`` makes from a config, in its order.

    transformers does this in ``GenerationMixin._get_logits_processor``. Its methods need a model, so the list is
    written out here, and a test compares the two.
    """

    def __init__(
        self,
        config: GenerationConfig,
        eos: list[int],
        max_new_tokens: int,
        prompt_length: int | None,
        device: str | torch.device,
    ):
        self.config, self.eos, self.max_new_tokens = config, eos, max_new_tokens
        self._prompt_length, self.device = prompt_length, str(device)

    def processors(self, *, sample: bool) -> list[Callable[..., Any]]:
        """Returns all processors; those for sampling only if ``sample``."""
        made = [*self._adjustments(), *self._lengths(), *self._suppressions()]
        if sample:
            made += self._filters()
        if self.config.renormalize_logits:
            made.append(LogitNormalization())
        return made

    def _adjustments(self) -> list[Callable[..., Any]]:
        """Returns bias, penalties and bans."""
        config, made = self.config, []
        if config.sequence_bias is not None:
            made.append(SequenceBiasLogitsProcessor(config.sequence_bias))
        if config.repetition_penalty not in (None, 1.0):
            made.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        if config.no_repeat_ngram_size not in (None, 0):
            made.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
        if config.bad_words_ids is not None:
            made.append(NoBadWordsLogitsProcessor(config.bad_words_ids, self.eos or None))
        return made

    def _lengths(self) -> list[Callable[..., Any]]:
        """Returns the processors that look at how many tokens there are."""
        config, made = self.config, []
        min_length = config.min_length or 0
        if config.min_new_tokens is not None:  # it replaces min_length
            min_length = config.min_new_tokens + self._prompt("min_new_tokens") if config.min_new_tokens > 0 else 0
        if min_length > 0:
            name = "min_length" if config.min_new_tokens is None else "min_new_tokens"
            made.append(MinLengthLogitsProcessor(min_length, self._eos(name), device=self.device))
        if config.min_new_tokens:
            prompt = self._prompt("min_new_tokens")
            eos = self._eos("min_new_tokens")
            made.append(MinNewTokensLengthLogitsProcessor(prompt, config.min_new_tokens, eos, device=self.device))
        if config.forced_bos_token_id is not None:
            made.append(ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
        if config.forced_eos_token_id is not None:
            length = self._prompt("forced_eos_token_id") + self.max_new_tokens
            made.append(ForcedEOSTokenLogitsProcessor(length, config.forced_eos_token_id, device=self.device))
        if config.remove_invalid_values:
            made.append(InfNanRemoveLogitsProcessor())
        if config.exponential_decay_length_penalty is not None:
            name = "exponential_decay_length_penalty"
            made.append(
                ExponentialDecayLengthPenalty(
                    config.exponential_decay_length_penalty, self._eos(name), self._prompt(name)
                )
            )
        return made

    def _suppressions(self) -> list[Callable[..., Any]]:
        """Returns the processors that forbid tokens, everywhere or at the beginning."""
        config, made = self.config, []
        if config.suppress_tokens is not None:
            made.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=self.device))
        if config.begin_suppress_tokens is not None:
            begin = self._prompt("begin_suppress_tokens")
            begin += int(begin <= 1 and config.forced_bos_token_id is not None)
            made.append(SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin, device=self.device))
        return made

    def _filters(self) -> list[Callable[..., Any]]:
        """Returns what only sampling uses: temperature, and the choice of tokens to sample from."""
        config, made = self.config, []
        if config.temperature not in (None, 1.0):
            made.append(TemperatureLogitsWarper(config.temperature))
        if getattr(config, "top_h", None) is not None:
            made.append(TopHLogitsWarper(config.top_h))
        top_k = DEFAULT_TOP_K if config.top_k is None else config.top_k
        if top_k != 0:
            made.append(TopKLogitsWarper(top_k))
        if config.top_p is not None and config.top_p < 1:
            made.append(TopPLogitsWarper(config.top_p))
        if config.min_p is not None:
            made.append(MinPLogitsWarper(config.min_p))
        if config.typical_p is not None and config.typical_p < 1:
            made.append(TypicalLogitsWarper(config.typical_p))
        if config.epsilon_cutoff is not None and 0 < config.epsilon_cutoff < 1:
            made.append(EpsilonLogitsWarper(config.epsilon_cutoff))
        if config.eta_cutoff is not None and 0 < config.eta_cutoff < 1:
            made.append(EtaLogitsWarper(config.eta_cutoff, device=self.device))
        return made

    def _prompt(self, name: str) -> int:
        """Returns the prompt's length, for a field that needs it."""
        if self._prompt_length is None:
            raise ValueError(
                f"the generation config sets {name}={getattr(self.config, name)!r}, which counts from the prompt's "
                f"end: give prompt_length"
            )
        return self._prompt_length

    def _eos(self, name: str) -> list[int]:
        """Returns the EOS tokens, for a field that needs them."""
        if not self.eos:
            raise ValueError(
                f"the generation config sets {name}={getattr(self.config, name)!r}, but no eos_token_id to apply it "
                f"to: set eos_token_id"
            )
        return self.eos

"""Translates transformers' ``GenerationConfig`` and its logits processors into ``SamplingParams``.

``generate`` calls its processors once per step with all rows, padding included; our engine calls one for one row at a
time, at the nodes of its draft tree, without padding (``specdec.engine.processors``). Some are built into the engine.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import transformers.generation.logits_process as transformers_processors
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from specdec.arguments import instance
from specdec.requests import SamplingParams
from specdec.target.target import Target

Processor = Callable[..., Any]

_KNOWN = frozenset([
    "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "cache_config", "max_cache_len",
    "early_stopping", "length_penalty", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "transformers_version", "compile_config", "disable_compile", "prefill_chunk_size",
    "low_memory", "continuous_batching_config", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "prompt_lookup_num_tokens", "use_mtp", "speculation_type", "do_sample", "temperature", "top_h",
    "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "exponential_decay_length_penalty",
    "remove_invalid_values", "renormalize_logits", "max_new_tokens", "max_length", "eos_token_id", "stop_strings",
    "num_return_sequences",
])  # fmt: skip
"""Fields without effect on the tokens of one sequence of plain sampling or greedy decoding, and those translated."""
# The values that transformers gives to the other fields if they are None; with these they change nothing.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "guidance_scale": 1,
    "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "token_healing": False, "is_assistant": False,
}  # fmt: skip
# Fields that change how `generate` decodes. All others reach a custom loop as processors or stopping criteria.
DECODING_FIELDS = (
    "num_beams", "num_beam_groups", "diversity_penalty", "constraints", "force_words_ids", "penalty_alpha",
    "dola_layers", "assistant_ensemble_weight", "is_assistant",
)  # fmt: skip
_FOR_EOS = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")
_FROM_THE_PROMPTS_END = (*_FOR_EOS[1:], "forced_eos_token_id", "begin_suppress_tokens")
DEFAULT_NEW_TOKENS, DEFAULT_TOP_K = 20, 50

# The processors that our engine has built in: the field, and the processor's attribute with its value.
_BUILT_IN: dict[type, tuple[str, str]] = {
    transformers_processors.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    transformers_processors.TemperatureLogitsWarper: ("temperature", "temperature"),
    transformers_processors.TopKLogitsWarper: ("top_k", "top_k"),
    transformers_processors.TopPLogitsWarper: ("top_p", "top_p"),
    transformers_processors.MinPLogitsWarper: ("min_p", "min_p"),
}
# The order in which our engine applies them; "others" is where it runs the processors that it is given.
_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_ORDER = ("logit_bias", "repetition_penalty", "bad_words_ids", "others", "min_new_tokens", *_FILTERS)
# Of processors that forbid ends: attributes whose sum is a length, of which the first counts padding, too.
_LENGTHS: dict[type, tuple[str, ...]] = {
    transformers_processors.MinLengthLogitsProcessor: ("min_length",),
    transformers_processors.MinNewTokensLengthLogitsProcessor: ("prompt_length_to_skip", "min_new_tokens"),
}
# Processors that are no function of tokens and scores, so that they cannot run at the nodes of a tree.
_REFUSED: dict[type, str] = {
    transformers_processors.UnbatchedClassifierFreeGuidanceLogitsProcessor: "runs the model itself at each step",
    transformers_processors.ClassifierFreeGuidanceLogitsProcessor: "needs a second, unconditional row for each row",
    transformers_processors.SynthIDTextWatermarkLogitsProcessor: "keeps a state from step to step",
}


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
        ValueError: A field is set that this engine does not have, or needs another one. Nothing is ignored.
    """
    instance("config", config, GenerationConfig, "a GenerationConfig of transformers")
    check_fields(config)
    length, limit = config.max_new_tokens, config.max_length
    if length is None and limit is not None:
        if prompt_length is None or limit <= prompt_length:
            behind = "" if prompt_length is None else f" and leaves no token after a prompt of {prompt_length}"
            raise ValueError(f"max_length={limit} stands alone{behind}: set max_new_tokens, or give prompt_length")
        length = limit - prompt_length
    length = DEFAULT_NEW_TOKENS if length is None else length
    eos = token_ids(config.eos_token_id)
    processors = _processors(config, eos, length, prompt_length, device)
    prompt = prompt_length if config.stop_strings is None else None  # in transformers, early stop strings count
    return SamplingParams(
        **sampling_fields(processors, sample=bool(config.do_sample), prompt=prompt, ends=eos, most=length),
        max_new_tokens=length,
        stop=() if config.stop_strings is None else config.stop_strings,
        stop_token_ids=tuple(eos),
        ignore_eos=bool(eos),
        n=1 if config.num_return_sequences is None else config.num_return_sequences,
        seed=seed,
    )


def from_model(target: Target, *, prompt_length: int | None = None, **changes: Any) -> SamplingParams:
    """Return what ``generate`` applies by the files of a target's model, with changes; raises ValueError as above."""
    config = copy.deepcopy(target.model.generation_config) or GenerationConfig()
    config.max_new_tokens = changes.get("max_new_tokens", config.max_new_tokens)  # instead of a max_length
    return replace(from_generation_config(config, prompt_length=prompt_length, device=target.device), **changes)


def check_fields(config: GenerationConfig, names: Iterable[str] | None = None) -> None:
    """Refuse a config that asks, in any field or in those named, for what this engine does not have."""
    fields = config.to_dict()
    wrong = {
        name: fields[name]
        for name in sorted(fields.keys() - _KNOWN if names is None else fields.keys() & set(names))
        if fields[name] is not None
        and not name.startswith("_")
        and not (name in _NEUTRAL and fields[name] == _NEUTRAL[name])
        # All other caches hold the same numbers, in other places.
        and not (name == "cache_implementation" and fields[name] != "quantized")
    }
    if wrong:
        named = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        raise ValueError(f"the generation config sets {named}, which this engine does not have: unset it")


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
        sets = f"the generation config sets {name}={value!r}"
        if name in _FROM_THE_PROMPTS_END and prompt_length is None:
            raise ValueError(f"{sets}, which counts from the prompt's end: give prompt_length")
        if name in _FOR_EOS and not eos:
            raise ValueError(f"{sets}, but no eos_token_id to apply it to: set eos_token_id")
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


def sampling_fields(
    processors: Sequence[Processor], *, sample: bool, prompt: int | None = None, ends: Sequence[int] = (), most: int = 0
) -> dict[str, Any]:
    """Return fields of ``SamplingParams`` that do what these processors do, one after the other; greedy or ``sample``.

    Built-in parameters take their place if the list has our engine's order, each kind at most once: they are faster.
    One that forbids ends is replaced if it is for all ``ends`` of a row, behind so long a ``prompt`` and with at
    ``most`` so many new tokens.
    """
    fields: dict[str, Any] = {"temperature": 1.0 if sample else 0.0}
    found = [_built_in(processor, prompt, ends) for processor in processors]
    places = [_ORDER.index(name) for name, _ in found]
    least = [min(value, most) for name, value in found if name == "min_new_tokens"]  # of new tokens, and of all
    built_in = [name for name, _ in found if name not in ("others", "min_new_tokens")]
    filters_greedy = not sample and set(built_in) & set(_FILTERS)
    if filters_greedy or places != sorted(places) or len(built_in) != len(set(built_in)):
        return fields | {"logits_processor": tuple(processors)}
    others = tuple(each for each, (name, _) in zip(processors, found, strict=True) if name == "others")
    fields |= {name: value for name, value in found if name != "others"} | {"logits_processor": others or None}
    return fields | {"min_new_tokens": max(least)} if least else fields


def _built_in(processor: Any, prompt: int | None, ends: Sequence[int]) -> tuple[str, Any]:
    """Return the field and the value that replace a processor, or ("others", None)."""
    kind = type(processor)
    if kind in _LENGTHS and prompt is not None and {*token_ids(processor.eos_token_id)} == {*ends}:
        return "min_new_tokens", max(0, sum(getattr(processor, name) for name in _LENGTHS[kind]) - prompt)
    if kind is transformers_processors.NoBadWordsLogitsProcessor and processor.sequence_bias:
        return "bad_words_ids", tuple(processor.sequence_bias)
    if kind is transformers_processors.SequenceBiasLogitsProcessor:
        values = {ids[0]: bias for ids, bias in processor.sequence_bias.items() if len(ids) == 1 and abs(bias) <= 100}
        return ("logit_bias", values) if len(values) == len(processor.sequence_bias) else ("others", None)
    name, attribute = _BUILT_IN.get(kind, ("others", ""))
    value = getattr(processor, attribute, None)
    replaceable = (
        getattr(processor, "prompt_ignore_length", None) is None
        and getattr(processor, "filter_value", -torch.inf) == -torch.inf
        and (name == "top_k" or getattr(processor, "min_tokens_to_keep", 1) == 1)  # top_k has it in its value
        and not (name == "top_p" and value == 0)  # transformers keeps one token then
    )
    return (name, value) if replaceable and attribute else ("others", None)


def for_row(processor: Any, row: int, rows: int, padding: Int[Tensor, " position"]) -> Processor:
    """Return a processor that does for one row, given without padding, what this one does for it in its batch.

    ``row`` counts samples of a prompt as rows, and ``padding`` is on its left. Refuses what is no function of tokens
    and scores, and what is for another number of rows.
    """

    def prompt_of(prompts: int) -> int:
        return row // max(1, rows // prompts)

    for kind, reason in _REFUSED.items():
        if isinstance(processor, kind):
            raise ValueError(f"{type(processor).__name__} {reason}: leave it out, the nodes of a tree do not allow it")
    if type(processor) in _LENGTHS:
        made, (name, *_) = copy.copy(processor), _LENGTHS[type(processor)]
        setattr(made, name, max(0, getattr(made, name) - len(padding)))
        return made
    if isinstance(processor, transformers_processors.RepetitionPenaltyLogitsProcessor):
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            if len(ignored) != rows:
                raise ValueError(
                    f"the repetition penalty has prompt_ignore_length for {len(ignored)} rows, and the batch has "
                    f"{rows}: give one length per row"
                )
            processor = copy.copy(processor)
            # `generate` penalizes the prompt, too, but not its padding. Our rows have no padding.
            processor.prompt_ignore_length = None if ignored[row] == len(padding) else int(ignored[row])
            if processor.prompt_ignore_length is None:
                return processor
    elif isinstance(processor, transformers_processors.PrefixConstrainedLogitsProcessor):
        # Since transformers 5.24 the samples of a prompt count as its beams.
        allowed, number = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        processor = type(processor)(lambda _, tokens: allowed(number, tokens), num_beams=1)
    elif isinstance(processor, transformers_processors.EncoderRepetitionPenaltyLogitsProcessor):
        given: Any = copy.copy(processor)
        prompt = prompt_of(len(given.encoder_input_ids))

        def penalized(input_ids: Tensor, scores: Tensor, tokens: Tensor = given.encoder_input_ids[prompt]) -> Tensor:
            given.encoder_input_ids = tokens.expand(len(scores), -1)
            return given(input_ids, scores)

        processor = penalized
    elif isinstance(processor, transformers_processors.EncoderNoRepeatNGramLogitsProcessor):
        prompt, processor = prompt_of(processor.batch_size), copy.copy(processor)
        processor.generated_ngrams, processor.batch_size = [processor.generated_ngrams[prompt]], 1
    if not len(padding):
        return processor

    def padded(input_ids: Tensor, scores: Tensor) -> Tensor:
        before = padding.to(input_ids.device).expand(len(input_ids), -1)
        return processor(torch.cat([before, input_ids], dim=1), scores)  # pyright: ignore[reportArgumentType]

    return padded

"""For users of transformers: its ``GenerationConfig`` as our parameters, and our engine inside its ``generate``.

``model.generate(**inputs, custom_generate=SpeculativeGenerate(drafter, verifier))`` runs transformers' own preparation
of inputs, processors and stopping criteria, then our loop in place of its own.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.modeling.target import Target
from specdec.requests import SamplingParams

# Fields that do not change which tokens come out of one sequence of plain sampling or greedy decoding.
_NO_EFFECT = frozenset(
    [
        "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "cache_implementation", "cache_config",
        "max_cache_len", "early_stopping", "length_penalty", "output_attentions", "output_hidden_states",
        "output_scores", "output_logits", "return_dict_in_generate", "transformers_version", "compile_config",
        "disable_compile", "prefill_chunk_size", "low_memory", "continuous_batching_config", "num_assistant_tokens",
        "is_assistant", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size",
        "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "remove_invalid_values",
        "assistant_ensemble_weight", "speculation_type", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    ]
)  # fmt: skip
_TRANSLATED = frozenset(
    [
        "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "max_length",
        "eos_token_id", "stop_strings", "num_return_sequences", "no_repeat_ngram_size", "bad_words_ids",
        "sequence_bias", "suppress_tokens",
    ]
)  # fmt: skip


def from_generation_config(
    config: GenerationConfig, *, prompt_length: int | None = None, seed: int | None = None
) -> SamplingParams:
    """Translate a generation config; fields left at None get transformers' defaults (top_k is 50 when sampling).

    Args:
        config: As ``model.generate`` takes it.
        prompt_length: Tokens of the prompt; needed where only ``max_length`` is set.
        seed: Of the random numbers (transformers has none of its own).

    Raises:
        ValueError: A field is set that this engine does not have (beam search, watermarks, …). Nothing is ignored.
    """
    unsupported = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in _NO_EFFECT | _TRANSLATED and not name.startswith("_") and value not in (None, False, 0, 1, 1.0)
    }
    if unsupported:
        raise ValueError(
            f"the generation config sets {', '.join(f'{k}={v!r}' for k, v in unsupported.items())}, which this engine "
            f"does not have: unset it, or pass a logits_processor that does it"
        )
    length = config.max_new_tokens
    if length is None:
        limit = config.max_length or 20
        if prompt_length is None:
            raise ValueError(
                f"the generation config has max_length={limit} only: set max_new_tokens, or give prompt_length"
            )
        length = limit - prompt_length
    processors: list[Callable[..., Tensor]] = []
    if config.sequence_bias:
        processors.append(SequenceBiasLogitsProcessor(config.sequence_bias))
    if config.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    eos = config.eos_token_id
    stop_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if config.bad_words_ids:
        processors.append(NoBadWordsLogitsProcessor(config.bad_words_ids, stop_ids or None))
    if config.suppress_tokens:
        processors.append(SuppressTokensLogitsProcessor(config.suppress_tokens))
    sample = bool(config.do_sample)

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    return SamplingParams(
        temperature=given(config.temperature, 1.0) if sample else 0.0,
        top_k=given(config.top_k, 50) if sample else 0,
        top_p=given(config.top_p, 1.0) if sample else 1.0,
        min_p=given(config.min_p, 0.0) if sample else 0.0,
        repetition_penalty=given(config.repetition_penalty, 1.0),
        max_new_tokens=length,
        stop=tuple([config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or ()),
        stop_token_ids=tuple(stop_ids),
        n=given(config.num_return_sequences, 1),
        seed=seed,
        logits_processor=processors or None,
    )


class SpeculativeGenerate:
    """A callable for ``model.generate(..., custom_generate=…)``: any drafter and verifier on a transformers model.

    Sampling draws its seed from torch's global generator, so ``torch.manual_seed`` repeats an output.
    Processors that this engine has itself (temperature, top-k, top-p, min-p, repetition penalty) run at full speed;
    all others run at every node (``specdec.engine.processors``).

    transformers does not hand ``streamer`` to a callable (as of 5.23 it drops every argument of ``generate`` that the
    callable's signature does not add). Arguments with names of our own do arrive: pass ``on_tokens=streamer.put``
    (called with an Int[position] tensor of each round's new tokens; batch size 1).

    Args:
        drafter: None decodes plainly.
        verifier: The acceptance rule; needed with a drafter.
        tokenizer: Needed for ``stop_strings``.
        max_batch_size: Rows that decode together; default: all of the call's.
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        *,
        tokenizer: Any = None,
        max_batch_size: int | None = None,
    ):
        self.drafter, self.verifier = drafter, verifier
        self.tokenizer = tokenizer
        self.max_batch_size = max_batch_size
        self._engine: Engine | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch position"],
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        on_tokens: Callable[[Tensor], None] | None = None,
        **model_kwargs: Any,
    ) -> Int[Tensor, "batch length"]:
        """What ``generate`` calls; returns prompts and outputs, padded at the end, as its own loop does."""
        assert generation_config is not None
        limit = _check_criteria(stopping_criteria or StoppingCriteriaList())
        mask = model_kwargs.get("attention_mask")
        pads = [0] * len(input_ids) if mask is None else (mask == 0).sum(-1).tolist()
        if on_tokens is not None and len(input_ids) != 1:
            raise ValueError(
                f"on_tokens follows one sequence, and the batch has {len(input_ids)}: call generate once per prompt"
            )
        seed = int(torch.randint(2**62, (), dtype=torch.long))
        prompts = [row[pad:].tolist() for row, pad in zip(input_ids, pads, strict=True)]
        sampling = [
            self._sampling(generation_config, logits_processor or [], limit - input_ids.shape[1], row[:pad], seed)
            for row, pad in zip(input_ids, pads, strict=True)
        ]
        engine = self._engine_for(model, rows=len(prompts), length=limit)
        if on_tokens is None:
            outputs = [list(completion.token_ids) for completion in engine.generate(prompts, sampling)]
        else:
            outputs = [[]]
            for step in engine.stream(prompts, sampling):
                outputs[0] += step.token_ids
                on_tokens(torch.tensor(step.token_ids))
        fill = generation_config.pad_token_id
        width = max(len(output) for output in outputs)
        rows = [output + [fill if fill is not None else 0] * (width - len(output)) for output in outputs]
        return torch.cat([input_ids, torch.tensor(rows, device=input_ids.device, dtype=input_ids.dtype)], dim=1)

    def _sampling(
        self, config: GenerationConfig, processors: list[Any], length: int, padding: Tensor, seed: int
    ) -> SamplingParams:
        """One row's parameters from the processors that transformers prepared."""
        stop = config.stop_strings
        common: dict[str, Any] = {
            "max_new_tokens": length,
            "stop": tuple([stop] if isinstance(stop, str) else stop or ()),
            "stop_token_ids": tuple(_ids(config.eos_token_id)),
            "ignore_eos": True,  # the config's EOS counts, and only that
            "seed": seed,
        }
        native, others = _split(processors)
        if native is None or (others and not config.do_sample and native.keys() - {"repetition_penalty"}):
            native, others = {"temperature": 1.0 if config.do_sample else 0.0}, processors
        elif not config.do_sample:
            native["temperature"] = 0.0
        others = [_for_one_row(processor, padding) for processor in others]
        common.update(native)
        return SamplingParams(**common, logits_processor=tuple(others) or None)

    def _engine_for(self, model: PreTrainedModel, *, rows: int, length: int) -> Engine:
        """An engine for this model with room for the call; kept for the next one."""
        engine = self._engine
        batch = self.max_batch_size or rows
        fits = engine is not None and engine.max_batch_size >= batch and engine.max_length >= length
        if engine is None or engine.target.model is not model or not fits:
            self._engine = None  # frees the cache before the next one is allocated
            target = Target(model, self.tokenizer)
            self._engine = engine = Engine(target, self.drafter, self.verifier, max_batch_size=batch, max_length=length)
        return engine


_NATIVE: dict[type, tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
_ORDER = list(_NATIVE)


def _split(processors: list[Any]) -> tuple[dict[str, Any] | None, list[Any]]:
    """Our parameters for the processors that we have, and the others between penalty and temperature.

    None in place of the parameters if the order is another than ours; then all must run as they are.
    """
    native: dict[str, Any] = {"temperature": 1.0}
    others: list[Any] = []
    stage = 0
    for processor in processors:
        kind = type(processor)
        if kind in _NATIVE and (kind is not RepetitionPenaltyLogitsProcessor or _ignores_padding(processor)):
            position = 0 if kind is RepetitionPenaltyLogitsProcessor else 2 + _ORDER.index(kind)
            name, attribute = _NATIVE[kind]
            native[name] = getattr(processor, attribute)
        else:
            position = 1
            others.append(processor)
        if position < stage:
            return None, processors
        stage = position
    return native, others


def _for_one_row(processor: Callable[..., Tensor], padding: Tensor) -> Callable[..., Tensor]:
    """A processor that sees the left padding of its row, as in transformers' own loop."""
    if _ignores_padding(processor):
        return RepetitionPenaltyLogitsProcessor(processor.penalty)  # our rows have none
    if not len(padding):
        return processor

    def with_padding(input_ids: Tensor, scores: Tensor) -> Tensor:
        return processor(torch.cat([padding.expand(len(input_ids), -1), input_ids], dim=1), scores)

    return with_padding


def _ignores_padding(processor: Any) -> TypeGuard[RepetitionPenaltyLogitsProcessor]:
    """Whether this is a repetition penalty as ``generate`` makes it: of the prompt too, but not of its padding."""
    if type(processor) is not RepetitionPenaltyLogitsProcessor:
        return False
    return not isinstance(getattr(processor, "prompt_ignore_length", None), int)


def _check_criteria(criteria: StoppingCriteriaList) -> int:
    """The length limit (prompt included); refuses criteria that this engine does not have."""
    unknown = [
        type(c).__name__
        for c in criteria
        if not isinstance(c, MaxLengthCriteria | EosTokenCriteria | StopStringCriteria)
    ]
    if unknown:
        raise ValueError(
            f"stopping criteria {', '.join(unknown)} are not supported: use max_new_tokens, EOS or stop_strings"
        )
    limits = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    if not limits:
        raise ValueError("generate has no length limit: pass max_new_tokens")
    return min(limits)


def _ids(eos: int | list[int] | Tensor | None) -> list[int]:
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else [int(token) for token in eos]

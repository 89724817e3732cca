"""Translates transformers' logits processors into fields of ``SamplingParams``.

``generate`` calls its processors once per step with all rows, padding included; our engine calls one for one row at a
time, at the nodes of its draft tree, without padding (``specdec.engine.processors``). Some are built into the engine.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    ClassifierFreeGuidanceLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

Processor = Callable[..., Any]

# The processors that our engine has built in: the field, and the processor's attribute with its value.
_BUILT_IN: dict[type, tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
# The order in which our engine applies them; "others" is where it runs the processors that it is given.
_ORDER = ("repetition_penalty", "others", "temperature", "top_k", "top_p", "min_p")

# Processors that are no function of tokens and scores, so that they cannot run at the nodes of a tree.
_REFUSED: dict[type, str] = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "runs the model itself at each step (guidance_scale)",
    ClassifierFreeGuidanceLogitsProcessor: "needs a second, unconditional row for each row",
    SynthIDTextWatermarkLogitsProcessor: "keeps a state from step to step",
}


def sampling_fields(processors: Sequence[Processor], *, sample: bool) -> dict[str, Any]:
    """Return fields of ``SamplingParams`` that do what these processors do, one after the other.

    The built-in parameters take the place of processors if the list has our engine's order, each kind at most once.
    Otherwise all processors run as they are, which is slower. ``processors`` are what ``generate`` would apply to a row
    without padding; without ``sample`` the most probable token is taken.
    """
    temperature = 1.0 if sample else 0.0
    fields: dict[str, Any] = {"temperature": temperature}
    others: list[Processor] = []
    place = -1
    for processor in processors:
        name, value = _built_in(processor)
        filters_greedy = not sample and name not in ("repetition_penalty", "others")
        next_place = _ORDER.index(name)
        if filters_greedy or next_place < place or (next_place == place and name != "others"):
            return {"temperature": temperature, "logits_processor": tuple(processors)}
        place = next_place
        if name == "others":
            others.append(processor)
        else:
            fields[name] = value
    return fields | {"logits_processor": tuple(others) or None}


def _built_in(processor: Processor) -> tuple[str, Any]:
    """Return the field and the value that replace a processor, or ("others", None)."""
    if type(processor) not in _BUILT_IN:
        return "others", None
    name, attribute = _BUILT_IN[type(processor)]
    value = getattr(processor, attribute)
    replaceable = (
        getattr(processor, "prompt_ignore_length", None) is None
        and getattr(processor, "filter_value", -torch.inf) == -torch.inf
        and (name == "top_k" or getattr(processor, "min_tokens_to_keep", 1) == 1)  # top_k has it in its value
        and not (name == "top_p" and value == 0)  # transformers keeps one token then
    )
    return (name, value) if replaceable else ("others", None)


def check_processors(processors: Sequence[Processor]) -> None:
    """Refuse processors that are known to be no function of the tokens and scores that they are given."""
    for processor in processors:
        for kind, reason in _REFUSED.items():
            if isinstance(processor, kind):
                raise ValueError(
                    f"{type(processor).__name__} {reason}, which the nodes of a draft tree do not allow: leave it out"
                )


def for_row(processor: Processor, row: int, rows: int, padding: Int[Tensor, " position"]) -> Processor:
    """Return a processor that does for one row, given without padding, what this one does for it in its batch.

    ``row`` counts as ``generate`` does: the samples of a prompt are rows of their own. ``padding`` stands on the row's
    left.
    """
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
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
    elif isinstance(processor, PrefixConstrainedLogitsProcessor):
        # Since transformers 5.24 the samples of a prompt count as its beams.
        allowed, number = processor._prefix_allowed_tokens_fn, row // processor._num_beams
        processor = PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed(number, tokens), num_beams=1)
    elif isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        processor = _encoder_penalty(processor, _prompt_of(row, rows, len(processor.encoder_input_ids)))
    elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        prompt = _prompt_of(row, rows, processor.batch_size)
        processor = copy.copy(processor)
        processor.generated_ngrams, processor.batch_size = [processor.generated_ngrams[prompt]], 1
    return _with_padding(processor, padding) if len(padding) else processor


def _prompt_of(row: int, rows: int, prompts: int) -> int:
    return row // max(1, rows // prompts)


def _encoder_penalty(given: EncoderRepetitionPenaltyLogitsProcessor, prompt: int) -> Processor:
    processor: Any = copy.copy(given)
    tokens = given.encoder_input_ids[prompt : prompt + 1]

    def penalized(input_ids: Tensor, scores: Tensor) -> Tensor:
        processor.encoder_input_ids = tokens.expand(len(scores), -1)
        return processor(input_ids, scores)

    return penalized


def _with_padding(processor: Processor, padding: Int[Tensor, " position"]) -> Processor:
    def padded(input_ids: Tensor, scores: Tensor) -> Tensor:
        before = padding.to(input_ids.device).expand(len(input_ids), -1)
        return processor(torch.cat([before, input_ids], dim=1), scores)

    return padded

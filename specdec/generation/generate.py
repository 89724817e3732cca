"""Our engine as the decoding loop of transformers' ``generate``.

``model.generate(**inputs, custom_generate=SpeculativeGenerate(drafter, verifier))`` runs transformers' own preparation
of inputs, processors and stopping criteria, then our loop in place of its own.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from specdec.arguments import whole
from specdec.engine.engine import Engine
from specdec.engine.parts import check_drafter, check_verifier
from specdec.generation.calls import Endings, check_inputs, left_padding
from specdec.generation.config import DECODING_FIELDS, check_fields, token_ids
from specdec.generation.processors import check_processors, for_row, sampling_fields
from specdec.interfaces import Drafter, Verifier
from specdec.requests import SamplingParams
from specdec.target.support import check_tokenizer
from specdec.target.target import Target
from specdec.types import Completion, Step


class SpeculativeGenerate:
    """A callable for ``model.generate(..., custom_generate=…)``: any drafter and verifier on a transformers model.

    Sampling draws its seed from torch's global generator, so ``torch.manual_seed`` repeats an output.
    Processors that this engine has built in (temperature, top-k, top-p, min-p, repetition penalty) run at full speed;
    all others run at every node (``specdec.engine.processors``), so they must depend on nothing but the tokens and
    scores of the row that they are given. What this engine does not have is refused with a ``ValueError``.

    ``generate(…, streamer=…)`` streams each round's tokens together. ``on_tokens=`` does the same with any function,
    which is called with an Int[position] tensor. Both follow a batch of one row.

    transformers (as of 5.23) keeps ``tokenizer`` from a callable: with ``stop_strings=``, give it here. Stop strings in
    a ``GenerationConfig`` do not work, because transformers then demands a tokenizer; pass ``stop_strings=`` to
    ``generate``, or a ``StopStringCriteria``.

    Args:
        drafter: None decodes plainly.
        verifier: The acceptance rule; needed with a drafter.
        tokenizer: Needed for ``stop_strings=``.
        max_batch_size: Rows that decode together; by default all rows of the call.

    Attributes:
        completions: What the last call decoded, one per row: its steps tell what every round did. The texts are empty
            without a tokenizer.
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        *,
        tokenizer: Any = None,
        max_batch_size: int | None = None,
    ):
        check_drafter(drafter)
        check_verifier(verifier)
        check_tokenizer(tokenizer)
        if max_batch_size is not None:
            whole("max_batch_size", max_batch_size, least=1)
        self.drafter, self.verifier = drafter, verifier
        self.tokenizer = tokenizer
        self.max_batch_size = max_batch_size
        self.completions: list[Completion] = []
        self._engine: Engine | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch position"],
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        on_tokens: Callable[[Tensor], object] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Int[Tensor, "batch length"] | GenerateDecoderOnlyOutput:
        """Return prompts and outputs, padded at the end, as ``generate``'s own loop does, which calls this.

        Raises:
            ValueError: The call asks for something that this engine does not have.
            RuntimeError: A row's logits were not finite.
        """
        assert generation_config is not None
        check_fields(generation_config, DECODING_FIELDS)
        check_inputs(model, generation_config, model_kwargs)
        if _argument_of_generate("assistant_model") is not None:
            raise ValueError("assistant_model is not used: this engine drafts with its own drafter, so leave it out")
        pads = left_padding(input_ids, model_kwargs)
        endings = Endings(stopping_criteria or [], stop_strings, self.tokenizer)
        rows, width = input_ids.shape
        streamer = streamer if streamer is not None else _argument_of_generate("streamer")
        for name, given in (("a streamer", streamer), ("on_tokens", on_tokens)):
            if rows != 1 and given is not None:
                raise ValueError(
                    f"{name} follows one sequence, and the batch has {rows}: call generate once per prompt"
                )
        if rows != 1 and endings.has_strings and not endings.eos_ids:
            raise ValueError(
                f"stop strings end the {rows} rows at different lengths, and transformers pads them only if there is "
                f"an EOS token: set eos_token_id, or call generate once per prompt"
            )
        processors = logits_processor or []
        check_processors(processors)
        common = {
            # transformers looks at its criteria after a token: there is always one.
            "max_new_tokens": max(1, endings.max_length - width),
            "stop_token_ids": endings.eos_ids,
            "ignore_eos": True,  # the criteria's EOS counts, and only that
            "seed": int(torch.randint(2**62, (), dtype=torch.long)),
        }
        sampling = []
        for row, pad in enumerate(pads):
            own = [for_row(processor, row, rows, input_ids[row, :pad]) for processor in processors]
            fields = sampling_fields(own, sample=bool(generation_config.do_sample))
            sampling.append(SamplingParams(**common, **fields, stream=row))
        listeners = [listen for listen in (on_tokens, getattr(streamer, "put", None)) if listen is not None]
        self.completions = self._decode(model, input_ids.tolist(), pads, sampling, endings, listeners)
        if streamer is not None:
            streamer.end()
        outputs = [list(completion.token_ids) for completion in self.completions]
        fill = [generation_config.pad_token_id, *token_ids(generation_config.eos_token_id), *endings.eos_ids, 0]
        pad_id = int(next(token for token in fill if token is not None))
        longest = max(len(output) for output in outputs)
        padded = [output + [pad_id] * (longest - len(output)) for output in outputs]
        new = torch.tensor(padded, device=input_ids.device)  # int64, and so is the result, as in transformers
        sequences = torch.cat([input_ids, new], dim=1)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences)  # pyright: ignore[reportArgumentType] (a LongTensor it is)

    def _decode(
        self,
        model: PreTrainedModel,
        padded: list[list[int]],
        pads: list[int],
        sampling: list[SamplingParams],
        endings: Endings,
        listeners: Sequence[Callable[[Tensor], object]],
    ) -> list[Completion]:
        """Return what each row decoded."""
        prompts = [row[pad:] for row, pad in zip(padded, pads, strict=True)]
        lengths = [len(prompt) + wanted.max_new_tokens for prompt, wanted in zip(prompts, sampling, strict=True)]
        engine = self._engine_for(model, rows=len(prompts), length=max(lengths))
        outputs: list[list[int]] = [[] for _ in prompts]
        steps: list[list[Step]] = [[] for _ in prompts]
        row_of: dict[int, int] = {}
        try:
            for row, (prompt, wanted) in enumerate(zip(prompts, sampling, strict=True)):
                row_of[engine.submit(prompt, wanted)] = row
            while engine.unfinished:
                for step in engine.step():
                    row = row_of[step.request]
                    if step.finish_reason == "error":
                        raise RuntimeError(f"row {row}: {step.error}")
                    tokens = list(step.token_ids)
                    cut = endings.cut(padded[row] + outputs[row], tokens) if endings.has_strings else None
                    if cut is not None:
                        tokens = tokens[:cut]
                        engine.abort(step.request)
                        step = replace(step.shortened(cut), finish_reason="stop")
                    outputs[row] += tokens
                    steps[row].append(step)
                    for listen in listeners:
                        listen(torch.tensor(tokens))
        finally:
            for request in row_of:  # those that have ended are ignored
                engine.abort(request)
        texts = [self.tokenizer.decode(each, skip_special_tokens=True) if self.tokenizer else "" for each in outputs]
        return [
            Completion(
                prompt_ids=tuple(prompt),
                token_ids=tuple(output),
                text=text,
                finish_reason=played[-1].finish_reason or "stop",
                steps=tuple(played),
            )
            for prompt, output, text, played in zip(prompts, outputs, texts, steps, strict=True)
        ]

    def _engine_for(self, model: PreTrainedModel, *, rows: int, length: int) -> Engine:
        """Returns an engine for this model with room for the call; it is kept for the next one.

        A conversation grows from call to call. So an engine that is only too short is replaced by one of twice its
        length, as far as the model has positions.
        """
        engine = self._engine
        batch = self.max_batch_size or rows
        target = Target(model, self.tokenizer)
        capacity = length
        if engine is not None and engine.target.model is model and engine.max_batch_size >= batch:
            if engine.max_length >= length:
                return engine
            capacity = max(length, min(2 * engine.max_length, target.max_length))
        self._engine = engine = None  # frees the cache before the next one is allocated
        # Room for later calls is not worth an error: the memory or the drafter's positions may not suffice for it.
        for room in (capacity, length):
            try:
                made = Engine(target, self.drafter, self.verifier, max_batch_size=batch, max_length=room)
                break
            except ValueError:
                if room == length:
                    raise
        self._engine = made
        return made


def _argument_of_generate(name: str) -> Any:
    """Returns an argument that the running ``generate`` was called with and does not pass on to a callable.

    It is a local variable of the function that calls ours. Of a ``streamer``, transformers hands it the prompt, and it
    would wait for an output that never comes; an ``assistant_model`` would be ignored in silence.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None

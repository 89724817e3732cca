"""Our engine as the decoding loop of transformers' ``generate``, behind its own preparation of inputs."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel, QuantizedCache
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria, StopStringCriteria

from specdec.arguments import whole
from specdec.cache.transformers_cache import CACHE
from specdec.engine.engine import Engine
from specdec.engine.parts import check_component
from specdec.generation.config import DECODING_FIELDS, check_fields, for_row, sampling_fields, token_ids
from specdec.interfaces import Drafter, Verifier
from specdec.requests import SamplingParams
from specdec.target.configuration import check_tokenizer
from specdec.target.target import Target
from specdec.types import Completion, Step

# Arguments of the model's forward that `generate` itself adds, and that change no token.
_HARMLESS = frozenset(["use_cache", "logits_to_keep", "cache_position", "output_attentions", "output_hidden_states"])
_READ = frozenset(["attention_mask", "position_ids", CACHE])


def check_inputs(model: PreTrainedModel, config: GenerationConfig, kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs that would change the output or what is returned, and that this engine does not have."""
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds are not supported: the engine starts from tokens, so pass input_ids")
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _HARMLESS | _READ]
    if unknown:
        raise ValueError(
            f"generate got {', '.join(sorted(unknown))} for the model's forward, which this engine does not pass on: "
            f"leave it out (for a tokenizer's token_type_ids: return_token_type_ids=False)"
        )
    cache = kwargs.get(CACHE)
    if isinstance(cache, QuantizedCache) or (isinstance(cache, Cache) and cache.get_seq_length() > 0):
        raise ValueError(
            f"{CACHE} holds {cache.get_seq_length()} tokens or rounds them, and this engine keeps a cache of its own: "
            f"leave it out, and pass all tokens"
        )
    wanted = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    missing = [name for name in wanted if config.return_dict_in_generate and getattr(config, name)]
    if missing:
        raise ValueError(f"{', '.join(missing)}: this engine returns sequences only; unset it")


def left_padding(input_ids: Int[Tensor, "batch position"], kwargs: Mapping[str, Any]) -> list[int]:
    """Return each row's number of padding tokens, all on its left.

    Refuses other masks, and positions that are not 0, 1, 2, … from each row's first token on.
    """
    mask = kwargs.get("attention_mask")
    kept = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask != 0
    if kept.shape != input_ids.shape:
        raise ValueError(
            f"the attention mask is {list(kept.shape)} for tokens {list(input_ids.shape)}: give equal ones"
        )
    first = kept.cumsum(1) > 0
    for row in ((kept != first).any(1) | ~kept.any(1)).nonzero()[:1, 0].tolist():
        raise ValueError(
            f"row {row} of the attention mask has zeros behind its first token, or no token: pad on the left "
            f"(padding_side='left' for a tokenizer), and leave no holes"
        )
    positions = kwargs.get("position_ids")
    if positions is not None:  # one row of them may stand for all
        same = positions.ndim == 2 and positions.shape[1] == kept.shape[1]
        wrong = ((positions != kept.cumsum(1) - 1) & kept).any(1) if same else torch.ones(1, dtype=torch.bool)
        for row in wrong.nonzero()[:1, 0].tolist():
            raise ValueError(f"row {row} of position_ids is not 0, 1, 2, … from its first token on: leave it out")
    return (~kept).sum(-1).tolist()


class Endings:
    """One call's ends; transformers finds stop strings, also from in the prompt; ``max_length`` counts padding, too."""

    def __init__(self, criteria: Sequence[Any], stop_strings: str | Sequence[str] | None = None, tokenizer: Any = None):
        # By exact type: a subclass may do something else.
        known = MaxLengthCriteria, EosTokenCriteria, StopStringCriteria
        unknown = [type(c).__name__ for c in criteria if type(c) not in known]
        if unknown:
            raise ValueError(
                f"stopping criteria {', '.join(unknown)} are not supported: use max_new_tokens, EOS or stop_strings"
            )
        self.max_length = min((c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)), default=0)
        if not self.max_length:
            raise ValueError("generate has no length limit: pass max_new_tokens")
        self.eos_ids = [t for c in criteria if isinstance(c, EosTokenCriteria) for t in token_ids(c.eos_token_id)]
        self._strings = [c for c in criteria if isinstance(c, StopStringCriteria)]
        if stop_strings:
            if tokenizer is None:
                raise ValueError(f"stop_strings={stop_strings!r} need a tokenizer: generate(..., tokenizer=tokenizer)")
            several = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
            self._strings.append(StopStringCriteria(tokenizer, several))
        self.has_strings = bool(self._strings)
        # A token of a stop string is at least one byte of it, so more tokens than this never matter.
        self._window = max((len(text.encode()) for c in self._strings for text in c.stop_strings), default=0)

    def cut(self, before: Sequence[int], tokens: Sequence[int]) -> int | None:
        """Return how many new tokens there are up to the end of a stop string; None if none ends in them."""
        row = [*before[-self._window :], *tokens]
        for count in range(1, len(tokens) + 1):
            end = len(row) - len(tokens) + count
            seen = torch.tensor([row[max(0, end - self._window) : end]])
            # transformers asks for a LongTensor, which a tensor of integers is.
            if any(bool(criterion(seen, None)) for criterion in self._strings):  # pyright: ignore[reportArgumentType]
                return count
        return None


class SpeculativeGenerate:
    """A callable for ``model.generate(..., custom_generate=…)``: any drafter and verifier on a transformers model.

    Sampling draws its seed from torch's global generator, so ``torch.manual_seed`` repeats an output. Processors that
    this engine does not have built in run at every node, so they must depend on nothing but the tokens and scores that
    they are given. What this engine does not have is refused with a ``ValueError``.

    ``streamer=`` and ``on_tokens=``, a function of an Int[position] tensor, get each round's tokens together, for a
    batch of one row. Stop strings in a ``GenerationConfig`` do not work, because transformers then demands a tokenizer.

    Args:
        drafter: None decodes plainly.
        verifier: The acceptance rule; needed with a drafter.
        max_batch_size: Rows that decode together; by default all rows of the call.

    Attributes:
        completions: What the last call decoded, one per row: its steps tell what every round did.
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        *,
        tokenizer: Any = None,
        max_batch_size: int | None = None,
    ):
        check_component("drafter", drafter)
        check_component("verifier", verifier)
        check_tokenizer(tokenizer)
        if max_batch_size is not None:
            whole("max_batch_size", max_batch_size, least=1)
        self.drafter, self.verifier, self.tokenizer, self.max_batch_size = drafter, verifier, tokenizer, max_batch_size
        self.completions: list[Completion] = []
        self._engine: Engine | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch position"],
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        generation_config: GenerationConfig | None = None,
        on_tokens: Callable[[Tensor], object] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Int[Tensor, "batch length"] | GenerateDecoderOnlyOutput:
        """Return prompts and outputs, padded at the end, as ``generate``'s own loop does, which calls this.

        Logits that are not finite are a ``RuntimeError``.
        """
        assert generation_config is not None
        check_fields(generation_config, DECODING_FIELDS)
        check_inputs(model, generation_config, model_kwargs)
        if _argument_of_generate("assistant_model") is not None:
            raise ValueError("assistant_model is not used: this engine drafts with its own drafter, so leave it out")
        pads = left_padding(input_ids, model_kwargs)
        endings = Endings(stopping_criteria or [], stop_strings, self.tokenizer or _argument_of_generate("tokenizer"))
        rows, width = input_ids.shape
        streamer = streamer if streamer is not None else _argument_of_generate("streamer")
        for name, given in (("a streamer", streamer), ("on_tokens", on_tokens)):
            if rows != 1 and given is not None:
                raise ValueError(f"{name} follows one sequence, and the batch has {rows}: call generate per prompt")
        if rows != 1 and endings.has_strings and not endings.eos_ids:
            raise ValueError(
                f"stop strings end the {rows} rows at different lengths, which transformers pads only with an EOS "
                f"token: set eos_token_id, or call generate once per prompt"
            )
        common = {
            "max_new_tokens": max(1, endings.max_length - width),  # transformers looks at its criteria after a token
            "stop_token_ids": endings.eos_ids,
            "ignore_eos": True,  # the criteria's EOS counts, and only that
            "seed": int(torch.randint(2**62, (), dtype=torch.long)),
        }
        sampling = []
        for row, pad in enumerate(pads):
            own = [for_row(processor, row, rows, input_ids[row, :pad]) for processor in logits_processor or []]
            counted = {"ends": endings.eos_ids, "most": common["max_new_tokens"], "prompt": width - pad}
            fields = sampling_fields(own, sample=bool(generation_config.do_sample), **counted)
            sampling.append(SamplingParams(**common, **fields, stream=row))
        padded = input_ids.tolist()
        prompts = [row[pad:] for row, pad in zip(padded, pads, strict=True)]
        engine = self._engine_for(model, rows=rows, length=max(map(len, prompts)) + common["max_new_tokens"])
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
                    cut = endings.cut(padded[row] + outputs[row], step.token_ids) if endings.has_strings else None
                    if cut is not None:
                        engine.abort(step.request)
                        step = replace(step.shortened(cut), finish_reason="stop")
                    outputs[row] += step.token_ids
                    steps[row].append(step)
                    for listen in filter(None, (on_tokens, getattr(streamer, "put", None))):
                        listen(torch.tensor(step.token_ids))
        finally:
            for request in row_of:  # those that have ended are ignored
                engine.abort(request)
        self.completions = [
            Completion(
                prompt_ids=tuple(prompt),
                token_ids=tuple(output),
                text=self.tokenizer.decode(output, skip_special_tokens=True) if self.tokenizer else "",
                finish_reason=played[-1].finish_reason or "stop",
                steps=tuple(played),
            )
            for prompt, output, played in zip(prompts, outputs, steps, strict=True)
        ]
        if streamer is not None:
            streamer.end()
        fill = [generation_config.pad_token_id, *token_ids(generation_config.eos_token_id), *endings.eos_ids, 0]
        pad_id = int(next(token for token in fill if token is not None))
        tokens = [torch.tensor(completion.token_ids) for completion in self.completions]  # int64, as in transformers
        new = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=pad_id).to(input_ids.device)
        sequences: Any = torch.cat([input_ids, new], dim=1)
        return GenerateDecoderOnlyOutput(sequences) if generation_config.return_dict_in_generate else sequences

    def _engine_for(self, model: PreTrainedModel, *, rows: int, length: int) -> Engine:
        """Returns an engine with room for the call, kept for the next one; one that is too short grows twofold."""
        engine, batch, room = self._engine, self.max_batch_size or rows, length
        if engine is not None and engine.target.model is not model.eval():
            engine = None
        target = Target(model, self.tokenizer) if engine is None else engine.target  # each warns once
        if engine is not None and engine.max_batch_size >= batch:
            if engine.max_length >= length:
                return engine
            room = max(length, min(2 * engine.max_length, target.max_length))
        self._engine = engine = None  # frees the cache before the next one is allocated
        try:
            self._engine = Engine(target, self.drafter, self.verifier, max_batch_size=batch, max_length=room)
        except ValueError:
            if room == length:
                raise
            # Room for later calls is not worth an error: the memory or the drafter's positions may not suffice for it.
            self._engine = Engine(target, self.drafter, self.verifier, max_batch_size=batch, max_length=length)
        return self._engine


def _argument_of_generate(name: str) -> Any:
    """Returns an argument that the running ``generate`` was called with and does not pass on to a callable.

    It is a local variable of the function that calls ours, or an argument of the ``torch.no_grad`` around that if
    ``generate`` takes it out of its own (``tokenizer``). An ``assistant_model`` would be ignored in silence.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            around = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None
            return frame.f_locals.get(name, around.get(name) if isinstance(around, dict) else None)
        frame = frame.f_back
    return None

"""transformers' own ``generate`` on the target's model object: plain, with prompt lookup, or with an assistant.

Assisted generation is speculative sampling (Leviathan et al. 2023) as transformers implements it, prompt lookup is
Saxena 2023. Both draft one chain, at batch 1.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import AutoModel, CompileConfig, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from drafters.assistant import buildable
from experiments.contenders.base import OtherEngine, seed_of
from specdec.requests import SamplingParams
from specdec.target.loading import load, load_tokenizer
from specdec.types import Completion


class HfGenerate(OtherEngine):
    """Decodes with ``model.generate``, from the very weights that our engine uses.

    Args:
        assistant: The model that drafts, for assisted generation: a folder, a name on the hub, or ``bundled/…``. A
            small model, an assistant of Gemma-4, or with ``options={speculation_type: dflash}`` a DFlash model.
        num_tokens: The number of tokens that are drafted per round: by the assistant (always the same number), or
            without one by prompt lookup, where the prompt or output has a match. None decodes without drafts. DFlash
            and MTP draft as many as they were trained for.
        options: More arguments of ``generate``, such as ``{use_mtp: true}``, ``{assistant_early_exit: 2}`` or
            ``{cache_implementation: static, compile_config: {}}``, which compiles on CPUs, too.
    """

    def __init__(
        self,
        *,
        assistant: str | None = None,
        num_tokens: int | None = None,
        dtype: str = "auto",
        device: str = "auto",
        options: dict[str, Any] | None = None,
    ):
        self.options, self._name, self._assistant = dict(options or {}), assistant, None
        own = {"use_mtp", "assistant_early_exit"} & self.options.keys()
        self._drafts = assistant is not None or num_tokens is not None or bool(own)
        if num_tokens is not None and num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens}: give at least 1")
        if (given := self.options.get("compile_config")) is not None:
            self.options["compile_config"] = config = CompileConfig(**given)
            config._compile_all_devices = True  # pyright: ignore[reportAttributeAccessIssue] (else GPUs only)
        self.about = f"transformers {transformers.__version__}"
        if assistant is not None and self.options.get("speculation_type") == "dflash":
            self.options["assistant_model"] = AutoModel.from_pretrained(assistant, dtype=dtype)
        elif assistant is not None:
            with buildable():
                self._assistant = load(assistant, dtype=dtype, device=device).model
            config = self._assistant.generation_config
            assert config is not None, "every causal LM has one"
            config.num_assistant_tokens = 4 if num_tokens is None else num_tokens
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0  # else it stops drafting early, whatever the number
            self.options["assistant_model"] = self._assistant
        elif num_tokens is not None:
            self.options["prompt_lookup_num_tokens"] = num_tokens

    def check(self) -> None:
        """Refuse drafts in batches, and an assistant of another vocabulary without the tokenizers of both."""
        if self._drafts and self.max_batch_size > 1:
            raise ValueError(
                f"transformers drafts at batch 1 only, and engine.max_batch_size={self.max_batch_size}: "
                "leave this contender out, or set engine.max_batch_size=1"
            )
        if self._assistant is None:
            if "assistant_model" in self.options:
                self.options["assistant_model"].to(self.target.device)
        elif self._assistant.config.get_text_config(decoder=True).vocab_size != self.target.vocab_size:
            tokenizer = load_tokenizer(str(self._name))
            if tokenizer is None or self.target.tokenizer is None:
                raise ValueError(
                    f"assistant={self._name!r} has another vocabulary than {self.target.name}, "
                    "so transformers needs the tokenizers of both: save one beside each model"
                )
            self.options |= {"tokenizer": self.target.tokenizer, "assistant_tokenizer": tokenizer}

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, speculate: bool = True
    ) -> list[Completion]:
        """Decode prompts in one call of ``generate``, padded on the left. All share their sampling but for streams."""
        first = sampling[0]
        if first.grammar is not None:
            raise ValueError("transformers' generate is given no grammar here: leave sampling.grammar out")
        model = self.target.model
        width = max(map(len, prompts))
        # A row's own first token: transformers up to 5.17 counts padding as something that must not be repeated.
        padding = [[prompt[0]] * (width - len(prompt)) for prompt in prompts]
        ids = torch.tensor([[*pad, *prompt] for pad, prompt in zip(padding, prompts, strict=True)], device=model.device)
        mask = torch.tensor([[0] * len(pad) + [1] * (width - len(pad)) for pad in padding], device=model.device)
        watch = _Rounds()
        options = dict(self.options)
        if first.logits_processor is not None:
            options["logits_processor"] = LogitsProcessorList(first.processors)
        if first.stop:
            options |= {"stop_strings": list(first.stop), "tokenizer": self.target.tokenizer}
        devices = [model.device] if model.device.type == "cuda" else []
        with _generation_config(model, first, sorted(self.ends(first))), torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed_of(sampling))
            output: Any = model.generate(ids, attention_mask=mask, streamer=watch, **options)  # type: ignore[operator]
        rows = zip(prompts, sampling, output[:, width:].tolist(), strict=True)
        return [self.completion(*row, watch.counts[1:], watch.moments) for row in rows]


class _Rounds(BaseStreamer):
    """Counts the tokens of the prompt, and then of each forward, which transformers hands over together, and when."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.moments: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        # Plain decoding hands over one token per row, drafting one row of several tokens.
        self.counts.append(1 if value.dim() == 1 else value.shape[1])
        self.moments.append(time.perf_counter())

    def end(self) -> None: ...


@contextmanager
def _generation_config(model: PreTrainedModel, sampling: SamplingParams, ends: list[int]) -> Iterator[None]:
    """During the ``with`` block, the model's defaults are this request's, and it warns of nothing in its own code."""
    drawn: dict[str, Any] = {}
    if not sampling.greedy:
        drawn = {name: float(getattr(sampling, name)) for name in ("temperature", "top_p")}
        drawn |= {"top_k": sampling.top_k, "min_p": float(sampling.min_p) or None}
    before, logger = model.generation_config, logging.getLogger("transformers.generation.utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    model.generation_config = GenerationConfig(
        do_sample=not sampling.greedy,
        max_new_tokens=sampling.max_new_tokens,
        repetition_penalty=float(sampling.repetition_penalty),
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **drawn,
    )
    try:
        yield
    finally:
        model.generation_config = before
        logger.setLevel(level)

"""The target: the model whose distribution the output must follow."""

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from specdec import inflate as inflation
from specdec.llama_shapes import LlamaShape
from specdec.machine import dtype_name
from specdec.placement import main_device
from specdec.quantization import quantization_of
from specdec.quantization.base import num_weights, output_width, weights_read
from specdec.target.adapters import Adapters
from specdec.target.configuration import check_model, check_tokenizer
from specdec.target.grammars import Grammars
from specdec.target.loading import find_tokenizer, load, load_tokenizer

logger = logging.getLogger(__name__)


def _ends(*sources: Any) -> frozenset[int]:
    """Return the tokens that end an output by the first source that names any; say if another one names others."""
    named: list[frozenset[int]] = []
    for source in sources:
        end = getattr(source, "eos_token_id", None)
        default = getattr(type(source), "eos_token_id", None) if isinstance(source, PreTrainedConfig) else None
        if end not in (None, default):
            named.append(frozenset(torch.as_tensor(end).flatten().tolist()))
    first = named[0] if named else frozenset[int]()
    if others := sorted(first.union(*named) - first):
        remedy = "give them as stop_token_ids if outputs are to end with them"
        logger.warning("outputs end with %s, as in transformers; files also name %s: %s", sorted(first), others, remedy)
    return first


class Target:
    """A loaded causal LM with its tokenizer and the tokens that end its output.

    Args:
        model: Any decoder-only Hugging Face model.
        tokenizer: Its tokenizer. Without one, prompts are token ids and completions have no text.
        name: The name in results; by default the model's own path.
        dtype_reason: Why the model has its dtype, for the heading of a table; ``from_pretrained`` fills it in.
        adapters: Folders of LoRA adapters by their names, which are put into the model. Every request chooses one or
            none (``SamplingParams.adapter``).

    Attributes:
        eos_token_ids: The EOS tokens of the generation config, as in ``generate``; if it names none, those of the
            model's config (not its class's default), or else the tokenizer's.
        vocab_size: The width of the logits, padding included.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, name: str = "",
        dtype_reason: str = "", adapters: Mapping[str, str] | None = None,
    ):  # fmt: skip
        check_model("model", model, "Target.from_pretrained")
        check_tokenizer(tokenizer)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.name = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
        self.dtype_reason = dtype_reason or f"{dtype_name(model.dtype)}, as given"
        output, self._text_config = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
        self.vocab_size = self._text_config.vocab_size if output is None else output_width(output)
        self.eos_token_ids = _ends(getattr(model, "generation_config", None), model.config, tokenizer)
        self.adapters = Adapters(model, adapters) if adapters else None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        quantization: str | None = None,
        quantization_check: bool = True,
        inflate: str | Mapping[str, int] | LlamaShape | None = None,
        device_map: str | Mapping[str, Any] | None = None,
        tensor_parallel: bool | int | None = None,
        tokenizer: str | None = None,
        adapter: str | None = None,
        adapters: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> "Target":
        """Load a model and its tokenizer from files, the hub, or this package (``"bundled/target"``).

        Args:
            name_or_path: A folder, a GGUF file, a name on the hub (``gguf_file=`` for one there), or ``bundled/…``.
            dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``; or ``"auto"`` for the checkpoint's own where the
                machine has native arithmetic for it, and the fastest that it has otherwise (``dtype_reason`` says).
            device: ``"auto"`` for the GPU if there is one.
            quantization: A name of ``specdec/quantization``, such as ``"int8"``: the target is that quantized model.
            quantization_check: Refuse a scheme that is not faster than full precision on the device.
            inflate: A larger Llama shape (``"110m"``, ``"1b"``, ``"8b"`` or numbers). The model then costs what that
                shape costs and computes what it computes now (``specdec/inflate.py``).
            device_map: ``"auto"`` spreads the layers over all devices; a dict says which module goes where
                (``{"model.layers.0": 0, …, "lm_head": "cpu"}``). Not together with ``device``.
            tensor_parallel: The number of processes that share the model, which torchrun has started; True for all.
            tokenizer: A folder or a name on the hub with a tokenizer, for a model that comes without one. Without any,
                the target takes and returns token ids.
            adapter: A folder or a name on the hub with a LoRA adapter (peft's layout), to be merged into the weights.
            adapters: Such adapters by names of your choice, among which every request chooses.
            **kwargs: Passed on to the model's ``from_pretrained``; ``HUB_OPTIONS`` also to the tokenizer's.
        """
        loaded = load(
            name_or_path, dtype=dtype, device=device, quantization=quantization, quantization_check=quantization_check,
            inflate=inflate, device_map=device_map, tensor_parallel=tensor_parallel,
            adapter=adapter, adapters=tuple((adapters or {}).values()), **kwargs,
        )  # fmt: skip
        found = find_tokenizer(name_or_path, **kwargs) if tokenizer is None else load_tokenizer(tokenizer)
        inflated = "" if inflate is None else f" inflated to {inflation.describe(inflate)}"
        quantized = "" if (scheme := quantization_of(loaded.model)) is None else f" in {scheme}"
        adapted = "" if adapter is None else f" with the adapter {adapter}"
        name = f"{name_or_path}{adapted}{inflated}{quantized}"
        return cls(loaded.model, found, name=name, dtype_reason=loaded.dtype_reason, adapters=adapters)

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars that were compiled for its tokenizer."""
        return Grammars(self.tokenizer, self.vocab_size)

    @property
    def device(self) -> torch.device:
        return main_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_parameters(self) -> int:
        """The number of weights. A quantized output layer no longer shares the embedding's table, so it adds some."""
        return num_weights(self.model)

    @property
    def bytes_per_weight(self) -> float:
        """The bytes per weight as stored; an engine may read fewer."""
        return weights_read(self.model).bytes_per_weight

    @property
    def num_layers(self) -> int | None:
        """The number of the model's layers; None if its configuration does not say."""
        return getattr(self._text_config, "num_hidden_layers", None)

    @property
    def max_length(self) -> int:
        """The number of positions that the model has."""
        return getattr(self._text_config, "max_position_embeddings", None) or 2**31 - 1

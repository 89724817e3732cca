"""The target: the model whose distribution the output must follow."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specdec import bundled
from specdec import inflate as inflation
from specdec.inflate import LlamaShape
from specdec.quantization import check_quantization, quantize
from specdec.quantization.base import weights_read


class Target:
    """A loaded causal LM with its tokenizer and the tokens that end its output.

    Args:
        model: Any decoder-only Hugging Face model.
        tokenizer: Its tokenizer; without one, prompts are token ids and completions have no text.
        name: Shown in results; the model's own path when empty.

    Attributes:
        eos_token_ids: EOS of the generation config (a list for some models), the model's config and the tokenizer.
        vocab_size: Width of the logits, padding included.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, name: str = ""):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
        output = model.get_output_embeddings()
        self.vocab_size = (
            model.config.get_text_config(decoder=True).vocab_size if output is None else output.weight.shape[0]
        )
        self.eos_token_ids = _eos_token_ids(model, tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        quantization: str | None = None,
        inflate: str | Mapping[str, int] | LlamaShape | None = None,
        **kwargs: object,
    ) -> "Target":
        """Load a model and its tokenizer from a folder, the hub, or this package (``"bundled/target"``).

        Args:
            name_or_path: What ``AutoModelForCausalLM.from_pretrained`` takes, or ``bundled/…``.
            dtype: ``"auto"`` for the checkpoint's, or ``"float32"``, ``"bfloat16"``, ``"float16"``.
            device: ``"auto"`` for the GPU if there is one.
            quantization: ``"int8"`` or ``"int8_compact"`` (``specdec/quantization``); None leaves the weights as they
                are. The target is the quantized model then: outputs follow its distribution.
            inflate: A larger Llama shape (``"110m"``, ``"1b"``, ``"8b"`` or numbers) at whose cost the model is to run,
                computing what it computes now (``specdec/inflate.py``). The name says so.
            **kwargs: Passed on to ``from_pretrained``.

        Raises:
            ValueError: The model cannot be found, loaded, inflated or quantized.
        """
        model = load_model(
            name_or_path, dtype=dtype, device=device, quantization=quantization, inflate=inflate, **kwargs
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(name_or_path))
        except (OSError, ValueError) as error:
            raise ValueError(f"no tokenizer for {name_or_path!r}: {_first_line(error)}") from error
        inflated = "" if inflate is None else f" inflated to {inflation.describe(inflate)}"
        quantized = "" if quantization is None else f" in {quantization}"
        return cls(model, tokenizer, name=f"{name_or_path}{inflated}{quantized}")

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_parameters(self) -> int:
        """Of the model; a quantized output layer that shared the embedding's table has weights of its own."""
        return self.model.num_parameters()

    @property
    def bytes_per_weight(self) -> float:
        """Bytes that a forward of one token reads, per weight that it reads: 2 in bfloat16, little over 1 in int8."""
        read = weights_read(self.model)
        return read.bytes / read.weights

    @property
    def max_length(self) -> int:
        """Positions that the model has."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31 - 1


def load_model(
    name_or_path: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    quantization: str | None = None,
    inflate: str | Mapping[str, int] | LlamaShape | None = None,
    **kwargs: object,
) -> PreTrainedModel:
    """Load a causal LM for use as a target or a drafter (see ``Target.from_pretrained``)."""
    if quantization is not None:
        check_quantization(quantization)
    if inflate is not None:
        inflation.resolve_shape(inflate)  # a wrong name is told before anything is loaded
    where = resolve_device(device)
    kind = resolve_dtype(dtype)
    path = bundled.resolve(name_or_path)
    if Path(path).is_absolute() or str(path).startswith("."):
        if not Path(path).is_dir():
            raise ValueError(f"no model at {name_or_path!r}: there is no such folder")
        if not (Path(path) / "config.json").is_file():
            raise ValueError(f"no model at {name_or_path!r}: the folder has no config.json")
    try:
        config = AutoConfig.from_pretrained(path)
        if config.is_encoder_decoder:
            raise ValueError(f"{config.model_type} is an encoder-decoder model; give a decoder-only causal LM")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=kind, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the model {name_or_path!r}: {_first_line(error)}") from error
    model = model.to(where).eval()  # pyright: ignore[reportArgumentType] (transformers' decorator hides self)
    if inflate is not None:
        model = inflation.inflate(model, inflate)
    return model if quantization is None else quantize(model, quantization)


def resolve_device(device: str | torch.device) -> torch.device:
    """``"auto"`` is the GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: give 'auto', 'cpu', 'cuda' or 'cuda:1'") from error


def resolve_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A dtype by its torch name; ``"auto"`` stays (the checkpoint's own)."""
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    resolved = getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ValueError(f"dtype={dtype!r}: give 'auto', 'float32', 'bfloat16' or 'float16'")
    return resolved


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]

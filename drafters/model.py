"""A small causal LM that drafts a chain or a tree, and its training.

Leviathan et al. 2023 (arXiv 2211.17192) for chains, SpecInfer (arXiv 2305.09781) for trees; with noise that the target
shares, Daliri et al. 2024 (arXiv 2408.07978); distilled from the target, DistillSpec (arXiv 2310.08461).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from drafters.heads.assemble import mask_of
from drafters.heads.files import Public, Where, has
from drafters.heads.training import (
    Anchors,
    Prediction,
    TargetStates,
    TextBatch,
    TrainedHead,
    additive,
    frozen_copy,
    masks_suffice,
    output_of,
)
from drafters.own_model import CausalDrafter, Options, Settings
from drafters.reduced import DraftVocabulary, Reduced
from specdec import Target
from specdec.cache.formats import check_format
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.vocabulary import Ids, shared_tokens
from specdec.dtypes import choose_dtype
from specdec.interfaces import Description, Drafter
from specdec.placement import main_device
from specdec.quantization.base import output_width
from specdec.quantization.checkpoint import quantized_by, stored_scheme
from specdec.quantization.speed import AUTO, fastest, largest_linear
from specdec.target.configuration import check_model, check_tokenizer
from specdec.target.loading import load, load_config, load_model, load_tokenizer, resolve_device, resolve_dtype


class ModelFiles(Where, total=False):
    """Where the files of a small model are, and how they are read; see ``Target.from_pretrained``."""

    device_map: str | Mapping[str, Any] | None
    trust_remote_code: bool
    gguf_file: str | None
    adapter: str | None
    dtype: str | torch.dtype
    device: str | torch.device
    quantization: str | None
    quantization_check: bool


class LoadedModel(ModelFiles, Settings, total=False):
    """``ModelFiles``, and ``Settings``."""


def is_model(names: Sequence[str], config: Mapping[str, Any]) -> bool:
    """Whether files hold a model of transformers and no head. An MTP module may stand in a model's files, too."""
    embeds = has(names, "embed_tokens.", "transformer.wte.", "wte.", "embed_in.")
    return bool(config.get("model_type")) and embeds and not has(names, "fc.weight", "medusa_head", "blocks.0.layers.")


def _read(path: str, target: Any, *, dtype: torch.dtype | None, adapter: str | None = None) -> PreTrainedModel:
    return load_model(path, dtype=dtype or load_config(path).dtype or "auto", device="cpu", adapter=adapter)


MODEL: dict[str, Any] = {
    "read": _read,
    "write": lambda model, folder, target, **to: model.save_pretrained(folder),
    "takes": ("adapter",),
    "decides": ("config.model_type",),
}
"""How a model of transformers is published."""


class ModelDrafter(CausalDrafter):
    """Drafts with a model of the target's vocabulary on its device; other widths are cut or filled up with zeros."""

    runs, same_vocabulary = "model", True
    public = (
        Public(
            name="lm",
            title="a small causal LM",
            formats=("native", "sglang"),
            holds=lambda names, config: is_model(names, config) and mask_of("it", config) is None,
            tokens=lambda model: 4,
            **MODEL,
        ),
    )

    def __init__(
        self,
        model: PreTrainedModel,
        shape: AnyTree = 4,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Unpack[Options],
    ):
        check_model("model", model, "ModelDrafter.from_pretrained")
        check_tokenizer(tokenizer)
        options["name"] = options.get("name") or model.config.model_type
        super().__init__(tree_of(shape), **options)
        self.model, self.tokenizer = model, tokenizer

    @classmethod
    def from_pretrained(cls, name_or_path: str, *, shape: AnyTree = 4, **options: Unpack[LoadedModel]) -> Self:
        """Load a model and its tokenizer, as a target's; ``quantization="auto"``, the default, is ``format_here``."""
        given: dict[str, Any] = {"quantization": AUTO, **options}
        files = {key: given.pop(key) for key in ModelFiles.__annotations__ if key in given}
        files = {key: each for key, each in files.items() if each not in (None, False) or key == "quantization_check"}
        check_format(given.get("kv_cache"))  # before the model is loaded
        DraftVocabulary(1, **{key: given[key] for key in Reduced.__annotations__ if key in given})
        if files.get("quantization") == AUTO:
            files["quantization"], measured = format_here(name_or_path, **files)
            files |= {"quantization_check": False} if measured else {}
        model = load_model(name_or_path, **files)
        try:
            tokenizer = load_tokenizer(name_or_path, **files)
        except ValueError:
            tokenizer = None  # many drafters ship without one; then only the widths can be compared
        return cls(model, shape, tokenizer=tokenizer, name=name_or_path, **given)

    def describe(self, target: Target | None = None) -> Description:
        model, ids = (self.model, None) if target is None else self.reduced(self.model, target, self.shared(target))
        tokens = None if ids is None else ids.tolist()
        return Description(kind="model", parts=(model,), at_once=self.at_once, tokens=tokens)

    def model_for(self, target: Target) -> PreTrainedModel:
        check_device(self.model, target)
        return self.model

    def shared(self, target: Target) -> Ids | None:
        output = self.model.get_output_embeddings()
        if output is None or not self.same_vocabulary:  # without one, the runner says so
            return None
        return shared_tokens(self.name, self.tokenizer, output_width(output), target)


def format_here(name: str, *, dtype: Any = "auto", device: Any = "auto", **files: Any) -> tuple[str | None, str]:
    """Return the quantization in which a model drafts fastest here and why (``fastest``), by its configuration alone.

    None for a model that is quantized already, on several devices, or whose files say nothing: loading says why.
    """
    try:
        config: Any = load_config(name, **files)
        given, where = resolve_dtype(dtype), resolve_device(device)
        if quantized_by(config) or stored_scheme(config) or files.get("device_map"):
            return None, ""
        with torch.device("meta"):
            shape = largest_linear(AutoModelForCausalLM.from_config(config))
        known = given if isinstance(given, torch.dtype) else choose_dtype(config.dtype or torch.float32, where).dtype
    except (OSError, ValueError, TypeError, AttributeError):
        return None, ""
    return fastest(shape, known, where.type)


def check_device(model: PreTrainedModel, target: Target) -> None:
    """Refuse a drafting model on another device than the target's."""
    device = main_device(model)
    if device != target.device:
        raise ValueError(f"the drafter is on {device} and the target on {target.device}: load both on one device")


class TrainedLM(TrainedHead):
    """A model of any decoder-only architecture of transformers; with ``name``, one that is trained already.

    Args:
        name: A folder or a name on the hub to go on from; None for new weights.
        architecture: The architecture of new weights: a ``model_type`` of transformers, such as ``"llama"``.
        config: Its sizes, in that architecture's words. Vocabulary and special tokens are the target's.
        copies: A folder or a name on the hub: new weights begin as that model's, where it has some of equal name and
            shape. So a hybrid model takes over embeddings and feed-forward layers (Wang et al. 2024, arXiv 2408.15237).
        depths: The length of the drafts that are measured while training. One token at a time is trained.
    """

    title = "causal LM"
    autoregressive = same_vocabulary = True

    def __init__(
        self,
        *,
        name: str | None = None,
        architecture: str = "llama",
        config: Mapping[str, Any] | None = None,
        copies: str | None = None,
        depths: int = 4,
    ):
        super().__init__(depths)
        if (name is None) == (not config):
            raise ValueError("head: give head.config (the sizes of a new model) or head.name (one to go on from)")
        self.name, self.architecture, self.sizes, self.copies = name, architecture, dict(config or {}), copies
        self.tokenizer: PreTrainedTokenizerBase | None = None

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        self.head = self._made(target)
        self.packs = masks_suffice(self.head, self._hidden)

    def _made(self, target: Target) -> PreTrainedModel:
        self.tokenizer = target.tokenizer
        if self.name is not None:
            drafter = ModelDrafter.from_pretrained(self.name, dtype="float32", device=target.device, quantization=None)
            drafter.shared(target)
            model = drafter.model_for(target)
        else:
            given: Any = target.model.config.get_text_config(decoder=True)
            special = {key: getattr(given, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
            config = AutoConfig.for_model(
                self.architecture,
                **{"vocab_size": target.vocab_size, "tie_word_embeddings": True, **special, **self.sizes},
            )
            model = AutoModelForCausalLM.from_config(config).float()
            if self.copies is not None:
                copy_weights(model, load(self.copies, dtype="float32", device="cpu").model)
        width = output_of(model).weight.shape[0]
        if width != target.vocab_size:
            raise ValueError(
                f"the head has {width} tokens and the target {target.name} has {target.vocab_size}: "
                f"give a model of the target's vocabulary"
            )
        return model

    def anchors(self, batch: TextBatch, generator: torch.Generator) -> Anchors:
        """Every position with a supervised successor: a model needs no state of the target."""
        return Anchors.everywhere(batch, 1, before=0)

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        index = anchors.index
        if batch.packed and not self.packs:
            batch, places = batch.apart()
            index = places.flatten()[index]
        return Prediction([self._hidden(batch).flatten(0, 1)[index]])

    def _hidden(self, batch: TextBatch) -> Float[Tensor, "row position width"]:
        mask = additive(batch.visible(), torch.float32) if batch.packed else None
        return self._states(input_ids=batch.tokens, attention_mask=mask, position_ids=batch.positions, use_cache=False)

    def _states(self, **inputs: Any) -> Float[Tensor, "row position width"]:
        return self.head.base_model(**inputs).last_hidden_state

    def logits(self, states: Tensor, previous: Int[Tensor, " place"], depth: int) -> Float[Tensor, "place column"]:
        return output_of(self.head)(states).float()

    def drafter(self) -> Drafter:
        return ModelDrafter(frozen_copy(self.head), self.depths, optimize=False)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the model in bfloat16, with the target's tokenizer."""
        super().save(folder, facts)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


@torch.no_grad()
def copy_weights(model: PreTrainedModel, source: PreTrainedModel) -> int:
    """Copy weights of equal names and shapes, norms as differences from how they begin; return how many there are."""
    given, copied = source.state_dict(), 0
    for name, weight in model.state_dict().items():
        if name in given and given[name].shape == weight.shape:
            weight.copy_(given[name] if weight.ndim > 1 else weight + given[name] - 1)
            copied += 1
    if not copied:
        raise ValueError(
            f"head.copies: a {source.config.model_type} has no weights of the names and shapes of a "
            f"{model.config.model_type}: give a model with equal sizes, or leave it out"
        )
    return copied

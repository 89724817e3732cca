"""A head beside its target: on its device, with what it borrows, as wide as it, and for its positions and tokens."""

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafters.reduced import DraftVocabulary, cut, twin_of
from specdec.drafting.vocabulary import MOST_PADDING
from specdec.inflate import signal_width
from specdec.interfaces import Description
from specdec.quantization.base import output_width
from specdec.target.target import Target

POWERS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
CAPS = "final_logit_softcapping", "logits_soft_cap"
"""Keys of models' configurations to whose powers logits are scaled, and those they are capped to."""
_Head = TypeVar("_Head", bound=nn.Module)
_Draft = TypeVar("_Draft", bound="DraftHead")


def move(head: _Head, device: torch.device | str, dtype: torch.dtype | None) -> _Head:
    """Move a head to a device and cast it, but not the frequencies of its rotary embedding, which stay in float32."""
    body: Any = getattr(head, "base_model", None)
    rotary = getattr(body, "rotary_emb", None)
    if rotary is not None:  # made anew, because a head on the meta device has not computed its frequencies
        body.rotary_emb = nn.Identity()
    nn.Module.to(head, device=device, dtype=dtype)
    if rotary is not None:
        body.rotary_emb = type(rotary)(body.config).to(device)
    return head


def beside(head: _Head, device: torch.device, dtype: torch.dtype) -> _Head:
    """Returns the head if it is on this device and in this dtype, otherwise a copy that is."""
    if all(parameter.device == device and parameter.dtype is dtype for parameter in head.parameters()):
        return head
    twin = copy.deepcopy(head)
    twin.zero_grad()  # a head in training was copied with its gradients
    return move(twin.requires_grad_(False), device, dtype).eval()


class OutputLayer(nn.Module):
    """A model's output layer, with the scale and the softcap that the model's own code puts on logits."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        said: Any = model.config.get_text_config(decoder=True)
        powers = POWERS | ({"logits_scaling": 1} if said.model_type == "hyperclovax" else {})  # it multiplies
        self.layer: Any = model.get_output_embeddings()
        self.scale = math.prod((getattr(said, key, None) or 1.0) ** power for key, power in powers.items())
        self.cap: float | None = next((getattr(said, key) for key in CAPS if getattr(said, key, None)), None)

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, hidden: Float[Tensor, "*place hidden"]) -> Float[Tensor, "*place vocab"]:
        logits = self.layer(hidden) * self.scale
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


def output_of(model: PreTrainedModel) -> Any:
    """Returns a model's output layer, in an ``OutputLayer`` where its code scales or caps the logits."""
    output = OutputLayer(model)
    return output.layer if (output.scale, output.cap) == (1.0, None) else output


def rows_of(output: Any) -> Tensor:
    """Returns the weights of ``output_of`` a model as numbers, with its scale."""
    layer, scale = (output.layer, output.scale) if isinstance(output, OutputLayer) else (output, 1.0)
    return (layer.dequantized() if hasattr(layer, "dequantized") else layer.weight.detach()) * scale


class DraftHead(PreTrainedModel):
    """A model that drafts from the target's hidden states: ``captured`` of them, each of ``captured_width``.

    ``draft_ids`` are the target's ids of the logits' columns, ascending; None if column i is id i. A head that
    ``scales_itself`` takes the target's output layer as it is, without what the target's code does to its logits.
    """

    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    captured: int
    captured_width: int
    draft_ids: Int[Tensor, " column"] | None
    scales_itself: bool = False

    @abstractmethod
    def describe(self) -> Description:
        """Return what the head is, as its files say."""

    def bound(self, target: PreTrainedModel) -> Self:
        """Return the head on the target's device and in its dtype, with what it borrows; parameters stay its own."""
        placed = beside(self, target.device, target.dtype)
        twin = twin_of(placed)
        if twin.base_model.embed_tokens is None:
            twin.base_model.embed_tokens = target.get_input_embeddings()
        if twin.lm_head is None:
            twin.lm_head = target.get_output_embeddings() if self.scales_itself else output_of(target)
        return twin.eval()

    def reduce(self, vocabulary: DraftVocabulary, name: str, target: Target) -> None:
        """Keep some tokens of its own, with a copy of the output layer's rows for them."""
        twin: Any = self
        columns = output_width(getattr(twin.lm_head, "layer", twin.lm_head))
        self.draft_ids, rows = vocabulary.kept(name, columns, self.draft_ids, target)
        twin.lm_head = cut(twin.lm_head, rows)
        if getattr(twin, "place_head", None) is not None:
            twin.place_head.reduce(rows)

    def widened(self, width: int) -> Self:
        """Return the same head for wider hidden states of the target (``widened``), where there is one; else itself."""
        return self


def fitted(head: _Draft, name: str, layers: Sequence[int], target: Target) -> _Draft:
    """Returns a head that reads these hidden states of a target, wider if it is inflated; refuses one of another."""
    this, that, remedy = f"the head {name}", f"the target {target.name}", "give a head that was trained on this target"
    width, count = target.model.config.get_text_config(decoder=True).hidden_size, target.num_layers
    if head.captured_width == signal_width(target.model) < width:
        head = head.widened(width)  # it costs what such a target's head would
    own, embeddings, output = head.config.hidden_size, head.get_input_embeddings(), head.get_output_embeddings()
    if head.captured_width != width:
        raise ValueError(
            f"{this} reads hidden states of width {head.captured_width} and those of {that} have {width}: {remedy}"
        )
    if own != width and (embeddings is None or output is None):
        part = "embeddings" if embeddings is None else "output layer"
        raise ValueError(f"{this} is {own} wide and has no {part} of its own, and {that} is {width} wide: {remedy}")
    beyond = [layer for layer in layers if layer < -1 or (count is not None and layer >= count)]
    if beyond:
        raise ValueError(
            f"{this} reads the input of layer {beyond[0]} and {that} has the layers 0 to {(count or 0) - 1}: {remedy}, "
            f"or hidden_layers"
        )
    if len(layers) != head.captured:
        raise ValueError(
            f"{this} reads {head.captured} hidden states, and hidden_layers={list(layers)} are {len(layers)}: give "
            f"{head.captured}"
        )
    ids, tokens = head.draft_ids, target.vocab_size
    if ids is not None and int(ids.max()) >= tokens:
        raise ValueError(f"{this} drafts token {int(ids.max())} and {that} has {tokens} tokens: {remedy}")
    tables = {"output layer": None if ids is not None else output, "embeddings": embeddings}
    widths = {part: layer.weight.shape[0] for part, layer in tables.items() if layer is not None}
    if not widths and head.config.vocab_size > 1:  # 1: not stated
        widths["vocabulary"] = head.config.vocab_size  # as its files state
    for part, known in widths.items():
        if abs(known - tokens) > MOST_PADDING:
            raise ValueError(f"the {part} of {this} has {known} tokens and {that} has {tokens}: {remedy}")
    return head


def sizes_like(text: Any) -> dict[str, Any]:
    """Returns the fields of a configuration in which a new head is like its target, whose own is given."""
    heads, width = text.num_attention_heads, text.hidden_size
    return {
        "hidden_size": width,
        "intermediate_size": getattr(text, "intermediate_size", None) or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or width // heads,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "max_position_embeddings": text.max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def wider_config(config: Any, factor: float) -> Any:
    """Returns the configuration of decoder layers for wider hidden states, of which only the first channels count."""
    twin = copy.deepcopy(config)
    twin.hidden_size = round(config.hidden_size * factor)
    twin.intermediate_size = round(config.intermediate_size * factor)
    if twin.hidden_size != config.hidden_size * factor:
        raise ValueError(
            f"the head's width {config.hidden_size} does not grow by {factor:g}, as the inflated target's did, to a "
            f"whole number: inflate the target to another width"
        )
    groups = config.num_attention_heads // config.num_key_value_heads
    twin.num_key_value_heads = math.ceil(config.num_key_value_heads * factor)
    twin.num_attention_heads = twin.num_key_value_heads * groups
    twin.rms_norm_eps = config.rms_norm_eps / factor
    return twin


def widened(
    head: nn.Module, larger: _Head, factor: float, parts: Callable[[str], tuple[int, int]] = lambda name: (1, 0)
) -> _Head:
    """Fill a larger head so that it computes the same from hidden states of which only the first channels count.

    It is for a target inflated by ``specdec.inflate``: new channels and new attention heads are zero. What an RMSNorm
    divides by shrinks with the share of channels that carry signal, so its weights shrink likewise. ``parts`` tells
    what a weight reads, by its name: how many equal states side by side, and how many more channels behind.
    """
    epsilon = getattr(getattr(head, "config", None), "rms_norm_eps", None)
    with torch.no_grad():
        for name, new in larger.named_parameters():
            old, owner = head.get_parameter(name).detach(), larger.get_submodule(name.rpartition(".")[0])
            if type(owner).__name__.endswith("RMSNorm"):
                if old.shape == new.shape:  # it norms single attention heads, which are as wide as before
                    setattr(owner, "variance_epsilon", epsilon)  # noqa: B010
                else:
                    old = old * factor**-0.5
            count, behind = parts(name)
            new.zero_()
            rooms = new.split((new.shape[-1] - behind, behind), dim=-1)
            for part, room in zip(old.split((old.shape[-1] - behind, behind), dim=-1), rooms, strict=True):
                for read, space in zip(part.chunk(count, dim=-1), room.chunk(count, dim=-1), strict=True):
                    space[tuple(slice(size) for size in read.shape)] = read
    first = next(head.parameters())
    return move(larger.requires_grad_(False), first.device, first.dtype).eval()


def lengthen(head: PreTrainedModel, max_length: int) -> None:
    """Let a head run at so many positions if its rotary embedding is the same whatever the longest position is."""
    config: Any = head.config
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") in ("default", "linear", "llama3", "yarn"):
        config.max_position_embeddings = max(config.max_position_embeddings, max_length)


def row_of(head: PreTrainedModel, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """Returns what turns a target's token ids into rows of a head's embeddings, which may lack ids of padding."""
    embeddings: Any = head.get_input_embeddings()
    rows: int = embeddings.weight.shape[0]
    return (lambda tokens: tokens.clamp(max=rows - 1)) if rows < vocab_size else (lambda tokens: tokens)

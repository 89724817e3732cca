"""Medusa: extra heads on the target's last hidden state draft a sparse tree (Cai et al. 2024, arXiv 2401.10774)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafters.heads.assemble import Names, Written, fill, named, needed
from drafters.heads.bound import OutputLayer, rows_of
from drafters.heads.files import INDICES, WEIGHTS, Checkpoint, Public, ServedFor, check_layout, has, write
from drafters.heads.last_state import Heads, LastStateDrafter, LastStateScorer, TrainedHeads
from drafters.heads.training import Anchors, Prediction, TargetStates, TextBatch
from specdec import Batch, Target
from specdec.drafting.vocabulary import Ids
from specdec.interfaces import Description, Sizes

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_WHOLE = (*INDICES, *WEIGHTS, "rank0.safetensors")  # with the target's tensors, or vLLM's; the last: TensorRT-LLM's
_TARGETS = ("model.", "transformer.")
_PREFIXES = ("medusa_heads.", "medusa_head.")  # modelopt, TensorRT-LLM and some of vLLM's; models trained as a whole
LAYOUTS = {
    "native": ("{head}.{layer}.linear.", "{head}.{layers}."),
    "tensorrt-llm": ("{head}.medusa_layers.{layer}.linear.", "{head}.lm_head."),
    "vllm": ("blocks.{head}.layers.{layer}.", "lm_heads.{head}."),
}
"""By layout, how the names of a block's and of an output layer's tensors begin, behind a prefix. FasterDecoding's and
modelopt's are the native one."""


def names_of(layout: str, num_heads: int, num_layers: int) -> Names:
    """The table of names of some heads."""
    block, output = LAYOUTS[layout]
    table = []
    for head in range(num_heads):
        for layer in range(num_layers):
            table.append((f"heads.{head}.{layer}.linear.", block.format(head=head, layer=layer)))
        table.append((f"heads.{head}.{num_layers}.", output.format(head=head, layers=num_layers)))
    return table


class ResidualBlock(nn.Module):
    """Computes ``x + SiLU(W x + b)``. W and b begin at zero, so that a new head starts as its output layer alone."""

    def __init__(self, hidden_size: int, *, bias: bool = True):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=bias)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHeads(Heads):
    """Heads that predict several tokens ahead from the target's last hidden state.

    Head ``i`` predicts token t+2+i from the state at t, by ``num_layers`` residual blocks, then an output layer; with a
    ``vocab_size`` of 0 all heads have the target's (version 2). ``shared`` blocks are one that is passed through
    ``num_layers`` times, as in the published code (``[ResBlock(hidden_size)] * num_layers``).
    """

    files = (*FILES, *_WHOLE)
    least_layers = least_columns = 0
    sizes = (*Heads.sizes, "shared", "bias")

    def __init__(
        self, *, shared: bool = True, bias: bool = True, draft_ids: Int[Tensor, " column"] | None = None, **sizes: Any
    ):
        super().__init__(**sizes)
        self.shared, self.bias = shared, bias
        self.draft_ids = draft_ids
        heads, count = [], self.num_layers
        for _ in range(self.num_heads):
            made = [ResidualBlock(self.hidden_size, bias=bias) for _ in range(min(count, 1) if shared else count)]
            output = [nn.Linear(self.hidden_size, self.vocab_size, bias=False)] if self.vocab_size else []
            heads.append(nn.Sequential(*(made * count if shared else made), *output))
        self.heads = nn.ModuleList(heads)

    def describe(self) -> Description:
        facts = {"heads": f"{self.num_heads}, of {self.num_layers} residual layers each"}
        return replace(super().describe(), facts=facts)

    def output(self, depth: int) -> Any:
        layers: Any = self.heads
        return layers[depth - 1][-1]

    def begin_as(self, output: nn.Linear) -> None:
        """New residual blocks change nothing."""
        layers: Any = self.heads
        for head in layers:
            head[-1].weight.copy_(rows_of(output))

    def completed(self, output: Any) -> "MedusaHeads":
        if self.vocab_size:
            return self
        layer: Any = output.layer if isinstance(output, OutputLayer) else output
        if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
            raise ValueError(
                "these Medusa heads have the target's output layer (version 2), which is quantized here: load the "
                "target without quantization, or give heads with output layers of their own"
            )
        tensors = self.state_dict()
        weight = layer.weight.detach() if layer is output else layer.weight.detach() * output.scale
        with torch.device("meta"):
            twin = self.like(vocab_size=len(weight), hidden_size=self.hidden_size)
        outputs = {f"heads.{head}.{self.num_layers}.weight": weight for head in range(self.num_heads)}
        twin.load_state_dict(tensors | outputs, assign=True)
        return twin.requires_grad_(False).eval()

    def forward(self, hidden: Float[Tensor, "*rows hidden"], num_heads: int | None = None) -> Tensor:
        return torch.stack([head(hidden) for head in self.heads[:num_heads]])

    def save_pretrained(self, path: str | Path, *, layout: str = "native") -> None:
        """Write a folder in FasterDecoding's format (``"native"``), or in vLLM's."""
        check_layout(layout, ("native", "vllm"))
        sizes: dict[str, Any] = {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}
        if layout == "native":
            if self.draft_ids is not None or not self.bias:
                raise ValueError("FasterDecoding's format has biases and the whole vocabulary: give layout='vllm'")
            config = {"medusa_num_heads": self.num_heads, "medusa_num_layers": self.num_layers, **sizes}
            config |= {"base_model_name_or_path": self.base_model} | ({} if self.vocab_size else {"version": "2"})
        else:
            if not self.vocab_size:
                raise ValueError("vLLM's layout has the output layers of heads: give heads with their own")
            config = {"model_type": "medusa", "architectures": ["MedusaModel"], **sizes, "num_heads": self.num_heads}
            config |= {"num_hidden_layers": self.num_layers, "medusa_fc_bias": self.bias}
            if self.draft_ids is not None:  # wide enough for all of them; the target's own number is not known here
                config |= {"truncated_vocab_size": self.vocab_size, "vocab_size": 1 + int(self.draft_ids[-1])}
        tensors = named(self.state_dict(), names_of(layout, self.num_heads, self.num_layers))
        tensors |= {} if self.draft_ids is None else {"token_map": self.draft_ids}
        write(path, tensors, config, file=FILES[0] if layout == "native" else WEIGHTS[0])

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "MedusaHeads":
        """Returns the heads of FasterDecoding's checkpoints in both versions, modelopt's, TensorRT-LLM's or vLLM's."""
        name, stored = checkpoint.name, checkpoint.config
        tensors = _behind_prefix(checkpoint.tensors(lambda key: not key.startswith(_TARGETS)))
        layout = "vllm" if any(key.startswith("blocks.") for key in tensors) else "native"
        layout = "tensorrt-llm" if any(".medusa_layers." in key for key in tensors) else layout
        numbers = {"head": r"(?P<head>\d+)", "layer": r"(?P<layer>\d+)", "layers": r"\d+"}
        block, output = (re.compile(each.replace(".", r"\.").format(**numbers)) for each in LAYOUTS[layout])
        blocks = [match for match in map(block.match, tensors) if match]
        num_layers = 1 + max((int(match["layer"]) for match in blocks), default=-1)
        heads = [int(match["head"]) for match in (*blocks, *filter(None, map(output.match, tensors)))]
        if not heads:
            raise ValueError(
                f"{name} has no weights of Medusa heads: give a folder with {FILES[0]}, or a model "
                f"that was trained with heads (medusa_head.…)"
            )
        num_heads = 1 + max(heads)
        table = names_of(layout, num_heads, num_layers)
        outputs = [f"{table[(head + 1) * (num_layers + 1) - 1][1]}weight" for head in range(num_heads)]
        ids = _take_outputs(name, stored, tensors, outputs)
        first = needed(name, tensors, f"{table[0][1]}weight")
        with torch.device("meta"):
            made = cls(
                num_heads=num_heads,
                hidden_size=first.shape[1],
                vocab_size=next((len(tensors[key]) for key in outputs if key in tensors), 0),
                num_layers=num_layers,
                shared=_repeats(tensors, table, num_layers),
                bias=f"{table[0][1]}bias" in tensors or not num_layers,
                base_model=stored.get("base_model_name_or_path") or "",
            )
        made.draft_ids = ids
        return fill(name, made, tensors, table)


def _behind_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The heads' tensors without the prefix that some layouts have; all tensors if there is none."""
    for prefix in _PREFIXES:
        found = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        if found:
            return found | ({"token_map": tensors["token_map"]} if "token_map" in tensors else {})
    return tensors


def _repeats(tensors: Mapping[str, Tensor], table: Names, num_layers: int) -> bool:
    """Whether every block of a head is its first one."""
    for start in range(0, len(table), num_layers + 1):
        first = table[start][1]
        for _, other in table[start : start + num_layers]:
            for part in ("weight", "bias"):
                one, two = tensors.get(f"{first}{part}"), tensors.get(f"{other}{part}")
                if one is not None and two is not None and not torch.equal(one, two):
                    return False
    return True


def _take_outputs(name: str, stored: Mapping[str, Any], tensors: Written, outputs: Sequence[str]) -> Ids | None:
    """Give heads output layers in the target's order (vLLM's ``original_lm_head`` serves all); take the ids."""
    single = tensors.pop("lm_head.weight", None)
    if single is None and stored.get("original_lm_head"):
        single = tensors.get(outputs[0])
    if single is not None:
        tensors |= dict.fromkeys(outputs, single)
    ids = tensors.pop("token_map", None)
    if ids is None:
        return None
    ids, order = ids.long().sort()
    for key in outputs:
        rows = needed(name, tensors, key)
        tensors[key] = rows[order] if len(rows) == len(order) else rows[ids]
    return ids


def _saved_for(heads: MedusaHeads, folder: Path, target: Any, *, layout: str, served: ServedFor) -> None:
    heads.base_model = served.target or heads.base_model
    heads.save_pretrained(folder)


class MedusaScorer(LastStateScorer):
    """Scores every depth with a head of its own."""

    per_depth = True

    def all_logits(self, batch: Batch, depth: int) -> Float[Tensor, "batch depth vocab"]:
        return self.heads(self.newest[batch.slots], depth).transpose(0, 1)


class MedusaDrafter(LastStateDrafter):
    """Drafts every depth of the tree at once, from the hidden state at the last committed position.

    Depth d takes its tokens from head d-1, whatever the nodes above are (section 2.1.2). By default a node whose path
    ends with rank r has the head's r-th most probable token, as in the paper. Arguments: see ``LastStateDrafter``.
    """

    kind, title = MedusaHeads, "Medusa"
    usual: ClassVar = {"family": "medusa"}
    public = (
        Public(
            name="medusa",
            title="Medusa heads",
            formats=("native",),
            files=FILES,
            holds=lambda names, config: has(names, *_PREFIXES, "blocks.0.layers."),
            read=lambda path, target, **given: MedusaHeads.from_pretrained(path, **given),
            write=_saved_for,
            tokens=lambda heads: heads.num_heads,
            bounded=True,
            width="hidden_size",
            decides=("num_heads", "num_layers", "hidden_size", "vocab_size"),
        ),
    )

    def scorer(self, heads: Any, target: Target, sizes: Sizes) -> MedusaScorer:
        return MedusaScorer(**self.placed(heads, target, sizes))


class TrainedMedusa(TrainedHeads):
    """Medusa-1, the target frozen. Arguments: see ``TrainedHeads``."""

    title, made = "Medusa heads", MedusaDrafter

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        layers: Any = self.head.heads
        hidden = states.before(anchors).to(next(layers.parameters()).dtype)
        return Prediction([head[:-1](hidden) for head in layers])

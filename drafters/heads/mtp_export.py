"""Writes MTP modules in the layout of speculators."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from drafters.heads.files import OURS
from drafters.heads.mtp import MTPHead
from drafters.heads.mtp_files import named_as, save_mtp, told_of
from drafters.heads.served_for import VERSION, ServedFor, speculators_section

LAYOUTS = ("native", "speculators")
"""MiMo's or Qwen's names; speculators'."""

TOKENS = 3
_INPUT = "mtp_layers.0.input_proj.weight"


def export_mtp(
    head: MTPHead,
    folder: str | Path,
    *,
    layout: str,
    served: ServedFor,
    target_config: Mapping[str, Any] | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and ``specdec.json``.

    speculators joins the embedding and the hidden state in this order, under the names of MiMo, which joins them the
    other way round: the two halves of the projection are exchanged where it is needed.

    Args:
        head: The head.
        folder: Where to; it is made if it is not there.
        layout: One of ``LAYOUTS``.
        served: The target.
        target_config: What the target's ``config.json`` says of its decoder, for speculators' layout.

    Raises:
        ValueError: There is no such layout, or it cannot say what this module is.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: give one of {', '.join(LAYOUTS)}")
    if layout == "native":
        save_mtp(head, folder)
        return
    if head.model.embed_tokens is not None or head.lm_head is not None:
        raise ValueError(
            "speculators' MTP modules borrow the target's embeddings and output layer, and this one has its own: "
            "give native"
        )
    if target_config is None:
        raise ValueError("speculators' layout describes the target's layers: its config.json is needed")
    dtype = str(head.dtype).removeprefix("torch.")
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": VERSION,
        "dtype": dtype,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "transformer_layer_config": dict(target_config) | {"dtype": dtype},
        "speculators_config": speculators_section("mtp", served, tokens=TOKENS),
    }
    tensors = named_as("mimo", head, "mtp_layers.0.")
    if head.model.hidden_first:
        tensors[_INPUT] = tensors[_INPUT].roll(head.captured_width, dims=1).contiguous()
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    (path / OURS).write_text(json.dumps(told_of(head, None), indent=2) + "\n")


def embedding_first(head: MTPHead) -> MTPHead:
    """Returns the same module with the embedding before the hidden state; the head itself if it is so already."""
    if not head.model.hidden_first:
        return head
    twin: Any = copy.deepcopy(head)
    twin.model.hidden_first = False
    twin.model.proj.weight.data = twin.model.proj.weight.data.roll(head.captured_width, dims=1)
    return twin

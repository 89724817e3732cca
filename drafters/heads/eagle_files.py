"""The folder layouts of EAGLE heads, read and written: EAGLE-1/2, EAGLE-3 and 3.1, speculators', DeepSpec's.

What a checkpoint is, is read off its tensors; its ``config.json`` is asked only for what they cannot tell.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.heads.assemble import config_of, count_of, fill, finite, needed, section
from drafters.heads.bound import move
from drafters.heads.eagle import EagleHead
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.eagle_layouts import (
    count_layers,
    draft_ids_of,
    flag_of,
    layers_of,
    our_name,
    public_config,
    public_name,
)
from drafters.heads.files import OURS, Checkpoint
from specdec.drafting.vocabulary import MOST_PADDING
from specdec.target.loading import resolve_device, resolve_dtype

EMBEDDINGS = ("auto", "own", "target")
_LAYER = re.compile(r"(?:midlayer|layers\.0)\.")
_IGNORED = re.compile(r"d2t|t2d|.*rotary_emb\.inv_freq|verifier_(?:lm_head|norm)\.weight")


def load_eagle(
    path: str | Path,
    *,
    hidden_layers: tuple[int, ...] | None = None,
    embeddings: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    **where: Any,
) -> EagleHead | Eagle3Head:
    """Load a head of EAGLE-1, 2, 3 or 3.1.

    Args:
        path: A folder, a name on the hub, or ``bundled/…``.
        hidden_layers: The target's hidden states that the head fuses, in place of those that its files name; for
            EAGLE-3 only.
        embeddings: ``"own"`` takes the checkpoint's, ``"target"`` the target's; ``"auto"`` the checkpoint's if it has
            some and they are finite.
        dtype: What to load them in; None for the checkpoint's own.
        device: Where to put them.
        **where: See ``Checkpoint``.

    Raises:
        ValueError: There is no such checkpoint, or it is none of an EAGLE head, or incomplete.
    """
    if embeddings not in EMBEDDINGS:
        raise ValueError(f"embeddings={embeddings!r}: give one of {', '.join(EMBEDDINGS)}")
    resolved = None if dtype is None else resolve_dtype(dtype)
    place = resolve_device(device)
    checkpoint = Checkpoint(path, **where)
    tensors = {name.removeprefix("model."): tensor for name, tensor in checkpoint.tensors().items()}
    ours = checkpoint.json(OURS) or {}
    if _fuses(tensors):
        head = _eagle3(checkpoint, tensors, ours, hidden_layers, embeddings)
    elif "fc.weight" in tensors and any(_LAYER.match(name) for name in tensors):
        if hidden_layers is not None:
            raise ValueError(
                f"hidden_layers={list(hidden_layers)} and {checkpoint.name} is an EAGLE-1 head, which reads the last "
                f"hidden state: leave hidden_layers out"
            )
        head = _eagle1(checkpoint, tensors, embeddings)
    else:
        shown = ", ".join(sorted(tensors)[:3]) or "none"
        raise ValueError(
            f"{checkpoint.name} is no EAGLE head: it has no tensors fc.weight and midlayer.* (or layers.0.*); "
            f"its tensors are {shown} …"
        )
    move(head, place, resolved if isinstance(resolved, torch.dtype) else head.dtype)
    return head


def _fuses(tensors: Mapping[str, Tensor]) -> bool:
    """Returns whether tensors are EAGLE-3's, whatever may be missing: its first layer reads two widths side by side."""
    if any(name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight" for name in tensors):
        return True
    queries, output = (tensors.get(f"layers.0.self_attn.{part}_proj.weight") for part in "qo")
    return queries is not None and output is not None and queries.shape[1] == 2 * output.shape[0]


def _eagle1(checkpoint: Checkpoint, tensors: dict[str, Tensor], embeddings: str) -> EagleHead:
    name = checkpoint.name
    config = config_of(name, checkpoint.config, tensors, "layers.0.")
    config.num_hidden_layers = count_layers(tensors)
    own, tensors = _embeddings(name, tensors, embeddings)
    tensors.pop("lm_head.weight", None)  # the target's, where a copy was saved
    joined = needed(name, tensors, "fc.weight").shape
    if joined[1] != 2 * joined[0]:
        raise ValueError(
            f"{name}: fc.weight joins {joined[1]} channels to {joined[0]}, and EAGLE-1's joins two hidden sizes to one"
        )
    if own:
        config.vocab_size = tensors["embed_tokens.weight"].shape[0]
    with torch.device("meta"):
        head = EagleHead(config, fusion_bias="fc.bias" in tensors, owns_embeddings=own)
    kept = {key: tensor for key, tensor in tensors.items() if not _IGNORED.fullmatch(key)}
    names = {f"model.{key}": key for key in kept}
    wanted = {key: key.removeprefix("model.") for key in head.state_dict()}
    fill(name, head, {ours: kept[theirs] for ours, theirs in names.items()}, wanted | names)
    return head


def _eagle3(
    checkpoint: Checkpoint,
    tensors: dict[str, Tensor],
    ours: Mapping[str, Any],
    hidden_layers: tuple[int, ...] | None,
    embeddings: str,
) -> Eagle3Head:
    name, stored = checkpoint.name, checkpoint.config
    layers = section(name, stored, "transformer_layer_config") or stored
    first = "midlayer." if any(key.startswith("midlayer.") for key in tensors) else "layers.0."
    config = config_of(name, layers, tensors, first)
    config.num_hidden_layers = count_layers(tensors)
    own, tensors = _embeddings(name, tensors, embeddings)
    width = config.hidden_size
    if own and tensors["embed_tokens.weight"].shape[1] != width:
        raise ValueError(
            f"{name}: its embeddings have width {tensors['embed_tokens.weight'].shape[1]} and its layers {width}"
        )
    joined = needed(name, tensors, "fc.weight").shape[1]
    captured_width = ours.get("captured_width") or count_of(name, stored, "target_hidden_size") or width
    if joined % captured_width:
        raise ValueError(
            f"{name}: fc.weight reads {joined} channels, which are no whole number of hidden states of "
            f"{captured_width}: correct target_hidden_size in its config.json"
        )
    chosen = hidden_layers or layers_of(stored, ours, name=name)
    captured = joined // captured_width
    if chosen is not None and len(chosen) != captured:
        raise ValueError(
            f"{name} fuses {captured} hidden states of width {captured_width}, and {list(chosen)} are {len(chosen)}: "
            f"give hidden_layers with {captured} numbers"
        )
    for flag, key in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if stored.get(flag) is True:
            needed(name, tensors, key)
    ids = draft_ids_of(name, tensors)
    if ids is not None and "lm_head.weight" in tensors:
        rows = tensors["lm_head.weight"].shape[0]
        if rows != len(ids):
            raise ValueError(
                f"{name}: its output layer has {rows} columns, and d2t or t2d names {len(ids)} tokens: one of them "
                f"belongs to another checkpoint"
            )
        order = ids.argsort()
        ids, tensors["lm_head.weight"] = ids[order], tensors["lm_head.weight"][order]
    if ids is not None and "lm_head.weight" not in tensors:
        raise ValueError(
            f"{name} is incomplete: it has a vocabulary of {len(ids)} tokens of its own (d2t) and no lm_head.weight, "
            f"which cannot be tied to the target's"
        )
    if "embed_tokens.weight" in tensors:
        config.vocab_size = tensors["embed_tokens.weight"].shape[0]
    elif ids is None and "lm_head.weight" in tensors:
        config.vocab_size = tensors["lm_head.weight"].shape[0]
    if "t2d" in tensors:
        _check_marks(name, len(tensors["t2d"]), config, own=own)
    with torch.device("meta"):
        head = Eagle3Head(
            config,
            hidden_layers=chosen,
            captured=captured,
            captured_width=captured_width,
            norm_before_residual=flag_of(stored, ours, "norm_before_residual"),
            norm_joined="input_norm.weight" in tensors,
            norm_each="fc_norm.0.weight" in tensors,
            feeds_normed=flag_of(stored, ours, "norm_output"),
            fusion_bias="fc.bias" in tensors,
            owns_embeddings=own,
            owns_output="lm_head.weight" in tensors,
            draft_ids=ids,
        )
    kept = {key: tensor for key, tensor in tensors.items() if not _IGNORED.fullmatch(key)}
    names = {our_name(key): key for key in kept}
    wanted = {key: public_name(key, first) for key, _ in head.named_parameters()}
    fill(name, head, {mine: kept[theirs] for mine, theirs in names.items()}, wanted | names)
    return head


def _check_marks(name: str, marks: int, config: Any, *, own: bool) -> None:
    """Compare the length of t2d with the embeddings, or take it for the vocabulary's size where there are none.

    Raises:
        ValueError: They are for different vocabularies.
    """
    if not own:
        config.vocab_size = marks
    elif abs(marks - config.vocab_size) > MOST_PADDING:
        raise ValueError(
            f"{name}: its t2d marks the tokens of a vocabulary of {marks} and its embeddings have {config.vocab_size}: "
            f"one of them belongs to another checkpoint"
        )


def _embeddings(name: str, tensors: dict[str, Tensor], embeddings: str) -> tuple[bool, dict[str, Tensor]]:
    """Returns whether a head keeps its own embeddings, and the tensors without those that it does not."""
    stored = tensors.get("embed_tokens.weight")
    if embeddings == "own" and not finite(stored):
        raise ValueError(f"embeddings='own' and {name} has none that are finite: give 'target'")
    own = embeddings == "own" or (embeddings == "auto" and finite(stored))
    return own, {key: tensor for key, tensor in tensors.items() if own or key != "embed_tokens.weight"}


def save_eagle(head: EagleHead | Eagle3Head, path: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
    """Write a head as its authors' code writes it, and ``specdec.json`` beside it.

    Args:
        head: The head.
        path: A folder, which is made if need be.
        notes: More to keep in ``specdec.json``, such as the target's name and the training data.
    """
    first = "midlayer." if isinstance(head, Eagle3Head) and len(head.model.layers) == 1 else "layers.0."
    write_eagle(head, path, config=public_config(head), first=first, notes=notes)


def write_eagle(
    head: EagleHead | Eagle3Head,
    path: str | Path,
    *,
    config: Mapping[str, Any],
    first: str,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write a head's tensors, and ``specdec.json``, beside a configuration.

    Args:
        head: The head.
        path: A folder, which is made if need be.
        config: What ``config.json`` is to say.
        first: What the names of the first layer's tensors begin with.
        notes: More to keep in ``specdec.json``.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {public_name(key, first): value.detach().clone().contiguous() for key, value in head.named_parameters()}
    ours: dict[str, Any] = {"family": "eagle3" if isinstance(head, Eagle3Head) else "eagle", **(notes or {})}
    if isinstance(head, Eagle3Head):
        if head.draft_ids is not None:
            ids = head.draft_ids.cpu()
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        ours |= {
            "hidden_layers": head.hidden_layers,
            "captured_width": head.captured_width,
            "norm_before_residual": head.norm_before_residual,
            "norm_output": head.feeds_normed,
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / OURS).write_text(json.dumps(ours, indent=2) + "\n")

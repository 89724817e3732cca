"""Every mistake that the inspection knows, planted in a head that is right by construction."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.block import BlockDrafter
from drafters.eagle import EagleDrafter
from drafters.heads.eagle_files import save_eagle
from drafters.heads.mtp import MTPHead
from drafters.medusa import MedusaDrafter
from drafters.mtp import MTPDrafter
from experiments.inspecting.wiring import Mistake
from specdec.interfaces import Drafter
from tests.experiments.inspecting.toys import (
    MASK,
    VOCAB,
    WIDTH,
    Seen,
    toy_block,
    toy_eagle,
    toy_eagle3,
    toy_medusa,
    toy_model,
    toy_mtp,
)

LOW = range(VOCAB // 2)


def noisy(head: Any, amount: float) -> Any:
    """A head that has learned less: noise on all of its matrices."""
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * parameter.data.std() * amount)
    return head


def rewritten(folder: Path, head: Any, tensors: Callable[[dict[str, Tensor]], object] = len, **config: Any) -> Path:
    """A head's files in the public layout alone, with something changed."""
    save_eagle(head, folder)
    (folder / "specdec.json").unlink()
    stored = load_file(folder / "model.safetensors")
    tensors(stored)
    save_file(stored, folder / "model.safetensors")
    kept = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    return folder


def absolute(tensors: dict[str, Tensor]) -> None:
    """The tokens themselves where differences belong, and nothing that contradicts them."""
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    del tensors["t2d"]


def rolled(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[name] = tensors[name].roll(WIDTH, 1).contiguous()

    return change


def put(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = value(tensors[name])

    return change


def embeddings_of_another(tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = toy_model(5).model.embed_tokens.weight.data.clone()


def without_norms(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("fc_norm.")]:
        del tensors[name]


def shifted_states(head: Any, *, before_norm: bool) -> MTPHead:
    head.before_norm = before_norm
    return head


def swapped(head: Any) -> MTPHead:
    head.model.hidden_first = not head.model.hidden_first
    return head


def ones(head: Any) -> Any:
    head.norm.weight.data.fill_(1)
    return head


HALVES = tuple(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")
ROPE: dict[str, Any] = {"rope_parameters": None, "rope_theta": None}
Plant = Callable[[Seen, Path], Drafter]

WRONG: dict[str, tuple[Plant, int, Mistake, str]] = {
    "layers one too low": (
        lambda seen, folder: EagleDrafter(toy_eagle3(seen), 2, hidden_layers=(1, 3, 4)),
        2,
        Mistake.LAYERS,
        "drafter.hidden_layers=[2,4,5]",
    ),
    "layers one too high": (
        lambda seen, folder: EagleDrafter(toy_eagle3(seen), 2, hidden_layers=(3, 5, 6)),
        2,
        Mistake.LAYERS,
        "drafter.hidden_layers=[2,4,5]",
    ),
    "layers that are not the usual ones": (
        lambda seen, folder: EagleDrafter(toy_eagle3(seen), 2, hidden_layers=(0, 1, 7)),
        2,
        Mistake.LAYERS,
        "drafter.hidden_layers=[2,4,5]",
    ),
    "layers in another order": (
        lambda seen, folder: EagleDrafter(toy_eagle3(seen), 2, hidden_layers=(5, 4, 2)),
        2,
        Mistake.LAYERS,
        "drafter.hidden_layers=[2,4,5]",
    ),
    "a block's layers": (
        lambda seen, folder: BlockDrafter(toy_block(seen), hidden_layers=(3, 5, 6)),
        3,
        Mistake.LAYERS,
        "drafter.hidden_layers=[2,4,5]",
    ),
    "a normed residual stream": (
        lambda seen, folder: EagleDrafter.from_pretrained(
            rewritten(folder, toy_eagle3(seen), norm_before_residual=True), shape=2
        ),
        2,
        Mistake.NORM,
        "'norm_before_residual: false'",
    ),
    "an output that should be fed back normed": (
        lambda seen, folder: EagleDrafter.from_pretrained(rewritten(folder, noisy(toy_eagle3(seen), 0.1)), shape=2),
        2,
        Mistake.NORM,
        "'norm_output: true'",
    ),
    "an MTP module that was made for its output before the norm": (
        lambda seen, folder: MTPDrafter(toy_mtp(seen, before_norm=True), 2),
        2,
        Mistake.NORM,
        "here it is fed back after it",
    ),
    "norms of captured states that are missing": (
        lambda seen, folder: EagleDrafter.from_pretrained(
            rewritten(folder, toy_eagle3(seen, norm_each=True), without_norms), shape=2
        ),
        1,
        Mistake.NORM,
        "fc_norm.*",
    ),
    "norm weights centred at zero": (
        lambda seen, folder: EagleDrafter.from_pretrained(
            rewritten(
                folder,
                toy_eagle3(seen),
                lambda tensors: [
                    tensors.update({name: tensor - 1}) for name, tensor in list(tensors.items()) if "norm" in name
                ],
            ),
            shape=2,
        ),
        1,
        Mistake.NORM,
        "centred at zero",
    ),
    "a block's last norm": (
        lambda seen, folder: BlockDrafter(ones(toy_block(seen))),
        3,
        Mistake.NORM,
        "norm.weight",
    ),
    "an MTP module that reads before the norm": (
        lambda seen, folder: MTPDrafter(shifted_states(toy_mtp(seen, before_norm=True), before_norm=False), 2),
        1,
        Mistake.NORM,
        "drafter.hidden_state=before_norm",
    ),
    "an MTP module that reads after the norm": (
        lambda seen, folder: MTPDrafter(shifted_states(toy_mtp(seen), before_norm=True), 2),
        1,
        Mistake.NORM,
        "drafter.hidden_state=after_norm",
    ),
    "an EAGLE-1 head that reads before the norm": (
        lambda seen, folder: EagleDrafter(toy_eagle(seen, state=8), 2),
        1,
        Mistake.NORM,
        "before the final norm",
    ),
    "mask token": (
        lambda seen, folder: BlockDrafter(toy_block(seen), mask_token_id=5),
        3,
        Mistake.MASK_TOKEN,
        f"drafter.mask_token_id={MASK}",
    ),
    "pairs of a state and its own token": (
        lambda seen, folder: EagleDrafter(toy_eagle(seen, token=0), 2),
        1,
        Mistake.SHIFT,
        "train it on pairs of the state at t and token t + 1",
    ),
    "pairs of a state and its own token, which predict the next one": (
        lambda seen, folder: EagleDrafter(toy_eagle(seen, token=0, label=0), 2),
        1,
        Mistake.SHIFT,
        "train it on pairs of the state at t and token t + 1",
    ),
    "Medusa heads that begin with the target's own": (
        lambda seen, folder: MedusaDrafter(toy_medusa(seen, first=1), 2),
        1,
        Mistake.SHIFT,
        "leave out the first head",
    ),
    "EAGLE-1 with the hidden state first": (
        lambda seen, folder: EagleDrafter.from_pretrained(
            rewritten(folder, toy_eagle(seen), rolled("fc.weight")), shape=2
        ),
        2,
        Mistake.HALVES,
        "halves of the columns of fc.weight",
    ),
    "EAGLE-3 with the hidden state first": (
        lambda seen, folder: EagleDrafter.from_pretrained(
            rewritten(folder, toy_eagle3(seen), rolled(*HALVES)), shape=2
        ),
        2,
        Mistake.HALVES,
        "q_proj, k_proj and v_proj",
    ),
    "MTP with the hidden state first": (
        lambda seen, folder: MTPDrafter(swapped(toy_mtp(seen)), 2),
        2,
        Mistake.HALVES,
        "halves of the columns of its projection",
    ),
    "no rope_theta": (
        lambda seen, folder: EagleDrafter.from_pretrained(rewritten(folder, toy_eagle3(seen), **ROPE), shape=2),
        2,
        Mistake.ROPE,
        "'rope_theta: 50'",
    ),
    "d2t that holds tokens": (
        lambda seen, folder: EagleDrafter.from_pretrained(
            rewritten(folder, toy_eagle3(seen, draft_ids=LOW), absolute), shape=2
        ),
        1,
        Mistake.VOCABULARY,
        "d2t - torch.arange(len(d2t))",
    ),
    "an output layer of another model": (
        lambda seen, folder: EagleDrafter.from_pretrained(
            rewritten(folder, toy_eagle3(seen), put("lm_head.weight", lambda own: own.flip(0).contiguous())), shape=2
        ),
        2,
        Mistake.OUTPUT,
        "lm_head.weight",
    ),
    "embeddings of another model": (
        lambda seen, folder: EagleDrafter.from_pretrained(
            rewritten(folder, toy_eagle3(seen), embeddings_of_another), shape=2
        ),
        2,
        Mistake.EMBEDDINGS,
        "drafter.embeddings=target",
    ),
    "a block of another form": (
        lambda seen, folder: BlockDrafter(toy_block(seen, shifted=True)),
        3,
        Mistake.BLOCK,
        "'shifted: false'",
    ),
}

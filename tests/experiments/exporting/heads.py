"""A trained drafter of every kind, written as the trainer writes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drafters.heads.block import BlockHead
from drafters.heads.eagle import Eagle3Head
from drafters.heads.eagle_files import save_eagle
from drafters.heads.mtp import MTPHead
from drafters.heads.mtp_files import save_mtp
from specdec.target.target import Target
from tests.components import eagle_head, markov_head, medusa_heads, perturbed, wide

VOCAB = 64
IDS = [token for token in range(VOCAB) if token % 3]


def eagle3_of(target: Target, **options: Any) -> Eagle3Head:
    given = {"hidden_layers": (1, 2, 3), "draft_ids": IDS} | options
    return wide(Eagle3Head.for_target(target.model, **given), 1.5)


def module_of(target: Target, **options: Any) -> MTPHead:
    head = wide(MTPHead.for_target(target.model, **options), 1.5)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(parameter.numel()))
    return head


def block_of(target: Target, **options: Any) -> BlockHead:
    given = {"layers": 1, "block_size": 4, "hidden_layers": (1, 3)} | options
    head = BlockHead.for_target(target.model, **given).eval()
    return wide(head)  # type: ignore[type-var]


WRITE: dict[str, Callable[[Target, Path], object]] = {
    "medusa": lambda target, folder: medusa_heads(target.model).save_pretrained(folder),
    "eagle": lambda target, folder: save_eagle(eagle_head(target.model), folder),
    "eagle3": lambda target, folder: save_eagle(eagle3_of(target), folder),
    "mtp": lambda target, folder: save_mtp(module_of(target, hidden_first=True), folder),
    "dflash": lambda target, folder: block_of(target).save_pretrained(folder),
    "dspark": lambda target, folder: markov_head(target.model).save_pretrained(folder),
    "lm": lambda target, folder: perturbed(target.model, 0.1).save_pretrained(folder),
}


Export = Callable[..., Path]

"""Drafters of every kind for a model with random weights, so that nothing has to be loaded."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from drafters.block import BlockDrafter
from drafters.eagle import EagleDrafter
from drafters.heads.block import BlockHead
from drafters.heads.eagle import Eagle3Head
from drafters.heads.mtp import MTPHead
from drafters.medusa import MedusaDrafter, MedusaHeads
from drafters.model import ModelDrafter
from drafters.mtp import MTPDrafter
from drafters.ngram import NGramDrafter
from drafters.suffix import SuffixDrafter
from specdec.drafting.builders import ExpansionTree
from specdec.interfaces import Drafter
from specdec.target.target import Target

TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
COLUMNS = 32000
"""Tokens that an EAGLE-3 head may draft, as published heads have it."""

Module = TypeVar("Module", bound=nn.Module)


def eagle3(target: Target, tree: Any) -> EagleDrafter:
    """Return EAGLE-3 with a random head of the target's widths."""
    ids = list(range(min(COLUMNS, target.vocab_size)))
    layers = None if (target.num_layers or 0) >= 8 else (0, 1, -1)  # published heads read layers that a toy has not
    head = Eagle3Head.for_target(target.model, hidden_layers=layers, draft_ids=ids)
    return EagleDrafter(_random(head, target), tree)


def small_model(target: Target, shape: Any, sampling: str) -> ModelDrafter:
    """Return a drafter that mostly agrees with the target: a copy of it with some noise on its weights."""
    twin = copy.deepcopy(target.model)
    generator = torch.Generator(target.device).manual_seed(5)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.ndim > 1:
                parameter.add_(0.1 * parameter.std() * torch.empty_like(parameter).normal_(generator=generator))
    return ModelDrafter(twin, shape, sampling=sampling)


def _medusa(target: Target) -> MedusaDrafter:
    heads = MedusaHeads(num_heads=3, hidden_size=target.model.config.hidden_size, vocab_size=target.vocab_size)
    output: Any = target.model.get_output_embeddings()
    with torch.no_grad():
        heads.begin_as(output)
    return MedusaDrafter(heads, TREE)


DRAFTERS: Mapping[str, Callable[[Target], Drafter]] = {
    "ngram": lambda target: NGramDrafter(max_draft_tokens=4, branches=2, max_ngram=3),
    "eagle3": lambda target: eagle3(target, ExpansionTree(nodes=8, depth=3, width=3)),
    "chain": lambda target: small_model(target, 3, "iid"),
    "medusa": _medusa,
    "suffix": lambda target: SuffixDrafter(6, mode="tree", tree_depth=8),
    "tree": lambda target: small_model(target, TREE, "without_replacement"),
    "mtp": lambda target: MTPDrafter(_random(MTPHead.for_target(target.model, hidden_first=True), target), 3),
    "block": lambda target: BlockDrafter(_random(BlockHead.for_target(target.model, layers=1, block_size=4), target)),
}
"""Two that draft on the host, a model that drafts a chain and a tree, and heads of four kinds."""


def _random(head: Module, target: Target) -> Module:
    """Move a head to the target, and fill its matrices with small noise."""
    head = head.to(target.device, target.dtype).eval().requires_grad_(False)
    generator = torch.Generator(target.device).manual_seed(11)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return head

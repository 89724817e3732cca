"""What heads that read pairs draft: in every round, at every node, what a dense forward over all pairs gives."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafters import EagleDrafter, MTPDrafter, PEagleDrafter
from drafters.combined import AdaptiveDrafter
from drafters.heads.eagle import Eagle3Head, EagleHead
from drafters.heads.eagle_files import save_eagle
from drafters.heads.mtp import MTPHead, save_mtp
from drafters.own_model import FeatureDrafter
from drafters.peagle import PEagleHead
from specdec import SamplingParams, Target
from specdec.drafting.policies import LengthPolicy
from tests.components import TREE, eagle_head, mtp_head, wide
from tests.drafters import pairs
from tests.drafters.agreeing import PROMPTS, Law, agreements
from tests.verifiers.cases import complete

VOCAB = 24
LAYERS = (0, 1, -1)

Pairs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From embeddings and features of all pairs to what is fed back and the logits, as a reference computes them."""
Fuse = Callable[[list[Tensor]], Tensor]
"""Makes features of the target's hidden states, from the embeddings' to the normalized last."""


class Reference(NamedTuple):
    """A head computed slowly; ``mask`` is the pair that stands in place of drafted ones, if the head has masks."""

    law: Pairs
    fuse: Fuse
    mask: tuple[Tensor, Tensor] | None = None


def law_of(model, reference: Reference) -> Law:
    """The head's distribution after some tokens drafted behind a sequence, from forwards over all of it."""
    law, fuse, mask = reference

    def after(known: list[int], path: list[int]) -> Tensor:
        states = list(model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states)
        features = fuse([state[0] for state in states])
        embeds = model.get_input_embeddings()(torch.tensor(known[1:]))
        fed, logits = law(embeds, features)
        for token in path[1:]:
            embed, feature = mask or (model.get_input_embeddings()(torch.tensor([token])), fed[-1:])
            embeds, features = torch.cat([embeds, embed]), torch.cat([features, feature])
            fed, logits = law(embeds, features)
        return logits[-1].softmax(-1)

    return after


def reference(head, folder: Path, target) -> Reference:
    """The reference of a head, which reads its weights from the files that it was saved to."""
    config = head.config
    output = target.get_output_embeddings().weight
    if isinstance(head, MTPHead):
        save_mtp(head, folder)
        weights = pairs.under(load_file(folder / "model.safetensors"), "mtp_layers.0.")

        def law(embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
            fed, out = pairs.mtp(weights, config, embeds, features)
            return fed, out @ output.T

        scale = target.model.norm.weight if head.before_norm else 1.0
        return Reference(law, lambda states: states[-1] / scale)
    save_eagle(head, folder)
    weights = load_file(folder / "model.safetensors")
    if isinstance(head, EagleHead):

        def law(embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
            fed, out = pairs.eagle(weights, config, embeds, features)
            return fed, out @ output.T

        return Reference(law, lambda states: states[-1])
    columns = torch.arange(len(weights["d2t"])) + weights["d2t"] if "d2t" in weights else torch.arange(VOCAB)

    def law(embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        fed, out = pairs.eagle3(
            weights, config, embeds, features, normed_residual=head.norm_before_residual, feeds_normed=head.feeds_normed
        )
        logits = torch.full((len(out), VOCAB), -torch.inf)
        logits[:, columns] = out @ weights["lm_head.weight"].T
        return fed, logits

    def fuse(states: list[Tensor]) -> Tensor:
        parts = [states[layer] for layer in LAYERS]
        if head.norm_each:
            parts = [pairs.norm(p, weights[f"fc_norm.{i}.weight"], config.rms_norm_eps) for i, p in enumerate(parts)]
        return torch.cat(parts, dim=-1) @ weights["fc.weight"].T

    if not isinstance(head, PEagleHead):
        return Reference(law, fuse)
    embed = target.get_input_embeddings()(torch.tensor([head.mask_token_id])).detach()
    return Reference(law, fuse, (embed, weights["mask_hidden"][0] @ weights["fc.weight"].T))


IDS = [token for token in range(VOCAB) if token % 5]


def eagle3(model, **options) -> Eagle3Head:
    return wide(Eagle3Head.for_target(model, hidden_layers=LAYERS, draft_ids=IDS, **options), 1.5)


HEADS = {
    "eagle": eagle_head,
    "eagle3": eagle3,
    "eagle3.1": lambda model: eagle3(model, norm_each=True, feeds_normed=True),
    "eagle3, normed residual": lambda model: eagle3(model, norm_before_residual=True),
    "peagle": lambda model: wide(PEagleHead.for_target(model, hidden_layers=LAYERS, mask_token_id=VOCAB - 1), 1.5),
    "mtp": mtp_head,
    "mtp before the norm": lambda model: wide(MTPHead.for_target(model, hidden_first=True, before_norm=True), 1.5),
}


def drafter_of(head, tree, sampling: str = "iid") -> FeatureDrafter:
    kind = MTPDrafter if isinstance(head, MTPHead) else PEagleDrafter if isinstance(head, PEagleHead) else EagleDrafter
    return kind(head, tree, sampling=sampling)


@pytest.mark.parametrize(
    ("name", "tree", "sampling"),
    [
        *(complete(name, 3, "iid", strong=name in ("eagle", "eagle3.1", "peagle", "mtp")) for name in HEADS),
        ("eagle3", TREE, "without_replacement"),
        complete("mtp", [2, 2], "iid", strong=False),
    ],
)
def test_every_node_has_the_law_of_a_dense_forward_over_all_pairs(model, tmp_path, name, tree, sampling) -> None:
    """Ragged rows, refilled slots, prompts in chunks; in float32 the two differ by rounding alone."""
    head = HEADS[name](model)
    for weight in (each for key, each in head.named_parameters() if "norm" in key):
        weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(weight.numel()))
    law = law_of(model, reference(head, tmp_path, model))
    nodes, accepted = agreements(Target(model), drafter_of(head, tree, sampling), law)
    assert all(same for _, same in nodes) and len(nodes) > 20 and accepted > 3


@pytest.mark.parametrize(("name", "part"), [("eagle3", "fed_back"), ("peagle", "mask_token_id")])
def test_the_reference_tells_a_wrong_part(model, tmp_path, name: str, part: str) -> None:
    """The mutants: the output before the norm is what is fed back, and not the one after; another mask token."""
    head = HEADS[name](model)
    law = law_of(model, reference(head, tmp_path, model))
    setattr(head, part, getattr(head, part) + (1 if part == "fed_back" else -1))
    nodes, _ = agreements(Target(model), drafter_of(head, 3), law, prompts=PROMPTS[:1])
    assert all(same == (depth == 0) for depth, same in nodes) and sum(not same for _, same in nodes) > 5


class Seldom(LengthPolicy):
    """Drafts in every sixth round, all rows at once."""

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        super().bind(max_batch_size=max_batch_size, max_depth=max_depth)
        self._rounds = 0

    def depths(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        self._rounds += 1
        return np.full(len(slots), 0 if self._rounds % 6 else self._max_depth)


def test_pairs_of_rounds_without_drafts_are_not_lost(model, tmp_path) -> None:
    """More of them than a slot keeps: they are forwarded before they drop out."""
    head = eagle3(model)
    law = law_of(model, reference(head, tmp_path, model))
    drafter = AdaptiveDrafter(EagleDrafter(head, 2, sampling="iid"), Seldom())
    nodes, _ = agreements(Target(model), drafter, law, sampling=SamplingParams(temperature=1.0, max_new_tokens=24))
    assert all(same for _, same in nodes) and 8 <= len(nodes) < 48

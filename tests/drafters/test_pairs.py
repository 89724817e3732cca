"""Heads that read pairs and drafters that fill masks: at every node what a dense forward gives, and public folders."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafters import EagleDrafter, ModelDrafter, MTPDrafter, PARDDrafter, PEagleDrafter
from drafters.combined import AdaptiveDrafter
from drafters.heads.eagle import Eagle3Head, EagleHead
from drafters.heads.eagle_files import load_eagle, save_eagle
from drafters.heads.mtp import MTPHead, save_mtp
from drafters.own_model import FeatureDrafter
from drafters.peagle import PEagleHead
from specdec import Drafter, Engine, ModelRunner, SamplingParams, Target
from specdec.drafting.policies import LengthPolicy
from tests.components import TREE, eagle3_head, eagle_head, mtp_head, peagle_head, perturbed, wide
from tests.drafters import pairs
from tests.drafters.agreeing import PROMPTS, Law, agreements
from tests.drafters.folders import rewritten
from tests.drafters.test_eagle import parallel, speculators
from tests.shapes import shapes_unchecked
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

VOCAB, MASK = 64, 50
LAYERS = (0, 1, -1)


def law_of(model, head, folder: Path) -> Law:
    """The head's distribution after some tokens drafted behind a sequence, from slow forwards over all of its pairs.

    Weights are read from the files that the head is saved to. A head with masks has one in place of drafted tokens.
    """
    (save_mtp if isinstance(head, MTPHead) else save_eagle)(head, folder)
    weights, config, embed = load_file(folder / "model.safetensors"), head.config, model.get_input_embeddings()
    columns, output, mask = torch.arange(VOCAB), model.get_output_embeddings().weight, None
    if isinstance(head, MTPHead):
        step = partial(pairs.mtp, pairs.under(weights, "mtp_layers.0."), config)
    elif isinstance(head, EagleHead):
        step = partial(pairs.eagle, weights, config)
    else:
        output = weights["lm_head.weight"]
        columns = columns[: len(output)] + weights.get("d2t", 0)
        ways = {"normed_residual": head.norm_before_residual, "feeds_normed": head.feeds_normed}
        step = partial(pairs.eagle3, weights, config, **ways)
    if isinstance(head, PEagleHead):
        mask = embed(torch.tensor([head.mask_token_id])), weights["mask_hidden"][0] @ weights["fc.weight"].T

    def fused(states: list[Tensor]) -> Tensor:
        if isinstance(head, MTPHead | EagleHead):
            return states[-1] / (model.model.norm.weight if getattr(head, "before_norm", False) else 1.0)
        parts = [states[layer] for layer in LAYERS]
        if head.norm_each:
            parts = [pairs.norm(p, weights[f"fc_norm.{i}.weight"], config.rms_norm_eps) for i, p in enumerate(parts)]
        return torch.cat(parts, dim=-1) @ weights["fc.weight"].T

    def after(known: list[int], path: list[int]) -> Tensor:
        states = model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        embeds, features = embed(torch.tensor(known[1:])), fused([state[0] for state in states])
        fed, out = step(embeds, features)
        for token in path[1:]:
            one, feature = mask or (embed(torch.tensor([token])), fed[-1:])
            embeds, features = torch.cat([embeds, one]), torch.cat([features, feature])
            fed, out = step(embeds, features)
        return torch.full((VOCAB,), -torch.inf).scatter(0, columns, out[-1] @ output.T).softmax(-1)

    return after


IDS = [token for token in range(VOCAB) if token % 5]


def eagle3(model, **options) -> Eagle3Head:
    return wide(Eagle3Head.for_target(model, hidden_layers=LAYERS, draft_ids=IDS, **options), 1.5)


HEADS = {
    "eagle": eagle_head,
    "eagle3": eagle3,
    "eagle3.1": lambda model: eagle3(model, norm_each=True, feeds_normed=True),
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
    law = law_of(model, head, tmp_path)
    nodes, accepted = agreements(Target(model), drafter_of(head, tree, sampling), law)
    assert all(same for _, same in nodes) and len(nodes) > 20 and accepted > 3
    # The mutants: the output before the norm is what is fed back, and not the one after; another mask token.
    if part := {"eagle3": "fed_back", "peagle": "mask_token_id"}.get(name):
        setattr(head, part, getattr(head, part) + (1 if part == "fed_back" else -1))
        nodes, _ = agreements(Target(model), drafter_of(head, 3), law, prompts=PROMPTS[:1])
        assert all(same == (depth == 0) for depth, same in nodes) and sum(not same for _, same in nodes) > 5


class Seldom(LengthPolicy):
    """Drafts in every sixth round, and in the round before in all slots but the second."""

    rounds = 0

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        super().bind(max_batch_size=max_batch_size, max_depth=max_depth)
        Seldom.rounds = 0  # of the class: sessions have a policy of their own

    def depths(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        Seldom.rounds += 1
        drafts = (Seldom.rounds % 6 == 0) | ((Seldom.rounds % 6 == 5) & (slots != 1))
        return np.where(drafts, self._max_depth, 0)


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_rounds_without_drafts_run_no_drafter_and_lose_nothing(model, tmp_path, kind: str, monkeypatch) -> None:
    """Of pairs there are more than a slot keeps: they are forwarded before they drop out."""
    own, ran, run = perturbed(model, 0.3), Counter[int](), ModelRunner.run
    if kind == "model":
        law: Law = lambda known, path: own(torch.tensor([known + path[1:]])).logits[0, -1].softmax(-1)  # noqa: E731
        drafter: Drafter = ModelDrafter(own, 2, sampling="iid")
    else:
        head = eagle3(model)
        law, drafter = law_of(model, head, tmp_path), EagleDrafter(head, 2, sampling="iid")

    def counted(self: ModelRunner, *given: Any, **named: Any) -> Any:
        ran[Seldom.rounds] += self.model is not model
        return run(self, *given, **named)

    monkeypatch.setattr(ModelRunner, "run", counted)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=24)
    drafter, sizes = AdaptiveDrafter(drafter, Seldom()), {"prompts": PROMPTS[:2], "prefill_chunk": 16}
    nodes, _ = agreements(Target(model), drafter, law, sampling=sampling, **sizes)
    assert all(same for _, same in nodes) and 8 <= len(nodes) < 48
    idle = [ran[number] for number in range(2, Seldom.rounds) if number % 6 in (1, 2, 3, 4)]
    assert len(idle) > 10 and sum(ran.values()) > 8
    assert sum(idle) == 0 if kind == "model" else 0 < sum(idle) <= len(idle) / 2


def masked_law(drafting: Any, mask: int) -> Law:
    """The distribution of a plain forward over a sequence and masks in place of what was drafted."""
    return lambda known, path: drafting(torch.tensor([known + [mask] * (len(path) - 1)])).logits[0, -1].softmax(-1)


@pytest.mark.parametrize(
    ("shape", "law", "seldom"), [(3, "iid", False), (TREE, "without_replacement", False), (2, "iid", True)]
)
def test_every_depth_has_the_law_of_a_plain_forward_over_masks(model: Any, shape: Any, law: str, seldom: bool) -> None:
    """Ragged rows, refilled slots, prompts in chunks and of one token, and rounds without drafts."""
    own = perturbed(model, 0.3)
    drafter = PARDDrafter(own, shape, sampling=law, mask_token_id=MASK)
    drafter = AdaptiveDrafter(drafter, Seldom()) if seldom else drafter
    sampling = SamplingParams(temperature=1.0, max_new_tokens=24 if seldom else 14)
    nodes, accepted = agreements(Target(model), drafter, masked_law(own, MASK), sampling=sampling, atol=1e-4)
    assert all(same for _, same in nodes) and len(nodes) > 8 and accepted > 2
    # The mutant: only the first depth, which needs no mask, is what it should be.
    nodes, _ = agreements(Target(model), drafter, masked_law(own, MASK + 1), prompts=PROMPTS[:1], sampling=sampling)
    assert all(same == (depth == 0) for depth, same in nodes) and (seldom or len(nodes) > 8)


def test_a_folder_of_pards_authors_loads(model: Any, tmp_path: Path) -> None:
    def loaded(**more: Any) -> PARDDrafter:
        (tmp_path / "config.json").write_text(json.dumps(said | more))
        return PARDDrafter.from_pretrained(str(tmp_path), device="cpu")

    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    for more, mask in (({"pard_token": MASK, "spd_type": "pard"}, MASK), ({"ptd_token_id": 0}, 0)):
        drafter = loaded(**more)
        assert (drafter.mask_token_id, drafter.max_depth) == (mask, 8)
    assert PARDDrafter.from_pretrained(str(tmp_path), device="cpu", mask_token_id=7).mask_token_id == 7
    for more, message in (
        ({}, r"names no mask token \(pard_token\).*give mask_token_id, or drafter=model"),
        ({"pard_token": MASK, "spd_type": "pard2"}, "PARD-2's"),
        ({"pard_token": VOCAB}, f"mask_token_id={VOCAB}: the embeddings of the drafter .* have {VOCAB} rows"),
    ):
        with pytest.raises(ValueError, match=message):
            loaded(**more)


def test_a_folder_of_p_eagle_s_authors_loads(model: Any, tmp_path: Path) -> None:
    """It drafts as far as it was trained, where that is known; without ``mask_hidden``, vLLM takes zeros."""
    head = parallel(model)
    save_eagle(head, tmp_path / "a")
    folder = speculators(tmp_path / "a", "peagle")
    assert PEagleDrafter.from_pretrained(folder).max_depth == 3
    save_eagle(head, tmp_path)
    again = load_eagle(rewritten(tmp_path, lambda tensors: tensors.pop("mask_hidden")), kind=PEagleHead)
    assert isinstance(again, PEagleHead) and not again.model.mask_hidden.any()  # type: ignore[union-attr]
    assert PEagleDrafter(again).max_depth == 5
    for load in (lambda: EagleDrafter.from_pretrained(folder), lambda: EagleDrafter(head)):
        with pytest.raises(ValueError, match=r"fills masks,? and was not trained to read its own output: give the "):
            load()
    with shapes_unchecked(), pytest.raises(ValueError, match=r"head is .*: give a P-EAGLE head"):
        PEagleDrafter(eagle3_head(model))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names no mask token, so it is not P-EAGLE's: add mask_token_id"):
        PEagleDrafter.from_pretrained(speculators(tmp_path, "peagle", mask_token_id=None))
    wrong = peagle_head(model)
    wrong.mask_token_id = VOCAB
    with pytest.raises(ValueError, match=f"has the mask token {VOCAB}, and the embeddings have {VOCAB} rows"):
        Engine(Target(model), PEagleDrafter(wrong, 2), RejectionVerifier(), max_length=16)

"""Drafters that fill masks: what PARD drafts is what a plain forward gives, and public folders of both kinds load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import EagleDrafter, PARDDrafter, PEagleDrafter
from drafters.combined import AdaptiveDrafter
from drafters.heads.eagle_files import load_eagle, save_eagle
from drafters.heads.files import ServedFor
from drafters.peagle import PEagleHead
from specdec import Engine, SamplingParams, Target
from tests.components import TREE, eagle3_head, eagle_head, peagle_head, perturbed
from tests.drafters.agreeing import PROMPTS, Law, agreements
from tests.drafters.test_eagle import logits, rewritten, speculators
from tests.drafters.test_feature_heads import Seldom
from tests.shapes import shapes_unchecked
from verifiers import RejectionVerifier

VOCAB, MASK = 64, 50


def law_of(drafting: Any, mask: int) -> Law:
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
    nodes, accepted = agreements(Target(model), drafter, law_of(own, MASK), sampling=sampling, atol=1e-4)
    assert all(same for _, same in nodes) and len(nodes) > 8 and accepted > 2


def test_the_reference_tells_a_wrong_mask(model: Any) -> None:
    """The mutant: only the first depth, which needs no mask, is what it should be."""
    own = perturbed(model, 0.3)
    drafter = PARDDrafter(own, 3, sampling="iid", mask_token_id=MASK)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=14)
    nodes, _ = agreements(Target(model), drafter, law_of(own, MASK + 1), prompts=PROMPTS[:1], sampling=sampling)
    assert all(same == (depth == 0) for depth, same in nodes) and len(nodes) > 8


def test_a_folder_of_pards_authors_loads(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"names no mask token \(pard_token\).*give mask_token_id, or drafter=model"):
        PARDDrafter.from_pretrained(str(tmp_path), device="cpu")
    said = json.loads((tmp_path / "config.json").read_text())
    for more, mask in (({"pard_token": MASK, "spd_type": "pard"}, MASK), ({"ptd_token_id": 0}, 0)):
        (tmp_path / "config.json").write_text(json.dumps(said | more))
        drafter = PARDDrafter.from_pretrained(str(tmp_path), device="cpu")
        assert (drafter.mask_token_id, drafter.max_depth) == (mask, 8)
    assert PARDDrafter.from_pretrained(str(tmp_path), device="cpu", mask_token_id=7).mask_token_id == 7
    for more, message in (
        ({"pard_token": MASK, "spd_type": "pard2"}, "PARD-2's"),
        ({"pard_token": VOCAB}, f"mask_token_id={VOCAB}: the embeddings of the drafter .* have {VOCAB} rows"),
        ({"pard_token": -1}, "pard_token"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(said | more))
        with pytest.raises(ValueError, match=message):
            PARDDrafter.from_pretrained(str(tmp_path), device="cpu")


def published(folder: Path, head: PEagleHead, **more: Any) -> Path:
    """A P-EAGLE head as ``speculators`` writes it."""
    save_eagle(head, folder)
    return speculators(folder, "peagle", **more)


def parallel(model: Any) -> PEagleHead:
    head = PEagleHead.for_target(
        model, hidden_layers=(0, 1, 1), layers=2, mask_token_id=MASK, owns_embeddings=True, draft_ids=range(0, VOCAB, 2)
    )
    return head.eval()


def test_speculators_folder_of_p_eagle_loads(model: Any, tmp_path: Path) -> None:
    head = parallel(model)
    drafter = PEagleDrafter.from_pretrained(published(tmp_path, head))
    again = drafter.head
    assert isinstance(again, PEagleHead)
    assert (again.mask_token_id, again.tokens, drafter.max_depth) == (MASK, 3, 3)
    assert again.hidden_layers == (0, 1, 1) and again.owns_embeddings
    assert torch.equal(again.model.mask_hidden, head.model.mask_hidden)  # type: ignore[arg-type]
    assert torch.equal(logits(again, model), logits(head, model))


def without(*names: str) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors.pop(name)

    return change


def test_a_folder_that_vllm_takes_for_parallel_drafting_loads(model: Any, tmp_path: Path) -> None:
    """An EAGLE-3 head with a ``pard_token``; without ``mask_hidden``, vLLM takes zeros."""
    head = parallel(model)
    save_eagle(head, tmp_path)
    again = load_eagle(rewritten(tmp_path, without(), mask_token_id=None), kind=PEagleHead)
    assert isinstance(again, PEagleHead) and again.mask_token_id == MASK
    assert torch.equal(again.model.mask_hidden, head.model.mask_hidden)  # type: ignore[arg-type]
    assert PEagleDrafter(again).max_depth == 5
    again = load_eagle(rewritten(tmp_path, without("mask_hidden")), kind=PEagleHead)
    assert isinstance(again, PEagleHead) and not again.model.mask_hidden.any()  # type: ignore[union-attr]


def test_what_is_no_p_eagle_head_is_refused(model: Any, tmp_path: Path) -> None:
    head = parallel(model)
    folder = published(tmp_path / "a", head)
    for load in (lambda: EagleDrafter.from_pretrained(folder), lambda: EagleDrafter(head)):
        with pytest.raises(ValueError, match=r"fills masks,? and was not trained to read its own output: give the "):
            load()
    for plain in (eagle3_head(model), eagle_head(model)):
        with shapes_unchecked(), pytest.raises(ValueError, match=r"head is .*: give a P-EAGLE head"):
            PEagleDrafter(plain)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names no mask token, so it is not P-EAGLE's: add mask_token_id"):
        PEagleDrafter.from_pretrained(published(tmp_path / "b", head, mask_token_id=None))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if name != "mask_hidden"}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="is incomplete: the tensor mask_hidden is missing"):
        PEagleDrafter.from_pretrained(folder)
    wrong = peagle_head(model)
    wrong.mask_token_id = VOCAB
    with pytest.raises(ValueError, match=f"has the mask token {VOCAB}, and the embeddings have {VOCAB} rows"):
        Engine(Target(model), PEagleDrafter(wrong, 2), RejectionVerifier(), max_length=16)


def test_p_eagle_heads_are_written_for_vllm(model: Any, tmp_path: Path) -> None:
    head = parallel(model)
    head.hidden_layers = (0, 1, 2)
    save_eagle(head, tmp_path, layout="speculators", served=ServedFor(target="some/target"))
    said = json.loads((tmp_path / "config.json").read_text())
    assert (said["speculators_model_type"], said["mask_token_id"]) == ("peagle", MASK)
    again = load_eagle(tmp_path, kind=PEagleHead)
    assert isinstance(again, PEagleHead) and again.mask_token_id == MASK
    assert torch.equal(logits(again, model), logits(head, model))
    with pytest.raises(ValueError, match="layout=sglang has heads with"):
        save_eagle(head, tmp_path / "s", layout="sglang")

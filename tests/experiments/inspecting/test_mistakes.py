"""Every mistake is planted in a head that is right by construction, and found by its name; a right head is not accused.

The toys' acceptance is a function of fixed seeds, so nothing here is drawn anew. An alternative that changes nothing is
taken for a mistake if it is better by 4 standard errors over places (1 in 30,000) and by 2.5 over prompts (1 in 50), so
that with two dozen alternatives fewer than one right head in a thousand is accused by chance."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from drafters.block import BlockDrafter
from drafters.eagle import EagleDrafter
from drafters.heads.eagle import EagleHead
from drafters.heads.mtp import MTPHead
from drafters.medusa import MedusaDrafter
from drafters.model import ModelDrafter
from drafters.mtp import MTPDrafter
from drafters.ngram import NGramDrafter
from experiments.inspecting.families import family_of, kind_of
from experiments.inspecting.search import Inspection, inspect
from experiments.inspecting.text import Text, prompts_of, text_of
from experiments.inspecting.wiring import Mistake
from specdec.interfaces import Drafter
from specdec.target.target import Target
from tests.components import perturbed, wide
from tests.experiments.inspecting.planted import LOW, WRONG, noisy
from tests.experiments.inspecting.toys import (
    Seen,
    reordered,
    toy_block,
    toy_eagle,
    toy_eagle3,
    toy_medusa,
    toy_model,
    toy_mtp,
)


def inspected(drafter: Drafter, target: Target, text: Text) -> Inspection:
    drafter.bind(target, max_batch_size=1, max_length=32)
    return inspect(family_of(drafter, target), text)


RIGHT: dict[str, tuple[Callable[[Seen], Drafter], int]] = {
    "EAGLE-1": (lambda seen: EagleDrafter(toy_eagle(seen), 2), 2),
    "EAGLE-1 with noise": (lambda seen: EagleDrafter(noisy(toy_eagle(seen), 0.2), 2), 2),
    "EAGLE-3": (lambda seen: EagleDrafter(toy_eagle3(seen), 2), 2),
    "EAGLE-3 with noise": (lambda seen: EagleDrafter(noisy(toy_eagle3(seen), 0.1), 2), 1),
    "EAGLE-3, half of the vocabulary": (lambda seen: EagleDrafter(toy_eagle3(seen, draft_ids=LOW), 2), 1),
    "EAGLE-3.1": (lambda seen: EagleDrafter(toy_eagle3(seen, norm_each=True), 2), 1),
    "MTP": (lambda seen: MTPDrafter(toy_mtp(seen), 2), 2),
    "MTP before the norm": (lambda seen: MTPDrafter(toy_mtp(seen, before_norm=True), 2), 1),
    "Medusa": (lambda seen: MedusaDrafter(toy_medusa(seen), 2), 2),
    "block": (lambda seen: BlockDrafter(toy_block(seen)), 3),
    "block with noise": (lambda seen: BlockDrafter(noisy(toy_block(seen), 0.2)), 3),
    "model": (lambda seen: ModelDrafter(perturbed(seen.model, 0.2), 2), 2),
}


FULL = {
    *("EAGLE-1 with noise", "EAGLE-3 with noise", "EAGLE-3.1", "MTP before the norm", "block with noise", "model"),
    *("layers one too high", "layers in another order", "a block's layers", "norm weights centred at zero"),
    *("an MTP module that was made for its output before the norm", "an MTP module that reads after the norm"),
    *("an EAGLE-1 head that reads before the norm", "pairs of a state and its own token, which predict the next one"),
    *("MTP with the hidden state first", "EAGLE-1 with the hidden state first", "an output layer of another model"),
    *("EAGLE-1, untrained", "MTP, untrained", "Medusa"),
}
"""Cases beside which another one tries the same thing."""


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.full) if name in FULL else name for name in names]


@pytest.mark.parametrize("name", cases(RIGHT))
def test_a_right_head_is_not_accused(name: str, target: Target, seen: Seen, texts: dict[int, Text]) -> None:
    make, depth = RIGHT[name]
    found = inspected(make(seen), target, texts[depth])
    assert found.names == [], found.mistakes[0].variation.name if found.mistakes else "knows nothing"
    assert found.loaded.acceptance[0] > found.ignorance + 0.1


@pytest.mark.parametrize("name", cases(WRONG))
def test_a_mistake_is_named(name: str, target: Target, seen: Seen, texts: dict[int, Text], tmp_path: Path) -> None:
    plant, depth, mistake, words = WRONG[name]
    found = inspected(plant(seen, tmp_path), target, texts[depth])
    assert found.names[:1] == [mistake], [each.variation.name for each in found.mistakes]
    assert len(found.names) == 1, [each.variation.name for each in found.mistakes]
    first = found.mistakes[0]
    assert words in first.variation.remedy
    assert first.measured.length == pytest.approx(found.loaded.length + first.gain.tokens)


OTHERS: dict[str, Callable[[Seen], Drafter]] = {
    "EAGLE-1, untrained": lambda seen: EagleDrafter(wide(EagleHead.for_target(seen.model), 1.0), 2),
    "EAGLE-3": lambda seen: EagleDrafter(toy_eagle3(seen), 2),
    "MTP, untrained": lambda seen: MTPDrafter(wide(MTPHead.for_target(seen.model), 1.0), 2),
    "Medusa": lambda seen: MedusaDrafter(toy_medusa(seen), 2),
    "block": lambda seen: BlockDrafter(toy_block(seen)),
}
"""A solved EAGLE-1 or MTP head copies the state in part, which helps with any target."""


@pytest.fixture(scope="module")
def stranger() -> tuple[Target, Text]:
    """Another target of the same sizes and vocabulary, so that everything fits. Its channels have another order."""
    target = Target(reordered(toy_model(7)), name="stranger")
    return target, text_of(target, prompts_of(target, None, 0), tokens=40, depths=2, places=160, seed=0)


@pytest.mark.parametrize("name", cases(OTHERS))
def test_a_head_of_another_target(name: str, seen: Seen, stranger: tuple[Target, Text]) -> None:
    found = inspected(OTHERS[name](seen), *stranger)
    assert found.names == [Mistake.TARGET], [each.variation.name for each in found.mistakes]


@pytest.mark.full
def test_two_mistakes_at_once(target: Target, seen: Seen, texts: dict[int, Text]) -> None:
    """Each is found on top of the other."""
    drafter = BlockDrafter(toy_block(seen), hidden_layers=(3, 5, 6), mask_token_id=5)
    found = inspected(drafter, target, texts[3])
    right = inspected(BlockDrafter(toy_block(seen)), target, texts[3])
    assert sorted(found.names) == sorted([Mistake.LAYERS, Mistake.MASK_TOKEN])
    assert found.best.length == pytest.approx(right.loaded.length)


def test_a_drafter_without_a_trained_head(target: Target) -> None:
    drafter = NGramDrafter()
    with pytest.raises(ValueError, match=r"^NGramDrafter is not one trained model, .* give drafter=eagle, mtp, block"):
        family_of(drafter, target)


@pytest.mark.full
def test_kinds_have_names(target: Target, seen: Seen) -> None:
    names = []
    for make, _ in RIGHT.values():
        drafter = make(seen)
        drafter.bind(target, max_batch_size=1, max_length=32)
        names.append(kind_of(family_of(drafter, target)))
    wanted = {"EAGLE-1 head", "EAGLE-3 head", "MTP module", "Medusa heads", "block head (DFlash)", "model"}
    assert set(names) == wanted

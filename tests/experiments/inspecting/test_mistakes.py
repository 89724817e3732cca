"""The likeliest mistakes are planted in heads that are right by construction, and found; a right head is not accused.

The toys' acceptance is a function of fixed seeds, so nothing here is drawn anew. An alternative that changes nothing is
taken for a mistake if it is better by 4 standard errors over rounds (1 in 30,000) and by 2.5 over prompts (1 in 50)."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from drafters import BlockDrafter, EagleDrafter, MedusaDrafter, ModelDrafter, MTPDrafter
from drafters.heads.eagle import EagleHead
from drafters.heads.eagle_files import save_eagle
from experiments.inspecting.acceptance import prompts_of
from experiments.inspecting.mistakes import USUAL, Inspection, Mistake, inspect
from specdec import Drafter, Target
from tests.components import perturbed, wide
from tests.experiments.inspecting import toys
from tests.experiments.inspecting.toys import MASK, Seen, toy_block, toy_eagle, toy_eagle3, toy_medusa, toy_mtp

Make = Callable[..., Drafter]


@pytest.fixture(scope="module")
def target() -> Target:
    return toys.toy_target()


@pytest.fixture(scope="module")
def seen(target: Target) -> Seen:
    return Seen(target.model)  # pyright: ignore[reportArgumentType]


def inspected(
    make: Callable[[Mapping[str, Any]], Drafter], target: Target, *given: str, batches: int = 1, tokens: int = 40
) -> Inspection:
    prompts = [prompt for seed in range(batches) for prompt in prompts_of(target, None, seed)]
    return inspect(make, target, prompts, tokens=tokens, given=given)


def eagle3(seen: Seen, **settings: Any) -> Drafter:
    return EagleDrafter(toy_eagle3(seen), 2, sampling="iid", **settings)


def block(seen: Seen, **settings: Any) -> Drafter:
    return BlockDrafter(toy_block(seen), sampling="iid", **settings)


def mtp(seen: Seen, hidden_state: str = "after_norm") -> Drafter:
    head = toy_mtp(seen)
    head.before_norm = hidden_state == "before_norm"
    return MTPDrafter(head, 2)


def public(seen: Seen, folder: Path, **config: Any) -> Make:
    """EAGLE-3 from its public files, with something changed in them."""
    save_eagle(toy_eagle3(seen), folder)
    (folder / "specdec.json").unlink()
    kept = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    return lambda **settings: EagleDrafter.from_pretrained(folder, shape=2, sampling="iid", **settings)


RIGHT: dict[str, Callable[[Seen], Make]] = {
    "MTP": lambda seen: lambda **settings: mtp(seen, **settings),
    "EAGLE-1": lambda seen: lambda: EagleDrafter(toy_eagle(seen), 2),
    "model": lambda seen: lambda: ModelDrafter(perturbed(seen.model, 0.2), 2),
}
"""The other kinds are inspected by the command's own tests."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "MTP" else pytest.mark.full) for n in RIGHT])
def test_a_right_head_is_not_accused(name: str, target: Target, seen: Seen) -> None:
    make = RIGHT[name](seen)
    found = inspected(lambda settings: make(**settings), target)
    assert found.mistake is None and not found.knows_nothing and not found.refused
    assert found.loaded.acceptance[0] > found.loaded.unigram + 0.1
    assert found.drafter.kind in {*USUAL, "model"}


# How a mistake is made, which one it is, and what mends it.
WRONG: dict[str, tuple[Callable[[Seen, Path], Make], Mistake, str]] = {
    "layers one too low": (
        lambda seen, folder: lambda hidden_layers=(1, 3, 4): eagle3(seen, hidden_layers=tuple(hidden_layers)),
        Mistake.LAYERS, "drafter.hidden_layers=[2,4,5]",
    ),
    "a block's layers": (
        lambda seen, folder: lambda hidden_layers=(3, 5, 6), **m: block(seen, hidden_layers=tuple(hidden_layers), **m),
        Mistake.LAYERS, "drafter.hidden_layers=[2,4,5]",
    ),
    "a normed residual stream": (
        lambda seen, folder: public(seen, folder, norm_before_residual=True),
        Mistake.NORM, "'norm_before_residual: false'",
    ),
    "no rope_theta": (
        lambda seen, folder: public(seen, folder, rope_parameters=None, rope_theta=None),
        Mistake.ROPE, "'rope_theta: 50'",
    ),
    "an MTP module that reads after the norm": (
        lambda seen, folder: lambda hidden_state="before_norm": mtp(seen, hidden_state),
        Mistake.NORM, "drafter.hidden_state=after_norm",
    ),
    "EAGLE-1 with the hidden state first": (
        lambda seen, folder: lambda: EagleDrafter(swapped(toy_eagle(seen)), 2),
        Mistake.HALVES, "halves of the columns of fc.weight",
    ),
    "mask token": (
        lambda seen, folder: lambda mask_token_id=5, **more: block(seen, mask_token_id=mask_token_id, **more),
        Mistake.MASK_TOKEN, f"drafter.mask_token_id={MASK}",
    ),
    "Medusa heads that begin with the target's own": (
        lambda seen, folder: lambda: MedusaDrafter(toy_medusa(seen, 3, first=1), 2, sampling="iid"),
        Mistake.SHIFT, "leave it out",
    ),
}  # fmt: skip


def swapped(head: Any) -> EagleHead:
    weight = head.model.fc.weight
    weight.data = weight.data.roll(head.model.fc.in_features // 2, dims=1)
    return head


FIRST = ("an MTP module that reads after the norm",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FIRST else pytest.mark.full) for n in WRONG])
def test_a_mistake_is_named(name: str, target: Target, seen: Seen, tmp_path: Path) -> None:
    plant, mistake, words = WRONG[name]
    make = plant(seen, tmp_path)
    batches = 12 if mistake is Mistake.SHIFT else 1  # those heads know least
    found = inspected(lambda settings: make(**settings), target, batches=batches)
    assert found.mistake is not None, [(each.alternative.name, each.gain) for each in found.tried]
    assert found.mistake.alternative.mistake == mistake and words in found.mistake.alternative.remedy
    assert found.mistake.gain.tokens > 0.1


@pytest.mark.full
def test_the_checkpoints_own_layers_are_tried(target: Target, seen: Seen, tmp_path: Path) -> None:
    """They are none of the neighbours."""
    make = public(seen, tmp_path)

    def wrong(settings: Mapping[str, Any]) -> Drafter:
        return make(**{"hidden_layers": (0, 1, 7), **settings})

    found = inspected(wrong, target, "hidden_layers")
    assert found.mistake is not None
    assert found.mistake.alternative.name == "hidden_layers of its own files"
    assert found.mistake.alternative.remedy == "leave out drafter.hidden_layers"


def test_an_untrained_head(target: Target, seen: Seen) -> None:
    head = wide(EagleHead.for_target(seen.model), 1.0)
    assert inspected(lambda settings: EagleDrafter(head, 2), target, tokens=16).knows_nothing

"""The likeliest mistakes are planted in the bundled heads, and found; a right head is not accused.

Seeds are fixed, so nothing here is drawn anew. An alternative that changes nothing is taken for a mistake if it is
better by 4 standard errors over rounds (1 in 30,000) and by 2.5 over prompts (1 in 50).
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from drafters import BlockDrafter, EagleDrafter, MedusaDrafter, ModelDrafter, MTPDrafter
from drafters.heads.eagle import EagleHead
from experiments.inspecting.acceptance import prompts_of
from experiments.inspecting.mistakes import USUAL, Inspection, Mistake, alternatives, inspect
from specdec import Drafter, Target, bundled
from tests.components import wide
from tests.drafters.test_mtp import head_of
from tests.models import tiny_model

Make = Callable[[Mapping[str, Any]], Drafter]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained("bundled/target", dtype="float32")


def inspected(make: Make, target: Target, *given: str, batches: int = 1, tokens: int = 40) -> Inspection:
    prompts = [prompt for seed in range(batches) for prompt in prompts_of(target, None, seed)]
    return inspect(make, target, prompts, tokens=tokens, given=given)


def loaded(kind: Any, name: str | Path, **options: Any) -> Make:
    return lambda settings: kind.from_pretrained(str(name), **{"shape": 2, "sampling": "iid", **options, **settings})


def eagle3(folder: Path, **config: Any) -> Make:
    """EAGLE-3 with something changed in its files."""
    shutil.copytree(bundled.resolve("bundled/eagle3"), folder, dirs_exist_ok=True)
    for name in ("config.json", "specdec.json"):
        kept = json.loads((folder / name).read_text()) | config
        (folder / name).write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    return loaded(EagleDrafter, folder)


RIGHT: dict[str, Make] = {
    "block head (DSpark)": loaded(BlockDrafter, "bundled/dspark"),
    "Medusa heads": loaded(MedusaDrafter, "bundled/medusa"),
    "model": loaded(ModelDrafter, "bundled/drafter"),
}


@pytest.mark.parametrize("kind", [pytest.param(n, marks=[] if n[0] == "M" else pytest.mark.full) for n in RIGHT])
def test_a_right_head_is_not_accused(kind: str, target: Target) -> None:
    found = inspected(RIGHT[kind], target)
    assert found.mistake is None and not found.knows_nothing and not found.refused
    assert found.loaded.acceptance[0] > found.loaded.unigram + 0.1
    assert found.drafter.kind == kind and kind in {*USUAL, "model"}


# How a mistake is made, which settings are given, which mistake it is, and what mends it.
WRONG: dict[str, tuple[Callable[[Target, Path], Make], str, Mistake, str]] = {
    "layers in another order": (
        lambda target, folder: loaded(EagleDrafter, "bundled/eagle3", hidden_layers=(5, 3, 1)),
        "", Mistake.LAYERS, "drafter.hidden_layers=[1,3,5]",
    ),
    "layers that are not the checkpoint's own": (
        lambda target, folder: loaded(EagleDrafter, "bundled/eagle3", hidden_layers=(5, 3, 1)),
        "hidden_layers", Mistake.LAYERS, "leave out drafter.hidden_layers",
    ),
    "an un-normed residual stream": (
        lambda target, folder: eagle3(folder, norm_before_residual=False),
        "", Mistake.NORM, "'norm_before_residual: true'",
    ),
    "another rope_theta": (
        lambda target, folder: eagle3(
            folder, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 2.0}
        ),
        "", Mistake.ROPE, "'rope_theta: 10000'",
    ),
    "mask token": (
        lambda target, folder: loaded(BlockDrafter, "bundled/dspark", mask_token_id=5),
        "", Mistake.MASK_TOKEN, "drafter.mask_token_id=4095",
    ),
}  # fmt: skip
FIRST = ("layers in another order",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FIRST else pytest.mark.full) for n in WRONG])
def test_a_mistake_is_named(name: str, target: Target, tmp_path: Path) -> None:
    plant, given, mistake, words = WRONG[name]
    found = inspected(plant(target, tmp_path), target, *given.split(), batches=2)
    assert found.mistake is not None, [(each.alternative.name, each.gain) for each in found.tried]
    assert found.mistake.alternative.mistake == mistake and words in found.mistake.alternative.remedy
    assert found.mistake.gain.tokens > 0.1


def test_an_mtp_module_is_tried_with_the_other_state() -> None:
    model: Any = tiny_model("llama", vocab_size=64)
    small, module = Target(model), head_of(model)
    for before, state in ((True, "after_norm"), (False, "before_norm")):
        module.before_norm = before
        tried = alternatives(MTPDrafter(module, 2).describe(small), small)
        (norm,) = [each for each in tried if each.settings.get("hidden_state")]
        assert norm.mistake is Mistake.NORM and norm.settings == {"hidden_state": state}


def test_an_untrained_head(target: Target) -> None:
    head = wide(EagleHead.for_target(target.model), 1.0)
    assert inspected(lambda settings: EagleDrafter(head, 2), target, tokens=16).knows_nothing

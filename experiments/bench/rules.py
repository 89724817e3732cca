"""Acceptance rules by the names of their files in ``conf/verifier``, read without Hydra."""

import importlib
from collections.abc import Sequence
from pathlib import Path

import yaml

from specdec.interfaces import Verifier

FOLDER = Path(__file__).parents[2] / "conf" / "verifier"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def make_rules(names: Sequence[str] = NAMES) -> dict[str, Verifier]:
    """The rules with the arguments that their files give them, by name."""
    made: dict[str, Verifier] = {}
    for name in names:
        options = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
        module, _, kind = options.pop("_target_").rpartition(".")
        made[name] = getattr(importlib.import_module(module), kind)(**options)
    return made

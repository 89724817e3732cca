"""Heads of EAGLE-3 for tests."""

from typing import Any

from drafters.heads.eagle import Eagle3Head
from tests.components import wide

VOCAB = 64
IDS = [token for token in range(VOCAB) if token % 3]


def eagle3(model, **options: Any) -> Eagle3Head:
    given = {"hidden_layers": (0, 2, 3), "draft_ids": IDS} | options
    return wide(Eagle3Head.for_target(model, **given), 1.5)

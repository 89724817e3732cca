"""Figures as JSON that every reader takes."""

import json
import math
from typing import Any


def json_text(value: Any) -> str:
    """The value as indented JSON with a line break at its end.

    A number that JSON does not have (not finite) becomes null.
    """
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value

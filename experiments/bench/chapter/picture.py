"""A picture of the chapter: its figures, how they are drawn, and a digest that tells whether a file is current."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.reporting import style

Data = dict[str, Any]
"""What a picture shows: texts and numbers."""


@dataclass(frozen=True)
class Picture:
    """A picture of the chapter.

    Attributes:
        data: Returns what it shows.
        draw: Draws that.
    """

    data: Callable[[], Data]
    draw: Callable[[Data], Figure]

    def digest(self) -> str:
        """Returns what tells apart two pictures of different figures."""
        return hashlib.sha256(json.dumps(_rounded(self.data()), sort_keys=True).encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Draw it into a file."""
        with style.styled():
            self.draw(self.data()).savefig(path, metadata={"Description": self.digest()})


def _rounded(found: Any) -> Any:
    """Returns data whose last digits, which differ between machines, are gone."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_rounded(value) for value in found]
    return float(f"{found:.9g}") if isinstance(found, float) else found

"""Prompts of your own."""

from dataclasses import dataclass

from experiments.datasets.prompt import Prompt


@dataclass(frozen=True, kw_only=True)
class Signatures:
    """The beginnings of functions, for a model of code to continue.

    Attributes:
        count: Prompts to take; None for all.
        seed: Seed of the choice.
    """

    count: int | None = None
    seed: int = 0

    def load(self) -> list[Prompt]:
        """One prompt per verb and noun; results are reported per verb, too."""
        return [
            Prompt(
                id=f"{verb}_{noun}",
                turns=(f"import os\n\n\ndef {verb}_{noun}(path):\n    with open(path) as file:\n        ",),
                category=verb,
            )
            for verb in ("read", "write")
            for noun in ("header", "lines", "table")
        ]

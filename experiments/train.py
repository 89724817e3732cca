"""Train a drafter for a target: ``python -m experiments.train head=medusa target.name=… data=chat data.file=…``.

``export=FOLDER format=speculators out=FOLDER`` writes a trained one in the layout that a serving engine reads.
"""

from dataclasses import dataclass
from typing import Literal

from experiments.config.kinds import Count, Natural, Pace, Section, Settings, Text
from experiments.config.launch import Command


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """What ``conf/train.yaml`` holds."""

    seed: Natural | None
    target: Section
    data: Section
    regenerate: Section
    loss: Section
    weights: Section
    head: Section
    tracker: Section
    fit: Section
    served: Section
    evaluate_every: Count
    held_out_rows: Count
    states: Text | None
    sharded: bool
    mixed_precision: Literal["no", "bf16"]
    resume: bool
    progress_every: Pace
    export: Text | Section | None
    format: Literal["native", "speculators", "sglang"]
    tokens: Count | None
    overwrite: bool


def _rewrite(words: list[str]) -> list[str]:
    """With ``export=…``, the target is the one that the files name, unless it is given."""
    exports = any(word.startswith("export") for word in words)
    return ["target.name=null", *words] if exports and not any(word.startswith("target") for word in words) else words


train = Command(
    "train",
    TrainSettings,
    work=lambda config: "train" if config.export is None else "export",
    rewrite=_rewrite,
    divides=True,
)
main = train.main

if __name__ == "__main__":
    main()

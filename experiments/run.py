"""Measure methods against plain decoding: ``python -m experiments.run drafter=medusa sampling.temperature=1``.

``methods`` names several, which are then measured in turn, at all ``temperatures``: see ``experiment=drafters``. With
``experiment=accuracy grading.tasks=gsm8k``, the answers to benchmarks of lm-eval are compared instead.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from omegaconf import DictConfig

from experiments.config.kinds import (
    Count,
    Dropped,
    MeasuredSettings,
    Natural,
    OneOrMore,
    Options,
    Pace,
    Price,
    Section,
    Temperatures,
    Text,
    check_name,
)
from experiments.config.launch import Command

if TYPE_CHECKING:
    from experiments.results.runs import Run


@dataclass(frozen=True, kw_only=True)
class GradingSettings:
    """The section ``grading``: benchmarks of lm-eval."""

    tasks: OneOrMore[Text]
    include: Text | None
    limit: Count | None
    fewshot: Natural | None
    chat: bool
    generation: Options
    max_new_tokens: Count
    execute: bool


@dataclass(frozen=True, kw_only=True)
class RunSettings(MeasuredSettings):
    """What ``conf/run.yaml`` holds."""

    contenders: Section
    labels: Section
    compared_with: Text | None
    temperatures: Temperatures | None
    race: Text | None
    costs: Text | None
    peaks: Literal["measured", "none"]
    trace: bool
    trace_dropped: Dropped
    objective: Literal["speedup", "tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate"] | None
    progress_every: Pace
    price: Price | None
    requests_table: bool | None
    study: Section | None
    grading: GradingSettings | None

    def __post_init__(self) -> None:
        super().__post_init__()
        methods = list(self.methods) or list(self.policies) or [self.method]
        if self.objective is not None and len(methods) > 1:
            raise ValueError(f"objective={self.objective} is of one method, and there are {len(methods)}: give null")
        if self.objective is not None and not self.drafts:
            raise ValueError(f"objective={self.objective}: plain decoding alone has none, give a drafter")
        check_name("compared_with", self.compared_with, methods)
        check_name("race", self.race, methods)


def objective(config: DictConfig, made: "Run") -> float | None:
    """The figure that the configuration's ``objective`` names, for sweepers that search for the best setting.

    Raises:
        ValueError: The run has no such figure.
    """
    if config.objective is None:
        return None
    for row in made.rows:
        if row["method"] == config.method and row[config.objective] is not None:
            return float(row[config.objective])
    raise ValueError(f"objective={config.objective}: this run has none, because {config.method} finished no prompt")


run = Command(
    "run",
    RunSettings,
    work=lambda config: "run" if config.grading is None else "accuracy",
    objective=objective,
)
main = run.main

if __name__ == "__main__":
    main()

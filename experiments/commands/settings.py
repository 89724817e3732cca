"""The commands: the settings of each, which are what ``conf/NAME.yaml`` holds, and the module that does its work.

Nothing heavy is imported here: a mistake in a setting is answered at once.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from omegaconf import DictConfig

from experiments.config.kinds import (
    Count,
    Distance,
    Dropped,
    EngineSettings,
    Folder,
    Format,
    MeasuredSettings,
    Natural,
    OneOrMore,
    Options,
    Pace,
    Positive,
    Price,
    Probability,
    Runs,
    Seconds,
    Section,
    ServedSettings,
    Settings,
    Several,
    Share,
    Temperatures,
    Text,
    Texts,
    Two,
    Wanted,
    check_name,
    did_you_mean,
    least,
    number,
)
from experiments.config.launch import Command
from experiments.config.sections import option_names, sections
from experiments.config.words import with_folders, with_lists


@dataclass(frozen=True, kw_only=True)
class AuditSettings(ServedSettings):
    """An audit: the subject is our engine, another engine (``+contender=…``), or a function."""

    seed: Natural
    dataset: Section
    contenders: Section
    function: Text | None
    assistant: Text
    mistakes: Texts
    context: Count
    horizon: Count | None
    drafted: Count
    undrafted: Natural
    level: Share
    tolerance: Distance
    wanted: Share
    least: Distance
    block: Count
    max_samples: Count
    chat_template: Options
    resume: bool


audit = Command("audit", AuditSettings)


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """A check of a drafter, of a rule, or of the files in a folder."""

    target: Section
    drafter: Section
    policy: Section
    verifier: Section
    sampling: Section
    engine: EngineSettings
    inspect: bool
    prompts: Texts
    tokens: Annotated[int, least(8)] | None
    rounds: Two
    draws: Natural
    depths: Count | None
    vocab: Two
    tables: Count
    temperatures: Annotated[list[Positive], Wanted("at least one temperature, each above 0", bool)]
    streams: Annotated[int, least(100)]
    threshold: Positive
    chat_template: Options
    seed: Natural
    threads: Count | None

    def __post_init__(self) -> None:
        drafter, verifier = (part.get("_target_") for part in (self.drafter, self.verifier))
        if not self.inspect and (drafter is None) == (verifier is None):
            raise ValueError(
                f"drafter._target_={drafter} and verifier._target_={verifier}: give drafter=NAME or verifier=NAME to "
                f"check, or a folder to inspect"
            )


def _check_words(words: list[str]) -> list[str]:
    """``experiments.check FOLDER`` is short for ``inspect=true drafter.name=FOLDER``."""
    found = with_folders(words, "++drafter.name", several=False)
    return ["inspect=true", *found] if found and found[0].startswith("++drafter.name=") else found


check = Command("check", CheckSettings, rewrite=_check_words)


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """A comparison of runs, or of studies of load."""

    runs: Runs
    allow_mixed: bool
    format: OneOrMore[Format]
    difference: Text | None
    width: Positive | None
    max_prompts: Natural
    out: Folder
    title: bool = True


compare = Command("compare", CompareSettings, rewrite=lambda words: with_lists(with_folders(words, "runs")))


@dataclass(frozen=True, kw_only=True)
class GridSettings:
    """The sizes that a fit measures: the sections ``grid`` and ``held_out``."""

    batch: Several[Count]
    context: Several[Count]
    drafted: Several[Natural]
    chunk: list[Count]


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    """A plan of costs on a device; with ``costs=timed`` and ``costs=fit`` what steps cost on this machine."""

    seed: Natural
    target: Section
    drafter: Section
    verifier: Section
    sampling: Section
    engine: EngineSettings
    device: Text | None
    devices: Text | None
    costs: Text | None
    measured: bool
    batch: OneOrMore[Count] | None
    context: Two | None
    output: Count
    acceptance: OneOrMore[Probability]
    longest: Count
    price: Price | None
    memory: Positive | None
    usable: Annotated[float, number("a share above 0, at most 1", lambda value: 0 < value <= 1)]
    page: Count
    overhead: Seconds
    pictures: bool
    nodes: Several[Two]
    draft_costs: Several[Annotated[float, number("a share of a plain step, 0 or above", lambda value: value >= 0)]]
    grid: GridSettings
    held_out: GridSettings
    ranges: list[Count] | None
    seconds: Seconds | None
    rounds: Natural
    chat_template: Options
    title: bool = True


plan = Command(
    "plan", PlanSettings, work=lambda config: {"timed": "pays", "fit": "calibrate"}.get(config.costs, "plan")
)


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings):
    """Rules asked about the drafts of a trace; with ``best=tree`` the best tree for its drafter."""

    seed: Natural
    trace: Annotated[OneOrMore[Text], Wanted("the folder of a run made with trace=true, or a list of them")]
    verifiers: Any
    baseline: Text
    best: Literal["tree"] | None
    method: Text | None
    max_nodes: Count
    max_depth: Count | None
    costs: Text
    rounds: Count
    bootstrap: Section
    title: bool = True

    def __post_init__(self) -> None:
        names = [*sections("verifier", self.verifiers), *option_names("verifier")]
        if self.baseline not in names:
            raise ValueError(f"baseline: there is no verifier {self.baseline!r}{did_you_mean(self.baseline, names)}")


def _replay_words(words: list[str]) -> list[str]:
    """``experiments.replay FOLDER verifier=a,b`` is short for ``trace=FOLDER verifiers=[a,b]``."""
    return [
        f"verifiers=[{word.removeprefix('verifier=').strip('[]')}]" if word.startswith("verifier=") else word
        for word in with_folders(words, "trace")
    ]


replay = Command(
    "replay",
    ReplaySettings,
    work=lambda config: "replay" if config.best is None else "best_tree",
    rewrite=_replay_words,
)


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
    """Methods measured against plain decoding; with ``grading`` their answers to benchmarks."""

    contenders: Section
    labels: Section
    compared_with: Text | None
    temperatures: Temperatures | None
    race: Text | None
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


def objective(config: DictConfig, made: Any) -> float | None:
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


@dataclass(frozen=True, kw_only=True)
class ServeSettings(ServedSettings):
    """An endpoint for standard clients."""

    seed: Natural
    host: Text
    port: Annotated[int, Wanted("a port from 0 (any that is free) to 65535", lambda value: 0 <= value < 65536)]
    name: Text | None
    template: Text | None
    queue: Natural
    drain: Seconds
    max_body: Count
    prefix: Literal["specdec", "vllm"]
    method: Text


serve = Command("serve", ServeSettings)


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """A training; with ``export=FOLDER`` a trained drafter written in the layout that a serving engine reads."""

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


def _train_words(words: list[str]) -> list[str]:
    """With ``export=…``, the target is the one that the files name, unless it is given."""
    exports = any(word.startswith("export") for word in words)
    return ["target.name=null", *words] if exports and not any(word.startswith("target") for word in words) else words


train = Command(
    "train",
    TrainSettings,
    work=lambda config: "train" if config.export is None else "export",
    rewrite=_train_words,
    divides=True,
)

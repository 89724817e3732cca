"""The settings of every command, as dataclasses: their types, their ranges, and which of them exclude each other.

``conf/NAME.yaml`` has the value and the meaning of each. Sections that describe a component (``drafter``, ``sampling``,
…) are checked against the component's own signature, once its class may be imported.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from experiments.config.checking import Wanted, did_you_mean
from experiments.config.groups import labelled, option_names, sections
from experiments.reporting.formats import FORMATS
from experiments.results.limits import seconds_of
from experiments.results.records import PLAIN

T = TypeVar("T")


def _least(smallest: int) -> Wanted:
    return Wanted(f"an integer of at least {smallest}", lambda value: value >= smallest)


def _number(words: str, test: Callable[[float], bool]) -> Wanted:
    return Wanted(words, lambda value: math.isfinite(value) and test(value))


def _nearest(path: str) -> Path:
    """A path, or the nearest folder above it that exists."""
    found = Path(path).absolute()
    while not found.exists() and not found.is_symlink() and found != found.parent:
        found = found.parent
    return found


def _folder_words(value: Any) -> str:
    wanted = "the path of a folder"
    if not isinstance(value, str) or not value:
        return wanted
    return f"{wanted} ({_nearest(value)} {'cannot be written to' if _nearest(value).is_dir() else 'is a file'})"


def _is_folder(value: str) -> bool:
    return bool(value) and _nearest(value).is_dir() and os.access(_nearest(value), os.W_OK | os.X_OK)


def _duration_words(value: Any) -> str:
    try:
        seconds_of(value)
    except ValueError as error:
        return str(error).removeprefix("give ")
    return "a time"


def _is_duration(value: Any) -> bool:
    return _duration_words(value) == "a time"


def _is_pace(value: Any) -> bool:
    return value >= 1 if isinstance(value, int) else re.fullmatch(r"[1-9]\d*[smh]", value) is not None


_FILLED = Wanted(test=bool)
Several = Annotated[list[T], _FILLED]
OneOrMore = T | Annotated[list[T], _FILLED]
Natural = Annotated[int, _least(0)]
Count = Annotated[int, _least(1)]
Two = Annotated[int, _least(2)]
Eight = Annotated[int, _least(8)]
Text = Annotated[str, Wanted("a text", bool)]
Texts = Annotated[list[Text], Wanted("a list of texts")] | None
Folder = Annotated[str, Wanted(_folder_words, _is_folder)]
Section = Annotated[dict, Wanted("a section, such as one of the files in conf/")]
Options = Annotated[dict, Wanted("a section, such as {enable_thinking: false}")] | None
Pace = Annotated[int | str, Wanted("a number of prompts, a time such as 30s or 5m", _is_pace)] | None
Positive = Annotated[float, _number("a number above 0", lambda value: value > 0)]
Seconds = Annotated[float, _number("seconds, 0 or more", lambda value: value >= 0)]
Temperature = Annotated[float, _number("a temperature, 0 or above", lambda value: value >= 0)]
Temperatures = Annotated[list[Temperature], Wanted("a list of temperatures, each 0 or above", bool)]
Probability = Annotated[float, _number("a probability from 0 to 1", lambda value: 0 <= value <= 1)]
Share = Annotated[float, _number("a share above 0, at most 1", lambda value: 0 < value <= 1)]
Dropped = Annotated[float, _number("a mass from 0 (keep every token) to below 1", lambda value: 0 <= value < 1)]
Duration = Annotated[Any, Wanted(_duration_words, _is_duration)] | None
Format = Annotated[str, Wanted(f"one or several of {', '.join(FORMATS)}", lambda value: value in FORMATS)]
Runs = Annotated[OneOrMore[Text], Wanted("folders of runs or of sweeps, or a pattern, as 'runs=[FOLDER,FOLDER]'")]
Trace = Annotated[OneOrMore[Text], Wanted("the folder of a run made with trace=true, or a list of them")]
Objective = Literal["speedup", "tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate"]
"""Figures of a method that an optimizing sweeper may ask for: fields of ``MethodSummary``."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The section ``engine``: arguments of ``specdec.engine.engine.Engine``, which would import PyTorch."""

    max_batch_size: Count
    max_length: Two | None
    prefill_chunk: Count
    attention: Text
    optimize: bool
    invariant: bool
    timing: bool
    scheduler: Any
    check: bool
    recording: Literal["auto", "rounds", "decisions", "off"]
    kv_cache: Literal["int8", "fp8"] | None


@dataclass(frozen=True, kw_only=True)
class LimitsSettings:
    """The section ``sla``: limits on latencies."""

    ttft: Duration
    tpot: Duration
    e2e: Duration


@dataclass(frozen=True, kw_only=True)
class MeasuringSettings:
    """The settings of every measurement."""

    target: Section
    verifier: Section
    sampling: Section
    dataset: Section
    tracker: Section
    engine: EngineSettings
    contenders: Section
    bootstrap: Section
    methods: Section
    seed: Natural | None
    warmup_prompts: Natural
    threads: Count | None
    out: Folder
    resume: bool
    trace: bool
    trace_dropped: Dropped
    chat_template: Options
    progress_every: Pace
    title: bool = True


@dataclass(frozen=True, kw_only=True)
class RunSettings(MeasuringSettings):
    """Settings of ``experiments.run``."""

    drafter: Section
    policy: Section
    policies: Section
    method: Text
    objective: Objective | None
    rules: Section
    labels: Section
    setups: Section
    ladder: Texts
    compared_with: Text | None
    costs: Text | None
    peaks: Literal["measured", "none"]
    temperatures: Temperatures | None
    sla: LimitsSettings
    price: Annotated[float, _number("the price of an hour, above 0", lambda value: value > 0)] | None
    requests_table: bool | None
    study: Section | None

    def __post_init__(self):
        """Refuse settings that contradict each other."""
        drafts = self.drafter.get("_target_") is not None
        methods = list(self.methods) or list(self.policies) or [self.method]
        if self.methods and drafts:
            raise ValueError(f"drafter and methods={methods} are both given: give drafter=none, or no methods")
        if self.objective is not None and len(methods) > 1:
            raise ValueError(f"objective={self.objective} is of one method, and there are {len(methods)}: give null")
        if self.objective is not None and not drafts:
            raise ValueError(f"objective={self.objective}: plain decoding alone has none, give a drafter")
        _check_name("compared_with", self.compared_with, methods)
        for rung in self.ladder or ():
            _check_name("ladder", rung, [PLAIN, *methods])
            own = rung in self.setups or (self.methods.get(rung) or {}).get("_target_") is not None
            if rung != PLAIN and not drafts and not own:
                raise ValueError(f"ladder: {rung} has neither a drafter nor a setup, give setups.{rung}={{engine: …}}")
        if self.ladder and (len(set(self.ladder)) < len(self.ladder) or len(self.ladder) < 2):
            raise ValueError(f"ladder={self.ladder}: give at least two methods, each once")


@dataclass(frozen=True, kw_only=True)
class DemoSettings(MeasuringSettings):
    """Settings of ``experiments.demo``."""

    drafter: Section
    policy: Section
    temperatures: Temperatures
    race: Text | None
    race_tokens: Count
    time_limit: Positive | None

    def __post_init__(self):
        """Refuse a race of a method that there is not."""
        _check_name("race", self.race, self.methods)


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """Settings of ``experiments.compare``."""

    runs: Runs
    allow_mixed: bool
    format: OneOrMore[Format]
    out: Text
    title: bool = True


@dataclass(frozen=True, kw_only=True)
class AccuracySettings:
    """Settings of ``experiments.accuracy``."""

    target: Section
    drafter: Section
    policy: Section
    verifier: Section
    engine: EngineSettings
    bootstrap: Section
    generation: Options
    tasks: Annotated[OneOrMore[Text], Wanted("a name of a task, or a list of them")]
    include: Text | None
    limit: Count | None
    fewshot: Natural | None
    chat: bool
    max_new_tokens: Count
    execute: bool
    method: Text
    chat_template: Options
    seed: Natural
    threads: Count | None
    format: OneOrMore[Format]
    out: Text


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Settings of ``experiments.plan``."""

    target: Section
    drafter: Section
    engine: EngineSettings
    device: Text | None
    devices: Text | None
    costs: Text | None
    measured: bool
    batch: OneOrMore[Count]
    context: Two | None
    output: Count
    acceptance: OneOrMore[Probability]
    longest: Count
    price: Positive | None
    memory: Positive | None
    usable: Share
    page: Count
    overhead: Seconds
    chat_template: Options
    pictures: bool
    out: Folder
    title: bool = True


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """Settings of ``experiments.report``."""

    runs: Runs
    out: Text
    max_prompts: Natural

    def __post_init__(self):
        """Refuse what is no HTML file."""
        if Path(self.out).suffix.lower() not in (".html", ".htm") or Path(self.out).is_dir():
            raise ValueError(f"out={self.out!r}: give the name of a file that ends in .html")


@dataclass(frozen=True, kw_only=True)
class ShowSettings:
    """Settings of ``experiments.show``."""

    run: Annotated[str, Wanted("the folder of a run", bool)]
    prompt: Any
    method: Any
    temperature: Temperature | None
    turn: Natural | None
    sample: Natural
    round: Natural | None


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Settings of ``experiments.replay``."""

    trace: Annotated[str, Wanted("the folder of a run made with trace=true, or of a sweep of them", bool)]
    verifiers: Any
    baseline: Text
    seed: Natural
    threads: Count | None
    out: Folder
    title: bool = True
    bootstrap: Section

    def __post_init__(self):
        """Refuse rules that there are not."""
        names = [*sections("verifier", self.verifiers), *option_names("verifier")]
        if self.baseline not in names:
            raise ValueError(f"baseline: there is no verifier {self.baseline!r}{did_you_mean(self.baseline, names)}")


@dataclass(frozen=True, kw_only=True)
class ReplayTextSettings:
    """Settings of ``experiments.replay_text``."""

    texts: Annotated[OneOrMore[Text], Wanted("a file, or a list of files: JSON Lines with prompts and answers")]
    drafters: Annotated[list[Any], Wanted("a list of drafters", bool)]
    tokenizer: Text
    per_category: Count | None
    seed: Natural
    threads: Count | None
    out: Folder
    title: bool = True
    bootstrap: Section

    def __post_init__(self):
        """Refuse drafters that there are not."""
        labelled("drafter", self.drafters)


@dataclass(frozen=True, kw_only=True)
class OptimizeTreeSettings:
    """Settings of ``experiments.optimize_tree``."""

    trace: Trace
    method: Text | None
    max_nodes: Count
    max_depth: Count | None
    costs: Text
    rounds: Count
    old: Any
    measure: bool
    target: Section
    drafter: Section
    verifier: Section
    sampling: Section
    dataset: Section
    engine: Section
    bootstrap: Section
    seed: Natural
    threads: Count | None
    out: Folder
    title: bool = True


@dataclass(frozen=True, kw_only=True)
class GridSettings:
    """The sizes that a calibration measures: the sections ``grid`` and ``held_out``."""

    batch: Several[Count]
    context: Several[Count]
    drafted: Several[Natural]
    chunk: list[Count]


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    """Settings of ``experiments.calibrate``."""

    target: Section
    drafter: Section
    verifier: Section
    sampling: Section
    engine: EngineSettings
    grid: GridSettings
    held_out: GridSettings
    ranges: list[Count] | None
    seconds: Seconds
    rounds: Natural
    costs: Text
    chat_template: Options
    seed: Natural
    threads: Count | None
    out: Folder
    title: bool = True


@dataclass(frozen=True, kw_only=True)
class CheckVerifierSettings:
    """Settings of ``experiments.check_verifier``."""

    verifier: Section
    vocab: Two
    tables: Count
    seed: Natural
    temperatures: Annotated[list[Positive], Wanted("at least one temperature, each above 0", bool)]
    streams: Annotated[int, _least(100)]
    threshold: Positive
    max_minutes: Positive


@dataclass(frozen=True, kw_only=True)
class CheckDrafterSettings:
    """Settings of ``experiments.check_drafter``."""

    target: Section
    drafter: Section
    policy: Section
    sampling: Section
    engine: EngineSettings
    prompts: Texts
    tokens: Eight
    rounds: Two
    draws: Natural
    chat_template: Options
    every_rule: bool
    seed: Natural
    threads: Count | None


@dataclass(frozen=True, kw_only=True)
class InspectDrafterSettings:
    """Settings of ``experiments.inspect_drafter``."""

    target: Section
    drafter: Section
    engine: EngineSettings
    prompts: Texts
    tokens: Eight
    depths: Count | None
    chat_template: Options
    seed: Natural
    threads: Count | None


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Settings of ``experiments.export``."""

    drafter: Section
    target: Section
    format: Literal["native", "speculators", "sglang"]
    out: Folder
    overwrite: bool
    tokens: Count | None


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of ``experiments.train``."""

    head: Section
    target: Section
    data: Section
    regenerate: Section
    loss: Section
    weights: Section
    fit: Section
    served: Section
    tracker: Section
    evaluate_every: Count
    held_out_rows: Count
    seed: Natural | None
    threads: Count | None
    mixed_precision: Literal["no", "bf16"]
    out: Folder
    resume: bool
    progress_every: Pace


@dataclass(frozen=True, kw_only=True)
class BundleSettings:
    """Settings of ``experiments.bundle``."""

    models: Annotated[list[Text], Wanted("a list of names of recipes: [target,drafter]", bool)]
    out: Folder
    work: Folder
    vocab_size: Annotated[int, _least(257)]
    max_length: Annotated[int, _least(4)]
    threads: Count
    overrides: list[str]


def _check_name(setting: str, name: str | None, known: Iterable[str] | Mapping[str, Any]) -> None:
    if name is not None and name not in known:
        raise ValueError(f"{setting}={name!r}: there is no such method{did_you_mean(name, known)}")

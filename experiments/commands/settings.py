"""The commands: the settings of each, which are what ``conf/NAME.yaml`` holds, and the module that does its work.

Nothing heavy is imported here: a mistake in a setting is answered at once.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from omegaconf import DictConfig

from experiments.config import kinds
from experiments.config.kinds import did_you_mean
from experiments.config.launch import Command, with_folders
from experiments.config.sections import option_names, sections


@dataclass(frozen=True, kw_only=True)
class LimitsSettings:
    """The section ``sla``: limits on latencies."""

    ttft: kinds.Duration
    tpot: kinds.Duration
    e2e: kinds.Duration


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that several commands have. Sections that no class lists are checked against their components."""

    seed: kinds.Natural | None = None
    threads: kinds.Count | None = None
    out: kinds.Text = "."
    title: bool = True
    resume: bool = False
    method: kinds.Text | None = None
    chat_template: kinds.Section | None = None
    price: kinds.Positive | None = None
    engine: kinds.Section | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredSettings(Settings):
    """Settings of commands that measure methods against plain decoding."""

    drafter: kinds.Section
    policy: kinds.Section
    methods: kinds.Section
    policies: kinds.Section
    warmup_prompts: kinds.Natural
    sla: LimitsSettings

    def __post_init__(self) -> None:
        if self.methods and self.drafts and self.drafter not in self.methods.values():
            raise ValueError(
                f"drafter and methods={list(self.methods)} are both given: give drafter=none, or no methods"
            )

    @property
    def drafts(self) -> bool:
        """Whether ``drafter`` is one."""
        return self.drafter.get("_target_") is not None


@dataclass(frozen=True, kw_only=True)
class AuditSettings(Settings):
    """An audit: the subject is our engine, another engine (``+contender=…``), or a function."""

    function: kinds.Text | None
    assistant: kinds.Text
    mistakes: kinds.Texts
    context: kinds.Count
    horizon: kinds.Count | None
    drafted: kinds.Count
    undrafted: kinds.Natural
    level: Annotated[float, kinds.number("a probability between 0 and 1", lambda value: 0 < value < 1)]
    tolerance: kinds.Share
    wanted: Annotated[float, kinds.number("a probability between 0 and 1", lambda value: 0 < value < 1)]
    least: kinds.Share
    block: kinds.Count
    max_samples: kinds.Count


@dataclass(frozen=True, kw_only=True)
class CheckSettings(Settings):
    """A check of a drafter, of a rule, or of the files in a folder."""

    drafter: kinds.Section
    verifier: kinds.Section
    inspect: bool
    prompts: kinds.Texts
    tokens: Annotated[int, kinds.least(8)] | None
    rounds: kinds.Two
    draws: kinds.Natural
    depths: kinds.Count | None
    vocab: kinds.Two
    tables: kinds.Count
    temperatures: Annotated[list[kinds.Positive], kinds.Wanted("at least one temperature, each above 0", bool)]
    streams: Annotated[int, kinds.least(100)]
    threshold: kinds.Positive

    def __post_init__(self) -> None:
        drafter, verifier = (part.get("_target_") for part in (self.drafter, self.verifier))
        if not self.inspect and (drafter is None) == (verifier is None):
            raise ValueError(
                f"drafter._target_={drafter} and verifier._target_={verifier}: give drafter=NAME or verifier=NAME to "
                f"check, or a folder to inspect"
            )


def _check_words(words: list[str]) -> list[str]:
    """``experiments.check FOLDER`` is short for ``inspect=true drafter.name=FOLDER``."""
    rewritten = with_folders(words, "++drafter.name", several=False)
    return ["inspect=true", *rewritten] if rewritten != words else rewritten


@dataclass(frozen=True, kw_only=True)
class CompareSettings(Settings):
    """A comparison of runs, or of studies of load."""

    runs: kinds.Runs
    allow_mixed: bool
    format: kinds.OneOrMore[kinds.Format]
    difference: kinds.Text | None
    max_prompts: kinds.Natural


@dataclass(frozen=True, kw_only=True)
class GridSettings:
    """The sizes that a fit measures: the sections ``grid`` and ``held_out``."""

    batch: kinds.Several[kinds.Count]
    context: kinds.Several[kinds.Count]
    drafted: kinds.Several[kinds.Natural]
    chunk: list[kinds.Count]


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    """A plan of costs on a device; with ``costs=timed`` and ``costs=fit`` what steps cost on this machine."""

    device: kinds.Text | None
    devices: kinds.Text | None
    costs: kinds.Text | None
    measured: bool
    batch: kinds.OneOrMore[kinds.Count] | None
    context: kinds.Two | None
    output: kinds.Count
    acceptance: kinds.OneOrMore[kinds.Probability]
    longest: kinds.Count
    memory: kinds.Positive | None
    usable: Annotated[float, kinds.number("a share above 0, at most 1", lambda value: 0 < value <= 1)]
    overhead: kinds.AtLeastZero
    nodes: kinds.Several[kinds.Two]
    draft_costs: kinds.Several[kinds.AtLeastZero]
    grid: GridSettings
    held_out: GridSettings
    seconds: kinds.AtLeastZero | None
    rounds: kinds.Natural


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings):
    """Rules asked about the drafts of a trace; with ``best=tree`` the best tree for its drafter."""

    trace: Annotated[kinds.OneOrMore[kinds.Text], kinds.Wanted("the folder of a run with trace=true, or a list")]
    verifiers: Any
    along: bool
    baseline: kinds.Text
    best: Literal["tree"] | None
    max_nodes: kinds.Count
    max_depth: kinds.Count | None
    costs: kinds.Text | None

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


@dataclass(frozen=True, kw_only=True)
class GradingSettings:
    """The section ``grading``: benchmarks of lm-eval."""

    tasks: kinds.OneOrMore[kinds.Text]
    include: kinds.Text | None
    limit: kinds.Count | None
    fewshot: kinds.Natural | None
    chat: bool
    generation: kinds.Section | None
    max_new_tokens: kinds.Count
    execute: bool


@dataclass(frozen=True, kw_only=True)
class RunSettings(MeasuredSettings):
    """Methods measured against plain decoding; with ``grading`` their answers to benchmarks."""

    compared_with: kinds.Text | None
    temperatures: kinds.Temperatures | None
    peaks: Literal["measured", "none"]
    trace: bool
    trace_dropped: kinds.Share
    objective: Literal["speedup", "tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate"] | None
    requests_table: bool | None
    study: kinds.Section | None
    grading: GradingSettings | None

    def __post_init__(self) -> None:
        super().__post_init__()
        methods = list(self.methods) or list(self.policies) or [self.method]
        if self.objective is not None and len(methods) > 1:
            raise ValueError(f"objective={self.objective} is of one method, and there are {len(methods)}: give null")
        if self.objective is not None and not self.drafts:
            raise ValueError(f"objective={self.objective}: plain decoding alone has none, give a drafter")
        if (name := self.compared_with) is not None and name not in methods:
            raise ValueError(f"compared_with={name!r}: there is no such method{did_you_mean(name, methods)}")


def objective(config: DictConfig, made: Any) -> float | None:
    """The figure that ``objective`` names, for sweepers that search for the best setting; it is an error if absent."""
    if config.objective is None:
        return None
    for row in made.rows:
        if row["method"] == config.method and row[config.objective] is not None:
            return float(row[config.objective])
    raise ValueError(f"objective={config.objective}: this run has none, because {config.method} finished no prompt")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Settings):
    """An endpoint for standard clients."""

    host: kinds.Text
    port: Annotated[int, kinds.Wanted("a port from 0 (any that is free) to 65535", lambda value: 0 <= value < 65536)]
    name: kinds.Text | None
    template: kinds.Text | None
    queue: kinds.Natural
    drain: kinds.AtLeastZero
    max_body: kinds.Count
    prefix: Literal["specdec", "vllm"]


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """A training; with ``export=FOLDER`` a trained drafter written in the layout that a serving engine reads."""

    evaluate_every: kinds.Count
    held_out_rows: kinds.Count
    states: kinds.Text | None
    sharded: bool
    mixed_precision: Literal["auto", "no", "bf16"]
    export: kinds.Text | kinds.Section | None
    format: Literal["native", "speculators", "sglang"]
    tokens: kinds.Count | None
    overwrite: bool


def _train_words(words: list[str]) -> list[str]:
    """With ``export=…``, the target is the one that the files name, unless it is given."""
    exports = any(word.startswith("export") for word in words)
    return ["target.name=null", *words] if exports and not any(word.startswith("target") for word in words) else words


audit = Command("audit", AuditSettings)
check = Command("check", CheckSettings, rewrite=_check_words)
compare = Command("compare", CompareSettings, rewrite=lambda words: with_folders(words, "runs"))
plan = Command("plan", PlanSettings)
replay = Command("replay", ReplaySettings, rewrite=_replay_words)
run = Command("run", RunSettings, objective=objective)
serve = Command("serve", ServeSettings)
train = Command("train", TrainSettings, rewrite=_train_words, divides=True)

"""The settings of every command: their types, their ranges, and which of them exclude each other.

``conf/NAME.yaml`` says which settings a command has, and the value and the meaning of each. Sections that describe a
component (``drafter``, ``sampling``, …) are checked against the component's own signature, once its class may be
imported.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import OmegaConf

from experiments.config.checking import Wanted, did_you_mean
from experiments.config.groups import option_names, sections
from experiments.config.sections import CONF
from experiments.reporting.formats import FORMATS
from experiments.results.limits import seconds_of

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


def _is_pace(value: Any) -> bool:
    return value >= 1 if isinstance(value, int) else re.fullmatch(r"[1-9]\d*[smh]", value) is not None


def _or_null(kind: Any) -> Any:
    return kind | None


_FILLED = Wanted(test=bool)
Several = Annotated[list[T], _FILLED]
OneOrMore = T | Annotated[list[T], _FILLED]
Natural = Annotated[int, _least(0)]
Count = Annotated[int, _least(1)]
Two = Annotated[int, _least(2)]
Text = Annotated[str, Wanted("a text", bool)]
Texts = Annotated[list[Text], Wanted("a list of texts")] | None
Folder = Annotated[str, Wanted(_folder_words, _is_folder)]
Section = Annotated[dict, Wanted("a section, such as one of the files in conf/")]
Options = Annotated[dict, Wanted("a section, such as {enable_thinking: false}")] | None
Positive = Annotated[float, _number("a number above 0", lambda value: value > 0)]
Seconds = Annotated[float, _number("seconds, 0 or more", lambda value: value >= 0)]
Temperature = Annotated[float, _number("a temperature, 0 or above", lambda value: value >= 0)]
Temperatures = Annotated[list[Temperature], Wanted("a list of temperatures, each 0 or above", bool)]
Duration = Annotated[Any, Wanted(_duration_words, lambda value: _duration_words(value) == "a time")] | None
Format = Annotated[str, Wanted(f"one or several of {', '.join(FORMATS)}", lambda value: value in FORMATS)]


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
    kv_cache: Literal["int8", "fp8", "fp8_e5m2"] | None
    cache: Any


@dataclass(frozen=True, kw_only=True)
class LimitsSettings:
    """The section ``sla``: limits on latencies."""

    ttft: Duration
    tpot: Duration
    e2e: Duration


@dataclass(frozen=True, kw_only=True)
class GridSettings:
    """The sizes that a calibration measures: the sections ``grid`` and ``held_out``."""

    batch: Several[Count]
    context: Several[Count]
    drafted: Several[Natural]
    chunk: list[Count]


KINDS: dict[str, Any] = {
    **dict.fromkeys(("target", "drafter", "verifier", "sampling", "dataset", "tracker", "bootstrap"), Section),
    **dict.fromkeys(("methods", "policy", "policies", "rules", "labels", "setups", "contenders"), Section),
    **dict.fromkeys(("head", "data", "regenerate", "loss", "weights", "fit", "served"), Section),
    **dict.fromkeys(("arrival", "workload", "overload", "clock", "lengths"), Section),
    **dict.fromkeys(("resume", "title", "allow_mixed", "chat", "execute", "measured", "pictures"), bool),
    **dict.fromkeys(("measure", "every_rule", "overwrite", "sharded"), bool),
    **dict.fromkeys(("method", "baseline", "tokenizer"), Text),
    **dict.fromkeys(("compared_with", "costs", "race", "include", "device", "devices", "states"), _or_null(Text)),
    **dict.fromkeys(("race_tokens", "max_new_tokens", "output", "longest", "page", "max_nodes"), Count),
    **dict.fromkeys(("tables", "evaluate_every", "held_out_rows"), Count),
    **dict.fromkeys(("threads", "limit", "max_depth", "depths"), _or_null(Count)),
    **dict.fromkeys(("warmup_prompts", "seed", "max_prompts", "sample", "draws"), Natural),
    **dict.fromkeys(("fewshot",), _or_null(Natural)),
    **dict.fromkeys(("prompt", "verifiers", "old"), Any),
    **dict.fromkeys(("out",), Folder),
    **dict.fromkeys(("grid", "held_out"), GridSettings),
    "memory": _or_null(Positive),
    **dict.fromkeys(("threshold", "max_minutes"), Positive),
    **dict.fromkeys(("seconds", "overhead"), Seconds),
    **dict.fromkeys(("chat_template", "generation"), Options),
    "prompts": Texts,
    "engine": EngineSettings,
    "sla": LimitsSettings,
    "trace": bool,
    "trace_dropped": Annotated[float, _number("a mass from 0 (keep every token) to below 1", lambda x: 0 <= x < 1)],
    "progress_every": _or_null(Annotated[int | str, Wanted("a number of prompts, a time such as 30s or 5m", _is_pace)]),
    **dict.fromkeys(("requests", "rates"), Any),
    "objective": Literal["speedup", "tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate"] | None,
    "peaks": Literal["measured", "none"],
    "temperatures": _or_null(Temperatures),
    "temperature": _or_null(Temperature),
    "price": _or_null(Annotated[float, _number("the price of an hour, above 0", lambda value: value > 0)]),
    "requests_table": bool | None,
    "study": _or_null(Section),
    "runs": Annotated[OneOrMore[Text], Wanted("folders of runs or of sweeps, or a pattern, as 'runs=[FOLDER,FOLDER]'")],
    "run": Annotated[str, Wanted("the folder of a run", bool)],
    "format": OneOrMore[Format],
    "tasks": Annotated[OneOrMore[Text], Wanted("a name of a task, or a list of them")],
    "files": Annotated[OneOrMore[Text], Wanted("a file, a pattern, or a list of them")],
    "drafters": Annotated[list[Any], Wanted("a list of drafters", bool)],
    "batch": OneOrMore[Count],
    "context": _or_null(Two),
    "acceptance": OneOrMore[Annotated[float, _number("a probability from 0 to 1", lambda value: 0 <= value <= 1)]],
    "usable": Annotated[float, _number("a share above 0, at most 1", lambda value: 0 < value <= 1)],
    "tokens": Annotated[int, _least(8)],
    "rounds": Natural,
    "ranges": list[Count] | None,
    "vocab": Two,
    "streams": Annotated[int, _least(100)],
    "mixed_precision": Literal["no", "bf16"],
    "function": _or_null(Text),
    "assistant": Text,
    "mistakes": Texts,
    **dict.fromkeys(("horizon", "drafted", "block", "max_samples"), Count),
    **dict.fromkeys(
        ("level", "wanted"), Annotated[float, _number("a probability between 0 and 1", lambda x: 0 < x < 1)]
    ),
    **dict.fromkeys(("tolerance", "least"), Annotated[float, _number("a total variation", lambda x: 0 <= x < 1)]),
}
"""The values that a setting may have, by its name."""
OWN: dict[str, dict[str, Any]] = {
    "run": {"seed": _or_null(Natural)},
    "demo": {"seed": _or_null(Natural), "temperatures": Temperatures},
    "train": {"seed": _or_null(Natural)},
    "compare": {"out": Text, "difference": _or_null(Text), "width": _or_null(Positive)},
    "accuracy": {"out": Text},
    "audit": {
        "context": Count,
        "horizon": _or_null(Count),
        "undrafted": Natural,
        "reference": Text,
        "prompts": Count,
        "shift": Annotated[float, _number("a probability of at most 0.2", lambda x: 0 < x <= 0.2)],
    },
    "report": {"out": Text},
    "replay": {
        "trace": Annotated[str, Wanted("the folder of a run made with trace=true, or of a sweep of them", bool)]
    },
    "optimize_tree": {
        "trace": Annotated[OneOrMore[Text], Wanted("the folder of a run made with trace=true, or a list of them")],
        "method": _or_null(Text),
        "costs": Text,
        "rounds": Count,
        "engine": Section,
    },
    "calibrate": {"costs": Text},
    "bench": {
        "parts": _or_null(Several[Literal["steps", "rounds", "gpu"]]),
        "against": _or_null(Text),
        "repeats": Two,
        "dtypes": Several[Literal["auto", "float32", "bfloat16", "float16"]],
        "quantizations": Annotated[list[Text | None], Wanted("a list of schemes, null for none", bool)],
        "inflate": Any,
        **dict.fromkeys(("nodes", "batch"), Several[Count]),
        "drafts": Several[Text],
        "temperatures": Temperatures,
        **dict.fromkeys(("context", "rounds"), Two),
        "shape": Literal["tiny", "llama-8b", "llama-70b"],
    },
    "load": {
        "seed": Natural,
        "engine": Section,
        "requests": _or_null(Count),
        "seconds": _or_null(Positive),
        "rates": _or_null(Annotated[list[Positive], Wanted("a list of rates, each above 0, as 'rates=[1,2,4]'", bool)]),
    },
    "serve": {
        "host": Text,
        "port": Annotated[int, Wanted("a port from 0 (any that is free) to 65535", lambda value: 0 <= value < 65536)],
        **dict.fromkeys(("name", "template"), _or_null(Text)),
        "queue": Natural,
        "drain": Seconds,
        "max_body": Count,
        "prefix": Literal["specdec", "vllm"],
    },
    "check_verifier": {
        "temperatures": Annotated[list[Positive], Wanted("at least one temperature, each above 0", bool)]
    },
    "check_drafter": {"rounds": Two},
    "export": {"format": Literal["native", "speculators", "sglang"], "tokens": _or_null(Count)},
    "pays": {
        "context": Count,
        "nodes": Several[Two],
        "draft_costs": Several[
            Annotated[float, _number("a share of a plain step, 0 or above", lambda value: value >= 0)]
        ],
    },
}
"""Where a command differs."""


def settings_of(command: str) -> type:
    """The settings of a command as a dataclass, which refuses settings that contradict each other."""
    file: Any = OmegaConf.load(CONF / f"{command}.yaml")
    groups = [name for entry in file.get("defaults", ()) if not isinstance(entry, str) for name in entry]
    kinds = KINDS | OWN.get(command, {})
    names = [name for name in dict.fromkeys([*groups, *file]) if name in kinds]
    contradictions = {"__post_init__": CONTRADICTIONS[command]} if command in CONTRADICTIONS else {}
    given = [(name, kinds[name], True) if name == "title" else (name, kinds[name]) for name in names]
    return make_dataclass(command, given, kw_only=True, namespace=contradictions)


def _check_run(self: Any) -> None:
    drafts = self.drafter.get("_target_") is not None
    methods = list(self.methods) or list(self.policies) or [self.method]
    if self.methods and drafts:
        raise ValueError(f"drafter and methods={methods} are both given: give drafter=none, or no methods")
    if self.objective is not None and len(methods) > 1:
        raise ValueError(f"objective={self.objective} is of one method, and there are {len(methods)}: give null")
    if self.objective is not None and not drafts:
        raise ValueError(f"objective={self.objective}: plain decoding alone has none, give a drafter")
    _check_name("compared_with", self.compared_with, methods)


def _check_load(self: Any) -> None:
    drafts, methods = self.drafter.get("_target_") is not None, list(self.methods)
    if methods and drafts:
        raise ValueError(f"drafter and methods={methods} are both given: give drafter=none, or no methods")
    if not methods and not drafts and (self.policies or self.policy.get("_target_") is not None):
        raise ValueError("a policy is given, and plain decoding alone drafts nothing: give a drafter or policy=none")


def _check_report(self: Any) -> None:
    if Path(self.out).suffix.lower() not in (".html", ".htm") or Path(self.out).is_dir():
        raise ValueError(f"out={self.out!r}: give the name of a file that ends in .html")


def _check_replay(self: Any) -> None:
    names = [*sections("verifier", self.verifiers), *option_names("verifier")]
    if self.baseline not in names:
        raise ValueError(f"baseline: there is no verifier {self.baseline!r}{did_you_mean(self.baseline, names)}")


CONTRADICTIONS: dict[str, Callable[[Any], object]] = {
    "run": _check_run,
    "load": _check_load,
    "demo": lambda self: _check_name("race", self.race, self.methods),
    "report": _check_report,
    "replay": _check_replay,
}
"""Further refusals, by all settings of a command together."""


def _check_name(setting: str, name: str | None, known: Iterable[str] | Mapping[str, Any]) -> None:
    if name is not None and name not in known:
        raise ValueError(f"{setting}={name!r}: there is no such method{did_you_mean(name, known)}")

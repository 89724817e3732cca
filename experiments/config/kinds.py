"""Kinds of values that settings may have, and the check of arguments against what takes them.

A signature says what a value may be: by its type, or by ``Annotated[int, Wanted(…)]`` with a condition in words. The
settings of commands (dataclasses) and the constructors of components are checked by the same function, before any work.
"""

import difflib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from experiments.reporting.formats import FORMATS
from experiments.results.limits import seconds_of

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """A condition on a value, for ``Annotated``.

    Attributes:
        words: What to give, behind "give"; a function of the wrong value, or empty where the type says it.
        test: Whether a value of the right type is right.
    """

    words: str | Callable[[Any], str] = ""
    test: Callable[[Any], bool] = lambda value: True


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them, or that there is none."""
    listed = [str(each) for each in known]
    if not listed:
        return ", and nothing else can be set here"
    near = difflib.get_close_matches(name, listed, n=1)
    return f": did you mean {prefix}{near[0]}?" if near else f": choose among {', '.join(listed)}"


def check_arguments(component: Any, options: Mapping[str, Any], within: str = "", *, given_first: bool = False) -> None:
    """Check arguments by name against the signature of what takes them.

    Args:
        options: Its arguments. ``_args_`` and ``_partial_`` are Hydra's.
        given_first: Whether the first argument comes from elsewhere.

    Raises:
        ValueError: An argument is unknown, missing, or not what its annotation allows.
    """
    parameters = parameters_of(component) | _passed_on(component)
    prefix = f"{within}." if within else ""
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in options:
            if name not in parameters and not name.startswith("_"):
                raise ValueError(f"there is no {prefix}{name}{did_you_mean(name, parameters, prefix)}")
    whole = "_args_" not in options and not options.get("_partial_")
    for number, (name, parameter) in enumerate(parameters.items()):
        if name in options:
            value, kind = options[name], parameter.annotation
            sections = [part for part in (kind, *get_args(kind)) if isinstance(part, type) and is_dataclass(part)]
            if sections and isinstance(value, Mapping):
                check_arguments(sections[0], value, f"{prefix}{name}")
            elif not _fits(value, kind):
                raise ValueError(f"{prefix}{name}={value!r}: give {in_words(kind, value)}")
        elif whole and _is_needed(parameter) and not (given_first and number == 0):
            raise ValueError(f"{prefix}{name} is missing: give {prefix}{name}=… (with + before it)")


_SIMPLE: dict[Any, Any] = {bool: (bool,), int: (int,), float: (int, float), str: (str,), NoneType: (NoneType,)}
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", NoneType: "null"}


def in_words(kind: Any, value: Any = None) -> str:
    """The values that an annotation allows, behind "give"."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        words = [each.words for each in parts[1:] if isinstance(each, Wanted) and each.words]
        return (words[0](value) if callable(words[0]) else words[0]) if words else in_words(parts[0], value)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is list:
        return f"a list, each {in_words(parts[0], value)}"
    if origin in (Union, UnionType):
        return ", or ".join("a list of them" if _of_list(part) in parts else in_words(part, value) for part in parts)
    return "a section" if is_dataclass(kind) or kind is dict else _WORDS.get(kind, f"a {kind}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is what an annotation allows; a type that is none of those below allows every value."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        conditions = [each for each in parts[1:] if isinstance(each, Wanted)]
        return _fits(value, parts[0]) and all(each.test(value) for each in conditions)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list | tuple) and all(_fits(each, parts[0]) for each in value)
    if kind is dict or is_dataclass(kind):
        return isinstance(value, Mapping)
    return kind not in _SIMPLE or type(value) in _SIMPLE[kind]  # not isinstance: true is no number


def _of_list(kind: Any) -> Any:
    """The type of a list's elements, as in ``int | list[int]``; an ellipsis for anything else."""
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_args(bare)[0] if get_origin(bare) is list else ...


def parameters_of(component: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a component, with those that ``**options`` stands for: ``Unpack[…]``, or the base class's."""
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(component).parameters.items():
        if get_origin(parameter.annotation) is Unpack:
            hints = get_type_hints(get_args(parameter.annotation)[0], include_extras=True)
            only = inspect.Parameter.KEYWORD_ONLY
            found |= {key: inspect.Parameter(key, only, default=None, annotation=kind) for key, kind in hints.items()}
        elif parameter.kind is parameter.VAR_KEYWORD and (base := _passed_to(component)) is not None:
            found |= parameters_of(base)
        else:
            found[name] = parameter
    return found


def _passed_to(component: Any) -> type | None:
    """The class whose constructor takes what that of a subclass passes on as ``**options: Any``."""
    bases = component.__mro__[1:-1] if isinstance(component, type) else ()
    return next((base for base in bases if "__init__" in vars(base)), None)


def _passed_on(component: Any) -> dict[str, inspect.Parameter]:
    """The parameters that a subclass adds to its constructor, for an inherited class method that passes options on."""
    kind = getattr(component, "__self__", None)
    passes = any(get_origin(each.annotation) is Unpack for each in inspect.signature(component).parameters.values())
    if not isinstance(kind, type) or not passes:
        return {}
    maker = next(each for each in kind.__mro__ if component.__name__ in vars(each))
    own, known = inspect.signature(kind).parameters, inspect.signature(maker).parameters
    return {name: each for name, each in own.items() if each.kind is each.KEYWORD_ONLY and name not in known}


def _is_needed(parameter: inspect.Parameter) -> bool:
    named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return named and parameter.default is parameter.empty


# ---------------------------------------------------------------- kinds of values


def least(smallest: int) -> Wanted:
    """An integer of at least so much."""
    return Wanted(f"an integer of at least {smallest}", lambda value: value >= smallest)


def number(words: str, test: Callable[[float], bool]) -> Wanted:
    """A finite number that passes a test."""
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


def _cache_formats() -> Iterable[str]:
    """The names of the KV cache's formats. They import PyTorch, so only a setting that names one does."""
    from specdec.cache import formats

    return formats.FORMATS


Several = Annotated[list[T], Wanted(test=bool)]
OneOrMore = T | Annotated[list[T], Wanted(test=bool)]
Natural = Annotated[int, least(0)]
Count = Annotated[int, least(1)]
Two = Annotated[int, least(2)]
Text = Annotated[str, Wanted("a text", bool)]
Texts = Annotated[list[Text], Wanted("a list of texts")] | None
Folder = Annotated[str, Wanted(_folder_words, _is_folder)]
Section = Annotated[dict, Wanted("a section, such as one of the files in conf/")]
Options = Annotated[dict, Wanted("a section, such as {enable_thinking: false}")] | None
Positive = Annotated[float, number("a number above 0", lambda value: value > 0)]
Price = Annotated[float, number("the price of an hour, above 0", lambda value: value > 0)]
Share = Annotated[float, number("a probability between 0 and 1", lambda value: 0 < value < 1)]
Probability = Annotated[float, number("a probability from 0 to 1", lambda value: 0 <= value <= 1)]
Distance = Annotated[float, number("a total variation", lambda value: 0 <= value < 1)]
Seconds = Annotated[float, number("seconds, 0 or more", lambda value: value >= 0)]
Temperature = Annotated[float, number("a temperature, 0 or above", lambda value: value >= 0)]
Temperatures = Annotated[list[Temperature], Wanted("a list of temperatures, each 0 or above", bool)]
Dropped = Annotated[float, number("a mass from 0 (keep every token) to below 1", lambda value: 0 <= value < 1)]
Duration = Annotated[Any, Wanted(_duration_words, lambda value: _duration_words(value) == "a time")] | None
Pace = Annotated[int | str, Wanted("a number of prompts, a time such as 30s or 5m", _is_pace)] | None
Format = Annotated[str, Wanted(f"one or several of {', '.join(FORMATS)}", lambda value: value in FORMATS)]
CacheFormat = Annotated[
    str, Wanted(lambda value: f"one of {', '.join(_cache_formats())}", lambda value: value in _cache_formats())
]
Runs = Annotated[OneOrMore[Text], Wanted("folders of runs or of sweeps, or a pattern, as 'runs=[FOLDER,FOLDER]'")]


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
    kv_cache: CacheFormat | None
    cache: Any


@dataclass(frozen=True, kw_only=True)
class LimitsSettings:
    """The section ``sla``: limits on latencies."""

    ttft: Duration
    tpot: Duration
    e2e: Duration


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that commands have in common."""

    threads: Count | None
    out: Folder


@dataclass(frozen=True, kw_only=True)
class ServedSettings:
    """Settings of commands with an engine of ours."""

    threads: Count | None
    out: Folder
    seed: Natural | None
    target: Section
    drafter: Section
    policy: Section
    verifier: Section
    sampling: Section
    engine: EngineSettings


@dataclass(frozen=True, kw_only=True)
class MeasuredSettings(ServedSettings):
    """Settings of commands that measure methods against plain decoding."""

    dataset: Section
    tracker: Section
    bootstrap: Section
    method: Text
    methods: Section
    policies: Section
    rules: Section
    setups: Section
    warmup_prompts: Natural
    chat_template: Options
    sla: LimitsSettings
    resume: bool
    title: bool

    def __post_init__(self) -> None:
        if self.methods and self.drafts:
            raise ValueError(
                f"drafter and methods={list(self.methods)} are both given: give drafter=none, or no methods"
            )

    @property
    def drafts(self) -> bool:
        """Whether ``drafter`` is one."""
        return self.drafter.get("_target_") is not None


def check_name(setting: str, name: str | None, known: Iterable[str] | Mapping[str, Any]) -> None:
    """Refuse the name of a method that there is not; None is no name."""
    if name is not None and name not in known:
        raise ValueError(f"{setting}={name!r}: there is no such method{did_you_mean(name, known)}")

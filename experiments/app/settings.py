"""What a configuration may hold: the only place where its keys, types and ranges are checked, before any work starts.

Every application has a table of its settings (``RUN``, ``COMPARE``, …). Sections that describe a component
(``sampling``, ``drafter``, …) are checked against the component's own signature by ``check_arguments``.
"""

import difflib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

from experiments.reporting.formats import FORMATS
from experiments.results.requests.limits import seconds_of

Check = Callable[[Any], str | None]
"""What to give instead of a value; None if the value is right."""


def integer(least: int, *, optional: bool = False) -> Check:
    """An integer from ``least`` on; with ``optional`` also null."""
    wanted = f"give an integer of at least {least}" + (", or null" if optional else "")

    def check(value: Any) -> str | None:
        if value is None and optional:
            return None
        return None if type(value) is int and value >= least else wanted  # not isinstance: true is no number

    return check


def number(test: Callable[[float], bool], wanted: str, *, optional: bool = False) -> Check:
    """A finite number that passes a test, which ``wanted`` says in words; with ``optional`` also null."""
    wanted += ", or null" if optional else ""

    def check(value: Any) -> str | None:
        if value is None:
            return None if optional else f"give {wanted}"
        right = type(value) in (int, float) and math.isfinite(value) and test(value)
        return None if right else f"give {wanted}"

    return check


def several(each: Check, wanted: str) -> Check:
    """A list of at least one value that all pass a check."""

    def check(value: Any) -> str | None:
        right = _is_list(value) and len(value) > 0 and all(each(part) is None for part in value)
        return None if right else f"give {wanted}"

    return check


def one_of(*names: str) -> Check:
    """One of some words."""
    return lambda value: None if value in names else f"give one of {', '.join(names)}"


def objective(value: Any) -> str | None:
    """A figure that a sweep searches the best of, or null."""
    return None if value is None or value in OBJECTIVES else f"give one of {', '.join(OBJECTIVES)}, or null"


def flag(value: Any) -> str | None:
    """True or false."""
    return None if type(value) is bool else "give true or false"


def text(value: Any) -> str | None:
    """A text that is not empty."""
    return None if isinstance(value, str) and value else "give a text"


def optional_texts(value: Any) -> str | None:
    """A list of texts, or null."""
    right = value is None or (_is_list(value) and all(text(each) is None for each in value))
    return None if right else "give a list of texts, or null"


def folder(value: Any) -> str | None:
    """The path of a folder that is there, or can be made."""
    if text(value) is not None:
        return "give the path of a folder"
    path = Path(value).absolute()
    while not path.exists() and not path.is_symlink() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        return f"{path} is a file, give the path of a folder"
    return None if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written to, give another folder"


def section(value: Any) -> str | None:
    """Settings of their own, by name."""
    return None if isinstance(value, Mapping) else "give a section, such as one of the files in conf/"


def optional_section(value: Any) -> str | None:
    """Settings by name, or none."""
    return (
        None
        if value is None or isinstance(value, Mapping)
        else "give a section, such as {enable_thinking: false}, or null"
    )


def pace(value: Any) -> str | None:
    """So many prompts, so much time, or never."""
    right = value is None or (type(value) is int and value >= 1)
    right = right or (isinstance(value, str) and re.fullmatch(r"[1-9]\d*[smh]", value) is not None)
    return None if right else "give a number of prompts, a time such as 30s or 5m, or null"


def anything(value: Any) -> str | None:
    """Checked where it is used."""
    return None


OBJECTIVES = ("speedup", "tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate")
"""Figures of a method that an optimizing sweeper may ask for: fields of ``MethodSummary``."""


def _optional_text(value: Any) -> str | None:
    return None if value is None or text(value) is None else "give a text, or null"


def _one_or_more(each: Check, wanted: str) -> Check:
    def check(value: Any) -> str | None:
        given = value if _is_list(value) else [value]
        return None if given and all(each(part) is None for part in given) else f"give {wanted}"

    return check


def duration(value: Any) -> str | None:
    """A limit on a latency, or none."""
    try:
        if value is not None:
            seconds_of(value)
    except ValueError as error:
        return f"{error}, or null"
    return None


SLA: dict[str, Check] = {"ttft": duration, "tpot": duration, "e2e": duration}


def kv_format(value: Any) -> str | None:
    """A format of keys and values (``specdec.cache.formats``, which would import PyTorch), or null."""
    return None if value in (None, "int8", "fp8") else "give int8, fp8 or null"


STAGES = ("tokenizer", "target", "samples", "drafter", "medusa", "card", "heads")

ENGINE: dict[str, Check] = {
    "max_batch_size": integer(1),
    "max_length": integer(2, optional=True),
    "prefill_chunk": integer(1),
    "attention": text,
    "optimize": flag,
    "invariant": flag,
    "timing": flag,
    "scheduler": anything,
    "check": flag,
    "recording": one_of("auto", "rounds", "decisions", "off"),
    "kv_cache": kv_format,
}
_MEASURING: dict[str, Check] = {
    "target": section,
    "verifier": section,
    "sampling": section,
    "dataset": section,
    "tracker": section,
    "engine": section,
    "contenders": section,
    "bootstrap": section,
    "seed": integer(0, optional=True),
    "warmup_prompts": integer(0),
    "threads": integer(1, optional=True),
    "out": folder,
    "resume": flag,
    "trace": flag,
    "trace_dropped": number(lambda value: 0 <= value < 1, "a mass from 0 (keep every token) to below 1"),
    "chat_template": optional_section,
    "progress_every": pace,
}
_TEMPERATURES = several(number(lambda value: value >= 0, ""), "a list of temperatures, each 0 or above")
RUN = {
    **_MEASURING,
    "drafter": section,
    "policy": section,
    "policies": section,
    "method": text,
    "objective": objective,
    "methods": section,
    "rules": section,
    "labels": section,
    "compared_with": _optional_text,
    "temperatures": lambda value: None if value is None else _TEMPERATURES(value),
    "sla": section,
    "price": number(lambda value: value > 0, "the price of an hour, above 0", optional=True),
    "requests_table": lambda value: None if value is None or flag(value) is None else "give true, false or null",
}
DEMO = {
    **_MEASURING,
    "methods": section,
    "drafter": section,
    "policy": section,
    "temperatures": _TEMPERATURES,
    "race": anything,
    "race_tokens": integer(1),
    "time_limit": lambda value: None if value is None else number(lambda v: v > 0, "seconds above 0, or null")(value),
}
_FORMAT = _one_or_more(one_of(*FORMATS), f"one or several of {', '.join(FORMATS)}")
COMPARE: dict[str, Check] = {"runs": anything, "allow_mixed": flag, "format": _FORMAT, "out": text}
ACCURACY: dict[str, Check] = {
    "runs": anything,
    "answers": _optional_text,
    "execute": flag,
    "seconds": integer(1),
    "memory_mb": integer(64),
    "workers": integer(1, optional=True),
    "k": _one_or_more(integer(1), "an integer of at least 1, or a list of them"),
    "bootstrap": section,
    "seed": integer(0),
    "format": _FORMAT,
    "out": text,
}
REPORT: dict[str, Check] = {
    "runs": anything,
    "out": text,
    "max_prompts": integer(0),
}
SHOW: dict[str, Check] = {
    "run": text,
    "prompt": anything,
    "method": anything,
    "temperature": number(lambda value: value >= 0, "a temperature of at least 0", optional=True),
    "turn": integer(0, optional=True),
    "sample": integer(0),
    "round": integer(0, optional=True),
}
REPLAY: dict[str, Check] = {
    "trace": text,
    "verifiers": anything,
    "baseline": text,
    "seed": integer(0),
    "threads": integer(1, optional=True),
    "out": folder,
    "bootstrap": section,
}
OPTIMIZE_TREE: dict[str, Check] = {
    "trace": _one_or_more(text, "the folder of a run made with trace=true, or a list of them"),
    "method": _optional_text,
    "max_nodes": integer(1),
    "max_depth": integer(1, optional=True),
    "costs": text,
    "rounds": integer(1),
    "old": anything,
    "measure": flag,
    **dict.fromkeys(("target", "drafter", "verifier", "sampling", "dataset", "engine", "bootstrap"), section),
    "seed": integer(0),
    "threads": integer(1, optional=True),
    "out": folder,
}
SHAPES = {**_MEASURING, "methods": section}
"""A run that decodes with several tree shapes, as ``optimize_tree`` makes it."""
REPLAY_TEXT: dict[str, Check] = {
    "texts": _one_or_more(text, "a file, or a list of files"),
    "drafters": several(anything, "a list of drafters"),
    "tokenizer": text,
    "per_category": integer(1, optional=True),
    "seed": integer(0),
    "threads": integer(1, optional=True),
    "out": folder,
    "bootstrap": section,
}
CHECK_VERIFIER: dict[str, Check] = {
    "verifier": section,
    "vocab": integer(2),
    "tables": integer(1),
    "seed": integer(0),
    "temperatures": several(number(lambda value: value > 0, ""), "at least one temperature, each above 0"),
    "streams": integer(100),
    "threshold": number(lambda value: value > 0, "a number above 0"),
    "max_minutes": number(lambda value: value > 0, "a number above 0"),
}
CHECK_DRAFTER: dict[str, Check] = {
    "target": section,
    "drafter": section,
    "policy": section,
    "sampling": section,
    "engine": section,
    "prompts": optional_texts,
    "tokens": integer(8),
    "rounds": integer(2),
    "draws": integer(0),
    "chat_template": optional_section,
    "every_rule": flag,
    "seed": integer(0),
    "threads": integer(1, optional=True),
}
EXPORT: dict[str, Check] = {
    "drafter": section,
    "target": section,
    "format": one_of("native", "speculators", "sglang"),
    "out": folder,
    "overwrite": flag,
    "tokens": integer(1, optional=True),
}
INSPECT_DRAFTER: dict[str, Check] = {
    "target": section,
    "drafter": section,
    "engine": section,
    "prompts": optional_texts,
    "tokens": integer(8),
    "places": integer(8),
    "depths": integer(1, optional=True),
    "chat_template": optional_section,
    "seed": integer(0),
    "threads": integer(1, optional=True),
}
TRAIN: dict[str, Check] = {
    "head": section,
    "target": section,
    "data": section,
    "regenerate": section,
    "loss": section,
    "weights": section,
    "fit": section,
    "served": section,
    "tracker": section,
    "evaluate_every": integer(1),
    "held_out_rows": integer(1),
    "seed": integer(0, optional=True),
    "threads": integer(1, optional=True),
    "mixed_precision": one_of("no", "bf16"),
    "out": folder,
    "resume": flag,
    "progress_every": pace,
}
BUNDLE: dict[str, Check] = {
    "out": folder,
    "work": folder,
    "stages": several(one_of(*STAGES), f"a list of {', '.join(STAGES)}"),
    "seed": integer(0),
    "threads": integer(1),
    "mixed_precision": one_of("no", "bf16", "fp16"),
    "tokenizer": section,
    "target": section,
    "samples": section,
    "drafter": section,
    "medusa": section,
    "heads": section,
}


def check_settings(given: Mapping[str, Any], known: Mapping[str, Check], *, within: str = "") -> None:
    """Check the values of a configuration, or of one section of it.

    Args:
        given: The resolved values.
        known: A check for every setting that there is.
        within: Name of the section, for messages.

    Raises:
        ValueError: A setting is unknown, missing or wrong. Says what was given and what to give.
    """
    prefix = f"{within}." if within else ""
    for name in given:
        if name not in known:
            raise ValueError(f"there is no {prefix}{name}{did_you_mean(str(name), known, prefix)}")
    for name, check in known.items():
        if name not in given:
            raise ValueError(f"{prefix}{name} is missing: give {prefix}{name}=…")
        wanted = check(given[name])
        if wanted is not None:
            raise ValueError(f"{prefix}{name}={given[name]!r}: {wanted}")


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them, or that there is none."""
    listed = [str(each) for each in known]
    if not listed:
        return ", and nothing else can be set here"
    near = difflib.get_close_matches(name, listed, n=1)
    return f": did you mean {prefix}{near[0]}?" if near else f": choose among {', '.join(listed)}"


_SIMPLE: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
    NoneType: (NoneType,),
}
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", NoneType: "null"}


def check_arguments(component: Any, options: Mapping[str, Any], within: str) -> None:
    """Check a section against the signature of the component that it describes.

    Args:
        component: A class or function.
        options: Its arguments, by name.
        within: Name of the section, for messages.

    Raises:
        ValueError: The component has no such argument, or asks for a value of another simple type.
    """
    parameters = inspect.signature(component).parameters
    prefix = f"{within}." if within else ""
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in options:
            if name not in parameters and not name.startswith("_"):
                raise ValueError(f"there is no {prefix}{name}{did_you_mean(name, parameters, prefix)}")
    for name, parameter in parameters.items():
        annotation = parameter.annotation
        kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        if name not in options or any(kind not in _SIMPLE for kind in kinds):
            continue
        allowed = {accepted for kind in kinds for accepted in _SIMPLE[kind]}
        if type(options[name]) not in allowed:  # not isinstance: true is no number
            wanted = " or ".join(_WORDS[kind] for kind in kinds)
            raise ValueError(f"{prefix}{name}={options[name]!r}: give {wanted}")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)

"""What a configuration may hold: the keys of every application, and the types and ranges of their values.

Every application has a table of its settings (``RUN``, ``COMPARE``, …), which ``check_settings`` goes by. Sections that
describe a component (``sampling``, ``drafter``, …) are checked against the component's own signature by
``check_arguments``.
"""

from typing import Any

from experiments.config.values import (
    Check,
    anything,
    flag,
    folder,
    integer,
    number,
    one_of,
    one_or_more,
    optional_section,
    optional_text,
    optional_texts,
    pace,
    section,
    several,
    text,
)
from experiments.reporting.formats import FORMATS
from experiments.results.limits import seconds_of

OBJECTIVES = ("speedup", "tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate")
"""Figures of a method that an optimizing sweeper may ask for: fields of ``MethodSummary``."""


def objective(value: Any) -> str | None:
    """A figure that a sweep searches the best of, or null."""
    return None if value is None or value in OBJECTIVES else f"give one of {', '.join(OBJECTIVES)}, or null"


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
    "setups": section,
    "ladder": optional_texts,
    "compared_with": optional_text,
    "costs": optional_text,
    "peaks": one_of("measured", "none"),
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
_FORMAT = one_or_more(one_of(*FORMATS), f"one or several of {', '.join(FORMATS)}")
COMPARE: dict[str, Check] = {"runs": anything, "allow_mixed": flag, "format": _FORMAT, "out": text}
ACCURACY: dict[str, Check] = {
    **dict.fromkeys(("target", "drafter", "policy", "verifier", "engine", "bootstrap"), section),
    "generation": optional_section,
    "tasks": one_or_more(text, "a name of a task, or a list of them"),
    "include": optional_text,
    "limit": integer(1, optional=True),
    "fewshot": integer(0, optional=True),
    "chat": flag,
    "max_new_tokens": integer(1),
    "execute": flag,
    "method": text,
    "chat_template": optional_section,
    "seed": integer(0),
    "threads": integer(1, optional=True),
    "format": _FORMAT,
    "out": text,
}
_PROBABILITY = number(lambda value: 0 <= value <= 1, "a probability from 0 to 1, or a list of them by position")
_ABOVE_0 = number(lambda value: value > 0, "a number above 0", optional=True)
PLAN: dict[str, Check] = {
    **dict.fromkeys(("target", "drafter", "engine"), section),
    "device": optional_text,
    "devices": optional_text,
    "costs": optional_text,
    "measured": flag,
    "batch": one_or_more(integer(1), "an integer of at least 1, or a list of them"),
    "context": integer(2, optional=True),
    "output": integer(1),
    "acceptance": one_or_more(_PROBABILITY, "a probability from 0 to 1, or a list of them by position"),
    "longest": integer(1),
    "price": _ABOVE_0,
    "memory": _ABOVE_0,
    "usable": number(lambda value: 0 < value <= 1, "a share above 0, at most 1"),
    "page": integer(1),
    "overhead": number(lambda value: value >= 0, "seconds, 0 or more"),
    "chat_template": optional_section,
    "pictures": flag,
    "out": folder,
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
    "trace": one_or_more(text, "the folder of a run made with trace=true, or a list of them"),
    "method": optional_text,
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
_SIZES = several(integer(1), "a list of integers, each at least 1")
GRID: dict[str, Check] = {
    "batch": _SIZES,
    "context": _SIZES,
    "drafted": several(integer(0), "a list of integers, each at least 0"),
    "chunk": lambda value: None if value == [] else _SIZES(value),
}
CALIBRATE: dict[str, Check] = {
    **dict.fromkeys(("target", "drafter", "verifier", "sampling", "engine", "grid", "held_out"), section),
    "ranges": lambda value: None if value in (None, []) else _SIZES(value),
    "seconds": number(lambda value: value >= 0, "seconds from 0 on"),
    "rounds": integer(0),
    "costs": text,
    "chat_template": optional_section,
    "seed": integer(0),
    "threads": integer(1, optional=True),
    "out": folder,
}
SHAPES = {**_MEASURING, "methods": section}
"""A run that decodes with several tree shapes, as ``optimize_tree`` makes it."""
REPLAY_TEXT: dict[str, Check] = {
    "texts": one_or_more(text, "a file, or a list of files"),
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
    "models": several(text, "a list of names of recipes: [target,drafter]"),
    "out": folder,
    "work": folder,
    "vocab_size": integer(257),
    "max_length": integer(4),
    "threads": integer(1),
    "overrides": anything,
}

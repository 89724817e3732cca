"""Rows and columns of the frames: from summaries, manifests and records to pandas, by the schema."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas

from experiments.results import metrics, schema
from experiments.results.origin import flatten
from experiments.results.records import Record
from experiments.results.requests.figures import LATENCIES, RATES
from experiments.results.requests.timeline import timeline_of
from experiments.results.runs import by_number
from experiments.results.utilization import utilization_columns


def method_columns(summary: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, Any]:
    """A row's figures in the frame ``runs``, from a run's and a method's summary as plain mappings."""
    row: dict[str, Any] = {name: summary[name] for name in ("complete", "planned", "confidence")}
    row |= {name: method[name] for name in schema.RUNS if name in method and name != "lossless"}
    for name in ("mean_acceptance_length", "distance_tv", "speedup"):
        row[f"{name}_low"], row[f"{name}_high"] = method[f"{name}_interval"] or (None, None)
    noise = summary.get("noise") or {}
    row |= {"noise_spread": noise.get("spread"), "other_cores": noise.get("other_cores"), "noisy": noise.get("noisy")}
    verdict = method["lossless"] or {}
    row["lossless"] = str(verdict["verdict"]) if verdict else None
    # How many divergences there are is known of lossy rules, too, which get no verdict.
    row["divergences"] = len(method["divergences"]) if method["compared_with_plain"] is not None else None
    row |= {name: verdict.get(name) for name in ("unexplained", "largest_margin", "tie_bound")}
    row |= {f"stage_seconds.{stage}": seconds for stage, seconds in method["stage_seconds"].items()}
    row |= utilization_columns(method.get("utilization") or {})
    row |= request_columns(method.get("requests"))
    row |= {f"finish.{reason}": count for reason, count in method["finish_reasons"].items()}
    by = method["acceptance_by_position"]
    for prefix, values in (
        ("acceptance_at", by["unconditional"]),
        ("conditional_acceptance_at", by["conditional"]),
        ("rounds_at", by["rounds"]),
    ):
        row |= {f"{prefix}.{position}": value for position, value in enumerate(values, start=1)}
    return row


def request_columns(requests: Mapping[str, Any] | None) -> dict[str, Any]:
    """What users felt, as columns of a row of the frame ``runs``; none where no request was timed."""
    if requests is None:
        return {}
    row: dict[str, Any] = {name: requests[name] for name in RATES}
    flying, good = requests["concurrency"] or {}, requests["goodput"] or {}
    row |= {"concurrency": flying.get("running"), "waiting": flying.get("waiting")}
    row |= {"attainment": good.get("attainment"), "goodput": good.get("per_second")}
    for name in LATENCIES:
        for part, value in (requests[name] or {}).items():
            if part.endswith("_interval"):
                ends = (f"{name}.{part.replace('_interval', end)}" for end in ("_low", "_high"))
                row |= dict(zip(ends, value or (None, None), strict=True))
            else:
                row[f"{name}.{part}"] = value
    for kind in ("phase", "stage"):
        row |= {f"{kind}_share.{part}": value for part, value in requests[f"{kind}_shares"].items()}
    return row


def origin_columns(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What made a row of the frame ``runs``, from its run's manifest; what an older manifest does not say is empty."""
    machine, git, target = (manifest.get(name) or {} for name in ("machine", "git", "target"))
    given = [str(text) for text in manifest.get("overrides") or []]
    row = {
        "run": folder.as_posix(),
        "target": target.get("name"),
        "parameters": target.get("parameters"),
        **{name: manifest.get(name) for name in ("dtype", "device", "threads", "prompts", "prompts_hash", "started")},
        "system": machine.get("system"),
        "processor": machine.get("processor"),
        "gpus": ", ".join(machine.get("gpus") or []) or None,
        "git_commit": git.get("commit"),
        "git_dirty": git.get("dirty"),
        "overrides": " ".join(given),
    }
    row |= {f"version.{name}": version for name, version in (manifest.get("versions") or {}).items()}
    for text in given:
        name, assigned, value = text.partition("=")
        if assigned:
            row[f"override.{name.lstrip('+~')}"] = value
    config = {f"config.{name}": _cell(value) for name, value in flatten(manifest["config"]).items()}
    return row | config


def _cell(value: Any) -> Any:
    """A setting as a value that can be grouped by: lists become their JSON text."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value


def prompt_columns(run: str, record: Record) -> dict[str, Any]:
    """A row of the frame ``prompts``."""
    row = {name: getattr(record, name) for name in schema.PROMPTS if hasattr(record, name)}
    line = timeline_of(record)
    felt = ("first_token", "ttft", "engine_ttft", "tpot", "e2e")
    return row | {
        **({} if line is None else {name: getattr(line, name) for name in felt}),
        "run": run,
        "tokens": len(record.token_ids),
        "rounds": len(record.accepted),
        "accepted": sum(record.accepted),
        "expected_accepted": sum(record.expected_accepted),
        "proposed_depth": sum(record.proposed_depth),
        "proposed_nodes": sum(record.proposed_nodes),
        "mean_acceptance_length": metrics.mean_acceptance_length(record.steps()),
        "batch_seconds": record.seconds,
    }


def round_columns(run: str, record: Record) -> dict[str, list[Any]]:
    """A record's rows of the frame ``rounds``, as columns."""
    count = len(record.accepted)
    alike = {"run": run} | {
        name: getattr(record, name) for name in ("method", "temperature", "prompt", "category", "turn", "sample")
    }
    columns = {name: [value] * count for name, value in alike.items()}
    columns["round"] = list(range(count))
    for name in ("accepted", "expected_accepted", "proposed_depth", "proposed_nodes"):
        columns[name] = list(getattr(record, name))
    for name, field in (
        ("distance_tv", "distance_tv"),
        ("distance_kl", "distance_kl"),
        ("seconds", "round_seconds"),
        ("predicted_seconds", "predicted_seconds"),
    ):
        known = list(getattr(record, field))
        columns[name] = known + [None] * (count - len(known))
    for name in ("emitted_at", "emitted"):  # a stop string may have cut all tokens of the last round
        known = list(getattr(record, name))[:count]
        columns[name] = known + [None] * (count - len(known))
    return columns


def frame(rows: Iterable[Mapping[str, Any]] | Mapping[str, list[Any]], known: Mapping[str, str]) -> pandas.DataFrame:
    """A frame with the columns of a schema, and those of its families that occur, in the schema's order.

    Args:
        rows: Rows, or columns of equal length.
        known: The schema.
    """
    made: Any = pandas.DataFrame(rows if isinstance(rows, Mapping) else list(rows))
    columns: dict[str, pandas.Series] = {}
    for name, dtype in known.items():
        if name.endswith(".*"):
            family = [column for column in made.columns if column.startswith(name[:-1])]
            family.sort(key=lambda column: by_number(Path(column.removeprefix(name[:-1]))))
            columns |= {column: _typed(made[column], dtype) for column in family}
        else:
            column = made[name] if name in made else pandas.Series([None] * len(made), dtype=object)
            columns[name] = _typed(column, dtype)
    return pandas.DataFrame(columns)


def _typed(column: pandas.Series, dtype: str) -> pandas.Series:
    if dtype == "any":
        return _settings(column)
    if dtype.startswith("datetime64"):
        return pandas.to_datetime(column, utc=True, format="ISO8601").astype(dtype)
    return column.astype(dtype)


def _settings(column: pandas.Series) -> pandas.Series:
    """A setting's values in the narrowest type that holds those of all runs; text where they are of several kinds."""
    values = [None if value is None or value != value else value for value in column.astype(object)]
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) > 1 and kinds <= {int, float}:
        return pandas.Series(values, column.index, dtype="float64")
    dtype = {bool: "boolean", int: "Int64", float: "float64"}.get(next(iter(kinds), str)) if len(kinds) == 1 else None
    if dtype is None:
        values = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pandas.Series(values, column.index, dtype=dtype or "string")

"""How well a run used its device, how much of the work was for nothing, and how well its times were predicted."""

from collections.abc import Mapping
from typing import Any

import pandas

from experiments.results.frame import Frame, Outputs, frame_of, rounds_of

TOLERANCE, CACHES = 0.05, 4
"""As in ``specdec.physics.work``, which a test compares: results are read where specdec is not installed."""

STAGES = ("prefill", "draft", "verify")
"""The stages that run a model."""
IMPOSSIBLE = "FASTER THAN PHYSICS"
"""Begins the note on a time that is shorter than the device allows, where caches do not explain it."""


def utilization_of(outputs: Outputs, peaks: Mapping[str, float] | None) -> dict[str, Any]:
    """Return a method's use of the device as columns of its row; empty where nothing was counted.

    Args:
        outputs: One method's, at one temperature.
        peaks: What the device does at best: ``copy``, ``read``, ``flops`` and ``cache_bytes`` as measured,
            ``printed_bandwidth`` and ``printed_flops`` where they are known. None: unknown.

    Returns:
        By stage (``mbu.verify``), where something is known about it: the shares of the memory's bandwidth (``mbu``) and
        of the operations (``mfu``) against the measured peaks, and against those that the device's maker prints
        (``mbu_printed``, ``mfu_printed``); ``of_least``, its time over the least one that the measured peaks allow;
        ``suspicion``, why the time is suspect or says nothing about memory. ``useful_mfu``: operations of the target
        for tokens that became final, over what the measured peak would have done during the verify stage. ``wasted``:
        the share of verified nodes that brought no token. And what ``_prediction`` has.
    """
    frame = frame_of(outputs)
    counted = frame[~frame.failed & frame.work.map(bool).astype(bool)]
    if counted.empty:
        return {}
    calls = counted.drop_duplicates(["batch", "turn"])
    work, seconds = (pandas.DataFrame(list(calls[name])).sum().to_dict() for name in ("work", "stage_seconds"))
    figures: dict[str, Any] = {}
    if peaks is not None:
        for name in STAGES:
            figures |= _stage(name, work, seconds.get(name), peaks)
        if "useful_flops" in work and seconds.get("verify"):
            figures["useful_mfu"] = work["useful_flops"] / (seconds["verify"] * peaks["flops"])
    if work.get("verified"):
        figures["wasted"] = 1 - work.get("committed", 0.0) / work["verified"]
    return figures | _prediction(rounds_of(frame), work)


def _stage(name: str, work: Mapping[str, float], time: float | None, peaks: Mapping[str, float]) -> dict[str, Any]:
    moved, flops = work.get(f"{name}_bytes"), work.get(f"{name}_flops")
    if not moved or flops is None or not time:
        return {}
    bandwidth, peak = max(peaks["copy"], peaks["read"]), peaks["flops"]
    printed_bandwidth, printed_peak = peaks.get("printed_bandwidth"), peaks.get("printed_flops")
    of_least = time / max(moved / bandwidth, flops / peak)
    # A mean forward: whether the caches can hold what it reads does not depend on how many there were.
    per_forward = moved / (work.get(f"{name}_forwards") or 1.0)
    return {
        f"mbu.{name}": moved / (time * bandwidth),
        f"mfu.{name}": flops / (time * peak),
        f"mbu_printed.{name}": None if printed_bandwidth is None else moved / (time * printed_bandwidth),
        f"mfu_printed.{name}": None if printed_peak is None else flops / (time * printed_peak),
        f"of_least.{name}": of_least,
        f"suspicion.{name}": suspicion(of_least, per_forward, peaks["cache_bytes"]),
    }


def suspicion(of_least: float, moved: float, cache_bytes: float) -> str:
    """Return why a time cannot be right, or is no statement about memory; empty if nothing speaks against it.

    Args:
        of_least: The time over the least one.
        moved: Bytes of one forward.
        cache_bytes: The size of the device's last cache; 0 if it is unknown.
    """
    if of_least >= 1 - TOLERANCE:
        return ""
    return "served by caches" if moved < CACHES * cache_bytes else f"{IMPOSSIBLE} ({of_least:.2f} of the least time)"


def _prediction(rounds: Frame, work: Mapping[str, float]) -> dict[str, Any]:
    """Return how well a cost file predicted the rounds; empty without one.

    ``prediction.rounds`` were predicted, ``prediction.outside`` are those for which the file says nothing. Seconds that
    were measured per round less the predicted ones are by stage (``prediction.draft``, ``verify``, ``judge``). Errors
    are relative ones: of all rounds together (``predicted_error``), of single rounds, and of the prefill.
    """
    counted, outside = int(work.get("predicted_rounds", 0)), int(work.get("unpredicted_rounds", 0))
    if not counted and not outside:
        return {}
    told = rounds[rounds.predicted_seconds.notna() & (rounds.seconds > 0)]
    errors = (told.predicted_seconds / told.seconds - 1).abs()
    parts = {
        n: [work.get(f"{kind}_{n}", 0.0) for kind in ("measured", "predicted")] for n in ("draft", "verify", "judge")
    }
    measured, predicted = map(sum, zip(*parts.values(), strict=True))
    prefill, known = work.get("measured_prefill"), work.get("predicted_prefill")
    return {
        "prediction.rounds": counted,
        "prediction.outside": outside,
        **{f"prediction.{name}": (m - p) / counted if counted else None for name, (m, p) in parts.items()},
        "prediction.prefill_error": known / prefill - 1 if known is not None and prefill else None,
        "prediction.median_error": float(errors.quantile(0.5, "higher")) if len(errors) else None,
        "prediction.p95_error": float(errors.quantile(0.95, "higher")) if len(errors) else None,
        "predicted_error": predicted / measured - 1 if measured else None,
    }

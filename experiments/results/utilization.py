"""How well a run used its device, how much of the work was for nothing, and how well its times were predicted."""

from collections.abc import Mapping

import pandas

from experiments.results.frame import Figures, Frame, Outputs, frame_of, rounds_of

TOLERANCE, CACHES = 0.05, 4
"""As in ``specdec.physics.bounds``, which a test compares: results are read where specdec is not installed."""

STAGES = ("prefill", "draft", "verify")
"""The stages that run a model."""
IMPOSSIBLE = "FASTER THAN PHYSICS"
"""Begins the note on a time that is shorter than the device allows, where caches do not explain it."""


def utilization_of(outputs: Outputs, peaks: Mapping[str, float] | None) -> Figures | None:
    """Return a method's use of the device; None where nothing was counted.

    Args:
        outputs: One method's, at one temperature.
        peaks: What the device does at best: ``copy``, ``read``, ``flops`` and ``cache_bytes`` as measured,
            ``printed_bandwidth`` and ``printed_flops`` where they are known. None: unknown.

    Returns:
        ``stages``: see ``_stage``, by stage; those about which nothing is known are left out. ``useful_mfu``:
        operations of the target for tokens that became final, over what the measured peak would have done during the
        verify stage. ``wasted``: the share of verified nodes that brought no token. ``prediction``: ``_prediction``.
    """
    frame = frame_of(outputs)
    counted = frame[~frame.failed & frame.work.map(bool).astype(bool)]
    if counted.empty:
        return None
    calls = counted.drop_duplicates(["batch", "turn"])
    work, seconds = (pandas.DataFrame(list(calls[name])).sum().to_dict() for name in ("work", "stage_seconds"))
    stages = {name: None if peaks is None else _stage(name, work, seconds.get(name), peaks) for name in STAGES}
    useful = None
    if peaks is not None and "useful_flops" in work and seconds.get("verify"):
        useful = work["useful_flops"] / (seconds["verify"] * peaks["flops"])
    return Figures(
        stages={name: found for name, found in stages.items() if found is not None},
        useful_mfu=useful,
        wasted=1 - work.get("committed", 0.0) / work["verified"] if work.get("verified") else None,
        prediction=_prediction(rounds_of(frame), work),
    )


def _stage(name: str, work: Mapping[str, float], time: float | None, peaks: Mapping[str, float]) -> Figures | None:
    """Return a stage's share of the memory's bandwidth (``mbu``) and of the operations (``mfu``).

    Both are against the measured peaks, and against those that the device's maker prints (``mbu_printed``,
    ``mfu_printed``). ``of_least`` is its time over the least one that the measured peaks allow; ``note`` says why the
    time is suspect, or says nothing about memory.
    """
    moved, flops = work.get(f"{name}_bytes"), work.get(f"{name}_flops")
    if not moved or flops is None or not time:
        return None
    bandwidth, peak = max(peaks["copy"], peaks["read"]), peaks["flops"]
    printed_bandwidth, printed_peak = peaks.get("printed_bandwidth"), peaks.get("printed_flops")
    of_least = time / max(moved / bandwidth, flops / peak)
    # A mean forward: whether the caches can hold what it reads does not depend on how many there were.
    each = moved / (work.get(f"{name}_forwards") or 1.0)
    return Figures(
        mbu=moved / (time * bandwidth),
        mfu=flops / (time * peak),
        mbu_printed=None if printed_bandwidth is None else moved / (time * printed_bandwidth),
        mfu_printed=None if printed_peak is None else flops / (time * printed_peak),
        of_least=of_least,
        note=suspicion(of_least, each, peaks["cache_bytes"]),
    )


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


def _prediction(rounds: Frame, work: Mapping[str, float]) -> Figures | None:
    """Return how well a cost file predicted the rounds; None without one.

    ``rounds`` were predicted, ``outside`` are those for which the file says nothing. ``predicted`` and ``measured``
    are seconds by stage (``draft``, ``verify``, ``judge``), errors are relative ones of single rounds.
    """
    counted, outside = int(work.get("predicted_rounds", 0)), int(work.get("unpredicted_rounds", 0))
    if not counted and not outside:
        return None
    told = rounds[rounds.predicted_seconds.notna() & (rounds.seconds > 0)]
    errors = (told.predicted_seconds / told.seconds - 1).abs().sort_values().to_list()
    names = ("draft", "verify", "judge")
    predicted = {name: work.get(f"predicted_{name}", 0.0) for name in names}
    measured = {name: work.get(f"measured_{name}", 0.0) for name in names}
    total = sum(measured.values())
    return Figures(
        rounds=counted,
        outside=outside,
        predicted=predicted,
        measured=measured,
        prefill_predicted=work.get("predicted_prefill"),
        prefill_measured=work.get("measured_prefill"),
        median_error=errors[len(errors) // 2] if errors else None,
        p95_error=errors[min(len(errors) - 1, int(0.95 * len(errors)))] if errors else None,
        total_error=sum(predicted.values()) / total - 1 if total else None,
    )

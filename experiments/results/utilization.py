"""How well a run used its device, how much of the work was for nothing, and how well its times were predicted."""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas

from experiments.results.frame import Frame, Outputs, frame_of, rounds_of

TOLERANCE, CACHES = 0.05, 4
"""As in ``specdec.physics.bounds``, which a test compares: results are read where specdec is not installed."""

STAGES = ("prefill", "draft", "verify")
"""The stages that run a model."""


@dataclass(frozen=True, kw_only=True)
class StageUse:
    """What a stage made of the device.

    Attributes:
        mbu: The bytes that it had to move over those that the measured bandwidth would have moved meanwhile.
        mfu: Its operations over those that the measured peak would have done meanwhile.
        mbu_printed, mfu_printed: The same against the peaks that the device's maker prints; None if those are unknown.
        of_least: Its time over the least time that the measured peaks allow.
        note: Why the time is suspect, or says nothing about memory; empty if neither.
    """

    mbu: float
    mfu: float
    mbu_printed: float | None = None
    mfu_printed: float | None = None
    of_least: float
    note: str = ""

    @property
    def impossible(self) -> bool:
        """Whether the time is shorter than the device allows, and caches do not explain it."""
        return self.note.startswith("FASTER")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How well a cost file predicted the rounds.

    Attributes:
        rounds: Rounds that were predicted.
        outside: Rounds for which the file says nothing, because they are outside of what was calibrated.
        predicted, measured: Their seconds, by stage: ``draft``, ``verify``, ``judge`` (acceptance and commit).
        prefill_predicted, prefill_measured: Seconds of the prefill; None where it was not predicted.
        median_error, p95_error: Of the absolute relative errors of single rounds.
        total_error: Predicted over measured seconds of all rounds, less 1.
    """

    rounds: int
    outside: int
    predicted: dict[str, float]
    measured: dict[str, float]
    prefill_predicted: float | None = None
    prefill_measured: float | None = None
    median_error: float | None = None
    p95_error: float | None = None
    total_error: float | None = None

    @property
    def residual(self) -> dict[str, float]:
        """Measured less predicted seconds, by stage."""
        return {name: self.measured[name] - self.predicted[name] for name in self.predicted}

    @property
    def prefill_error(self) -> float | None:
        """Predicted over measured seconds of the prefill, less 1; None where it was not predicted."""
        if self.prefill_predicted is None or not self.prefill_measured:
            return None
        return self.prefill_predicted / self.prefill_measured - 1


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """One method's use of the device.

    Attributes:
        stages: By stage; those about which nothing is known are left out.
        useful_mfu: Operations of the target for tokens that became final, over what the measured peak would have done
            during the verify stage (the others were executed for nothing).
        wasted: The share of verified nodes that brought no token: 1 - committed / verified.
        prediction: With a cost file.
    """

    stages: dict[str, StageUse]
    useful_mfu: float | None
    wasted: float | None
    prediction: Prediction | None = None


def utilization_of(outputs: Outputs, peaks: Mapping[str, float] | None) -> Utilization | None:
    """Return a method's use of the device; None where nothing was counted.

    Args:
        outputs: One method's, at one temperature.
        peaks: What the device does at best: ``copy``, ``read``, ``flops`` and ``cache_bytes`` as measured,
            ``printed_bandwidth`` and ``printed_flops`` where they are known. None: unknown.
    """
    frame = frame_of(outputs)
    counted = frame[~frame.failed & frame.work.map(bool).astype(bool)]
    if counted.empty:
        return None
    calls = counted.drop_duplicates(["batch", "turn"])
    work, seconds = (pandas.DataFrame(list(calls[name])).sum().to_dict() for name in ("work", "stage_seconds"))
    verified = work.get("verified", 0.0)
    useful = None
    if peaks is not None and "useful_flops" in work and seconds.get("verify"):
        useful = work["useful_flops"] / (seconds["verify"] * peaks["flops"])
    return Utilization(
        stages={} if peaks is None else _stages(work, seconds, peaks),
        useful_mfu=useful,
        wasted=1 - work.get("committed", 0.0) / verified if verified else None,
        prediction=_prediction(rounds_of(frame), work),
    )


def _stages(work: Mapping[str, float], seconds: Mapping[str, float], peaks: Mapping[str, float]) -> dict[str, StageUse]:
    bandwidth, peak = max(peaks["copy"], peaks["read"]), peaks["flops"]
    printed_bandwidth, printed_peak = peaks.get("printed_bandwidth"), peaks.get("printed_flops")
    found = {}
    for stage in STAGES:
        moved, flops, time = work.get(f"{stage}_bytes"), work.get(f"{stage}_flops"), seconds.get(stage)
        if not moved or flops is None or not time:
            continue
        of_least = time / max(moved / bandwidth, flops / peak)
        # A mean forward: whether the caches can hold what it reads does not depend on how many there were.
        each = moved / (work.get(f"{stage}_forwards") or 1.0)
        found[stage] = StageUse(
            mbu=moved / (time * bandwidth),
            mfu=flops / (time * peak),
            mbu_printed=None if printed_bandwidth is None else moved / (time * printed_bandwidth),
            mfu_printed=None if printed_peak is None else flops / (time * printed_peak),
            of_least=of_least,
            note=suspicion(of_least, each, peaks["cache_bytes"]),
        )
    return found


def suspicion(of_least: float, moved: float, cache_bytes: float) -> str:
    """Return why a time cannot be right, or is no statement about memory; empty if nothing speaks against it.

    Args:
        of_least: The time over the least one.
        moved: Bytes of one forward.
        cache_bytes: The size of the device's last cache; 0 if it is unknown.
    """
    if of_least >= 1 - TOLERANCE:
        return ""
    if moved < CACHES * cache_bytes:
        return "served by caches"
    return f"FASTER THAN PHYSICS ({of_least:.2f} of the least time)"


def _prediction(rounds: Frame, work: Mapping[str, float]) -> Prediction | None:
    counted, outside = int(work.get("predicted_rounds", 0)), int(work.get("unpredicted_rounds", 0))
    if not counted and not outside:
        return None
    told = rounds[rounds.predicted_seconds.notna() & (rounds.seconds > 0)]
    errors = (told.predicted_seconds / told.seconds - 1).abs().sort_values().to_list()
    names = ("draft", "verify", "judge")
    predicted = {name: work.get(f"predicted_{name}", 0.0) for name in names}
    measured = {name: work.get(f"measured_{name}", 0.0) for name in names}
    return Prediction(
        rounds=counted,
        outside=outside,
        predicted=predicted,
        measured=measured,
        prefill_predicted=work.get("predicted_prefill"),
        prefill_measured=work.get("measured_prefill"),
        median_error=errors[len(errors) // 2] if errors else None,
        p95_error=errors[min(len(errors) - 1, int(0.95 * len(errors)))] if errors else None,
        total_error=sum(predicted.values()) / sum(measured.values()) - 1 if sum(measured.values()) else None,
    )

"""How well a run used its device, and how much of the work was for nothing."""

from collections.abc import Mapping
from typing import Any

import pandas

from experiments.results.frame import Outputs, frame_of

STAGES = ("prefill", "draft", "verify")
"""The stages that run a model."""


def utilization_of(outputs: Outputs, peaks: Mapping[str, float] | None) -> dict[str, Any]:
    """Return a method's use of the device as columns of its row; empty where nothing was counted.

    Args:
        outputs: One method's, at one temperature.
        peaks: The most that was measured on the device: ``copy``, ``read`` and ``flops``. None: unknown.

    Returns:
        By stage (``mbu.verify``), where something is known about it: the shares of the memory's bandwidth (``mbu``) and
        of the operations (``mfu``) against the peaks; ``of_least``, its time over the least one that these allow.
        ``useful_mfu``: operations of the target for tokens that became final, over what the measured peak would have
        done during the verify stage. ``wasted``: the share of verified nodes that brought no token.
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
    return figures


def _stage(name: str, work: Mapping[str, float], time: float | None, peaks: Mapping[str, float]) -> dict[str, Any]:
    moved, flops = work.get(f"{name}_bytes"), work.get(f"{name}_flops")
    if not moved or flops is None or not time:
        return {}
    bandwidth, peak = max(peaks["copy"], peaks["read"]), peaks["flops"]
    return {
        f"mbu.{name}": moved / (time * bandwidth),
        f"mfu.{name}": flops / (time * peak),
        f"of_least.{name}": time / max(moved / bandwidth, flops / peak),
    }

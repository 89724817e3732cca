"""Costs that were measured with ``plan costs=fit``, in a plan: is a file about what is planned, what it says."""

from collections.abc import Mapping
from dataclasses import replace

from specdec.drafting.costs import check_conditions
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.capacity import kv_bytes_per_position
from specdec.physics.devices import Device, row_of
from specdec.physics.precision import Precision
from specdec.physics.shape import ModelShape

OUTSIDE = "outside what was measured"
"""What stands where a file says nothing."""


def longest_chain(costs: CalibratedRounds) -> int:
    """Return the longest chain whose costs are known; 0 if those of no drafts are."""
    return min(costs.box.drafted[1], costs.deepest)


def device_of(costs: CalibratedRounds, devices: Mapping[str, Device], *, memory: float) -> Device:
    """Return the device that costs were measured on: its row of the table, or what its file (or ``memory``) says."""
    name, peaks = costs.conditions.device, costs.peaks
    size = peaks.get("memory", memory)
    row = next((device for device in devices.values() if device.title == name), None) or row_of(name, size, devices)
    if row is not None:
        return row
    if not peaks:
        raise ValueError(f"the costs were measured on {name}, of which their file has no peaks: give device=NAME")
    return Device(
        name=name,
        title=name,
        memory=size,
        bandwidth=max(peaks["copy"], peaks["read"]),
        flops={costs.conditions.dtype: peaks["flops"]},
        cache=peaks.get("cache_bytes", 0.0),
        source="measured by plan costs=fit",
    )


def check_file(
    costs: CalibratedRounds,
    path: str,
    *,
    device: Device,
    own: Device,
    model: str,
    shape: ModelShape,
    drafter: str | None,
    **formats: str | None,
) -> None:
    """Refuse costs of something else than what is planned; models of one shape cost alike."""
    there = replace(costs.conditions, device=own.title)
    fingerprint = there.fingerprint if _same_shape(costs, shape) else "of another shape"
    planned = {"device": device.title, "model": model, "fingerprint": fingerprint, "drafter": drafter, **formats}
    check_conditions(there, replace(there, **planned), path, drafter=drafter is not None)


def _same_shape(costs: CalibratedRounds, shape: ModelShape) -> bool:
    there, work = costs.conditions, costs.work
    if not work:
        return True  # nothing is known of this type
    flops = 2.0 * (shape.active_weights + shape.output_weights)
    kv = kv_bytes_per_position(shape, Precision.of(there.dtype, kv=there.kv_cache))
    return work.get("token_flops") == flops and work.get("kv_bytes") in (0, kv)

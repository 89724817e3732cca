"""Costs that were measured with ``plan costs=fit``, in a plan: is a file about what is planned, what it says."""

from collections.abc import Mapping

from specdec.physics.calibrated import CalibratedRounds, Conditions
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
    row = next((each for each in devices.values() if each.title == name), None) or row_of(name, size, devices)
    if row is not None or not peaks:
        if row is None:
            raise ValueError(f"the costs were measured on {name}, of which their file has no peaks: give device=NAME")
        return row
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
    dtype: str,
    quantization: str | None,
    kv_cache: str | None,
    model: str,
    shape: ModelShape,
    drafter: str | None,
) -> None:
    """Refuse costs of something else than what is planned; models of one shape cost alike."""
    there: Conditions = costs.conditions
    different = []
    if device.name != own.name:
        different.append(f"device is {own.title} there and {device.title} here")
    here = {"dtype": dtype, "quantization": quantization, "kv_cache": kv_cache}
    for name, value in here.items():
        if getattr(there, name) != value:
            different.append(f"{name} is {getattr(there, name)} there and {value} here")
    if not _same_shape(costs, shape):
        different.append(f"model is {there.model} there and {model} here")
    if drafter is not None and there.drafter != drafter:
        different.append(f"drafter is {there.drafter} there and {drafter} here")
    if different:
        raise ValueError(
            f"costs={path} were measured under other conditions ({'; '.join(different)}): calibrate what is planned "
            f"with plan costs=fit, or plan what was measured"
        )


def _same_shape(costs: CalibratedRounds, shape: ModelShape) -> bool:
    there, work = costs.conditions, costs.work
    if not work:
        return True  # nothing is known of this type
    flops = 2.0 * (shape.active_weights + shape.output_weights)
    kv = kv_bytes_per_position(shape, Precision.of(there.dtype, kv=there.kv_cache))
    return work.get("token_flops") == flops and work.get("kv_bytes") in (0, kv)

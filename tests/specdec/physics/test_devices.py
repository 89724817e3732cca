"""Devices, their roofs, and times that cannot be right."""

from pathlib import Path

import pytest

from specdec.physics.devices import find_device, read_devices
from specdec.physics.work import Roof

ROW = "tiny:\n  memory: 1e9\n  bandwidth: 2.0e9\n  flops: {float32: 4e9}\n  source: here\n"


def test_the_table_that_ships() -> None:
    devices = read_devices()
    assert set(devices) >= {"h100", "h200", "b200", "a100-40gb", "a100-80gb", "l40s", "a10", "rtx4090", "mi300x"}
    for device in devices.values():
        assert len(device.source) > 20 and device.memory >= 1e10 and device.cache > 0, device
        assert 20 < device.roof("bfloat16").ridge < 500, f"{device.name}: dense rates, not those with sparsity"
        assert device.flops["float16"] == device.flops["bfloat16"]
        if "fp8" in device.flops:
            assert device.flops["fp8"] == pytest.approx(2 * device.flops["float16"], rel=0.02)
    for name, ridge in (("h100", 295.3), ("a100-40gb", 200.6), ("a100-80gb", 153.0)):
        assert devices[name].roof("float16").ridge == pytest.approx(ridge, abs=0.05)


def test_chips_add_up() -> None:
    """An H100 has 33 MiB of registers, and as much shared memory and first cache."""
    chip = read_devices()["h100"].chip
    assert chip is not None and chip["processors"] == 132 and chip["link"] == 900e9
    assert chip["processors"] * chip["registers"] == chip["processors"] * chip["shared"] == 33 << 20
    assert read_devices()["mi300x"].chip is None


def test_names_may_be_written_in_other_ways_and_near_ones_are_offered() -> None:
    devices = read_devices()
    for name, found in (("h100", "h100"), ("H100", "h100"), ("A100_80GB", "a100-80gb"), ("a100 80gb", "a100-80gb")):
        assert find_device(name, devices).name == found
    for name, said in (("h10", "mean h100"), ("a100", "a100-40gb or a100-80gb"), ("4090", "rtx4090"), ("tpu", "h100")):
        with pytest.raises(ValueError, match=said):
            find_device(name, devices)


def test_a_row_of_ones_own_and_rows_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(ROW + "  measured: {bandwidth: 1.5e9}\n")
    device = read_devices(path)["tiny"]
    assert device.roof("float32").bandwidth == 2e9, "printed"
    assert device.roof("float32", measured=True).bandwidth == 1.5e9
    assert device.roof("float32", measured=True).flops == 4e9, "not measured, so printed"
    with pytest.raises(ValueError, match="does not compute in fp8: give one of float32"):
        device.roof("fp8")
    for text, said in (
        ("", "has no rows"),
        ("a: [", "cannot be read"),
        ("tiny: 3\n", "tiny is not a row"),
        (ROW.replace("  bandwidth: 2.0e9\n", ""), "tiny has no bandwidth"),
        (ROW.replace("2.0e9", "fast"), "tiny.bandwidth='fast'"),
        (ROW.replace("2.0e9", "0"), "tiny.bandwidth=0"),
        (ROW.replace("float32", "float8"), "give numbers by name, out of float32"),
        (ROW + "  colour: red\n", "'colour'"),
        (ROW + "  measured: 3\n", "tiny.measured"),
        (ROW + "  measured: {flops: 3}\n", "tiny.measured.flops=3"),
        (ROW + "  chip: 3\n", "tiny.chip=3"),
        (ROW + "  chip: {processors: 3, registers: 0, shared: 1}\n", "tiny.chip.registers=0"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_devices(path)


def test_ridges() -> None:
    assert Roof(3.35e12, 989.4e12).ridge == pytest.approx(295.3, abs=0.05)
    assert Roof(3.35e12, 1979e12).ridge == pytest.approx(590.7, abs=0.05), "fp8, printed as 1,979 and as 1,987"
    assert Roof(2.0e12, 312e12).ridge == 156, "A100, rounded"

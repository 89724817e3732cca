"""What is measured on this machine decides, whatever else runs on it; and what was found is kept, if it is whole."""

import itertools
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from specdec.attention import native as attention
from specdec.execution import packing
from specdec.execution.invariant import ROWS
from specdec.execution.packing import PackedLinears
from specdec.machine import Cpu
from specdec.native import choices, native_library
from specdec.native.choices import chosen, loses, recommended_threads
from specdec.target.facts import find
from tests.launches import counted
from tests.models import tiny_model

needs_library = pytest.mark.skipif(native_library() is None, reason="no C compiler, or no AVX2")


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that is kept in this test's folder, of which nothing is known yet; the user wants measurements."""
    monkeypatch.setattr(choices, "native_library", lambda: SimpleNamespace(_name=str(tmp_path / "native-0.so")))
    monkeypatch.setattr(choices, "_known", {})
    monkeypatch.setattr(choices, "cpu", lambda: Cpu(name="Some CPU", physical_cores=4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("SPECDEC_NATIVE", raising=False)
    return tmp_path


def test_a_choice_is_measured_once_and_kept_for_its_conditions(measured: Path, monkeypatch, caplog) -> None:
    measure = Mock(return_value=64)
    with caplog.at_level(logging.INFO, logger=choices.__name__):
        for _ in range(3):
            assert chosen("rows", measure, 0) == 64
            choices._known.clear()
    (line,) = caplog.messages
    assert measure.call_count == 1 and line.startswith("rows: 64 (measured in ")
    assert chosen("other rows", Mock(return_value=32), 0) == 32
    monkeypatch.setattr(choices, "cpu", lambda: Cpu(name="Some CPU", onednn_limit="AVX2"))
    assert chosen("rows", Mock(return_value=16), 0) == 16
    assert [each.suffix for each in measured.iterdir()] == [".json"] * 3, "and nothing else is left"


@pytest.mark.parametrize("damage", [lambda text: text[:-3], lambda text: text.replace("torch ", "torch 1.")])
def test_a_file_that_is_cut_off_or_of_another_version_is_measured_again(damage, measured: Path) -> None:
    measure = Mock(side_effect=[64, 32])
    assert chosen("rows", measure, 0) == 64
    (file,) = measured.iterdir()
    file.write_text(damage(file.read_text()))
    for _ in range(2):  # and is right from then on
        choices._known.clear()
        assert chosen("rows", measure, 0) == 32


def test_nothing_is_measured_where_nothing_is_to_choose(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Mock(return_value=64)
    monkeypatch.setattr(choices, "least_seconds", measure)
    assert recommended_threads(Cpu(physical_cores=8, quota=2.0, omp_threads=6)) == 6
    with monkeypatch.context() as patch:
        patch.setenv("SPECDEC_NATIVE", "1")
        assert chosen("rows", measure, 0) == 0
    monkeypatch.setattr(choices, "native_library", lambda: None)
    assert chosen("rows", measure, 0) == 0
    assert measure.call_count == 0 and not list(measured.iterdir())


def test_the_c_gives_way_only_to_what_is_faster_by_a_tenth_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one thread; other work makes some calls long, or all of the first comparison, and does not decide."""
    now, threads = 0.0, set[int]()
    monkeypatch.setattr(choices, "perf_counter", lambda: now)

    def way(*seconds: float) -> Callable[[], None]:
        taking = itertools.cycle(seconds)

        def call() -> None:
            nonlocal now
            now += next(taking)
            threads.add(torch.get_num_threads())

        return call

    before, disturbed, once = torch.get_num_threads(), [9.0] * 7, [9.0] * 2 * choices.LEAST
    assert loses(way(2.0), way(1.0)) and loses(way(1.12), way(1.0))
    for own in ([1.08], [0.5], [*disturbed, 1.0], [*once, *[1.0] * 100]):
        assert not loses(way(*own), way(1.0))
    assert (threads, torch.get_num_threads()) == ({1}, before)


@pytest.mark.parametrize(
    ("seconds", "threads"),
    [
        ({1: 1.0, 2: 0.5, 4: 0.3, 6: 0.295}, 4),
        ({1: 1.0, 2: 0.98, 4: 0.5, 6: 0.7}, 4),
        ({1: 1.0, 2: 27.0, 4: 0.5, 6: 0.3}, 6),  # other work: all cores, and nothing is kept
    ],
)
def test_threads_are_the_fewest_with_which_a_product_is_fast(seconds, threads, measured, monkeypatch) -> None:
    monkeypatch.setattr(choices, "_WIDTH", 1)
    monkeypatch.setattr(choices, "least_seconds", lambda ways: [seconds[way.args[0]] for way in ways])
    assert recommended_threads(Cpu(physical_cores=12, quota=6.5)) == threads
    assert len(list(measured.iterdir())) == (max(seconds.values()) == 1.0)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_layer_gives_torch_the_rows_from_which_it_is_faster(dtype: torch.dtype, monkeypatch) -> None:
    assert min(packing._TRIED) > ROWS
    monkeypatch.setattr(packing, "loses", lambda own, other: torch.equal(own(), other()))
    assert packing.torch_rows(dtype) == min(packing._TRIED), "both ways compute the same"
    monkeypatch.setattr(packing, "torch_rows", lambda dtype: 40)
    layer = nn.Linear(256, 192, dtype=dtype)
    packed, inputs = PackedLinears(layer), torch.randn(2, 20, 256).to(dtype)
    with packed.in_use(), counted() as few:
        layer(inputs[:, :19])
        layer(inputs[0, :1])
    with packed.in_use(), counted() as many:
        outputs = layer(inputs)
    assert (few.operations["panels"], many.operations["panels"]) == (2, 0)
    assert torch.equal(outputs, layer(inputs)), "the model's own"


@needs_library
@pytest.mark.parametrize("slower", [{8}, {1, 8}], ids=str)
def test_attention_is_the_faster_one(slower: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def loses(own: partial[torch.Tensor], other: Callable[[], torch.Tensor]) -> bool:
        torch.testing.assert_close(own(), other())
        return own.args[0].shape[-2] in slower

    monkeypatch.setattr(attention, "loses", loses)
    found = find(tiny_model("llama"))
    assert found.name == ("grouped" if slower == {1, 8} else "native")
    assert attention.faster_here(torch.bfloat16) == found.name
    assert find(tiny_model("llama"), attention="native").name == "native", "who wants it has it"

"""A scheme that would not be faster is refused, with the reason; facts and times are injected, nothing is timed."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from drafters.model import ModelDrafter
from specdec.quantization import METHODS, quantization_of, quantize
from specdec.quantization import speed as checks
from specdec.quantization.base import QuantizedLinear
from specdec.quantization.speed import MEASURED_FROM, Hardware, RowTimes, check_fast, hardware, measure_row, obstacle
from specdec.target.loading import load_model
from specdec.target.target import Target
from tests.specdec.quantized import small

CPU = Hardware("cpu")
Measure = Callable[[str, tuple[int, int], torch.dtype], RowTimes]


def large(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A model whose output layer is just large enough to be measured."""
    config = LlamaConfig(
        vocab_size=MEASURED_FROM // 64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype)


def times(full: float, quantized: float) -> Measure:
    return lambda name, shape, dtype: RowTimes(full, quantized, (shape[0] // 2, shape[1]))


def test_the_slower_scheme_is_refused_with_what_was_measured() -> None:
    check_fast(large(), "int4", facts=CPU, measure=times(1.0, 0.5))
    said = "quantization='int4' is slower than bfloat16 .*32768 x 64 .* 0.75 ms, and 0.25 ms .*quantization_check=false"
    with pytest.raises(ValueError, match=said):
        check_fast(large(), "int4", facts=CPU, measure=times(0.25, 0.75))


def test_a_busy_machine_is_asked_twice() -> None:
    """Less than a tenth is noise, and a scheme is refused only if it was slower both times."""
    model = large()
    for found, refused in (([1.05], False), ([2.0, 0.9], False), ([2.0, 2.0], True)):
        left = iter(found)
        measure: Measure = lambda name, shape, dtype, left=left: RowTimes(1.0, next(left), shape)  # noqa: E731
        with pytest.raises(ValueError, match="slower") if refused else nullcontext():
            check_fast(model, "int8", facts=CPU, measure=measure)
        assert next(left, None) is None


def test_small_models_are_not_measured() -> None:
    def never(*arguments: object) -> RowTimes:
        raise AssertionError(arguments)

    for model in (small(), small(dtype=torch.float32)):
        check_fast(model, "int8", facts=CPU, measure=never)
    with pytest.raises(AssertionError, match="int8"):
        check_fast(large(), "int8", facts=CPU, measure=never)


def test_the_check_stands_before_the_work_and_can_be_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "measure_row", times(1.0, 2.0))
    model = large()
    with pytest.raises(ValueError, match="slower than bfloat16"):
        quantize(model, "int8")
    assert quantization_of(model) is None and not any(isinstance(each, QuantizedLinear) for each in model.modules())
    model.save_pretrained(tmp_path / "full")
    quantize(model, "int8", check=False).save_pretrained(tmp_path / "stored")
    for name, quantization in (("full", "int8"), ("stored", None)):
        for load in (load_model, ModelDrafter.from_pretrained):
            options = {"device": "cpu", "quantization": quantization}
            with pytest.raises(ValueError, match="quantization='int8' is slower"):
                load(str(tmp_path / name), **options)
            load(str(tmp_path / name), **options, quantization_check=False)


HOPPER = Hardware("cuda", (9, 0), triton=True)


@pytest.mark.parametrize(
    ("name", "dtype", "facts", "says"),
    [
        ("fp8", torch.bfloat16, CPU, "GPU .* this is a cpu device"),
        ("fp8", torch.bfloat16, Hardware("cuda", (8, 0), triton=True), "capability 8.9, .* 8.0"),
        ("int8", torch.bfloat16, Hardware("cuda", (9, 0)), "Triton"),
        ("int4", torch.float64, HOPPER, "float64"),
        ("int4_compact", torch.float16, CPU, "float16"),
        ("int4", torch.float32, Hardware("cpu", operators=frozenset()), "no _weight_int4pack_mm_for_cpu"),
        ("int8", torch.bfloat16, Hardware("mps"), "mps"),
    ],
)
def test_what_the_hardware_lacks(name: str, dtype: torch.dtype, facts: Hardware, says: str) -> None:
    with pytest.raises(ValueError, match=f"quantization='{name}': .*{says}"):
        check_fast(small(dtype=dtype), name, facts=facts)


def test_what_the_hardware_has() -> None:
    assert {name: obstacle(name, torch.bfloat16, HOPPER) for name in METHODS} == dict.fromkeys(METHODS)
    for dtype in (torch.float32, torch.bfloat16):
        assert [name for name in METHODS if obstacle(name, dtype, CPU)] == ["fp8"]
    assert hardware(torch.device("cpu")).capability is None
    assert obstacle("a scheme of somebody else", torch.float64, Hardware("mps")) is None


def test_a_measurement_is_of_part_of_a_large_layer() -> None:
    found = measure_row("int8", (100_000, 1024), torch.float32)
    assert found.shape == (2048, 1024) and found.full > 0 and found.quantized > 0
    assert measure_row("int4", (48, 64), torch.bfloat16).shape == (48, 64)
    assert torch.get_num_threads() == 1


def test_a_target_on_a_cpu_has_no_fp8() -> None:
    given = {"device": "cpu", "quantization": "fp8"}
    with pytest.raises(ValueError, match="fp8 weights need a GPU"):
        Target.from_pretrained("bundled/target", **given)
    assert Target.from_pretrained("bundled/target", **given, quantization_check=False).name.endswith("in fp8")

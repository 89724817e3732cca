"""A cache of one byte per number: the promised error, and every method token for token plain decoding with it."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafters import ModelDrafter
from specdec import Engine, ForwardBatch, ModelRunner, Target
from specdec.cache.formats import FORMATS, SMALLEST_SCALE, EightBitIntegers, Format, QuantizedTensor, check_device
from specdec.cache.layout import LayerShape
from specdec.cache.storage import Cache
from tests.models import tiny_model
from tests.test_lossless import MAIN, reference, target_model
from verifiers import RejectionVerifier

SLACK = 1 + 1e-5  # float32 rounds a factor, a quotient and a product besides
VECTORS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 9)),
    elements=st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-4, 4, width=32) | st.just(0.0),
)
formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())


def stored(format: Format, vectors: Tensor) -> Tensor:
    return format.decode(*format.encode(vectors), torch.float32)


def bound(format: Format, vectors: Tensor) -> Tensor:
    """The largest error that is promised for each number."""
    largest = vectors.abs().amax(-1, keepdim=True)
    return {
        "int8": (largest / 254).expand_as(vectors),
        "fp8": torch.maximum(vectors.abs() / 16, largest / 458_752),
        "fp8_e5m2": torch.maximum(vectors.abs() / 9, largest / 7_516_192_768),
    }[format.name]


@formats
@settings(max_examples=25)
@given(numbers=VECTORS)
@example(numbers=np.zeros((1, 3), np.float32))
@example(numbers=np.array([[3e38, -3e38, 1.0], [1e-38, 0.0, -2e-38]], np.float32))
def test_the_error_is_within_the_promise(format: Format, numbers: np.ndarray) -> None:
    vectors = torch.from_numpy(numbers)
    error = (stored(format, vectors) - vectors).abs()
    assert (error <= bound(format, vectors) * SLACK + SMALLEST_SCALE).all()
    assert (error[vectors == 0] == 0).all()


@formats
def test_a_smaller_promise_would_be_broken(format: Format) -> None:
    """The bounds are those of the formats, not just any."""
    vectors = torch.linspace(0, 1, 20001)[None]
    assert ((stored(format, vectors) - vectors).abs() > 0.93 * bound(format, vectors)).any()


@formats
def test_what_is_not_finite_stays_so_and_spoils_no_other_vector(format: Format) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        vectors = torch.randn(3, 8)
        vectors[1, 5] = bad
        kept = stored(format, vectors)
        assert not kept[1, 5].isfinite()
        assert torch.equal(kept[[0, 2]], stored(format, vectors[[0, 2]]))


class Squares(EightBitIntegers):  # whose codes kernels would read as other numbers
    def numbers(self, codes: Tensor) -> Tensor:
        return codes.float() * codes.float().abs() / self.largest


class Lacking(EightBitIntegers):
    def codes(self, scaled: Tensor) -> Tensor:
        raise TypeError("no such dtype on this device")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(Squares, r"its codes' values are not those of torch\.int8"), (Lacking, r"kv_cache='int8': cpu")],
)
def test_a_format_that_kernels_or_a_device_cannot_convert_is_refused(wrong: type[Format], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_device(wrong(), torch.device("cpu"))


@formats
def test_any_operation_reads_a_quantized_tensor_and_none_writes_to_it(format: Format) -> None:
    vectors = torch.randn(2, 3, 5, 8)
    kept = QuantizedTensor(*format.encode(vectors), format, torch.bfloat16)
    plain = kept.decoded()
    assert kept.shape == vectors.shape and kept.dtype is plain.dtype is torch.bfloat16
    assert type(plain) is Tensor and torch.equal(plain, format.decode(*format.encode(vectors), torch.bfloat16))
    for read in (
        lambda x: torch.cat([x, x], dim=2),
        lambda x: x[:, :, None].expand(2, 3, 2, 5, 8).reshape(2, 6, 5, 8),
        lambda x: torch.empty(2, 3, 5, 8, dtype=torch.bfloat16).copy_(x),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    ):
        assert torch.equal(read(kept), read(plain)) and type(read(kept)) is Tensor
    with pytest.raises(RuntimeError, match="would write to keys or values that are quantized"):
        kept.mul_(2)


def test_bytes_are_known_and_checked_against_memory_and_names_before_any_work() -> None:
    runner = ModelRunner(tiny_model(), max_batch_size=1, max_length=64, kv_cache="int8")
    # Layers x (K and V) x kv heads x (head_dim codes, a float32).
    assert runner.cache.bytes_per_position == 4 * 2 * 2 * (8 + 4)
    cache = runner.cache
    assert cache.quantized
    assert sum(t.numel() * t.element_size() for t in cache.tensors) == runner.cache.bytes_per_position * cache.positions
    shapes, sizes = {0: LayerShape(2, 8, 2, 8, torch.float32)}, {"max_batch_size": 4, "max_nodes": 0}
    with pytest.raises(ValueError, match="68719476736 positions x 48 bytes"):
        Cache(shapes, format=FORMATS["int8"], max_length=2**36, device=torch.device("cpu"), **sizes)
    with pytest.raises(ValueError, match="kv_cache='int4': give int8, fp8, fp8_e5m2"):
        ModelRunner(runner.model, max_batch_size=1, max_length=8, kv_cache="int4")


def test_layers_of_several_shapes_and_the_keys_of_an_indexer() -> None:
    """Keys wider than values, groups of layers, and one that selects keys by its own keys, which stay as they are."""
    sizes_of_heads = enumerate([(2, 12, 2, 8), (1, 16, 1, 4), (2, 12, 2, 8)])
    shapes = {layer: LayerShape(*heads, torch.float32) for layer, heads in sizes_of_heads}
    sizes = {"max_batch_size": 3, "max_length": 16, "max_nodes": 2, "device": torch.device("cpu")}
    indexers, format = {1: LayerShape(1, 6, 0, 0, torch.float32)}, FORMATS["fp8"]
    cache = Cache(shapes, format=format, indexers=indexers, **sizes)
    full = Cache(shapes, indexers=indexers, **sizes)
    for start, slots in ((0, [2, 0]), (3, [0, 2])):
        tokens = torch.zeros(2, 3, dtype=torch.long)
        batch = ForwardBatch.of_chunk(tokens, host_slots=np.array(slots), host_lengths=np.array([start, start]))
        cache.aim(batch)
        full.aim(batch)
        assert cache.get_mask_sizes(3, 0) == full.get_mask_sizes(3, 0)
        for layer, shape in shapes.items():
            keys = torch.randn(2, shape.key_heads, 3, shape.key_dim)
            values = torch.randn(2, shape.value_heads, 3, shape.value_dim)
            for read, wanted in zip(cache.update(keys, values, layer), full.update(keys, values, layer), strict=True):
                assert read.shape == wanted.shape and read.dtype is wanted.dtype
                written = wanted[:, :, : start + 3]
                rounded = format.decode(*format.encode(written), torch.float32)
                assert torch.equal(read[:, :, : start + 3], rounded) and not torch.equal(rounded, written)
        selected = torch.randn(2, 3, 6)
        assert torch.equal(cache.update_indexer(selected, 1), full.update_indexer(selected, 1))


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("kv_cache", FORMATS)
def test_a_drafters_cache_is_its_own_and_the_comparison_would_notice_one_that_is_not_quantized(kv_cache: str) -> None:
    target = Target(target_model(MAIN))
    engine = Engine(target, ModelDrafter(target.model, 2, kv_cache=kv_cache), RejectionVerifier(), max_length=64)
    (runner,) = engine.session.models
    assert runner.cache.quantized and not engine.runner.cache.quantized
    assert reference(MAIN, kv_cache=kv_cache) != reference(MAIN)

"""The quantized cache against the model with transformers' cache, whose entries are rounded in the same format.

Two forwards that compute the same key round it differently, and where it lies on the border of two codes, this changes
a code. So logits are compared twice: nearly all to float32's rounding, and all to what a few codes make.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specdec.attention.grouped
from drafters import ModelDrafter
from specdec.attention.grouped import attend
from specdec.cache.base import LayerShape
from specdec.cache.formats import FORMATS, Format
from specdec.cache.quantized import QuantizedSlotCache
from specdec.cache.quantized_tensor import QuantizedTensor
from specdec.cache.slot_cache import SlotCache
from specdec.checks.reference import cache_like
from specdec.forward import ForwardBatch
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, TreeShape
from tests.forwards import prefill, verify
from tests.models import ARCHITECTURES, tiny_model
from tests.verifiers.cases import complete

formats = pytest.mark.parametrize("kv_cache", FORMATS)
LENGTHS = [11, 4, 17]
SLOTS = [4, 0, 1]
SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
ROUNDING, CODES = 1e-5, 0.02
"""Differences of logits whose spread is about 1: of a forward in other pieces, and where a code differs."""


def prefilled(model: PreTrainedModel, kv_cache: str, *, chunk: int = 5, **kwargs: object):
    """A runner with ragged rows in slots that are not consecutive, and the rows' tokens."""
    runner = ModelRunner(model, max_batch_size=5, max_length=64, max_nodes=8, kv_cache=kv_cache, **kwargs)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, runner.vocab_size, (length,), generator=generator) for length in LENGTHS]
    starts = np.zeros(3, dtype=np.int64)
    while (starts < LENGTHS).any():
        counts = np.clip(np.array(LENGTHS) - starts, 0, chunk)
        tokens = torch.zeros(3, counts.max(), dtype=torch.long)
        for b, row in enumerate(rows):
            tokens[b, : counts[b]] = row[starts[b] : starts[b] + counts[b]]
        prefill(runner, tokens, starts, slots=SLOTS)
        starts = starts + counts
    return runner, rows


def drafted(runner: ModelRunner) -> DraftTree:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, runner.vocab_size, (3, SHAPE.num_nodes + 1), generator=generator)
    return DraftTree.from_shape(SHAPE, tokens)


def own(model: PreTrainedModel, tokens: Tensor, kv_cache: str | None) -> Tensor:
    """The logits after a sequence by the model itself, with rounded entries."""
    return model(tokens[None], past_key_values=cache_like(model, kv_cache)).logits[0, -1]


def assert_alike(logits: list[Tensor], wanted: list[Tensor]) -> None:
    errors = torch.tensor([float((a - b).abs().max()) for a, b in zip(logits, wanted, strict=True)])
    assert errors.max() <= CODES, errors
    assert errors.median() <= ROUNDING, errors


@pytest.mark.parametrize(
    ("architecture", "attention", "kv_cache"),
    [
        *(("llama", "grouped", name) for name in FORMATS),
        ("gemma2", "eager", "int8"),
        ("mistral_sliding", "grouped", "fp8"),
        *(complete(each, "grouped", "int8", strong=False) for each in ARCHITECTURES if each != "llama"),
    ],
)
@torch.inference_mode()
def test_every_node_sees_the_stored_entries_of_its_own_path(architecture: str, attention: str, kv_cache: str) -> None:
    model = tiny_model(architecture)
    runner, rows = prefilled(model, kv_cache, attention=attention)
    assert isinstance(runner.cache, QuantizedSlotCache)
    tree = drafted(runner)
    output = verify(runner, tree, LENGTHS, slots=SLOTS).scores
    places = [(b, node) for b in range(3) for node in range(tree.width)]
    paths = [torch.cat([rows[b], tree.tokens[b, tree.ancestors[b, node].nonzero()[:, 0]]]) for b, node in places]
    found = [output[place] for place in places]
    assert_alike(found, [own(model, path, kv_cache) for path in paths])
    for other in {None, *FORMATS} - {kv_cache}:  # entries that are not rounded, or rounded in another format
        with pytest.raises(AssertionError):
            assert_alike(found[:4], [own(model, path, other) for path in paths[:4]])


@formats
@torch.inference_mode()
def test_what_is_stored_is_what_is_read(kv_cache: str) -> None:
    """A kernel that multiplies stored numbers with their factors gets the keys and values that models are given."""
    runner, _ = prefilled(tiny_model("qwen3"), kv_cache)
    for layer in range(4):
        stored = runner.cache.stored(layer)
        assert stored.keys.dtype is FORMATS[kv_cache].dtype and stored.key_scales is not None
        assert stored.value_scales is not None and stored.key_scales.dtype is torch.float32
        keys, values = runner.cache.read(layer)
        length = keys.shape[2]
        pairs = ((stored.keys, stored.key_scales, keys), (stored.values, stored.value_scales, values))
        for numbers, scales, read in pairs:
            assert numbers.shape[:3] == scales.shape and scales.shape[0] == 5
            product = numbers.float() * scales[..., None]
            assert torch.equal(product[SLOTS, :, :length], read + 0)
            assert read.abs().max() > 0


def test_bytes_are_known_and_checked_against_memory_and_names_before_any_work() -> None:
    runner = ModelRunner(tiny_model(), max_batch_size=1, max_length=64, kv_cache="int8")
    assert runner.bytes_per_token == 4 * 2 * 2 * (8 + 4)  # layers x (K and V) x kv heads x (head_dim codes, a float32)
    cache = runner.cache
    assert isinstance(cache, QuantizedSlotCache)
    assert sum(t.numel() * t.element_size() for t in cache.tensors) == runner.bytes_per_token * cache.positions
    shapes, sizes = {0: LayerShape(2, 8, 2, 8, torch.float32)}, {"max_batch_size": 4, "max_nodes": 0}
    with pytest.raises(ValueError, match="68719476736 positions x 48 bytes"):
        QuantizedSlotCache(shapes, FORMATS["int8"], max_length=2**36, device=torch.device("cpu"), **sizes)
    for make in (
        lambda: ModelRunner(runner.model, max_batch_size=1, max_length=8, kv_cache="int4"),
        lambda: ModelDrafter(runner.model, 2, kv_cache="int4"),
    ):
        with pytest.raises(ValueError, match="kv_cache='int4'"):
            make()


def test_layers_of_several_shapes_and_the_keys_of_an_indexer() -> None:
    """Keys wider than values, groups of layers, and one that selects keys by its own keys, which stay as they are."""
    shapes = {
        0: LayerShape(2, 12, 2, 8, torch.float32),
        1: LayerShape(1, 16, 1, 4, torch.float32),
        2: LayerShape(2, 12, 2, 8, torch.float32),
    }
    sizes = {"max_batch_size": 3, "max_length": 16, "max_nodes": 2, "device": torch.device("cpu")}
    indexers, format = {1: LayerShape(1, 6, 0, 0, torch.float32)}, FORMATS["fp8"]
    cache = QuantizedSlotCache(shapes, format, indexers=indexers, **sizes)
    full = SlotCache(shapes, indexers=indexers, **sizes)
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


def attention_cases(
    format: Format, key_dim: int, value_dim: int
) -> tuple[Tensor, QuantizedTensor, QuantizedTensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(3, 4, 5, key_dim, generator=generator)
    keys, values = (torch.randn(3, 2, 23, dim, generator=generator) * 3 for dim in (key_dim, value_dim))
    mask = torch.zeros(3, 1, 5, 23).masked_fill_(torch.rand(3, 1, 5, 23) < 0.3, -torch.inf)
    mask[..., 0] = 0
    mask = mask.repeat(1, 1, 2, 1)  # two heads to a key head
    keys, values = (QuantizedTensor(*format.encode(each), format, torch.float32) for each in (keys, values))
    return query, keys, values, mask


@formats
@pytest.mark.parametrize(
    "extra", [{}, {"softcap": 5.0, "scaling": 0.7}, {"sinks": torch.tensor([1.0, -1.0, 0.5, 3.0])}]
)
def test_attention_over_codes_equals_attention_over_numbers(
    monkeypatch: pytest.MonkeyPatch, kv_cache: str, extra: dict
) -> None:
    """In blocks of a head, of a slot, of several slots; of many rows at once."""
    for key_dim, value_dim in [(16, 16), (16, 8), (8, 12)]:
        query, keys, values, mask = attention_cases(FORMATS[kv_cache], key_dim, value_dim)
        wanted = attend(query, keys.decoded(), values.decoded(), mask, **extra)
        for block in (1, 23 * 16, 23 * 16 * 2, 2**18):
            monkeypatch.setattr(specdec.attention.grouped, "BLOCK", block)
            torch.testing.assert_close(attend(query, keys, values, mask, **extra), wanted, atol=2e-5, rtol=1e-5)
        with monkeypatch.context() as patch:  # two heads of five queries to a key head are too many rows
            patch.setattr(specdec.attention.grouped, "MOST_ROWS", 9)
            assert torch.equal(attend(query, keys, values, mask, **extra), wanted)


@formats
def test_nan_in_one_key_alone_spoils_what_sees_it(kv_cache: str) -> None:
    """Not the embedding, which makes everything NaN: one number of one key, as a damaged weight would."""
    with torch.inference_mode():
        runner, _ = prefilled(tiny_model(), kv_cache)
        tree = drafted(runner)
        assert verify(runner, tree, LENGTHS, slots=SLOTS).scores.isfinite().all()
        assert isinstance(runner.cache, QuantizedSlotCache)
        key = torch.ones(1, 2, 1, 8)
        key[0, 1, 0, 3] = float("nan")
        codes, scales = runner.cache.format.encode(key)
        runner.cache._codes.keys[0][1, SLOTS[0], 2] = codes[0, :, 0]
        runner.cache._scales.keys[0][1, SLOTS[0], 2] = scales[0, :, 0]
        scores = verify(runner, tree, LENGTHS, slots=SLOTS).scores
    assert scores[0].isnan().all() and scores[1:].isfinite().all()

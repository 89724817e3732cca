"""The planner of memory: it says what an engine really allocates."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.bench.chapter.models import LLAMA_8B, ROUND_8B
from experiments.planning.formats import choose_formats
from specdec.cache.quantized import QuantizedSlotCache
from specdec.physics.capacity import (
    Memory,
    Served,
    activation_bytes,
    kv_bytes_per_position,
    state_bytes_per_row,
    weight_bytes,
    windowed_kv_bytes,
)
from specdec.physics.precision import Precision, stored
from specdec.physics.reading import read_shape
from specdec.quantization import quantize
from specdec.quantization.dispatch import DispatchedLinear
from specdec.slot_memory import SlotMemory
from specdec.target.runner import ModelRunner
from tests.architectures import tiny_config

ROWS, LENGTH, NODES = 3, 40, 5


def allocated(runner: ModelRunner) -> int:
    """The bytes of a runner's cache."""
    cache = runner.cache
    parts = cache._parts if isinstance(cache, QuantizedSlotCache) else (cache,)
    return sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.tensors)


@pytest.mark.parametrize(
    ("model_type", "kv_cache"),
    [
        ("llama", "int8"),
        ("gpt2", None),
        ("deepseek_v3", "int8"),
        ("deepseek_v32", None),
        ("gpt_oss", None),
        ("falcon", None),  # one head of keys and values for all queries
        ("llama4_text", None),  # layers in chunks
    ],
)
def test_an_engine_allocates_what_is_planned(model_type: str, kv_cache: str | None) -> None:
    config = tiny_config(model_type)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    runner = ModelRunner(
        model, max_batch_size=ROWS, max_length=LENGTH, max_nodes=NODES, kv_cache=kv_cache, optimize=False
    )
    precision = Precision.of("float32", kv=kv_cache)
    served = Served(shape=read_shape(config), precision=precision, drafted=NODES)
    memory = served.memory(rows=ROWS, length=LENGTH)
    assert memory.kv + memory.scratch == allocated(runner)
    assert kv_bytes_per_position(served.shape, precision) == runner.bytes_per_token
    matrices = [p for name, p in model.named_parameters() if p.ndim >= 2 and not name.endswith("bias")]
    assert memory.weights == sum(p.numel() * p.element_size() for p in matrices)


@pytest.mark.parametrize(("model_type", "scheme"), [("mixtral", "int8"), ("llama", "int4"), ("deepseek_v3", "int4")])
def test_quantized_weights_take_what_is_planned(model_type: str, scheme: str) -> None:
    """To the byte, but for the factors of int8's rows, biases and norms; and routers, which count as if quantized."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # whole groups in every row
    if model_type == "deepseek_v3":
        sizes |= {"moe_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 16}
    config = tiny_config(model_type, **sizes)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    quantize(model, scheme, check=False)
    layers = [module for module in model.modules() if isinstance(module, DispatchedLinear)]
    held = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    if scheme != "int8":
        held += sum(layer.scale.numel() * layer.scale.element_size() for layer in layers)
    precision = choose_formats(config.to_dict(), dtype="float32", quantization=scheme, kv_cache=None).precision
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside and parameter.ndim >= 2:
            router = name.endswith("gate.weight")
            held += parameter.numel() * (precision.weights if router else parameter.element_size())
    assert weight_bytes(read_shape(config), precision) == held


def test_a_cache_in_slots_is_solved_exactly() -> None:
    other = SlotMemory(per_position=10.0, drafted=7, per_row=5.0)
    for drafted, rows, length in itertools.product((0, 3), (1, 3), (1, 10)):
        slots = SlotMemory(per_position=100.0, drafted=drafted, per_row=7.0)
        size = slots.bytes(rows=rows, length=length)
        assert size == rows * (7 + (length + drafted) * 100)
        assert slots.most_rows(size, length=length) == rows and slots.most_rows(size - 1, length=length) == rows - 1
        assert slots.longest(size, rows=rows) == length and slots.longest(size - 1, rows=rows) == length - 1
        assert slots.longest(0, rows=1) == 0
        # Two caches are solved together.
        both = slots.beside(other).bytes(rows=rows, length=length)
        assert both == size + other.bytes(rows=rows, length=length)


def test_what_memory_adds_up_to_and_a_drafter_takes() -> None:
    parts = {"weights": 1, "drafter": 2, "kv": 4, "drafter_kv": 8, "scratch": 16, "activations": 32, "overhead": 64}
    assert Memory(**parts).total == 127
    alone = Served(shape=ROUND_8B, precision=Precision(), activations=0.0)
    drafting = Served(shape=ROUND_8B, precision=Precision(), drafter=ROUND_8B, drafted=4, activations=0.0, overhead=0.0)
    memory = drafting.memory(rows=2, length=100)
    assert memory.drafter == memory.weights == 16e9
    assert memory.drafter_kv == memory.kv == 200 * 131_072
    assert memory.scratch == 2 * 4 * 2 * 131_072
    assert drafting.most_rows(80e9, length=4096) < alone.most_rows(80e9, length=4096) / 1.3
    for room, rows in ((15e9, 0), (16e9, 0), (16e9 + 131_072, 1), (16e9 + 10.5 * 131_072, 10)):
        assert alone.most_rows(room, length=1) == rows
        assert rows == 0 or alone.longest(room, rows=1) == rows


def test_windows_and_output_layers_in_another_format() -> None:
    shape, precision = read_shape(tiny_config("gemma3_text")), Precision.of("float32")
    whole = kv_bytes_per_position(shape, precision)
    assert windowed_kv_bytes(shape, precision, 6) == 6 * whole, "as long as the window"
    assert windowed_kv_bytes(shape, precision, 20) == (6 + 20) / 2 * whole, "half of the layers have one"
    tied = read_shape(tiny_config("llama", tie_word_embeddings=True))
    shared, apart = (weight_bytes(tied, Precision.of("float32", output=each)) for each in (None, "int8"))
    assert apart == shared + tied.output_weights, "an output layer in another format is a second table"
    assert windowed_kv_bytes(LLAMA_8B, precision, 20) == 20 * kv_bytes_per_position(LLAMA_8B, precision)


def test_recurrent_layers_keep_the_same_for_any_length() -> None:
    config = tiny_config("qwen3_next")
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.inference_mode():
        cache = model(torch.zeros(1, 7, dtype=torch.long), use_cache=True).past_key_values
    kept = 0
    for layer in cache.layers:
        states = [value for name, value in vars(layer).items() if name.endswith("_states")]
        for state in states:
            parts = state if isinstance(state, list | tuple) else state.values() if isinstance(state, dict) else [state]
            kept += sum(part.numel() for part in parts if isinstance(part, torch.Tensor))
    assert state_bytes_per_row(read_shape(config), Precision.of("float32")) == 4 * kept


def test_activations_are_those_of_the_largest_forward() -> None:
    precision = Precision()
    few = activation_bytes(LLAMA_8B, precision, tokens=512, logits=1)
    assert activation_bytes(LLAMA_8B, precision, tokens=1024, logits=1) == 2 * few
    # Two vectors of the residual stream, and two as wide as the MLP.
    assert few == pytest.approx(512 * (2 * 4096 + 2 * 14336) * 2)
    many = activation_bytes(LLAMA_8B, precision, tokens=576, logits=576)
    assert many == 576 * 128_256 * 6, "logits in float32, and what they were rounded from"


def test_quantized_checkpoints() -> None:
    grouped = {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32}}}}
    for method, config, *expected in (
        ("fp8", {"weight_block_size": [128, 128]}, 1.0, None),
        ("mxfp4", {}, None, 0.53125),
        ("gptq", {"bits": 4, "group_size": 128}, 0.5 + 2.5 / 128, None),
        ("awq", {"bits": 4, "group_size": 64}, 0.5 + 2.5 / 64, None),
        ("gptq", {"bits": 8, "group_size": -1}, 1.0, None),
        ("bitsandbytes", {"load_in_4bit": True}, 0.5625, None),
        ("bitsandbytes", {"load_in_8bit": True}, 1.0, None),
        ("compressed-tensors", grouped, 0.5625, None),
    ):
        found = stored({"quantization_config": {"quant_method": method, **config}})
        assert found is not None and [found.weights, found.experts] == expected, method
    assert stored({}) is None
    with pytest.raises(ValueError, match="hqq"):
        stored({"quantization_config": {"quant_method": "hqq"}})

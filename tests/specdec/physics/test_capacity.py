"""The planner of memory and of shapes: it says what an engine and transformers' own models really allocate."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from experiments.planning.sources import choose_formats
from specdec import ModelRunner
from specdec.physics import heads
from specdec.physics.capacity import PROGRAM, Drafting, Memory, Served, kv_bytes_per_position, weight_bytes
from specdec.physics.precision import Precision, stored
from specdec.physics.reading import COUNTED, DEFAULTS, TIED, MissingSizeError, read_shape
from specdec.quantization import quantize
from specdec.quantization.base import QuantizedLinear
from specdec.slot_memory import SlotMemory
from tests.architectures import MODEL_TYPES, tiny, tiny_config
from tests.public_models import CONFIGS, LLAMA_8B, LLAMA_70B, ROUND_8B

BY_DEFAULT = (
    *("llama", "gpt2", "opt", "gpt_neox", "gpt_bigcode", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3"),
    *("deepseek_v32", "gpt_oss", "llama4_text", "qwen3_next", "granitemoehybrid", "lfm2", "gemma3"),
)
"""One type for each thing that is special."""
PARTS_FOR_IMAGES = ("vision", "multi_modal_projector")

BASE = CONFIGS["llama-3.1-8b"]


def matrices(config: PreTrainedConfig) -> int:
    """How many numbers the matrices of transformers' own model have, what is for images left out."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and not name.endswith("bias") and not any(part in name for part in PARTS_FOR_IMAGES)
    )


@pytest.mark.parametrize(
    "model_type",
    [*BY_DEFAULT, *(pytest.param(name, marks=pytest.mark.full) for name in sorted(COUNTED - set(BY_DEFAULT)))],
)
def test_weights_are_those_of_the_model(model_type: str) -> None:
    if model_type not in MODEL_TYPES:
        pytest.skip(f"this version of transformers has no {model_type}")
    config = tiny_config(model_type)
    shape = read_shape(config)
    assert shape.weights == matrices(config)
    assert read_shape(config.to_dict()) == shape, "from a file as from an object"
    inside = {"model_type": "llava", "vision_config": {"num_hidden_layers": 2}, "text_config": config.to_dict()}
    assert read_shape(inside).weights == shape.weights, "within a model for images"
    if model_type == "qwen3_moe":
        fewer = tiny_config(model_type, decoder_sparse_step=2)
        assert read_shape(fewer).weights == matrices(fewer) < shape.weights


def test_windows() -> None:
    """The window of every layer: of all, by a model type's rule, or by a list of the kinds of layers."""
    window, kinds = {"sliding_window": 32}, ["full_attention", "sliding_attention"]
    for given, expected in (
        ({"model_type": "mistral", **window}, [32] * 4),
        ({"model_type": "qwen2", **window, "use_sliding_window": False}, [None] * 4),
        ({**window, "layer_types": kinds * 2}, [None, 32, None, 32]),
        ({"attention_chunk_size": 64, "layer_types": ["chunked_attention", kinds[0]] * 2}, [64, None, 64, None]),
    ):
        shape = read_shape(BASE | {"num_hidden_layers": 4} | given)
        assert [layer.attention.window for layer in shape.layers] == expected, given
    # Older files have no ``layer_types``. The shape follows the rule by which transformers' classes complete them.
    for model_type in ("gemma2", "gemma3_text", "qwen2", "gpt_oss", "cohere2"):
        config = tiny_config(model_type)
        given = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
        completed = type(config)(**{key: value for key, value in given.items() if key not in ("model_type", "dtype")})
        assert read_shape(given).layers == read_shape(completed).layers, model_type


def test_mixtures_choose_layers() -> None:
    base = BASE | {"num_hidden_layers": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    deepseek = {"model_type": "deepseek_v3", "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 3}
    qwen = {"model_type": "qwen3_moe", "num_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    for given, experts in ((deepseek, [0, 0, 0, 6]), (qwen, [0, 6, 0, 0])):
        assert [layer.mlp.experts for layer in read_shape(base | given).layers] == experts


def test_what_is_no_decoder_is_refused() -> None:
    for config, said in (
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 12}, "BertForMaskedLM"),
        ({"model_type": "t5", "is_encoder_decoder": True, "num_layers": 6}, "encoder-decoder"),
        ({}, "the configuration has no layers"),
        (BASE | {"hidden_size": "wide"}, "hidden_size='wide'"),
        (BASE | {"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        (BASE | {"model_type": "zamba2", "layer_types": ["mamba"]}, "'mamba' layer of model_type 'zamba2'"),
    ):
        with pytest.raises(ValueError, match=said):
            read_shape(config)


def test_sizes_that_files_leave_out_are_named_or_those_that_transformers_takes() -> None:
    for missing in ("num_attention_heads", "hidden_size", "vocab_size", "tie_word_embeddings"):
        with pytest.raises(MissingSizeError, match=missing):
            read_shape({key: value for key, value in BASE.items() if key != missing})
    for kind in COUNTED:
        assert (kind in TIED) == CONFIG_MAPPING[kind]().tie_word_embeddings, kind
    for kind, sizes in DEFAULTS.items():
        config = CONFIG_MAPPING[kind]()
        assert {name: getattr(config, name) for name in sizes} == sizes


def test_sizes_of_published_models_and_heads() -> None:
    assert LLAMA_8B.weights == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_70B.weights == pytest.approx(70.55e9, rel=1e-3)
    assert LLAMA_8B.active_weights + LLAMA_8B.output_weights == LLAMA_8B.weights - LLAMA_8B.table_weights
    # A layer over twice the width, a projection of three states, and an output layer over 32,000 tokens.
    head = heads.eagle(LLAMA_8B)
    qkv, output, mlp = 8192 * (4096 + 1024 + 1024), 4096 * 4096, 3 * 4096 * 14336
    assert head.weights == qkv + output + mlp + 3 * 4096 * 4096 + 4096 * 32_000
    assert head.kept_per_position * 32 == LLAMA_8B.kept_per_position, "one layer"
    # A borrowed output layer takes no memory and is read.
    head = heads.block(LLAMA_8B)
    assert (head.output_weights, head.weights) == (LLAMA_8B.output_weights, head.dense_weights)
    assert heads.medusa(LLAMA_8B, heads=3).weights == 3 * 4096 * (4096 + 128_256)


ROWS, LENGTH, NODES = 3, 40, 5


@pytest.mark.parametrize(
    ("model_type", "dtype", "kv_cache"),
    [
        *(("llama", "float32", form) for form in ("int8", "fp8_e5m2")),
        ("deepseek_v3", "float32", "int8"),
        # Falcon has one head of keys and values for all queries, and Llama 4 layers in chunks.
        *((name, "float32", None) for name in ("gpt2", "deepseek_v32", "gpt_oss", "falcon", "llama4_text", "lfm2")),
        *((name, "bfloat16", None) for name in ("qwen3_next", "granitemoehybrid")),
    ],
)
def test_an_engine_allocates_what_is_planned(model_type: str, dtype: str, kv_cache: str | None) -> None:
    """Recurrent layers have a state for the row, its root and every node; matrices in float32 whatever the dtype."""
    model = tiny(model_type).to(getattr(torch, dtype))
    sizes = {"max_batch_size": ROWS, "max_length": LENGTH, "max_nodes": NODES}
    cache = ModelRunner(model, **sizes, kv_cache=kv_cache, optimize=False).cache
    precision = Precision.of(dtype, kv=kv_cache)
    served = Served(shape=read_shape(model.config), precision=precision, drafted=NODES)
    memory = served.memory(rows=ROWS, length=LENGTH)
    held = [*cache.tensors, *(() if cache.states is None else cache.states.tensors)]
    assert memory.kv + memory.scratch == sum(tensor.nbytes for tensor in held)
    assert kv_bytes_per_position(served.shape, precision) == cache.bytes_per_position
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
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    held = sum(layer.weight.nbytes + (scheme != "int8") * layer.scale.nbytes for layer in layers)
    precision = choose_formats(config.to_dict(), dtype="float32", quantization=scheme, kv_cache=None).precision
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside and parameter.ndim >= 2:
            router = name.endswith("gate.weight")
            held += parameter.numel() * (precision.weights if router else parameter.element_size())
    assert weight_bytes(read_shape(config), precision) == held


def test_a_cache_in_slots_is_solved_exactly() -> None:
    other = SlotMemory(per_position=10.0, drafted=7, per_row=5.0, per_node=2.0)
    for drafted, rows, length in itertools.product((0, 3), (1, 3), (1, 10)):
        slots = SlotMemory(per_position=100.0, drafted=drafted, per_row=7.0, per_node=3.0)
        size = slots.bytes(rows=rows, length=length)
        assert size == rows * (7 + 3 * drafted + (length + drafted) * 100)
        assert slots.most_rows(size, length=length) == rows and slots.most_rows(size - 1, length=length) == rows - 1
        assert slots.longest(size, rows=rows) == length and slots.longest(size - 1, rows=rows) == length - 1
        assert slots.longest(0, rows=1) == 0
        both = slots.beside(other).bytes(rows=rows, length=length)
        assert both == size + other.bytes(rows=rows, length=length), "two caches are solved together"


def test_what_memory_adds_up_to_and_a_drafter_takes() -> None:
    parts = {"weights": 1, "drafter": 2, "kv": 4, "drafter_kv": 8, "scratch": 16, "activations": 32, "overhead": 64}
    assert Memory(**parts).total == 127
    alone = Served(shape=ROUND_8B, precision=Precision(), activations=0.0)
    drafting = replace(alone, drafting=(Drafting(shape=ROUND_8B, precision=Precision(), shown=4),), drafted=4)
    memory = drafting.memory(rows=2, length=100)
    on_processor = replace(drafting, packed=True).memory(rows=2, length=100)
    copies = 2 * 2 * (ROUND_8B.dense_weights + ROUND_8B.output_weights)
    assert on_processor == replace(memory, overhead=PROGRAM + copies), "both models' products read copies"
    stored = replace(drafting, precision=Precision(weights=0.5, output=0.5), packed=True)
    assert stored.memory(rows=2, length=100).overhead == PROGRAM + copies / 2, "quantized ones are held once"
    assert memory.drafter == memory.weights == 16e9
    assert memory.drafter_kv == memory.kv == 200 * 131_072
    assert memory.scratch == 2 * 4 * 2 * 131_072
    assert drafting.most_rows(80e9, length=4096) < alone.most_rows(80e9, length=4096) / 1.3
    tied = read_shape(tiny_config("llama", tie_word_embeddings=True))
    shared, apart = (weight_bytes(tied, replace(Precision.of("float32"), output=each)) for each in (4.0, 1.0))
    assert apart == shared + tied.output_weights, "an output layer in another format is a second table"


def test_quantized_checkpoints() -> None:
    grouped = {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32}}}}
    for method, config, *expected in (
        ("fp8", {"weight_block_size": [128, 128]}, 1.0, None),
        ("mxfp4", {}, None, 0.53125),
        ("awq", {"bits": 4, "group_size": 64}, 0.5 + 2.5 / 64, None),
        ("gptq", {"bits": 8, "group_size": -1}, 1.0, None),
        ("bitsandbytes", {"load_in_4bit": True}, 0.5625, None),
        ("bitsandbytes", {"load_in_8bit": True}, 1.0, None),
        ("compressed-tensors", grouped, 0.5625, None),
    ):
        found = stored({"quantization_config": {"quant_method": method, **config}})
        assert found is not None and [found.weights, found.experts] == expected, method
    assert stored({}) is None
    for method, config in (("hqq", {}), ("compressed-tensors", {"config_groups": {"a": {"weights": None}}})):
        with pytest.raises(ValueError, match=method):
            stored({"quantization_config": {"quant_method": method, **config}})

"""Shapes from configurations: their counts are those of transformers' own models; what is no decoder is refused."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from experiments.bench.chapter.models import CONFIGS, LLAMA_8B, LLAMA_70B
from specdec.physics import heads
from specdec.physics.reading import COUNTED, DEFAULTS, TIED, MissingSizeError, read_shape
from tests.architectures import MODEL_TYPES, tiny_config

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
    [
        *BY_DEFAULT,
        *(pytest.param(name, marks=pytest.mark.full) for name in sorted(COUNTED - set(BY_DEFAULT))),
    ],
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


def test_a_shared_table_counts_once() -> None:
    for tied in (True, False):
        config = tiny_config("llama", tie_word_embeddings=tied)
        assert read_shape(config).weights == matrices(config)
        assert read_shape(config).tied == tied


def test_windows() -> None:
    """The window of every layer: of all, by a period of the model type, or by a list of the kinds of layers."""
    window, kinds = {"sliding_window": 32}, ["full_attention", "sliding_attention"]
    switched = {"model_type": "qwen2", **window, "use_sliding_window": True, "max_window_layers": 3}
    for given, expected in (
        ({}, [None] * 4),
        ({"model_type": "mistral", **window}, [32] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "gemma2", **window}, [32, None, 32, None]),
        ({"model_type": "gemma3_text", **window, "sliding_window_pattern": 3}, [32, 32, None, 32]),
        ({"model_type": "gpt_oss", **window}, [32, None, 32, None]),
        (switched | {"use_sliding_window": False}, [None] * 4),
        (switched, [None, None, None, 32]),
        ({**window, "layer_types": kinds * 2}, [None, 32, None, 32]),
        ({"attention_chunk_size": 64, "layer_types": ["chunked_attention", kinds[0]] * 2}, [64, None, 64, None]),
    ):
        shape = read_shape(BASE | {"num_hidden_layers": 4} | given)
        assert [layer.attention.window for layer in shape.layers] == expected, given


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "qwen2", "gpt_oss", "cohere2"])
def test_an_older_file_means_what_transformers_reads_in_it(model_type: str) -> None:
    """Files without ``layer_types`` are completed by transformers' class; the shape follows the same rule."""
    config = tiny_config(model_type)
    given = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    completed = type(config)(**{key: value for key, value in given.items() if key not in ("model_type", "dtype")})
    assert read_shape(given).layers == read_shape(completed).layers


def test_mixtures_choose_layers() -> None:
    base = BASE | {"num_hidden_layers": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    deepseek = read_shape(
        base | {"model_type": "deepseek_v3", "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 3}
    )
    assert [layer.mlp.experts for layer in deepseek.layers] == [0, 0, 0, 6]
    qwen = read_shape(
        base | {"model_type": "qwen3_moe", "num_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    )
    assert [layer.mlp.experts for layer in qwen.layers] == [0, 6, 0, 0]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 12}, "BertForMaskedLM"),
        ({"model_type": "t5", "is_encoder_decoder": True, "num_layers": 6}, "encoder-decoder"),
        ({"model_type": "resnet", "depths": [3, 4]}, "'resnet'"),
        ({}, "the configuration has no layers"),
        (BASE | {"hidden_size": "wide"}, "hidden_size='wide'"),
        (BASE | {"num_hidden_layers": "many"}, "num_hidden_layers='many'"),
        (BASE | {"layer_types": 7}, "a value that is no size"),
        (BASE | {"model_type": "gpt2", "max_position_embeddings": None}, "no max_position_embeddings"),
        (BASE | {"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        (BASE | {"model_type": "zamba2", "layer_types": ["mamba"]}, "'mamba' layer of model_type 'zamba2'"),
        (7, "not int"),
    ],
)
def test_what_is_no_decoder_is_refused(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_shape(config)


def test_a_missing_size_is_named() -> None:
    for missing in ("num_attention_heads", "hidden_size", "vocab_size", "tie_word_embeddings"):
        with pytest.raises(MissingSizeError, match=missing):
            read_shape({key: value for key, value in BASE.items() if key != missing})


def test_what_files_leave_out_is_what_transformers_takes() -> None:
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
    head = heads.eagle3(LLAMA_8B)
    qkv, output, mlp = 8192 * (4096 + 1024 + 1024), 4096 * 4096, 3 * 4096 * 14336
    assert head.weights == qkv + output + mlp + 3 * 4096 * 4096 + 4096 * 32_000
    assert head.kept_per_position * 32 == LLAMA_8B.kept_per_position, "one layer"
    # Borrowed output layers take no memory and are read.
    for head in (heads.eagle(LLAMA_8B), heads.mtp(LLAMA_8B), heads.block(LLAMA_8B)):
        assert head.output_weights == LLAMA_8B.output_weights
        assert head.weights == head.layer_weights + head.other_weights
    assert heads.medusa(LLAMA_8B, heads=3).weights == 3 * 4096 * (4096 + 128_256)

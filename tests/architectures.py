"""A tiny random model of any type that transformers knows, the comparison that it must pass, and the table of results.

    python -m tests.architectures      try every type; write this version's column

Most configurations become small by the same few fields, whatever their type (``SMALL``); ``OVERRIDES`` has what a type
needs besides, and the settings that make it use what is special about it (windows, chunks, indexers) in a short row.
"""

import csv
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec import DraftTree, ModelRunner, TreeShape
from specdec.cache.transformers_cache import cache_argument
from tests.forwards import prefill, verify

VOCAB = 64
POSITIONS = 256
MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # sizes
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dim_ff", "dff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("head_dim", "kv_channels", "dim_head", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    "rotary_dim": 4,
    "v_head_dim": 12,
    "hidden_size_per_layer_input": 8,
    # how far a layer sees, within a short row
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 6),
    "max_window_layers": 2,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 16),
    "index_topk": 4,
    "index_n_heads": 32,  # with few, scores of zero tie, and which of them is taken is nobody's promise
    # mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    "expert_ffn_hidden_size": 16,
    "first_k_dense_replace": 1,
    "mlp_only_layers": [1],
    # recurrent layers
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "mamba_chunk_size"), 8),
    **dict.fromkeys(("linear_head_dim", "ssm_state_size", "chunk_size", "mamba_head_dim", "adapter_rank"), 8),
    **dict.fromkeys(("linear_num_heads", "mamba_num_heads"), 4),
    "lru_width": 32,
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads"), 4),
    "mamba_d_head": 16,
    # encoders and decoders, vision and audio towers
    **dict.fromkeys(("decoder_layers", "encoder_layers", "depth", "num_blocks"), 1),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("image_size", "patch_size"), 14),
}

_SLIDING = ["sliding_attention", "full_attention"] * 2
_LINEAR = ["linear_attention", "full_attention"] * 2
_ROBERTA, _CONVOLVED = {"pad_token_id": 1}, {"layer_types": ["conv", "full_attention"] * 2}
_COMPRESSED = {"num_key_value_heads": 4}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "bailing_hybrid": {"layer_types": _LINEAR, **_COMPRESSED},
    "blt": {"encoder_hash_byte_group_vocab": VOCAB},
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _SLIDING},
        "layer_types": _SLIDING,
    },
    "cpmant": {"prompt_length": 4},
    "ctrl": {"vocab_size": VOCAB},
    "cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "doge": {"keep_window_size": 6},
    "dots3_note_audio_encoder": {"downsample_hidden_size": 8, "adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_text": {
        **_COMPRESSED,
        "layer_types": ["sliding_attention", "indexed_attention"] * 2,
        "shared_experts_intermediate_size": 16,
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_head_dim", "swa_q_lora_rank", "swa_kv_lora_rank"), 16),
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 12,
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32, "mlp_layer_types": ["dense"] * 4},
    "emu3_text_model": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": (1, 1)},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"layer_types": _SLIDING},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": _SLIDING,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
    },
    # Unscaled scores of normalized keys: with the default of 512 dimensions, rounding alone moves the logits by 1e-5.
    "gemma4_text": {"pad_token_id": 0, "num_kv_shared_layers": 2, "layer_types": _SLIDING, "global_head_dim": 16},
    "gemma4_unified_text": {"pad_token_id": 0, "layer_types": _SLIDING, "global_head_dim": 16},
    "got_ocr2": {
        "text_config": {"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": VOCAB}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 64},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _LINEAR, **_COMPRESSED},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "intermediate_size_mlp": 48,
        "floor_scale": 65,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "state_size": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mamba"], "n_groups": 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mllama_text_model": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cross_attention_layers": [1]},
    "modernbert-decoder": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "local_attention": 6},
    "prophetnet": {"pad_token_id": 0},
    "qwen2": {"use_sliding_window": True},
    "qwen3": {"head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_embed_dim": 64,
        "ngram_vocab_size_base": VOCAB,
        "split_ngram_parts": 1,
    },
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 16), "attention_head_size": 8},
    "xmod": {**_ROBERTA, "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"), _ROBERTA),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), _ROBERTA),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLVED),
    # Keys and values are compressed, and expanded to as many heads as the queries have.
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _COMPRESSED
    ),
    **dict.fromkeys(("hy_v4", "longcat_flash", "minicpm3", "youtu"), _COMPRESSED),
}


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A small configuration of a type, composite ones included."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**_small(cls, OVERRIDES.get(model_type, {}) | overrides))


def _small(cls: type[PreTrainedConfig], overrides: dict[str, Any]) -> dict[str, Any]:
    aliases = getattr(cls, "attribute_map", {})
    fields = {*inspect.signature(cls.__init__).parameters, *getattr(cls, "__dataclass_fields__", {}), *aliases}
    values = {aliases.get(name, name): value for name, value in SMALL.items() if name in fields}
    for name, part in cls.sub_configs.items():
        kind = getattr(part, "model_type", "")
        if not kind:  # a configuration of any type, with a default
            default = getattr(cls, "sub_configs_defaults", {}).get(name)
            kind = getattr(default, "model_type", "")
        if kind in CONFIG_MAPPING:
            values[name] = {"model_type": kind} | _small(CONFIG_MAPPING[kind], OVERRIDES.get(kind, {}))
    for name, value in overrides.items():
        both = isinstance(value, dict) and isinstance(values.get(name), dict)
        values[name] = values[name] | value if both else value
    return values


def tiny(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in float32 whose next token depends on its whole context."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **overrides)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    # SDPA leaves out softcaps and sinks in some versions; a model's own attention is what it means.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(10.0 if "emb" in name or "wte" in name else 3.0)
        else:  # biases and gates start at zero, where they would do nothing
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


LENGTHS = (11, 4, 17)
SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
PATH = ((1, 4, -1), (2, 5, -1), (-1, -1, -1))
MAX_LENGTH = 64
TOLERANCE = 1e-5


@torch.inference_mode()
def disagreement(model: PreTrainedModel) -> tuple[float, ModelRunner]:
    """Three ragged rows, prefilled in chunks, with a branching tree each, then a commit."""
    runner = ModelRunner(model, max_batch_size=3, max_length=MAX_LENGTH, max_nodes=SHAPE.num_nodes)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]
    starts = np.zeros(3, dtype=np.int64)
    while (starts < LENGTHS).any():
        counts = np.clip(np.array(LENGTHS) - starts, 0, 5)
        tokens = torch.zeros(3, counts.max(), dtype=torch.long)
        for row, start, count, chunk in zip(rows, starts, counts, tokens, strict=True):
            chunk[:count] = row[start : start + count]
        prefill(runner, tokens, starts, counts=counts)
        starts = starts + counts
    tree = DraftTree.from_shape(SHAPE, torch.randint(0, VOCAB, (3, SHAPE.num_nodes + 1), generator=generator))
    lengths = torch.tensor(LENGTHS)
    logits = verify(runner, tree, LENGTHS).scores
    errors, scale = [], 0.0
    for b, row in enumerate(rows):
        for node in range(tree.width):
            own = _plain(model, row, tree.tokens[b, tree.ancestors[b, node].nonzero()[:, 0]])
            errors.append((logits[b, node] - own).abs().max())
            scale = max(scale, float((own - own.mean()).abs().max()))
    path = torch.tensor(PATH)
    runner.cache.commit(torch.arange(3), lengths, path)
    longer = lengths + 1 + (path >= 0).sum(1)
    roots = torch.tensor([3, 5, 7])
    logits = verify(runner, DraftTree.root_only(roots), longer).scores
    for b, row in enumerate(rows):
        kept = torch.cat([torch.zeros(1, dtype=torch.long), path[b][path[b] >= 0]])
        own = _plain(model, row, torch.cat([tree.tokens[b, kept], roots[b : b + 1]]))
        errors.append((logits[b, 0] - own).abs().max())
    return float(torch.stack(errors).max()) / scale, runner


def _plain(model: PreTrainedModel, row: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    return model(input_ids=torch.cat([row, path])[None], use_cache=False).logits[0, -1]


@torch.inference_mode()
def own_error(model: PreTrainedModel) -> float:
    """How far the model's own decoding is from a plain forward, relative to the largest logit; 0 if it has no cache."""
    tokens = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(5))
    wanted, past, errors = model(input_ids=tokens, use_cache=False).logits[0], None, []
    name = cache_argument(inspect.signature(type(model).forward).parameters)
    for position in range(3, tokens.shape[1]):
        given = {} if past is None else {name: past}
        piece = tokens[:, : position + 1] if past is None else tokens[:, position : position + 1]
        output = model(input_ids=piece, use_cache=True, **given)
        past = getattr(output, name, None)
        if past is None:
            return 0.0
        errors.append((output.logits[0, -1] - wanted[position]).abs().max())
    return float(torch.stack(errors).max() / wanted.abs().max())


TABLE = Path(__file__).with_suffix(".csv")
"""Every type that was tried: a cell per version of transformers, and the reason where it is refused."""
VERSION = ".".join(transformers.__version__.split(".")[:2])


class Outcome(NamedTuple):
    """The outcome of trying a model type."""

    cell: str
    reason: str = ""


def outcome(model_type: str) -> Outcome:
    """Try a model type."""
    try:
        model = tiny(model_type)
    except Exception as error:  # whatever its constructor finds missing in a guessed configuration; the table has it
        return Outcome("?", _sentence(str(error)))
    try:
        error, runner = disagreement(model)
    except ValueError as refusal:
        if str(refusal).startswith("max_length"):
            raise AssertionError(f"{model_type}: the test is too long for it: {refusal}") from refusal
        return Outcome("no", _sentence(str(refusal).split(": ", 1)[1]))
    # States add rounding up: the model's own decoding says how much.
    bound = min(max(3 * own_error(model), TOLERANCE), 1e-4) if runner.facts.mixers else TOLERANCE
    assert error < bound, f"{model_type}: logits differ from plain forwards by {error:.1e} of the largest"
    return Outcome("eager" if runner.attention_name == "eager" else "yes")


def _sentence(text: str) -> str:
    return text.strip().split("\n")[0].split("; ")[0].replace("|", "/")


def read_table() -> tuple[list[str], dict[str, dict[str, str]]]:
    """The versions of the table, and every row by model type: cells by version, and ``"why not"``."""
    head, *rows = csv.reader(TABLE.read_text().splitlines())
    return head[1:-1], {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def write_column() -> None:
    """Try every type and put the results into this version's column."""
    versions, rows = read_table()
    versions = sorted({*versions, VERSION}, key=lambda version: [int(part) for part in version.split(".")])
    for model_type in MODEL_TYPES:
        found = outcome(model_type)
        print(model_type, *found, flush=True)
        row = rows.setdefault(model_type, {})
        row[VERSION] = found.cell
        # One reason per row: the newest version's that has one.
        newest = next((v for v in reversed(versions) if row.get(v) in ("no", "?")), None)
        if newest is None:
            row["why not"] = ""
        elif newest == VERSION:
            row["why not"] = found.reason if newest == versions[-1] else f"in {VERSION}: {found.reason}"
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["model type", *versions, "why not"], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({"model type": model_type} | row for model_type, row in sorted(rows.items()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    write_column()

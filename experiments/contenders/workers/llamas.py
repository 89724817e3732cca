"""Llama and Qwen2 models in transformers' layout, read without PyTorch, and written as llama.cpp reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Weights = Callable[[str], np.ndarray | None]
"""From a weight's name in transformers to its numbers in float32; None where the model has none of this name."""

_MATRICES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
"""The names of a layer's weights in ggml, and in transformers."""
_STORED = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""Types of numbers in safetensors files; NumPy has no bfloat16, which is the upper half of a float32."""


def read(folder: Path) -> tuple[dict[str, Any], Weights]:
    """The configuration of a model in transformers' layout, and its weights, each read when it is asked for.

    Raises:
        ValueError: The model is of a kind that is not written for other engines yet.
    """
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta", 1e4)}
    kind, odd = config["model_type"], config.get("rope_scaling") or config.get("use_sliding_window")
    if kind not in ("llama", "qwen2") or rope["rope_type"] != "default" or odd or config.get("attention_bias"):
        raise ValueError("only Llama and Qwen2 models with plain rotary embeddings are written for other engines")
    config |= {"rope_theta": rope["rope_theta"]}
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        places |= {name: (file, 8 + size, at) for name, at in header.items() if name != "__metadata__"}

    def weight(name: str) -> np.ndarray | None:
        if name not in places:
            return None
        file, start, at = places[name]
        array = np.memmap(file, _STORED[at["dtype"]], "r", start + at["data_offsets"][0], tuple(at["shape"]))
        wide = (array.astype(np.uint32) << 16).view(np.float32) if at["dtype"] == "BF16" else array
        return np.asarray(wide, np.float32)

    return config, weight


def converted(folder: Path, precision: str, into: Path) -> Path:
    """Write a model for llama.cpp, unless the file is there, and return the file.

    Tokens are spelled as their numbers, without an end of text.

    Args:
        precision: How the matrices are stored, by ggml's name: F32, F16, BF16, Q8_0, Q4_0.
    """
    import gguf
    from gguf import quants

    path = into / f"{precision}.gguf"
    if path.exists():
        return path
    config, weights = read(folder)
    width, tied = config["head_dim"], config.get("tie_word_embeddings", False)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(str(path.with_suffix(".part")), config["model_type"], use_temp_file=True)
    sizes = {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "head_count": heads["attn_q"], "head_count_kv": heads["attn_k"], "key_length": width, "value_length": width,
        "layer_norm_rms_eps": config["rms_norm_eps"], "rope_dimension_count": width,
        "rope_freq_base": config["rope_theta"], "vocab_size": config["vocab_size"],
    }  # fmt: skip
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([f" {token}" for token in range(config["vocab_size"])])
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"} | ({} if tied else {"output": "lm_head"})
    for layer in range(config["num_hidden_layers"]):
        names |= {f"blk.{layer}.{theirs}": f"model.layers.{layer}.{ours}" for theirs, ours in _MATRICES.items()}
    for name, part in ((name, part) for name in names for part in ("weight", "bias")):
        array, rotated = weights(f"{names[name]}.{part}"), heads.get(name.rpartition(".")[2])
        if array is None:
            continue
        if rotated and config["model_type"] == "llama":
            # transformers rotates the halves of a head against each other, ggml's Llama neighbours.
            array = array.reshape(rotated, 2, width // 2, -1).swapaxes(1, 2).reshape(array.shape)
        of = gguf.GGMLQuantizationType[precision if array.ndim == 2 else "F32"]
        writer.add_tensor(f"{name}.{part}", quants.quantize(np.ascontiguousarray(array), of), raw_dtype=of)
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        part()
    return path.with_suffix(".part").rename(path)
